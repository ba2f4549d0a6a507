"""The tables of methods side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynatree.bench.figures import (
    Sample,
    by,
    peak_memory,
    percentile,
    samples,
    spread,
    statistic,
    token_gaps,
    tpot,
    ttft,
)
from dynatree.bench.methods import PLAIN
from dynatree.bench.record import Report
from dynatree.bench.tables.cells import (
    equal,
    floor_line,
    mean,
    megabytes,
    milliseconds,
    quartiles,
    ratio,
    sampling,
    speed,
)
from dynatree.bench.tables.table import NONE, Table


def compare(report: Report) -> Iterator[Table]:
    """For each temperature how fast the methods are, and what their trees are."""
    for title, group in _by_sampling(report).items():
        yield _speed_table(report, title, group)
        yield _tree_table(title, group)


def _speed_table(report: Report, title: str, group: Sequence[Sample]) -> Table:
    """How fast each method is: medians over runs, but for the percentiles of TPOT, which are over all tokens."""
    rows = []
    for label, each in by(group, lambda sample: sample.label).items():
        runs = [sample.run for sample in each]
        gaps = [gap for run in runs for gap in token_gaps(run)]
        rates = spread(sample.rate for sample in each)
        rows.append(
            [
                label,
                speed(rates),
                quartiles(rates, speed) if len(each) > 1 else NONE,
                ratio(spread(sample.speedup for sample in each)),
                ratio(spread(sample.over_transformers for sample in each)),
                milliseconds(spread(map(ttft, runs))),
                milliseconds(spread([percentile(gaps, 50)])),
                milliseconds(spread([percentile(gaps, 99)])),
                equal(runs, report["models"]["target"]["dtype"]),
            ]
        )
    headings = [
        "policy",
        "tokens\n/s",
        "quartiles",
        "speed-\nup",
        "over\ntrans-\nformers",
        "TTFT\nms",
        "TPOT\np50 ms",
        "TPOT\np99 ms",
        "equal\nto\nplain",
    ]
    return Table(f"Speed, {title}", headings, rows, _share_of_floor(report, group)).without_empty_columns()


def _tree_table(title: str, group: Sequence[Sample]) -> Table:
    """What the trees were and what they cost: means over runs, the median round cost, and the largest memory."""
    plain_memory = peak_memory((sample.run for sample in group if sample.label == PLAIN.label), "verify")
    rows = []
    for label, each in by(group, lambda sample: sample.label).items():
        runs = [sample.run for sample in each]
        drafted = any(statistic(runs, "draft_n"))
        memory = peak_memory(runs, "verify")
        rows.append(
            [
                label,
                mean(runs, "tokens_per_round", 2),
                mean(runs, "nodes_per_round", 1),
                mean(runs, "acceptance_rate", 1, 100) if drafted else NONE,
                mean(runs, "committed_per_level", 2) if drafted else NONE,
                mean(runs, "rounds", 1),
                ratio(spread(sample.round_cost for sample in each)),
                megabytes(memory),
                f"{memory / plain_memory:.3f}" if memory and plain_memory else NONE,
            ]
        )
    headings = [
        "policy",
        "tokens\nper\nround",
        "nodes\nper\nround",
        "accept-\nance %",
        "commit-\nted per\nlevel",
        "rounds",
        "round\ncost",
        "verify\npeak\nMB",
        "over\nplain's",
    ]
    drawn = [row for row in rows if row[1] != NONE]
    return Table(f"Trees, {title}", headings, drawn).without_empty_columns()


def _share_of_floor(report: Report, group: Sequence[Sample]) -> list[str]:
    """How near plain decoding comes to reading the weights once a token, where the machine's bandwidth is known."""
    weight_bytes = report["models"]["target"].get("weight_bytes")
    bandwidth = report.get("machine", {}).get("read_bandwidth")
    step = spread(tpot(sample.run) for sample in group if sample.label == PLAIN.label)
    if not (weight_bytes and bandwidth and step):
        return []
    return [floor_line(step.median, weight_bytes, bandwidth)]


def sweep(report: Report) -> Iterator[Table]:
    """Each policy's settings, the fastest first, and the best of each policy."""
    for title, group in _by_sampling(report).items():
        rows, best = [], []
        for policy, tried in by(group, lambda sample: sample.run["policy"] or sample.label).items():
            ranked = sorted(by(tried, lambda sample: sample.label).items(), key=_median_speedup, reverse=True)
            rows += [_sweep_row(report, label, each) for label, each in ranked]
            label, each = ranked[0]
            if len(ranked) > 1:
                best.append(f"best of {policy}: {label}, speedup {ratio(spread(s.speedup for s in each))}")
        headings = [
            "settings",
            "speed-\nup",
            "quartiles",
            "tokens\n/s",
            "tokens\nper\nround",
            "nodes\nper\nround",
            "round\ncost",
            "equal\nto\nplain",
        ]
        yield Table(f"Sweep, {title}", headings, rows, best).without_empty_columns()


def _sweep_row(report: Report, label: str, each: Sequence[Sample]) -> list[str]:
    runs = [sample.run for sample in each]
    speedups = spread(sample.speedup for sample in each)
    return [
        label,
        ratio(speedups),
        quartiles(speedups, ratio) if len(each) > 1 else NONE,
        speed(spread(sample.rate for sample in each)),
        mean(runs, "tokens_per_round", 2),
        mean(runs, "nodes_per_round", 1),
        ratio(spread(sample.round_cost for sample in each)),
        equal(runs, report["models"]["target"]["dtype"]),
    ]


def _median_speedup(labelled: tuple[str, Sequence[Sample]]) -> float:
    speedups = spread(sample.speedup for sample in labelled[1])
    return speedups.median if speedups else 0.0


def _by_sampling(report: Report) -> dict[str, list[Sample]]:
    """The runs by temperature, under its words."""
    groups = by(samples(report), lambda sample: sample.run["temperature"])
    return {sampling(temperature, [sample.run for sample in group]): group for temperature, group in groups.items()}
