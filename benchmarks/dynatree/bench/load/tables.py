"""The tables of loads with many concurrent clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynatree.bench.figures import SIXTEEN_BIT, by, unequal
from dynatree.bench.load.figures import LoadRuns, load_runs
from dynatree.bench.methods import PLAIN
from dynatree.bench.record import Report
from dynatree.bench.table import NONE, Marked, Table, figure, milliseconds

DEFINITION = (
    "tokens/s are the tokens of all completions / the seconds until the last one had ended, the median over "
    "repetitions and in brackets their range; x plain is the ratio of two medians. Times are from when a request was "
    "due, percentiles over requests, those of TPOT over tokens."
)


def load(report: Report) -> Iterator[Table]:
    """For closed and for open loops: the speed of the methods, their requests' waits, and the passes they share."""
    for kind, each in by(load_runs(report), lambda one: one.clients is not None).items():
        title = f"{'closed' if kind else 'open'} loop, {_sampling(each)}"
        yield _speed(report, title, each)
        yield _passes(title, each)


def _sampling(each: Sequence[LoadRuns]) -> str:
    run = next((run for one in each for run in one.runs if run["policy"] is not None), None)
    temperature = run["temperature"] if run else 0.0
    return f"temperature {temperature:g}, {(run and run['scheme']) or 'greedy'}"


def _level(one: LoadRuns) -> dict[str, str]:
    return {"clients": str(one.clients)} if one.clients is not None else {"requests/s": f"{one.rate:g}"}


def _speed(report: Report, title: str, each: Sequence[LoadRuns]) -> Table:
    plain = {(one.clients, one.rate): one.throughput for one in each if one.label == PLAIN.label}
    rows = []
    for one in each:
        rate, base = one.throughput, plain.get((one.clients, one.rate))
        rows.append(
            {
                **_level(one),
                "method": one.label,
                "tokens/s": figure(rate, 1),
                "x plain": f"{rate.median / base.median:.2f}" if rate and base and base.median else NONE,
                **{f"TTFT p{percent} ms": milliseconds(one.ttft(percent)) for percent in (50, 99)},
                **{f"TPOT p{percent} ms": milliseconds(one.tpot(percent)) for percent in (50, 99)},
                **{f"latency p{percent} s": _plain(one.latency(percent), 2) for percent in (50, 99)},
                "refused": _count(one.refused),
                "failed": _count(one.failed),
                "equal to plain": _equal(one, report),
            }
        )
    return Table.of(f"Load, {title}", rows, [DEFINITION])


def _equal(one: LoadRuns, report: Report) -> str:
    checked = [run for run in one.runs if run["equal"] is not None]
    wrong = len(unequal(checked))
    if not wrong:
        return "yes" if checked else NONE
    parts = f"{wrong} of {len(checked)}"
    return f"{parts} part" if report["models"]["target"]["dtype"] in SIXTEEN_BIT else Marked(f"NO ({parts} differ)")


def _passes(title: str, each: Sequence[LoadRuns]) -> Table:
    """The requests' waits in the queue, and the passes of the target that they shared, as means over all rounds."""
    rows = [
        {
            **_level(one),
            "method": one.label,
            **{
                f"queue {name} ms": _plain(None if seconds is None else 1e3 * seconds, 0)
                for name, seconds in (("p50", one.queue(50)), ("p99", one.queue(99)), ("max", one.queue(100)))
            },
            "sessions per pass": _plain(one.per_pass("sessions_per_pass"), 2),
            "rows per pass": _plain(one.per_pass("rows_per_pass"), 2),
            "nodes per round": _plain(one.per_round("draft_n"), 2),
            "trimmed per round": _plain(one.per_round("trimmed_n"), 2),
            "acceptance %": _plain(None if one.acceptance is None else 100 * one.acceptance, 1),
            "cached tokens": _plain(one.total("cached_tokens") or None, 0),
            "KV usage %": _plain(100 * one.kv_cache_usage or None, 0),
        }
        for one in each
        if one.statistics
    ]
    return Table.of(f"Passes, {title}", rows)


def _plain(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _count(number: int) -> str:
    return Marked(number) if number else NONE


def failures(report: Report) -> Iterator[str]:
    """For each error code, the number of requests that ended in it, and the message of the first."""
    for code, each in by(report.get("failures", ()), lambda failure: failure["code"]).items():
        methods = ", ".join(dict.fromkeys(failure["label"] for failure in each))
        yield Marked(f"requests that ended in {code}: {len(each)} ({methods}); the first: {each[0]['details']}")
