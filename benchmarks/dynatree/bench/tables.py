"""The tables of a report, computed from its records alone; `figures` defines rates, cells and ratios.

`paper_figures` has the formulas of the papers' own tables. Other figures of a method are means over its runs of the
`dynatree.client.Statistics` of the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import pandas as pd
from pandas import DataFrame

from dynatree.bench.figures import (
    DEFINITION,
    INTERVALS,
    SIXTEEN_BIT,
    TRANSFORMERS,
    by,
    by_label,
    by_temperature,
    cells,
    frame,
    percentile,
    plain_step,
    recommended,
    token_gaps,
)
from dynatree.bench.load.tables import load
from dynatree.bench.methods import BACKBONE, DYNAMIC, DYNATREE, FIXED, LINEAR, PLAIN, READINGS, SMALL_FIXED
from dynatree.bench.paper_figures import COLUMNS, DYSPEC, OURS, TABLE_1, TABLE_2, TABLE_3, as_published, change
from dynatree.bench.ranks import add_ranks, sequoia_rates
from dynatree.bench.record import Point, Report
from dynatree.bench.table import NONE, Marked, Table, figure, megabytes, milliseconds
from dynatree.common.model_info import NO_MODEL

ENOUGH_PROMPTS = 8  # with fewer, a bootstrap interval is too narrow
CURVES = {
    "nodes": "Verifying by nodes of the tree",
    "context": "Verifying by length of the context",
    "sessions": "Verifying by sessions in one forward",
    "draft": "A draft forward by rows",
}


def tables(report: Report) -> list[Table]:
    """The tables of a report's command."""
    measured = report["runs"] or report.get("failures") or "costs" in report
    return list(_TABLES[report["command"]](report)) if measured else []


def _compare(report: Report) -> Iterator[Table]:
    """The speed of the methods and the figures of their trees, for each temperature."""
    for number, (title, runs) in enumerate(by_temperature(frame(report)).items()):
        rates, over_plain = cells(runs, "rate"), cells(runs, "rate", over=PLAIN.label)
        over_transformers, first = cells(runs, "rate", over=TRANSFORMERS), cells(runs, "ttft")
        temperature = runs["temperature"].iloc[0]
        rows = []
        for label, same in by_label(runs).items():
            mine = [run for run in report["runs"] if (run["label"], run["temperature"]) == (label, temperature)]
            gaps = [gap for run in mine for gap in token_gaps(run)]
            rows.append(
                {
                    "method": label,
                    "tokens/s": figure(rates.get(label), 1, interval=True),
                    "x plain": figure(over_plain.get(label), interval=True),
                    "x transformers": figure(over_transformers.get(label), interval=True),
                    "prompts": str(rates[label].prompts),
                    "TTFT ms": milliseconds(first[label].median if label in first else None),
                    "TPOT p50 ms": milliseconds(percentile(gaps, 50)),
                    "TPOT p99 ms": milliseconds(percentile(gaps, 99)),
                    "equal to plain": _equal(same, report),
                }
            )
        yield Table.of(f"Speed, {title}", rows, [DEFINITION, INTERVALS, *_share_of_floor(report, runs)])
        yield _trees(title, runs)
        columns = (*TABLE_1, *TABLE_2, *TABLE_3, *DYSPEC)
        yield as_published(f"As the papers report, {title}", runs, columns, formulas=number == 0)


def _trees(title: str, runs: DataFrame) -> Table:
    """Size and cost of the trees: means over runs, a round in plain steps, and the largest memory."""
    costs = cells(runs, "round_seconds", over=PLAIN.label, of="tpot")
    peaks = runs.groupby("label")["memory"].max()
    rows = [
        {
            "method": label,
            "tokens per round": _mean(same, "tokens_per_round", 2),
            "nodes per round": _mean(same, "nodes_per_round", 1),
            "acceptance %": _acceptance(same),
            "committed per level": _mean(same, "committed_per_level", 2) if same["draft_n"].any() else NONE,
            "rounds": _mean(same, "rounds", 1),
            "plain steps per round": figure(costs.get(label)),
            "verify peak MB": NONE if pd.isna(peaks[label]) else megabytes(peaks[label]),
            "x plain's": _over(peaks.get(label), peaks.get(PLAIN.label)),
        }
        for label, same in by_label(runs).items()
        if "draft_n" in same and same["draft_n"].notna().any()
    ]
    return Table.of(f"Trees, {title}", rows)


def _acceptance(runs: DataFrame) -> str:
    return _mean(runs, "acceptance_rate", 1, 100) if runs["draft_n"].any() else NONE


def _over(value: Any, base: Any) -> str:
    return NONE if base is None or pd.isna(value) or pd.isna(base) else f"{value / base:.3f}"


def _mean(runs: DataFrame, name: str, digits: int, factor: float = 1.0) -> str:
    values = runs[name].dropna()
    return f"{factor * values.mean():.{digits}f}" if len(values) else NONE


def _equal(runs: DataFrame, report: Report) -> str:
    """Say whether all outputs equal those of plain decoding; those of other programs' servers, of their own."""
    checked, own = runs["equal"].dropna(), runs["own_equal"].dropna()
    if len(own):
        parting = int((~own.astype(bool)).sum())
        return f"own: {parting} of {len(own)} part" if parting else "own: yes"
    wrong = int((~checked.astype(bool)).sum())
    if not wrong:
        return "yes" if len(checked) else NONE
    if report["models"]["target"]["dtype"] in SIXTEEN_BIT:
        return f"{wrong} of {len(checked)} part"
    return Marked(f"NO ({wrong} of {len(checked)} differ)")


def _share_of_floor(report: Report, runs: DataFrame) -> list[str]:
    """Compare a plain step with reading the weights once, if the machine's bandwidth is known."""
    bandwidth, step = report["machine"]["read_bandwidth"], plain_step(runs)
    if not bandwidth or step is None:
        return []
    return [floor_line(step.median, report["models"]["target"]["weight_bytes"], bandwidth)]


def floor_line(step: float, weight_bytes: float, bandwidth: float) -> str:
    """Compare a plain step of `step` seconds with reading the weights at `bandwidth` bytes per second."""
    floor = weight_bytes / bandwidth
    return (
        f"plain step {1e3 * step:.2f} ms; floor {1e3 * floor:.2f} ms "
        f"({megabytes(weight_bytes)} MB / {bandwidth / 1e9:.1f} GB/s) = {100 * floor / step:.0f} %"
    )


def _sweep(report: Report) -> Iterator[Table]:
    """Each policy's settings, fastest first, and the best settings of each policy."""
    for title, runs in by_temperature(frame(report)).items():
        rates, over_plain = cells(runs, "rate"), cells(runs, "rate", over=PLAIN.label)
        costs = cells(runs, "round_seconds", over=PLAIN.label, of="tpot")
        rows, best = [], []
        for policy, tried in runs.groupby(runs["policy"].fillna(runs["label"]), sort=False):
            same = by_label(tried)
            ranked = sorted(same, key=lambda label: -over_plain[label].median)
            rows += [
                {
                    "settings": label,
                    "x plain": figure(over_plain[label], interval=True),
                    "tokens/s": figure(rates[label], 1, interval=True),
                    "prompts": str(rates[label].prompts),
                    "tokens per round": _mean(same[label], "tokens_per_round", 2),
                    "nodes per round": _mean(same[label], "nodes_per_round", 1),
                    "plain steps per round": figure(costs.get(label)),
                    "equal to plain": _equal(same[label], report),
                }
                for label in ranked
            ]
            if len(ranked) > 1:
                best.append(f"best of {policy}: {ranked[0]}, {figure(over_plain[ranked[0]])} x plain")
        yield Table.of(f"Sweep, {title}", rows, [DEFINITION, INTERVALS, *best])


def _ablation(report: Report) -> Iterator[Table]:
    """DynaTree's Tables 4 and 3, for each temperature."""
    for temperature, runs in frame(report).groupby("temperature", sort=False):
        yield _table_4(runs, f"temperature {temperature:g}")
        yield _table_3(runs, f"temperature {temperature:g}")


def _table_4(runs: DataFrame, title: str) -> Table:
    """DynaTree's Table 4: throughput, its mean and standard deviation over prompts, and the gain of each component.

    The paper's fixed tree (D = 5, B = 2) is the row with tau = 0.05: policy `dynatree` with every component switched
    off, so that each row below it differs from the one before in one component only; delta is against this row.
    The row with tau = 0.1 is policy `fixed`, with the pruning of the paper's tuned baseline. The rows below DynaTree's
    are readings of points that the paper leaves open.
    """
    methods, columns = by_label(runs), dict(zip(("throughput (tokens/s)", "speedup"), TABLE_1, strict=True))
    rows = []
    for label in (method.label for method in (SMALL_FIXED, BACKBONE, DYNAMIC, DYNATREE, *READINGS)):
        if label in methods:
            same, plain = methods[label], runs[runs["label"] == PLAIN.label]
            figures = {heading: COLUMNS[column].text(same, plain) for heading, column in columns.items()}
            delta = {"delta vs fixed": change(same, runs[runs["label"] == BACKBONE.label])}
            rows.append({"variant": label, **figures, **delta})
    notes = [f"{heading}: {COLUMNS[column].formula}" for heading, column in columns.items()]
    return Table.of(f"Ablation (Table 4), {title}", rows, notes)


def _table_3(runs: DataFrame, title: str) -> Table:
    """DynaTree's Table 3, by the formulas that reproduce the paper's figures, with our formulas beside them."""
    names = {
        PLAIN.label: "autoregressive",
        LINEAR.label: LINEAR.label,
        FIXED.label: FIXED.label,
        DYNATREE.label: "DynaTree",
    }
    return as_published(f"Verification efficiency (Table 3), {title}", runs, (*TABLE_3, *OURS), names)


def _coupling(report: Report) -> Iterator[Table]:
    """Tokens per round by sampling scheme: the gain of shared noise, compared with residual sampling."""
    runs = frame(report)
    drafting = runs[runs["label"] != PLAIN.label]
    schemes = [str(scheme) for scheme in drafting["scheme"].unique()]
    rows = [
        {
            "policy": label,
            "T": f"{temperature:g}",
            **{scheme: _mean(same[same["scheme"] == scheme], "tokens_per_round", 2) for scheme in schemes},
            "equal to plain": _equal(same, report),
        }
        for temperature, group in drafting.groupby("temperature", sort=False)
        for label, same in by_label(group).items()
    ]
    yield Table.of("Coupling: tokens per round", rows)


def _rank(report: Report) -> Iterator[Table]:
    """The drafts of `dynatree rank`, the fastest first, and which one to use."""
    for title, runs in by_temperature(frame(report)).items():
        rates, over = cells(runs, "rate"), cells(runs, "rate", over=PLAIN.label)
        methods = by_label(runs)
        rows = [
            {
                "draft": "(plain decoding)" if label == PLAIN.label else label,
                "tokens per round": _mean(methods[label], "tokens_per_round", 2),
                "acceptance %": _acceptance(methods[label]),
                "tokens/s": figure(rates[label], 1, interval=True),
                "x plain": figure(over.get(label), interval=True),
                "prompts": str(rates[label].prompts),
                "draft peak MB": megabytes(_peak(report, label)),
                "equal to plain": _equal(methods[label], report),
            }
            for label in sorted(methods, key=lambda label: -over[label].median if label in over else 0)
        ]
        refused = {each["draft"]: each["refusal"] for each in report["options"]["drafts"] if each["refusal"]}
        rows += [{"draft": draft} for draft in refused]
        best, told = recommended(runs), "no draft model pays"
        if best != NO_MODEL:
            told = f"{figure(over[best])} x plain decoding, where none gives {figure(over.get(NO_MODEL))} x"
        reasons = [f"{draft} is not ranked: {reason}" for draft, reason in refused.items()]
        least = over[NO_MODEL].median if NO_MODEL in over else 0
        slower = [label for label in over if label not in (PLAIN.label, NO_MODEL) and over[label].median < least]
        if slower:
            other = "; `dynatree distill` makes drafts of the target" if best == NO_MODEL else ""
            reasons.append(f"slower than none: {', '.join(slower)}{other}")
        notes = [DEFINITION, INTERVALS, *reasons, f"use {best}: {told}", *_doubts(runs, best)]
        yield Table.of(f"Drafts, {title}", rows, notes)


def _doubts(runs: DataFrame, best: str) -> Iterator[str]:
    """Say whether more prompts may change the recommendation."""
    count = runs["prompt"].nunique()
    close = []
    for label in by_label(runs):
        cell = cells(runs, "rate", over=label).get(best)
        if label not in (best, PLAIN.label) and cell and not (cell.interval and cell.interval[0] > 1):
            close.append(label)
    if close or count < ENOUGH_PROMPTS:
        rivals = f": {', '.join(close)} may be as fast" if close else ""
        yield f"{count} prompts leave this uncertain{rivals}; measure more prompts"


def _peak(report: Report, label: str) -> int | None:
    """The largest memory of the draft service of a draft's name, in bytes."""
    peaks = [(run.get("peak_memory") or {}).get(label) for run in report["runs"] if run["label"] == label]
    return max((peak for peak in peaks if peak is not None), default=None)


def _ranks(report: Report) -> Iterator[Table]:
    """How often the target chose the draft's k-th guess, p_k, and the matching settings of policy `sequoia`."""
    for temperature, group in by(report["runs"], lambda run: run["temperature"]).items():
        counts = add_ranks([run["ranks"] for run in group])
        trials = counts["trials"]
        hits = [(f"p{rank}", hits) for rank, hits in enumerate(counts["hits"], start=1)]
        hits += [("none of them", trials - sum(counts["hits"])), ("all", trials)]
        rows = [
            {"guess": name, "chosen": str(each), "share": f"{each / trials:.4f}" if trials else NONE}
            for name, each in hits
        ]
        notes = []
        if trials:
            rates = ",".join(f"{rate:g}" for rate in sequoia_rates(counts))
            notes = [
                f"to use them: --policy sequoia --set rates={rates}",
                f"in dynatree bench: --policy sequoia:rates={rates}",
            ]
        sampling = f"scheme {group[0]['scheme']}" if group[0]["scheme"] else "greedy"
        yield Table.of(f"Acceptance by rank, temperature {temperature:g}, {sampling}", rows, notes)


def _costs(report: Report) -> Iterator[Table]:
    """One table per curve: medians over repetitions with their range, beside a plain decoding step."""
    measured = report["costs"]
    if not measured["points"]:  # interrupted before the first point
        return
    plain, floor = median(measured["plain_seconds"]), measured["floor"]
    notes = [floor_line(plain, floor["weight_bytes"], floor["read_bandwidth"])]
    for curve, points in by(measured["points"], lambda point: point["curve"]).items():
        yield Table.of(CURVES[curve], [_cost_row(point, plain) for point in points], notes)


def _cost_row(point: Point, plain: float) -> dict[str, str]:
    seconds, forward = point["seconds"], median(point["forward_seconds"])
    spread = f"{milliseconds(min(seconds))}-{milliseconds(max(seconds))}" if len(seconds) > 1 else NONE
    return {
        "nodes": str(point["nodes"]),
        "context": str(point["context"]),
        "sessions": str(point["sessions"]),
        "round ms": milliseconds(median(seconds)),
        "range ms": spread,
        "forward ms": milliseconds(forward),
        "plain steps": f"{median(seconds) / plain:.2f}",
    }


_TABLES = {
    "compare": _compare,
    "sweep": _sweep,
    "ablation": _ablation,
    "coupling": _coupling,
    "ranks": _ranks,
    "rank": _rank,
    "load": load,
    "costs": _costs,
}
