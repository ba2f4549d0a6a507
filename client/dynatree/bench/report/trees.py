"""The sections about trees: their settings, and how deep they are accepted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dynatree.bench.figures import Sample, Spread, by, spread
from dynatree.bench.report.charts import HeatMap, Lines
from dynatree.bench.report.content import Block, Section
from dynatree.bench.report.observations import Record, by_method, by_setting, observations


def sweeps(records: Sequence[Record]) -> Section:
    """Speedup by the settings that were swept."""
    groups: dict[str, Sequence[Block]] = {}
    for setting, group in by_setting(observations(records, "sweep")).items():
        charts = list(_sweep_charts([each.sample for each in group]))
        if charts:
            groups[str(setting)] = charts
    return Section(
        "Settings",
        "Median speedups over plain decoding. Where depth and breadth both vary, a map of the two; otherwise a plot "
        "for each setting that varies, over all runs that name it, whatever their other settings, with quartiles.",
        groups,
    )


def _sweep_charts(samples: Iterable[Sample]) -> Iterator[Block]:
    for policy, group in by(samples, lambda sample: sample.run["policy"]).items():
        varying = _varying_settings(group)
        if policy is not None and {"depth", "breadth"} <= set(varying):
            yield from _tree_maps(policy, group)
            varying = [name for name in varying if name not in ("depth", "breadth")]
        for name in varying:
            yield _setting_chart(f"{policy}: {name}", name, group)


def _varying_settings(samples: Iterable[Sample]) -> list[str]:
    """The settings that are numbers and vary; a list has no place on an axis."""
    values = by((item for sample in samples for item in _numbers(sample).items()), lambda item: item[0])
    return [name for name, items in values.items() if len(set(items)) > 1]


def _tree_maps(policy: str, samples: Sequence[Sample]) -> Iterator[HeatMap]:
    """A map of depth x breadth for each choice of the other settings."""
    shaped = [sample for sample in samples if {"depth", "breadth"} <= set(_numbers(sample))]
    for others, group in by(shaped, _other_settings).items():
        cells = {}
        for shape, each in by(group, _shape).items():
            speedups = spread(sample.speedup for sample in each)
            if speedups is not None:
                cells[shape] = speedups.median
        title = ", ".join((policy, *(f"{name} {value:g}" for name, value in others)))
        yield HeatMap(f"{title}: speedup", "depth", "breadth", cells)


def _numbers(sample: Sample) -> dict[str, float]:
    """The settings that are numbers."""
    return {name: value for name, value in sample.run["settings"].items() if isinstance(value, (int, float))}


def _shape(sample: Sample) -> tuple[float, float]:
    return _numbers(sample)["depth"], _numbers(sample)["breadth"]


def _other_settings(sample: Sample) -> tuple[tuple[str, float], ...]:
    return tuple(item for item in sorted(_numbers(sample).items()) if item[0] not in ("depth", "breadth"))


def _setting_chart(title: str, setting: str, samples: Sequence[Sample]) -> Lines:
    values = by((sample for sample in samples if setting in _numbers(sample)), lambda s: _numbers(s)[setting])
    points = ((value, spread(sample.speedup for sample in each)) for value, each in sorted(values.items()))
    line = [(value, speedups) for value, speedups in points if speedups is not None]
    return Lines(title, setting, "speedup", {title: line}, small=True)


def acceptance(records: Sequence[Record]) -> Section:
    """How deep trees are accepted."""
    groups: dict[str, Sequence[Block]] = {}
    for setting, group in by_setting(observations(records, "compare", "ablation")).items():
        lines = {label: _acceptance_line(samples) for label, samples in by_method(group).items()}
        drawn = {label: line for label, line in lines.items() if line}
        if drawn:
            groups[str(setting)] = [Lines("Acceptance by depth", "depth", "share of rounds", drawn, from_zero=True)]
    return Section(
        "Acceptance by depth",
        "Of the rounds whose tree reached a depth, the share whose accepted path did too: the mean over runs and data "
        "sets, weighted by their rounds. Depths that fewer than half of the runs reached are left out.",
        groups,
    )


def _acceptance_line(samples: Sequence[Sample]) -> list[tuple[float, Spread]]:
    known = [statistics for sample in samples if (statistics := sample.run["statistics"])]
    line: list[tuple[float, Spread]] = []
    while reached := [each for each in known if len(each.get("acceptance_by_depth", ())) > len(line)]:
        if 2 * len(reached) < len(known):
            break
        share = _weighted_mean([(each["acceptance_by_depth"][len(line)], each["rounds"]) for each in reached])
        line.append((len(line) + 1, Spread(share, share, share)))
    return line


def _weighted_mean(values: Sequence[tuple[float, float]]) -> float:
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)
