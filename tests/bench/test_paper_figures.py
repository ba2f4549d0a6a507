"""Tests the papers' formulas on the papers' own numbers, and on runs whose figures are computed by hand."""

import numpy as np
import pytest

from dynatree.bench import bootstrap
from dynatree.bench.figures import cells, frame
from dynatree.bench.paper_figures import COLUMNS, as_published, change, most_tokens
from dynatree.draft.policies.papers.dynatree import DynaTreeSettings
from dynatree.draft.policies.papers.fixed import FixedSettings, LinearSettings
from tests.support.bench_records import DRAFTED, STATISTICS, new_report, new_run

CHAIN, TREE = ("linear", "depth"), ("fixed", "depth")
ADAPTIVE = ("dynatree", "base_depth")
# DynaTree's Table 3: policy, depth, l-bar and Accept. in %; each different cell of the four versions once.
NINE_CELLS = [
    (CHAIN, 8, 7.05, 88.2),
    (TREE, 8, 7.10, 71.0),
    (TREE, 8, 6.43, 64.3),
    (CHAIN, 5, 4.88, 97.7),
    (TREE, 5, 5.78, 82.6),
    (TREE, 5, 5.80, 82.9),
    (CHAIN, 5, 4.63, 92.5),
    (ADAPTIVE, 5, 7.15, 102.2),
    (ADAPTIVE, 5, 6.45, 92.2),
]
# The same from cny123222/DynaTree's logs, with all digits: results/adaptive/main/paper_benchmark_main_1500tokens.json,
# results/adaptive/pg19/pg19_benchmark_1500tokens.json and pg19_benchmark_D8B3.json.
LOGGED = [
    (CHAIN, 5, 4.883349679252987, 0.9766699358505975),
    (TREE, 5, 5.781591393520188, 0.825941627645741),
    (ADAPTIVE, 5, 7.152364146859421, 1.0217663066942029),
    (CHAIN, 5, 4.627111571687498, 0.9254223143374996),
    (TREE, 5, 5.802884749579073, 0.8289835356541534),
    (TREE, 8, 6.428159568500843, 0.6428159568500844),
    (ADAPTIVE, 5, 6.454963832238174, 0.9221376903197391),
]
L_BAR = [(6.82, 220), (6.79, 221), (7.08, 212), (4.56, 329), (6.20, 242), (6.17, 243), (4.84, 310), (5.75, 261)]


def test_acceptance_of_table_3_is_l_bar_over_the_most_tokens() -> None:
    for (policy, setting), depth, path, printed in NINE_CELLS:
        most = most_tokens(policy, {setting: float(depth)})
        assert most is not None
        low, high = (100 * (path + error) / most for error in (-0.005, 0.005))
        assert low - 0.05 <= printed <= high + 0.05, "within the rounding of both"
    for (policy, setting), depth, path, logged in LOGGED:
        assert path / (most_tokens(policy, {setting: float(depth)}) or 0) == pytest.approx(logged, rel=1e-14)


def test_l_bar_of_table_3_is_all_tokens_over_all_rounds() -> None:
    assert [round(1500 / rounds, 2) for _, rounds in L_BAR] == [printed for printed, _ in L_BAR]


def test_depths_that_a_run_leaves_out_are_the_policies_defaults() -> None:
    for policy, most in (("linear", 8), ("fixed", 10), ("dynatree", 7)):
        assert most_tokens(policy, {}) == most
    assert (LinearSettings().depth, FixedSettings().depth, DynaTreeSettings().base_depth) == (8, 8, 5)
    assert most_tokens("dynatree", {}, defaults=False) is None, "a server may have others"
    assert most_tokens("dynatree", {"base_depth": 3.0}, defaults=False) == 5
    assert most_tokens("sequoia", {}) is None
    assert most_tokens(None, {}) is None


def two_prompts() -> list[object]:
    """Return runs of plain decoding with 10 and 20 tokens/s; a tree of D = 3 has 10 and 40, in 4 and 10 rounds.

    Tokens per round are 4 and 2; their mean is 3, but all tokens over all rounds give 36 / 14.
    """
    rounds = [{"rounds": 4, "tokens_per_round": 4.0}, {"rounds": 10, "tokens_per_round": 2.0}]
    return [
        run
        for prompt in range(2)
        for run in (
            new_run("autoregressive", 2.0 / (1 + prompt), prompt=prompt),
            new_run(
                "fixed:depth=3",
                2.0 / (1 + 3 * prompt),
                prompt=prompt,
                policy="fixed",
                settings={"depth": 3.0},
                statistics=DRAFTED | rounds[prompt],
            ),
        )
    ]


def test_a_table_as_the_papers_have_it() -> None:
    runs = frame(new_report("compare", two_prompts()))  # type: ignore[arg-type]
    table = as_published("Both papers", runs, list(COLUMNS))
    plain, tree = (dict(zip(table.frame, row, strict=True)) for row in table.rows)
    assert tree["tokens/s"] == "25.0 ± 15.0"  # of 10 and 40, with the divisor n
    assert tree["speedup"] == "1.67 [1.00-2.00]"  # 25 / 15, neither the median nor the mean of 1 and 2
    assert tree["TTFT ms"] == "62.5 ± 37.5"
    assert tree["Accept."] == "60.0 %"  # 3 / (3 + 2)
    assert (tree["L-bar"], tree["l-bar"], tree["#Iter."]) == ("2.57", "3.00", "7")
    assert tree["s/token (tokens a step)"] == "0.06250 (3.00)"
    assert (tree["per level"], tree["path"], tree["nodes accepted"]) == ("125.0 %", "1.50", "15.0 %")
    assert (plain["Accept."], plain["l-bar"], plain["L-bar"], plain["speedup"]) == ("-", "-", "1.00", "1.00")
    assert plain["s/token (tokens a step)"] == "0.07500"
    assert [note.partition(":")[0] for note in table.notes] == list(table.frame)[1:]


def test_a_server_of_others_may_have_another_depth() -> None:
    report = new_report("compare", [new_run("linear", statistics=DRAFTED)])
    assert as_published("x", frame(report), ["l-bar", "Accept."]).rows == [["linear", "2.50", "31.2 %"]]
    report["machine"]["threads"] = None
    assert as_published("x", frame(report), ["l-bar", "Accept."]).rows == [["linear", "2.50"]]


def test_without_plain_decoding_there_is_no_speedup() -> None:
    runs = frame(new_report("compare", [new_run("linear", statistics=DRAFTED)]))
    assert list(as_published("x", runs, ["tokens/s", "speedup"]).frame) == ["method", "tokens/s"]
    assert change(runs, runs.iloc[:0]) == "-"
    plain_only = frame(new_report("compare", [new_run("autoregressive", statistics=STATISTICS)]))
    assert as_published("x", plain_only, ["speedup"]).rows == [["autoregressive", "1.00"]]


# intervals


def test_an_interval_of_a_ratio_is_paired_over_prompts() -> None:
    """Rates vary tenfold between prompts, and one method is twice as fast as plain decoding on each."""
    rates = [10.0, 20.0, 40.0, 100.0]
    runs = frame(
        new_report(
            "compare",
            [
                new_run(label, 20 / (factor * rate), prompt=prompt)
                for prompt, rate in enumerate(rates)
                for label, factor in (("autoregressive", 1), ("x", 2))
            ],
        )
    )
    ratio, alone = (cells(runs, "rate", over=over)["x"].interval for over in ("autoregressive", None))
    assert ratio == pytest.approx((2.0, 2.0))
    assert alone is not None
    assert alone[0] < 60.0 < alone[1]
    assert as_published("x", runs, ["speedup"]).rows[1] == ["x", "2.00"]


def test_an_interval_needs_two_prompts_and_has_a_seed() -> None:
    assert bootstrap.interval(bootstrap.median, [1.0]) is None
    values = [1.0, 2.0, 5.0, 9.0]
    assert bootstrap.interval(bootstrap.median, values) == bootstrap.interval(bootstrap.median, list(values))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Draws 300 samples of 20 prompts; the true median is 1, and the true paired ratio of means is 2."""
    random = np.random.default_rng(1)
    held = np.zeros(2)
    for _ in range(300):
        base = random.lognormal(0.0, 0.3, 20)
        other = 2.0 * base * random.normal(1.0, 0.1, 20)
        found = (
            (bootstrap.interval(bootstrap.median, list(base)), 1.0),
            (bootstrap.interval(bootstrap.ratio_of_means, list(other), list(base)), 2.0),
        )
        held += [low <= truth <= high for (low, high), truth in found]  # type: ignore[misc]
    assert np.all((held / 300 >= 0.90) & (held / 300 <= 0.98))
