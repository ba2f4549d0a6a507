"""The tables of `dynatree bench`: every figure worked out by hand, on a terminal, in Markdown and in HTML."""

import pytest
from bench_records import DRAFTED, STATISTICS, baseline, costs_report, new_report, new_run, old_report, old_run

from dynatree.bench.figures import percentile, rate_until, spread, token_gaps, tpot, ttft
from dynatree.bench.record import Report
from dynatree.bench.tables import print_report, remarks, tables
from dynatree.bench.tables.table import Marked, Table, to_html, to_markdown


def rows(report: Report, number: int) -> list[list[str]]:
    return [list(row) for row in tables(report)[number].rows]


def notes(report: Report, number: int) -> list[str]:
    return list(tables(report)[number].notes)


# figures


def test_figures_of_arrivals() -> None:
    """The first token after 0.5 s, then 3 by 0.8 s, none new at 0.9 s, then 5 by 1.4 s."""
    run = new_run("x", tokens=5, arrivals=[[1, 0.5], [3, 0.8], [3, 0.9], [5, 1.4]])
    assert ttft(run) == 0.5
    assert tpot(run) == pytest.approx((1.4 - 0.5) / 4)
    assert token_gaps(run) == pytest.approx([0.15, 0.15, 0.3, 0.3])
    assert [rate_until(run, tokens) for tokens in (1, 2, 4, 6)] == pytest.approx([2.0, 3 / 0.8, 5 / 1.4, None])


def test_figures_without_arrivals_come_from_the_server() -> None:
    timed = STATISTICS | {"total_seconds": 2.1, "time_to_first_token_seconds": 0.2}
    assert tpot(old_run("x", statistics=timed)) == pytest.approx(1.9 / 19)
    assert (ttft(old_run("x")), tpot(old_run("x")), token_gaps(old_run("x"))) == (None, None, [])


def test_a_single_arrival_has_no_time_per_token() -> None:
    assert tpot(new_run("x", tokens=5, arrivals=[[5, 1.0]])) is None


def test_spreads_and_percentiles() -> None:
    spreads = spread([1.0, None, 2.0, 3.0, 4.0, 5.0])
    assert spreads is not None
    assert (spreads.low, spreads.median, spreads.high) == (2.0, 3.0, 4.0)
    assert spread([None]) is None
    assert percentile([float(value) for value in range(101)], 99) == pytest.approx(99.0)
    assert (percentile([7.0], 50), percentile([], 50)) == (7.0, None)


# compare


def test_a_comparison_of_version_2() -> None:
    """Of 20 tokens: plain 10 and transformers 8 tokens/s; drafted 20 and 40 tokens/s, five tokens at a time."""
    drafted = {"step": 5, "statistics": DRAFTED, "peak_memory": {"draft": 1, "verify": 60_000_000, "client": 1}}
    report = new_report(
        "compare",
        [
            *(new_run("autoregressive", prompt=prompt) for prompt in range(2)),
            *(baseline("transformers", 2.5, prompt=prompt) for prompt in range(2)),
            *(new_run("fixed", 1.0 / (1 + prompt), prompt=prompt, **drafted) for prompt in range(2)),
        ],
    )
    speed, trees = tables(report)
    assert [heading.replace("\n", " ") for heading in speed.headings] == [
        "policy",
        "tokens /s",
        "quartiles",
        "speed- up",
        "over trans- formers",
        "TTFT ms",
        "TPOT p50 ms",
        "TPOT p99 ms",
        "equal to plain",
    ]
    # fixed: first token after 1/20 s and 0.5/20 s; gaps of 50 and 25 ms a token
    assert [list(row) for row in speed.rows] == [
        ["autoregressive", "10.0", "10.0-10.0", "1.00", "1.25", "100", "100", "100", "yes"],
        ["transformers", "8.0", "8.0-8.0", "0.80", "1.00", "125", "125", "125", "yes"],
        ["fixed", "30.0", "25.0-35.0", "3.00", "3.75", "37.5", "37.5", "50", "yes"],
    ]
    # a round of fixed: 0.95 s / 4 and half of that, by plain steps of 1.9 s / 19
    assert [list(row) for row in trees.rows] == [
        ["autoregressive", "1.00", "0.0", "-", "-", "10.0", "1.90", "50", "1.000"],
        ["fixed", "2.50", "10.0", "15.0", "1.25", "4.0", "1.78", "60", "1.200"],
    ]
    assert list(speed.notes) == ["plain step 100.00 ms; floor 4.00 ms (40 MB / 10.0 GB/s) = 4 %"]


def test_columns_that_a_record_of_version_1_lacks_are_left_out() -> None:
    speed, trees = tables(old_report("compare", [old_run("autoregressive"), old_run("linear", statistics=DRAFTED)]))
    assert len(speed.headings) == len(speed.rows[0]) == 4
    assert list(speed.rows[1]) == ["linear", "10.0", "1.00", "yes"]
    assert list(trees.rows[1]) == ["linear", "2.50", "10.0", "15.0", "1.25", "4.0"]
    assert speed.notes == []


def test_each_temperature_has_its_tables() -> None:
    sampled = old_run("autoregressive", temperature=0.7, scheme="gumbel", seed=3)
    titles = [table.title for table in tables(old_report("compare", [old_run("autoregressive"), sampled]))]
    assert titles == [
        "Speed, temperature 0, greedy",
        "Trees, temperature 0, greedy",
        "Speed, temperature 0.7, scheme gumbel",
        "Trees, temperature 0.7, scheme gumbel",
    ]


# remarks


def test_outputs_that_differ_in_float32_are_errors() -> None:
    report = new_report("compare", [new_run("linear", equal=False, agrees=3), new_run("dyspec")])
    assert list(remarks(report)) == ["NOT EQUAL to plain decoding: linear, temperature 0, prompt 0"]
    assert all(isinstance(remark, Marked) for remark in remarks(report))
    assert rows(report, 0)[0][-1] == Marked("NO (1 of 1 differ)")
    assert isinstance(rows(report, 0)[0][-1], Marked)


def test_outputs_that_differ_in_sixteen_bits_are_near_ties() -> None:
    all_runs = [new_run("linear", equal=number > 1, agrees=17 - 4 * number, prompt=number) for number in range(4)]
    report = new_report("compare", all_runs, dtype="bfloat16")
    assert list(remarks(report)) == [
        "2 of 4 outputs part from plain decoding, the first at token 14 (bfloat16: near-ties)"
    ]
    assert not any(isinstance(remark, Marked) for remark in remarks(report))
    assert (rows(report, 0)[0][-1], type(rows(report, 0)[0][-1])) == ("2 of 4 part", str)


# sweep and costs


def test_a_sweep_is_sorted_within_each_policy_and_names_the_best() -> None:
    def tried(label: str, seconds: float, **settings: float) -> object:
        return new_run(label, seconds, policy=label.partition(":")[0], settings=settings, statistics=DRAFTED)

    all_runs = [
        new_run("autoregressive"),
        tried("fixed:depth=2", 1.6, depth=2.0),
        tried("linear:depth=2", 1.0, depth=2.0),
        tried("fixed:depth=4", 0.8, depth=4.0),
        tried("linear:depth=4", 2.5, depth=4.0),
    ]
    report = new_report("sweep", all_runs)  # type: ignore[arg-type]
    assert [(row[0], row[1]) for row in rows(report, 0)] == [
        ("autoregressive", "1.00"),
        ("fixed:depth=4", "2.50"),
        ("fixed:depth=2", "1.25"),
        ("linear:depth=2", "2.00"),
        ("linear:depth=4", "0.80"),
    ]
    assert notes(report, 0) == [
        "best of fixed: fixed:depth=4, speedup 2.50",
        "best of linear: linear:depth=2, speedup 2.00",
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
        ["0", "128", "1", "12", "11-13", "9", "1.20"],
        ["15", "128", "1", "13.5", "12.5-14.5", "10.5", "1.35"],
        ["255", "128", "1", "37.5", "36.5-38.5", "34.5", "3.75"],
    ]
    assert notes(report, 0) == ["plain step 10.00 ms; floor 4.00 ms (40 MB / 10.0 GB/s) = 40 %"]


# renderers

TABLE = Table("A | title", ["method", "speed-\nup"], [["<b>[x]</b>", Marked("0.50")], ["a_b", "1.50"]], ["see *this*"])


def test_a_table_in_markdown() -> None:
    assert to_markdown(TABLE) == (
        "**A \\| title**\n\n"
        "| method | speedup |\n| :-- | --: |\n| \\<b\\>\\[x\\]\\</b\\> | **0.50** |\n| a\\_b | 1.50 |\n\n"
        "see \\*this\\*"
    )


def test_a_table_in_html() -> None:
    html = to_html(TABLE)
    assert "<caption>A | title</caption>" in html
    assert '<th>method</th><th class="number">speedup</th>' in html
    assert '<td>&lt;b&gt;[x]&lt;/b&gt;</td><td class="number marked">0.50</td>' in html
    assert '<td>a_b</td><td class="number">1.50</td>' in html
    assert "<p>see *this*</p>" in html


def test_markup_in_labels_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(new_report("compare", [new_run("autoregressive"), new_run("[red]x[/red]", statistics=DRAFTED)]))
    out = capsys.readouterr().out
    assert "[red]x[/red]" in out
    assert "plain step 100.00 ms; floor 4.00 ms (40 MB / 10.0 GB/s) = 4 %" in out
    assert "equal to plain decoding: all of 2 outputs" in out
