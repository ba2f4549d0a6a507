"""The section about many clients at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynatree.bench.figures import Spread, by, spread
from dynatree.bench.load.figures import LoadRuns, closed, load_runs, opened
from dynatree.bench.report.charts import Lines
from dynatree.bench.report.content import Block, Section
from dynatree.bench.report.observations import Record, models_of
from dynatree.bench.tables.cells import sampling

_PER_RATE: dict[str, Callable[[LoadRuns], float | None]] = {
    "TTFT, p50": lambda one: one.ttft(50),
    "TTFT, p99": lambda one: one.ttft(99),
    "TPOT, p50": lambda one: one.tpot(50),
    "TPOT, p99": lambda one: one.tpot(99),
}


def many_clients(records: Sequence[Record]) -> Section:
    """Throughput by clients, and latency by requests a second."""
    groups: dict[str, Sequence[Block]] = {}
    for record in records:
        if record.report["command"] == "load" and record.report["runs"]:
            groups[_heading(record)] = _charts(load_runs(record.report))
    return Section(
        "Many clients",
        "Closed loops: each client sends a prompt when its last completion has ended; tokens/s are the tokens of all "
        "completions by the seconds until the last one had ended, median and quartiles over repetitions. Open loops: "
        "requests come at random times; times are from when a request was due.",
        {heading: charts for heading, charts in groups.items() if charts},
    )


def _heading(record: Record) -> str:
    runs = [run for run in record.report["runs"] if run["policy"] is not None] or record.report["runs"]
    words = sampling(runs[0]["temperature"], runs)
    new_tokens = record.report["options"]["max_new_tokens"]
    return f"{models_of(record.report)}; {words}; {new_tokens} new tokens ({record.file})"


def _charts(measured: Sequence[LoadRuns]) -> list[Lines]:
    by_clients = _lines(list(closed(measured)), lambda one: one.clients, lambda one: one.throughput)
    charts = [Lines("Throughput", "clients", "tokens/s", by_clients, from_zero=True)] if by_clients else []
    for title, figure in _PER_RATE.items():
        by_rate = _lines(list(opened(measured)), lambda one: one.rate, _in_milliseconds(figure))
        if by_rate:
            charts.append(Lines(title, "requests a second", "ms", by_rate, from_zero=True))
    return charts


def _in_milliseconds(figure: Callable[[LoadRuns], float | None]) -> Callable[[LoadRuns], Spread | None]:
    def milliseconds(one: LoadRuns) -> Spread | None:
        value = figure(one)
        return None if value is None else spread([1e3 * value])

    return milliseconds


def _lines(
    measured: Sequence[LoadRuns], x: Callable[[LoadRuns], float | None], y: Callable[[LoadRuns], Spread | None]
) -> dict[str, list[tuple[float, Spread]]]:
    """For each method its points, by x; without methods that have none."""
    lines = {
        label: [(at, value) for one in each if (at := x(one)) is not None and (value := y(one)) is not None]
        for label, each in by(measured, lambda one: one.label).items()
    }
    return {label: points for label, points in lines.items() if points}
