"""The tables of many clients at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dynatree.bench.figures import Spread, by, spread
from dynatree.bench.load.figures import LoadRuns, closed, load_runs, opened
from dynatree.bench.methods import PLAIN
from dynatree.bench.record import Report
from dynatree.bench.tables.cells import equal, milliseconds, quartiles, ratio, sampling, speed
from dynatree.bench.tables.table import NONE, Marked, Table


def load(report: Report) -> Iterator[Table]:
    """For closed loops and for open ones how fast the methods are, and how their requests waited and shared passes."""
    measured = load_runs(report)
    for kind, heading, level, each in (
        ("closed loop", "clients", _clients, list(closed(measured))),
        ("open loop", "requests\n/s", _rate, list(opened(measured))),
    ):
        if each:
            runs = [run for one in each for run in one.runs]
            temperature = next((run["temperature"] for run in runs if run["policy"] is not None), 0.0)
            title = f"{kind}, {sampling(temperature, runs)}"
            yield _speed_table(report, title, heading, level, each)
            yield _pass_table(title, heading, level, each)


def _clients(one: LoadRuns) -> str:
    return str(one.clients)


def _rate(one: LoadRuns) -> str:
    return f"{one.rate:g}"


def _speed_table(
    report: Report, title: str, heading: str, level: Callable[[LoadRuns], str], each: Sequence[LoadRuns]
) -> Table:
    """Tokens a second of all clients, medians over repetitions; percentiles over requests, of TPOT over tokens."""
    rows = []
    for group in by(each, level).values():
        plain = next((one.throughput for one in group if one.label == PLAIN.label), None)
        for one in group:
            throughput = one.throughput
            rows.append(
                [
                    level(one),
                    one.label,
                    speed(throughput),
                    quartiles(throughput, speed) if len(one.rates) > 1 else NONE,
                    _over(throughput, plain),
                    *(milliseconds(spread([one.ttft(percent)])) for percent in (50, 99)),
                    *(milliseconds(spread([one.tpot(percent)])) for percent in (50, 99)),
                    *(ratio(spread([one.latency(percent)])) for percent in (50, 99)),
                    _count(one.refused),
                    _count(one.failed),
                    equal(one.runs, report["models"]["target"]["dtype"]),
                ]
            )
    headings = [
        heading,
        "policy",
        "tokens\n/s",
        "quartiles",
        "over\nplain",
        "TTFT\np50 ms",
        "TTFT\np99 ms",
        "TPOT\np50 ms",
        "TPOT\np99 ms",
        "latency\np50 s",
        "latency\np99 s",
        "re-\nfused",
        "failed",
        "equal\nto\nplain",
    ]
    return Table(f"Load, {title}", headings, rows).without_empty_columns()


def _over(throughput: Spread | None, plain: Spread | None) -> str:
    """The ratio of two medians."""
    return f"{throughput.median / plain.median:.2f}" if throughput and plain and plain.median else NONE


def _pass_table(title: str, heading: str, level: Callable[[LoadRuns], str], each: Sequence[LoadRuns]) -> Table:
    """How requests waited for a turn, and what the target's passes were that they shared: means over all rounds."""
    rows = [
        [
            level(one),
            one.label,
            *(_whole_milliseconds(seconds) for seconds in (one.queue(50), one.queue(99), one.queue_max)),
            ratio(spread([one.per_pass("sessions_per_pass")])),
            ratio(spread([one.per_pass("rows_per_pass")])),
            ratio(spread([one.per_round("draft_n")])),
            ratio(spread([one.per_round("trimmed_n")])),
            NONE if one.acceptance is None else f"{100 * one.acceptance:.1f}",
            f"{one.cached_tokens:.0f}" if one.cached_tokens else NONE,
            f"{100 * one.kv_cache_usage:.0f}" if one.kv_cache_usage else NONE,
        ]
        for one in each
        if any(run["statistics"] for run in one.runs)
    ]
    headings = [
        heading,
        "policy",
        "queue\np50 ms",
        "queue\np99 ms",
        "queue\nmax ms",
        "sessions\nper pass",
        "rows\nper pass",
        "nodes\nper\nround",
        "trimmed\nper\nround",
        "accept-\nance %",
        "cached\ntokens",
        "KV\nusage %",
    ]
    return Table(f"Passes, {title}", headings, rows).without_empty_columns()


def _whole_milliseconds(seconds: float | None) -> str:
    """A time that is mostly nothing at all."""
    return NONE if seconds is None else f"{1e3 * seconds:.0f}"


def _count(number: int) -> Marked | str:
    return Marked(number) if number else NONE


def failures(report: Report) -> Iterator[str]:
    """How many requests of a load were refused or failed, by code, and what the services said of the first."""
    for code, each in by(report.get("failures", ()), lambda failure: failure["code"]).items():
        methods = ", ".join(dict.fromkeys(failure["label"] for failure in each))
        yield Marked(f"requests that ended in {code}: {len(each)} ({methods}); the first: {each[0]['details']}")
