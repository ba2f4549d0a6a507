"""The sections about what a round costs, in time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

from dynatree.bench.figures import Sample, Spread, by, peak_memory, quartiles_of, round_seconds
from dynatree.bench.record import PARTS, Costs, Point
from dynatree.bench.report.charts import Bars, Lines, Reference, Stacked
from dynatree.bench.report.content import Block, Section
from dynatree.bench.report.observations import Observation, Record, by_method, by_setting, models_of, observations
from dynatree.bench.tables.costs import CURVES, costs

_PROCESSES = {"verify": "verify service", "draft": "draft service", "client": "client"}
_X_AXES: dict[str, tuple[Literal["nodes", "context", "sessions"], str]] = {
    "nodes": ("nodes", "nodes of the tree"),
    "context": ("context", "tokens of context"),
    "sessions": ("sessions", "sessions"),
}


def round_times(records: Sequence[Record]) -> Section:
    """Where the time of a round goes."""
    groups: dict[str, Sequence[Block]] = {}
    for setting, group in by_setting(observations(records, "compare", "ablation")).items():
        chart = _round_chart(group)
        if chart.labels:
            groups[str(setting)] = [chart]
    return Section(
        "Time of a round",
        "The mean over all rounds. Other is what no part counts, such as waiting for a model thread; making text of "
        "tokens is off the critical path and not shown.",
        groups,
    )


def _round_chart(group: Sequence[Observation]) -> Stacked:
    rounds = {label: _round_parts(samples) for label, samples in by_method(group).items()}
    known = dict(sorted(((label, parts) for label, parts in rounds.items() if parts), key=lambda item: sum(item[1])))
    columns = {
        name.replace("_", " "): [parts[number] for parts in known.values()]
        for number, name in enumerate((*PARTS, "other"))
    }
    return Stacked("Time of a round", "ms per round", list(known), columns)


def _round_parts(samples: Sequence[Sample]) -> list[float]:
    """Milliseconds a round: `PARTS`, then the rest of its time; empty where no run has them."""
    known = [(run["statistics"], round_seconds(run)) for run in (sample.run for sample in samples) if run["statistics"]]
    timed = [(statistics, each) for statistics, each in known if each is not None and statistics.get("round_parts")]
    rounds = sum(statistics["rounds"] for statistics, _ in timed)
    if not rounds:
        return []
    parts = [sum(statistics["round_parts"][part]["total_seconds"] for statistics, _ in timed) for part in PARTS]
    whole = sum(statistics["rounds"] * each for statistics, each in timed)
    return [1e3 * seconds / rounds for seconds in (*parts, max(0.0, whole - sum(parts)))]


def verify_costs(records: Sequence[Record]) -> Section:
    """The curves of `dynatree bench costs`."""
    groups: dict[str, Sequence[Block]] = {}
    for record in records:
        if "costs" in record.report and record.report["costs"]["points"]:
            heading = f"{models_of(record.report)} ({record.file})"
            groups[heading] = [*_cost_charts(record.report["costs"]), *costs(record.report)]
    return Section(
        "Cost of verifying and drafting",
        "Medians over repetitions and quartiles. A round is the mask, the target's forward, acceptance and the commit; "
        "a plain step is a round without a tree at a context of 128 tokens; the floor is reading the weights once.",
        groups,
    )


def _cost_charts(measured: Costs) -> list[Lines]:
    plain = Reference("plain step", 1e3 * median(measured["plain_seconds"]))
    floor = Reference("floor", 1e3 * measured["floor"]["seconds"])
    return [
        _draft_chart(points) if curve == "draft" else _verify_chart(curve, points, [plain, floor])
        for curve, points in by(measured["points"], lambda point: point["curve"]).items()
    ]


def _verify_chart(curve: str, points: Sequence[Point], references: Sequence[Reference]) -> Lines:
    x, x_axis = _X_AXES[curve]
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for point in sorted(points, key=lambda point: point[x]):
        tree = f", {point['nodes']} nodes" if curve == "context" else ""
        lines.setdefault(f"round{tree}", []).append((point[x], _milliseconds(point["seconds"])))
        lines.setdefault(f"forward{tree}", []).append((point[x], _milliseconds(point["forward_seconds"])))
    return Lines(CURVES[curve], x_axis, "ms", lines, references, from_zero=True)


def _draft_chart(points: Sequence[Point]) -> Lines:
    line = [(point["nodes"], _milliseconds(point["forward_seconds"])) for point in points]
    return Lines(CURVES["draft"], "rows", "ms", {"forward": line}, from_zero=True)


def _milliseconds(seconds: Sequence[float]) -> Spread:
    return quartiles_of([1e3 * each for each in seconds])


def memory(records: Sequence[Record]) -> Section:
    """The largest resident size of each process."""
    groups: dict[str, Sequence[Block]] = {}
    for setting, group in by_setting(observations(records, "compare", "ablation")).items():
        methods = by_method(group)
        peaks = {
            name: [_megabytes(samples, process) for samples in methods.values()] for process, name in _PROCESSES.items()
        }
        if any(peak for each in peaks.values() for peak in each):
            groups[str(setting)] = [Bars("Peak memory", "MB resident", list(methods), peaks)]
    return Section("Memory", "The largest resident size of each process during any of the runs.", groups)


def _megabytes(samples: Sequence[Sample], process: str) -> Spread | None:
    size = peak_memory((sample.run for sample in samples), process)
    return None if size is None else quartiles_of([size / 1e6])
