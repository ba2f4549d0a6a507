"""Tests the tables of the ablation, of sampling schemes and of ranks, with figures computed by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from dynatree.bench.methods import ABLATION, PLAIN
from dynatree.bench.printing import print_report
from dynatree.bench.record import Run
from dynatree.bench.tables import tables
from tests.support.bench_records import DRAFTED, STATISTICS, new_report, new_run


def rows(command: str, runs: Sequence[Run]) -> list[list[str]]:
    """Return the rows of all tables."""
    return [list(row) for table in tables(new_report(command, runs)) for row in table.rows]


def test_the_tables_of_the_ablation() -> None:
    seconds = [2.0, 1.0, 1.0, 1.25, 1.0, 0.8, 0.5, 1.0, 0.8, 0.4, 0.5]
    runs = [
        new_run(
            method.label,
            prompt=prompt,
            seconds=(1 + prompt) * wall,
            policy=method.policy,
            settings=dict(method.settings),
            statistics=STATISTICS if method == PLAIN else DRAFTED,
        )
        for prompt in range(2)
        for method, wall in zip(ABLATION, seconds, strict=True)
    ]
    assert rows("ablation", runs) == [
        ["fixed (D = 5, B = 2, tau = 0.1)", "12.0 ± 4.0", "1.60", "-20.0 %"],
        ["fixed (D = 5, B = 2, tau = 0.05)", "15.0 ± 5.0", "2.00", "+0.0 %"],
        ["+ dynamic tree breadth and depth", "18.8 ± 6.2", "2.50", "+25.0 %"],
        ["+ history adaptation (DynaTree)", "30.0 ± 10.0", "4.00", "+100.0 %"],
        ["the same, acceptance over nodes", "15.0 ± 5.0", "2.00", "+0.0 %"],
        ["dynamic breadth and depth, calibrated", "18.8 ± 6.2", "2.50", "+25.0 %"],
        ["DynaTree, calibrated", "37.5 ± 12.5", "5.00", "+150.0 %"],
        ["the same, acceptance over nodes, calibrated", "30.0 ± 10.0", "4.00", "+100.0 %"],
        ["autoregressive", "-", "1.00", "-", "10", "-", "-", "-"],
        ["linear (K = 8)", "31.2 %", "2.50", "2.50", "4", "125.0 %", "1.50", "15.0 %"],  # 2.5 / 8
        ["fixed (D = 8, B = 3, tau = 0.1)", "25.0 %", "2.50", "2.50", "4", "125.0 %", "1.50", "15.0 %"],  # 2.5 / 10
        ["DynaTree", "35.7 %", "2.50", "2.50", "4", "125.0 %", "1.50", "15.0 %"],  # 2.5 / 7
    ]


def test_the_table_of_couplings() -> None:
    def drawn(label: str, scheme: str, tokens_per_round: float) -> Run:
        equal = None if scheme == "residual" else True
        statistics = STATISTICS | {"tokens_per_round": tokens_per_round}
        return new_run(label, temperature=1.0, scheme=scheme, seed=0, equal=equal, statistics=statistics)

    runs = [
        drawn("autoregressive", "gumbel", 1.0),
        drawn("linear", "gumbel", 2.0),
        drawn("linear", "residual", 1.5),
        drawn("opt-tree", "gumbel", 3.0),
    ]
    assert rows("coupling", runs) == [["linear", "1", "2.00", "1.50", "yes"], ["opt-tree", "1", "3.00", "-", "yes"]]


def guesses(trials: int, hits: Sequence[int], **changes: Any) -> Run:
    return new_run("guesses", equal=None, ranks={"trials": trials, "hits": list(hits)}, **changes)


def test_the_table_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [guesses(4, [2, number], prompt=number) for number in range(2)]
    assert rows("ranks", runs) == [
        ["p1", "4", "0.5000"],
        ["p2", "1", "0.1250"],
        ["none of them", "3", "0.3750"],
        ["all", "8", "1.0000"],
    ]
    print_report(new_report("ranks", runs))
    out = capsys.readouterr().out
    assert "--policy sequoia --set rates=0.5,0.125\n" in out
    assert "--policy sequoia:rates=0.5,0.125\n" in out


def test_the_table_of_no_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [guesses(0, [0])]
    assert rows("ranks", runs)[-1] == ["all", "0"]
    print_report(new_report("ranks", runs))
    assert "sequoia" not in capsys.readouterr().out
