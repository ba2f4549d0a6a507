"""DySpec's figures of trees: acceptance by draft probability, sizes, blocks of masks, time of a round's parts."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from pandas import concat

from dynatree.bench import plots
from dynatree.bench.figures import Cell
from dynatree.bench.paper.presets import Preset
from dynatree.bench.paper.published import BLOCKS, REAL_BLOCKS
from dynatree.bench.paper.tables import Drawn, Line, Records, notes_of, runs_of, title_of, where
from dynatree.bench.paper.trees import (
    BINS,
    BLOCK,
    RANDOM_TREES,
    acceptance,
    blocks,
    by_value,
    prefix_blocks,
    random_blocks,
    reordered,
    trees_of,
)
from dynatree.bench.report import part_times
from dynatree.bench.table import NONE, Table

PREFIXES = (0, 128, 256, 512, 1024, 2048)  # tokens
MOST_TREES = 50  # largest number of trees whose blocks are counted


def tree_acceptance(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """The share of accepted nodes by their draft probability, for each temperature."""
    rows = [{"draft probability": f"{low / BINS:.1f} to {(low + 1) / BINS:.1f}"} for low in range(BINS)]
    lines: dict[str, Line] = {}
    for experiment, report in records.items():
        name = f"temperature {experiment.temperature:g}"
        trees = [tree for run in trees_of(report) for tree in run]
        for row, each in zip(rows, acceptance(trees), strict=True):
            row[name] = f"{each.accepted / each.tried:.3f} ({each.accepted} of {each.tried})" if each.tried else NONE
            if each.tried:
                share = each.accepted / each.tried
                lines.setdefault(name, []).append(((each.low + each.high) / 2, Cell(share, share, share, each.tried)))
    title = _title(preset, records)
    return [Table.of(title, rows, _notes(records))], {
        "acceptance": plots.lines(title, "draft probability", "share accepted", lines)
    }


def tree_sizes(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """Nodes and accepted tokens at each step of the first prompt, and accepted tokens by quartile of tree size."""
    [report] = records.values()
    runs = trees_of(report)
    ranked = sorted((tree for run in runs for tree in run), key=lambda tree: len(tree["parents"]))
    rows = []
    for quarter in range(4):
        part = ranked[quarter * len(ranked) // 4 : (quarter + 1) * len(ranked) // 4]
        if part:
            sizes, accepted = [len(tree["parents"]) for tree in part], [len(tree["accepted"]) for tree in part]
            nodes = f"{sizes[0]} to {sizes[-1]}"
            line = {"nodes": nodes, "trees": str(len(part)), "mean nodes": f"{fmean(sizes):.2f}"}
            rows.append(line | {"mean accepted": f"{fmean(accepted):.2f}"})
    title, whole = _title(preset, records), fmean(len(tree["parents"]) for tree in ranked)
    drawn = {}
    counts = {
        "nodes": [len(tree["parents"]) for tree in runs[0]],
        "accepted": [len(tree["accepted"]) for tree in runs[0]],
    }
    for name, each in counts.items():
        steps: Line = [(step, Cell(size, size, size, 1)) for step, size in enumerate(each)]
        drawn[name] = plots.lines(f"{title}: {name}", "step", name, {name: steps})
    notes = [f"mean size {whole:.2f} nodes; the paper's 551.79 on OpenWebText at temperature 0.6", *_notes(records)]
    return [Table.of(title, rows, notes)], drawn


def masks(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """Mean blocks of the largest trees' masks, in Algorithm 1's order of nodes and reordered."""
    rows = []
    lines: dict[str, Line] = {}
    for report in records.values():
        trees = [tree for run in trees_of(report) for tree in run]
        most = max(len(tree["parents"]) for tree in trees)
        largest = [tree for tree in trees if len(tree["parents"]) == most][:MOST_TREES]
        original = fmean(blocks(tree["parents"], by_value(tree)) for tree in largest)
        better = fmean(blocks(tree["parents"], reordered(tree["parents"])) for tree in largest)
        papers = REAL_BLOCKS.get(most + 1, (NONE, NONE))
        for prefix in PREFIXES:
            before = prefix_blocks(most + 1, prefix)
            line = {"rows": str(most + 1), "prefix": str(prefix), "trees": str(len(largest))}
            line |= {"original order": f"{original + before:.1f}", "reordered": f"{better + before:.1f}"}
            rows.append(line | {"original, paper": papers[0], "reordered, paper": papers[1]})
            for name, count in ((f"{most + 1} rows, original", original), (f"{most + 1} rows, reordered", better)):
                total = count + before
                lines.setdefault(name, []).append((prefix, Cell(total, total, total, len(largest))))
    title = _title(preset, records)
    drawn = {"blocks": plots.lines(title, "prefix, tokens", f"blocks of {BLOCK} x {BLOCK}", lines)}
    return [Table.of(title, rows, _notes(records))], drawn


def random_masks(preset: Preset, _: Records) -> tuple[Sequence[Table], Drawn]:
    """The block counts of DySpec's Table 5, which need no model."""
    rows = []
    for size, (original, better) in BLOCKS.items():
        ours = random_blocks(size)
        line = {"rows": str(size), "original order": f"{ours[0]:.1f}", "original, paper": original}
        rows.append(line | {"reordered": f"{ours[1]:.1f}", "reordered, paper": better})
    note = (
        f"means over {RANDOM_TREES} trees whose parents are uniform among the rows before; blocks of {BLOCK} x {BLOCK}"
    )
    return [Table.of(title_of(preset), rows, [note])], {}


def parts(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """Milliseconds per round by part, for every method and record."""
    frames = []
    for experiment, report in records.items():
        for row, same in runs_of(experiment, report).items():
            frames.append(
                same.assign(label=f"{row.method.label}, {experiment.data_set}, T = {experiment.temperature:g}")
            )
    chart = part_times(concat(frames))
    title = _title(preset, records)
    rows = [
        {"method": str(label)} | {str(name): f"{value:.2f}" for name, value in values.items()}
        for label, values in chart.iterrows()
    ]
    drawn = {"parts": plots.stacked(title, "ms per round", chart)} if len(chart) else {}
    return [Table.of(title, rows, _notes(records))], drawn


def _title(preset: Preset, records: Records) -> str:
    return f"{title_of(preset)}, {'; '.join(dict.fromkeys(where(report) for report in records.values()))}"


def _notes(records: Records) -> list[str]:
    return list(dict.fromkeys(note for experiment, report in records.items() for note in notes_of(experiment, report)))
