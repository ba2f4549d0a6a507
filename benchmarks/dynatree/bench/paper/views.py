"""Print and draw presets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pandas import DataFrame

from dynatree.bench import plots
from dynatree.bench.figures import Cell
from dynatree.bench.methods import PLAIN
from dynatree.bench.paper.presets import DATA_SETS, Preset, Row
from dynatree.bench.paper.tables import (
    AR,
    Drawn,
    Line,
    Records,
    beside,
    latency_per_token,
    memory,
    runs_of,
    title_of,
    where,
)
from dynatree.bench.paper.tree_views import masks, parts, random_masks, tree_acceptance, tree_sizes
from dynatree.bench.paper_figures import COLUMNS, acceptance, by_prompt, path_length, speedup, tokens_per_round
from dynatree.bench.printing import print_tables
from dynatree.bench.record import Report
from dynatree.bench.table import Table

View = Callable[[Preset, Records], tuple[Sequence[Table], Drawn]]


def show(preset: Preset, records: Records, folder: Path | None) -> None:
    """Print a preset's tables, and draw its figures into a folder."""
    tables, drawn = VIEWS[preset.name](preset, records)
    print_tables(tables)
    for note in preset.notes:
        print(note)
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        for suffix in (".svg", ".png"):
            plots.save(figure, folder / f"{preset.version}-{preset.item.replace(' ', '-')}-{name}{suffix}")


def _table(make: Callable[[Preset, Records], Sequence[Table]]) -> View:
    return lambda preset, records: (make(preset, records), {})


NEW_TOKENS = "new tokens"  # label of an axis
FIGURES: Mapping[str, Callable[[DataFrame, DataFrame], float | None]] = {
    "speedup": lambda runs, plain: (speedup(runs, plain) or (None,))[0],
    "Accept.": lambda runs, _: None if (share := acceptance(runs)) is None else 100 * share,
    "L-bar": lambda runs, _: tokens_per_round(runs),
    "l-bar": lambda runs, _: path_length(runs),
    "#Iter.": lambda runs, _: float(by_prompt(runs, "rounds").mean()),
}
FILES = {
    "tokens/s": "throughput",
    "L-bar": "tokens-a-round",
    "l-bar": "path-length",
    "Accept.": "acceptance",
    "#Iter.": "rounds",
}


def cell(column: str, runs: DataFrame, plain: DataFrame) -> Cell | None:
    """Return the value of a column and its error bar; that of tokens/s is ± one standard deviation over prompts."""
    if column == "tokens/s":
        rates = by_prompt(runs, "rate")
        mean, deviation = float(rates.mean()), float(rates.std(ddof=0))
        return Cell(mean, mean - deviation, mean + deviation, len(rates))
    figure = FIGURES[column](runs, plain)
    return None if figure is None else Cell(figure, figure, figure, runs["prompt"].nunique())


def _cells(column: str, runs: Mapping[Row, DataFrame]) -> dict[str, Cell]:
    cells = {row.method.label: cell(column, same, runs[AR]) for row, same in runs.items()}
    return {label: each for label, each in cells.items() if each is not None}


def bars(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """Throughput and speedup, with a bar for each method and data set."""
    columns = ("tokens/s", "speedup")
    drawn = {}
    for column in columns:
        series = {
            DATA_SETS[experiment.data_set]: _cells(column, runs_of(experiment, report))
            for experiment, report in records.items()
        }
        drawn[FILES.get(column, column)] = plots.bars(f"{title_of(preset)}: {column}", column, series)
    return beside(preset, records, columns), drawn


def progression(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """The effect of each component on throughput, rounds, tokens per round and acceptance."""
    columns = ("tokens/s", "#Iter.", "L-bar", "Accept.")
    [(experiment, report)] = records.items()
    runs = runs_of(experiment, report)
    drawn = {
        FILES[column]: plots.bars(f"{title_of(preset)}: {column}", column, {column: _cells(column, runs)})
        for column in columns
    }
    return beside(preset, records, columns, plain=False), drawn


def over(
    preset: Preset, records: Records, *, axis: str, place: Callable[[Report], float], columns: Sequence[str]
) -> tuple[Sequence[Table], Drawn]:
    """A table and a plot for each column, with a row for each method and a place on the axis for each experiment."""
    everywhere = set.intersection(*({row.method for row in (AR, *experiment.rows)} for experiment in records))
    if axis != NEW_TOKENS:  # Table 1's record may have longer completions than the others, which were cut
        length = _new_tokens(next(iter(records.values())))
        records = {each: report for each, report in records.items() if _new_tokens(report) == length}
    text = where(next(iter(records.values())), axis)
    found: dict[float, dict[Row, DataFrame]] = {}
    for experiment, report in records.items():
        found.setdefault(place(report), runs_of(experiment, report))
    tables, drawn = [], {}
    for column in columns:
        lines: dict[str, Line] = {}
        rows: dict[str, dict[str, str]] = {}
        for x, runs in sorted(found.items()):
            for row, same in runs.items():
                if row.method in everywhere:
                    label = row.method.label
                    texts = rows.setdefault(label, {"method": label})
                    texts[f"{axis} {x:g}"] = COLUMNS[column].text(same, runs[AR])
                    if (drawn_cell := cell(column, same, runs[AR])) is not None:
                        lines.setdefault(label, []).append((x, drawn_cell))
        notes = [f"{column}: {COLUMNS[column].formula}"]
        tables.append(Table.of(f"{title_of(preset)}, {text}: {column}", list(rows.values()), notes))
        drawn[FILES.get(column, column)] = plots.lines(f"{title_of(preset)}: {column}", axis, column, lines)
    return tables, drawn


def sweep(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """Throughput by depth, breadth and threshold, each varied around the papers' best point."""
    [(experiment, report)] = records.items()
    runs = runs_of(experiment, report)
    cells = _cells("tokens/s", runs)
    best = {"depth": 8, "breadth": 3, "tau": 0.1}
    drawn = {}
    for name in best:
        line: Line = []
        for row in experiment.rows:
            settings = dict(row.method.settings)
            if all(settings[other] == value for other, value in best.items() if other != name):
                line.append((float(str(settings[name])), cells[row.method.label]))
        reference = {PLAIN.label: cells[PLAIN.label].median}
        drawn[name] = plots.lines(f"{title_of(preset)}: {name}", name, "tokens/s", {"fixed": sorted(line)}, reference)
    return beside(preset, records, ("tokens/s", "speedup", "L-bar")), drawn


def sensitivity(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """Throughput by thresholds, branch bounds and depths, beside the baselines of the same run."""
    [(experiment, report)] = records.items()
    title = f"{title_of(preset)}: (tau_h, tau_l), (B_min, B_max), (D_0, D_max)"
    cells = _cells("tokens/s", runs_of(experiment, report))
    drawn = {"throughput": plots.bars(title, "tokens/s", {"tokens/s": cells})}
    return beside(preset, records, ("tokens/s", "speedup", "Accept.")), drawn


def _new_tokens(report: Report) -> float:
    return float(report["options"]["max_new_tokens"])


def _prompt_tokens(report: Report) -> float:
    return float(report["options"]["prompt_tokens"])


VIEWS: Mapping[str, View] = {
    "throughput": _table(partial(beside, columns=("tokens/s", "speedup"))),
    "latency": _table(partial(beside, columns=("TTFT ms", "TPOT ms"))),
    "efficiency": _table(partial(beside, columns=("Accept.", "L-bar", "l-bar", "#Iter."))),
    "ablation": _table(partial(beside, columns=("tokens/s", "speedup", "delta vs fixed"), plain=False)),
    "sensitivity-table": _table(partial(beside, columns=("tokens/s", "speedup", "Accept."))),
    "memory": _table(memory),
    "latency-per-token": _table(latency_per_token),
    "bars": bars,
    "progression": progression,
    "scaling": partial(
        over, axis=NEW_TOKENS, place=_new_tokens, columns=("tokens/s", "speedup", "L-bar", "l-bar", "Accept.")
    ),
    "scaling-efficiency": partial(over, axis=NEW_TOKENS, place=_new_tokens, columns=("L-bar", "l-bar", "Accept.")),
    "prompt-length": partial(over, axis="prompt tokens", place=_prompt_tokens, columns=("tokens/s", "speedup")),
    "sweep": sweep,
    "sensitivity": sensitivity,
    "random-masks": random_masks,
    "acceptance": tree_acceptance,
    "tree-sizes": tree_sizes,
    "masks": masks,
    "parts": parts,
}
