"""What is printed and drawn of a preset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from dynatree.bench import plots
from dynatree.bench.figures import Cell
from dynatree.bench.methods import PLAIN
from dynatree.bench.paper.presets import DATA_SETS, Preset
from dynatree.bench.paper.tables import (
    AR,
    COLUMNS,
    Records,
    Runs,
    beside,
    latency_per_token,
    memory,
    runs_of,
    title_of,
    where,
)
from dynatree.bench.printing import print_tables
from dynatree.bench.record import Report
from dynatree.bench.table import Table

Drawn = Mapping[str, Figure]  # by what each shows
View = Callable[[Preset, Records], tuple[Sequence[Table], Drawn]]

Line = list[tuple[float, Cell]]


def show(preset: Preset, records: Records, out: Path | None) -> None:
    """Print a preset's tables, and draw its figure into a folder."""
    tables, drawn = VIEWS[preset.name](preset, records)
    print_tables(tables)
    for note in preset.notes:
        print(note)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        for suffix in (".svg", ".png"):
            plots.save(figure, out / f"{preset.version}-{preset.item.replace(' ', '-')}-{name}{suffix}")


def _table(make: Callable[[Preset, Records], Sequence[Table]]) -> View:
    return lambda preset, records: (make(preset, records), {})


def bars(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """Throughput and speedup, for each method a bar a data set."""
    drawn = {}
    for column, name in (("tokens/s", "throughput"), ("speedup", "speedup")):
        series = {
            DATA_SETS[experiment.data_set]: _cells(runs_of(experiment, report).items(), column)
            for experiment, report in records.items()
        }
        drawn[name] = plots.bars(f"{title_of(preset)}: {column}", column, series)
    return beside(preset, records, ("tokens/s", "speedup")), drawn


def _cells(runs: Iterable[tuple[object, Runs]], column: str) -> dict[str, Cell]:
    cells = {str(each.same["label"].iloc[0]): COLUMNS[column].cell(each) for _, each in runs}
    return {label: cell for label, cell in cells.items() if cell is not None}


def progression(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """What each component adds to throughput, rounds, tokens a round and acceptance."""
    columns = ("tokens/s", "#Iter.", "L-bar", "Accept.")
    [(experiment, report)] = records.items()
    runs = [item for item in runs_of(experiment, report).items() if item[1].drafts]
    drawn = {
        _file_name(column): plots.bars(f"{title_of(preset)}: {column}", column, {column: _cells(runs, column)})
        for column in columns
    }
    return beside(preset, records, columns, plain=False), drawn


def _file_name(column: str) -> str:
    names = {"L-bar": "tokens-a-round", "l-bar": "path-length", "Accept.": "acceptance", "#Iter.": "rounds"}
    return names.get(column, column.replace("tokens/s", "throughput"))


def over(
    preset: Preset, records: Records, *, axis: str, place: Callable[[Report], float], columns: Sequence[str]
) -> tuple[Sequence[Table], Drawn]:
    """A table and a plot for each column: a method a row, and an experiment a place on the axis."""
    lines: dict[str, dict[str, Line]] = {column: {} for column in columns}
    texts: dict[str, dict[str, dict[str, str]]] = {column: {} for column in columns}
    everywhere = set.intersection(*({row.method for row in (AR, *experiment.rows)} for experiment in records))
    for experiment, report in sorted(records.items(), key=lambda item: place(item[1])):
        x = place(report)
        shared = {row: runs for row, runs in runs_of(experiment, report).items() if row.method in everywhere}
        for row, runs in shared.items():
            for column in columns:
                cell = COLUMNS[column].cell(runs)
                texts[column].setdefault(row.method.label, {})[f"{x:g}"] = COLUMNS[column].show(runs)
                if cell is not None:
                    lines[column].setdefault(row.method.label, []).append((x, cell))
    text = where(next(iter(records.values())), same_length=False)
    tables = [
        Table.of(f"{title_of(preset)}, {text}: {column}", [{axis: label} | each for label, each in found.items()])
        for column, found in texts.items()
    ]
    drawn = {
        _file_name(column): plots.lines(f"{title_of(preset)}: {column}", axis, column, found)
        for column, found in lines.items()
    }
    return tables, drawn


def sweep(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """Speedups by depth, breadth and threshold, each around the papers' best."""
    [(experiment, report)] = records.items()
    runs = {row: each for row, each in runs_of(experiment, report).items() if each.drafts}
    best = {"depth": 8.0, "breadth": 3.0, "tau": 0.1}
    drawn = {}
    for name in best:
        line = []
        for row, each in runs.items():
            settings = dict(row.method.settings)
            if all(settings[other] == value for other, value in best.items() if other != name):
                cell = COLUMNS["tokens/s"].cell(each)
                assert cell is not None
                line.append((float(str(settings[name])), cell))
        plain = COLUMNS["tokens/s"].cell(next(iter(runs_of(experiment, report).values())))
        assert plain is not None
        title = f"{title_of(preset)}: by {name}"
        drawn[name] = plots.lines(title, name, "tokens/s", {"fixed": sorted(line)}, {PLAIN.label: plain.median})
    return beside(preset, records, ("tokens/s", "speedup", "L-bar")), drawn


def sensitivity(preset: Preset, records: Records) -> tuple[Sequence[Table], Drawn]:
    """Throughput by thresholds, branch bounds and depths, beside the baselines of the same run."""
    [(experiment, report)] = records.items()
    cells = _cells(runs_of(experiment, report).items(), "tokens/s")
    title = f"{title_of(preset)}: (tau_h, tau_l), (B_min, B_max), (D_0, D_max)"
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
        over, axis="new tokens", place=_new_tokens, columns=("tokens/s", "speedup", "L-bar", "l-bar", "Accept.")
    ),
    "scaling-efficiency": partial(over, axis="new tokens", place=_new_tokens, columns=("L-bar", "l-bar", "Accept.")),
    "prompt-length": partial(over, axis="prompt tokens", place=_prompt_tokens, columns=("tokens/s", "speedup")),
    "sweep": sweep,
    "sensitivity": sensitivity,
}
