"""Tests the figures and tables of `dynatree bench`, computed by hand, on a terminal and in Markdown."""

import pytest
from pandas import DataFrame

from dynatree.bench.figures import Cell, cells, frame, percentile, rate_until, token_gaps, tpot, ttft
from dynatree.bench.printing import print_report, remarks
from dynatree.bench.record import Report
from dynatree.bench.table import Marked, Table, figure, milliseconds, to_markdown
from dynatree.bench.tables import tables
from tests.support.bench_records import DRAFTED, baseline, costs_report, new_report, new_run


def rows(report: Report, number: int) -> list[list[str]]:
    return tables(report)[number].rows


# figures


def test_figures_of_arrivals() -> None:
    """The first token arrives after 0.5 s, then 3 by 0.8 s, none at 0.9 s, then 5 by 1.4 s."""
    run = new_run("x", tokens=5, arrivals=[(1, 0.5), (3, 0.8), (3, 0.9), (5, 1.4)])
    assert ttft(run) == 0.5
    assert tpot(run) == pytest.approx((1.4 - 0.5) / 4)
    assert token_gaps(run) == pytest.approx([0.15, 0.15, 0.3, 0.3])
    assert [rate_until(run, tokens) for tokens in (1, 2, 4, 6)] == pytest.approx([2.0, 3 / 0.8, 5 / 1.4, None])


def test_a_single_arrival_has_no_time_per_token() -> None:
    assert tpot(new_run("x", tokens=5, arrivals=[(5, 1.0)])) is None


def test_percentiles() -> None:
    assert percentile([float(value) for value in range(101)], 99) == pytest.approx(99.0)
    assert (percentile([7.0], 50), percentile([], 50), percentile([1.0, 3.0], 100)) == (7.0, None, 3.0)


def test_a_cell_is_the_median_over_prompts_and_a_ratio_that_of_ratios() -> None:
    """Three prompts of 20 tokens twice: plain has 10, 20, 40 tokens/s; x has 30, 20, 60, then half of that."""
    plain = [
        new_run("autoregressive", 2.0 / 2**prompt, prompt=prompt, repetition=again)
        for prompt in range(3)
        for again in range(2)
    ]
    other = [
        new_run("x", (1 + again) * 20 / rate, prompt=prompt, repetition=again)
        for prompt, rate in enumerate((30, 20, 60))
        for again in range(2)
    ]
    runs = frame(new_report("compare", [*plain, *other]))
    assert cells(runs, "rate")["autoregressive"] == Cell(20.0, 10.0, 40.0, 3)
    assert cells(runs, "rate")["x"] == Cell(22.5, 15.0, 45.0, 3)  # by prompt 22.5, 15, 45
    # by prompt and repetition 3 and 1.5, 1 and 0.5, 1.5 and 0.75; not 22.5 / 20
    assert cells(runs, "rate", over="autoregressive")["x"] == Cell(1.125, 0.75, 2.25, 3)
    assert cells(runs, "rate", over="nobody") == {}


def test_a_ratio_needs_the_same_prompt() -> None:
    runs = frame(new_report("compare", [new_run("autoregressive"), new_run("x", 1.0), new_run("x", 1.0, prompt=1)]))
    assert cells(runs, "rate", over="autoregressive")["x"] == Cell(2.0, 2.0, 2.0, 1)
    assert cells(runs, "rate")["x"].prompts == 2


def test_cells_as_text() -> None:
    assert figure(Cell(1.234, 1.0, 2.0, 3)) == "1.23 (1.00-2.00)"
    assert figure(Cell(12.34, 9.99, 100.0, 3)) == "12.3 (10.0-100.0)"
    assert figure(Cell(3.0, 3.0, 3.0, 4)) == "3.00"
    cell = Cell(1.234, 1.0, 2.0, 3, (1.1, 1.5))
    assert (figure(cell), figure(cell, interval=True)) == ("1.23 (1.00-2.00)", "1.23 (1.00-2.00) [1.10-1.50]")
    assert cell.times(10).interval == pytest.approx((11.0, 15.0))
    assert (figure(None), milliseconds(0.0123), milliseconds(12.3)) == ("-", "12.3", "12300")


# compare


def test_a_comparison() -> None:
    """Of 20 tokens, plain has 10 and transformers 8 tokens/s; drafts have 20 and 40 tokens/s, five tokens at a time."""
    drafted = {"step": 5, "statistics": DRAFTED, "peak_memory": {"draft": 1, "verify": 60_000_000, "client": 1}}
    report = new_report(
        "compare",
        [
            *(new_run("autoregressive", prompt=prompt) for prompt in range(2)),
            *(baseline("transformers", 2.5, prompt=prompt) for prompt in range(2)),
            *(new_run("fixed", 1.0 / (1 + prompt), prompt=prompt, **drafted) for prompt in range(2)),
        ],
    )
    speed, trees, _ = tables(report)
    assert list(speed.frame) == [
        "method",
        "tokens/s",
        "x plain",
        "x transformers",
        "prompts",
        "TTFT ms",
        "TPOT p50 ms",
        "TPOT p99 ms",
        "equal to plain",
    ]
    # fixed: the first token after 1/20 s and 0.5/20 s; gaps of 50 and 25 ms per token
    assert speed.rows == [
        ["autoregressive", "10.0", "1.00", "1.25", "2", "100", "100", "100", "yes"],
        ["transformers", "8.0", "0.80", "1.00", "2", "125", "125", "125", "yes"],
        [
            "fixed",
            "30.0 (20.0-40.0) [20.0-40.0]",
            "3.00 (2.00-4.00) [2.00-4.00]",
            "3.75 (2.50-5.00) [2.50-5.00]",
            "2",
            "37.5",
            "37.5",
            "50.0",
            "yes",
        ],
    ]
    # a round of fixed takes 0.95 s / 4 and half of that, over plain steps of 1.9 s / 19
    assert trees.rows == [
        ["autoregressive", "1.00", "0.0", "-", "-", "10.0", "1.90", "50", "1.000"],
        ["fixed", "2.50", "10.0", "15.0", "1.25", "4.0", "1.78 (1.19-2.38)", "60", "1.200"],
    ]
    assert speed.notes[2] == "plain step 100.00 ms; floor 4.00 ms (40 MB / 10.0 GB/s) = 4 %"
    assert "the median over prompts of the ratio on the same prompt" in speed.notes[0]


def test_columns_without_figures_are_left_out() -> None:
    runs = [new_run(label, statistics=None, peak_memory=None, arrivals=[]) for label in ("autoregressive", "linear")]
    report = new_report("compare", runs)
    report["machine"]["read_bandwidth"] = None
    speed, trees, published = tables(report)
    assert list(speed.frame) == ["method", "tokens/s", "x plain", "prompts", "equal to plain"]
    assert (len(speed.notes), trees.rows) == (2, [])
    assert list(published.frame) == ["method", "tokens/s", "speedup", "s/token (tokens a step)"]


def test_each_temperature_has_its_tables() -> None:
    sampled = new_run("autoregressive", temperature=0.7, scheme="gumbel", seed=3)
    titles = [table.title for table in tables(new_report("compare", [new_run("autoregressive"), sampled]))]
    assert titles == [
        "Speed, temperature 0, greedy",
        "Trees, temperature 0, greedy",
        "As the papers report, temperature 0, greedy",
        "Speed, temperature 0.7, scheme gumbel",
        "Trees, temperature 0.7, scheme gumbel",
        "As the papers report, temperature 0.7, scheme gumbel",
    ]


def test_a_measurement_without_runs_has_no_tables() -> None:
    assert tables(new_report("compare", [], complete=False)) == []


# remarks


def test_outputs_that_differ_in_float32_are_errors() -> None:
    report = new_report("compare", [new_run("linear", equal=False, agrees=3), new_run("dyspec")])
    assert list(remarks(report)) == ["NOT EQUAL to plain decoding: linear, temperature 0, prompt 0"]
    assert all(isinstance(remark, Marked) for remark in remarks(report))
    assert rows(report, 0)[0][-1] == Marked("NO (1 of 1 differ)")
    assert isinstance(rows(report, 0)[0][-1], Marked)


def test_outputs_that_differ_in_sixteen_bits_are_near_ties() -> None:
    runs = [new_run("linear", equal=number > 1, agrees=17 - 4 * number, prompt=number) for number in range(4)]
    runs[0]["margin"], runs[1]["margin"] = 0.0, 0.125
    report = new_report("compare", runs, dtype="bfloat16")
    assert list(remarks(report)) == [
        "2 of 4 outputs part from plain decoding (bfloat16: near-ties), linear 2; the first at token 14; "
        "margins in logits 0, 0.125"
    ]
    assert not any(isinstance(remark, Marked) for remark in remarks(report))
    assert (rows(report, 0)[0][-1], type(rows(report, 0)[0][-1])) == ("2 of 4 part", str)


# sweep and costs


def test_a_sweep_is_sorted_within_each_policy_and_names_the_best() -> None:
    def tried(label: str, seconds: float, **settings: float) -> object:
        return new_run(label, seconds, policy=label.partition(":")[0], settings=settings, statistics=DRAFTED)

    runs = [
        new_run("autoregressive"),
        tried("fixed:depth=2", 1.6, depth=2.0),
        tried("linear:depth=2", 1.0, depth=2.0),
        tried("fixed:depth=4", 0.8, depth=4.0),
        tried("linear:depth=4", 2.5, depth=4.0),
    ]
    report = new_report("sweep", runs)  # type: ignore[arg-type]
    assert [(row[0], row[1]) for row in rows(report, 0)] == [
        ("autoregressive", "1.00"),
        ("fixed:depth=4", "2.50"),
        ("fixed:depth=2", "1.25"),
        ("linear:depth=2", "2.00"),
        ("linear:depth=4", "0.80"),
    ]
    assert list(tables(report)[0].notes[2:]) == [
        "best of fixed: fixed:depth=4, 2.50 x plain",
        "best of linear: linear:depth=2, 2.00 x plain",
    ]


def test_the_tables_of_costs() -> None:
    report = costs_report()
    assert [table.title for table in tables(report)] == [
        "Verifying by nodes of the tree",
        "Verifying by length of the context",
        "Verifying by sessions in one forward",
        "A draft forward by rows",
    ]
    assert rows(report, 0) == [
        ["0", "128", "1", "12.0", "10.0-14.0", "9.00", "1.20"],
        ["15", "128", "1", "13.5", "11.5-15.5", "10.5", "1.35"],
        ["255", "128", "1", "37.5", "35.5-39.5", "34.5", "3.75"],
    ]
    assert list(tables(report)[0].notes) == ["plain step 10.00 ms; floor 4.00 ms (40 MB / 10.0 GB/s) = 40 %"]


# renderers


def test_a_table_in_markdown() -> None:
    cells = DataFrame({"method": ["<b>[x]</b>", "a_b"], "speed": [Marked("0.50"), "1.50"]}, dtype=object)
    assert to_markdown(Table("A | title", cells, ["see *this*"])).splitlines() == [
        "**A \\| title**",
        "",
        "| method           |    speed |",
        "|:-----------------|---------:|",
        "| \\<b\\>\\[x\\]\\</b\\> | **0.50** |",
        "| a\\_b             |     1.50 |",
        "",
        "see \\*this\\*",
    ]


def test_markup_in_labels_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(new_report("compare", [new_run("autoregressive"), new_run("[red]x[/red]", statistics=DRAFTED)]))
    out = capsys.readouterr().out
    assert "[red]x[/red]" in out
    assert "plain step 100.00 ms; floor 4.00 ms (40 MB / 10.0 GB/s) = 4 %" in out
    assert "equal to plain decoding: all of 2 outputs" in out
