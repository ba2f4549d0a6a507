"""The tables of presets: our figures by the papers' formulas, each beside the paper's figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from pandas import DataFrame

from dynatree.bench.figures import Cell, frame
from dynatree.bench.methods import PLAIN
from dynatree.bench.paper.presets import DATA_SETS, Experiment, Preset, Row
from dynatree.bench.paper.published import PUBLISHED, Figures
from dynatree.bench.paper_figures import COLUMNS, DYSPEC, change
from dynatree.bench.record import Report
from dynatree.bench.table import NONE, Table

Records = Mapping[Experiment, Report]
Line = list[tuple[float, Cell]]  # a line of a plot: x and cell
Drawn = Mapping[str, Figure]  # figures by name
AR = Row(PLAIN, "AR")
_DRAWN = {"bars": "table 1", "progression": "table 4"}  # the tables whose numbers these figures plot


def runs_of(experiment: Experiment, report: Report) -> dict[Row, DataFrame]:
    """The runs of each method that was measured; plain decoding first."""
    runs = frame(report)
    found = {row: runs[runs["label"] == row.method.label] for row in (AR, *experiment.rows)}
    return {row: same for row, same in found.items() if len(same)}


def title_of(preset: Preset) -> str:
    """A title such as `Table 1 of DynaTree 003: Main results`."""
    paper = "DySpec" if preset.version == "dyspec" else f"DynaTree {preset.version}"
    return f"{preset.item.capitalize()} of {paper}: {preset.title}"


def where(report: Report, axis: str = "") -> str:
    """The text that was measured, and the sizes that differ from the preset's, except the size on the axis."""
    told = report["options"]["paper"]
    name = DATA_SETS[told["data_set"]]
    measured = report["prompts"]["data_set"]
    text = name if measured == told["data_set"] else f"{measured} for {name}"
    scaled = [each for each in told["scaled"] if not axis or not each.endswith(axis)]
    return f"{text}; scaled: {', '.join(scaled)}" if scaled else text


def beside(preset: Preset, records: Records, columns: Sequence[str], plain: bool = True) -> list[Table]:
    """A table for each experiment: a row for each method, with our figure and the paper's for each column."""
    published = _published(preset)
    tables: list[Table] = []
    for experiment, report in records.items():
        runs = runs_of(experiment, report)
        rows = []
        for row in runs:
            if plain or row != AR:
                line = {"method": row.method.label}
                for column in columns:
                    line[column] = _text(column, runs, row)
                    line[f"{column}, paper"] = _row(published, experiment, row).get(column, NONE)
                rows.append(line)
        formulas = [f"{column}: {COLUMNS[column].formula}" for column in columns if column in COLUMNS]
        notes = [*notes_of(experiment, report), *(formulas if not tables else ())]
        tables.append(Table.of(f"{title_of(preset)}, {where(report)}", rows, notes))
    return tables


def _text(column: str, runs: Mapping[Row, DataFrame], row: Row) -> str:
    """A method's figure; Table 4's last column compares with the first method of the same reading."""
    if column == "delta vs fixed":
        return change(runs[row], next(runs[each] for each in runs if each != AR and each.is_listed == row.is_listed))
    return COLUMNS[column].text(runs[row], runs[AR])


def _published(preset: Preset) -> Figures:
    """The paper's figures for the preset's table, or for the table that the preset's figure plots."""
    return PUBLISHED.get((preset.version, _DRAWN.get(preset.name, preset.item)), {})


def _row(published: Figures, experiment: Experiment, row: Row) -> Mapping[str, str]:
    return published.get((experiment.data_set, row.paper), {})


def notes_of(experiment: Experiment, report: Report) -> list[str]:
    """A note on the sizes and the sampling of an experiment."""
    tokens = sorted({min(report["prompts"]["tokens"]), max(report["prompts"]["tokens"])})
    options = report["options"]
    how = "greedy" if experiment.temperature == 0 else f"temperature {experiment.temperature:g}, {experiment.scheme}"
    return [
        f"{report['prompts']['count']} prompts of {' to '.join(map(str, tokens))} tokens, "
        f"T = {options['max_new_tokens']}, {options['warmup']} warm-ups, {how}"
    ]


def latency_per_token(preset: Preset, records: Records) -> list[Table]:
    """DySpec's latency per token, with a row for each data set, temperature and method."""
    published = _published(preset)
    [column] = DYSPEC
    rows = []
    for experiment, report in records.items():
        runs = runs_of(experiment, report)
        for row in runs:
            paper = published.get((experiment.data_set, f"{row.paper}, {experiment.temperature:g}"), {})
            rows.append(
                {
                    "data set": DATA_SETS[experiment.data_set],
                    "temperature": f"{experiment.temperature:g}",
                    "method": row.method.label,
                    column: _text(column, runs, row),
                    f"{column}, paper": paper.get(column, NONE),
                }
            )
    texts = dict.fromkeys(where(report) for report in records.values())
    notes = dict.fromkeys(note for experiment, report in records.items() for note in notes_of(experiment, report))
    notes[f"{column}: {COLUMNS[column].formula}"] = None
    return [Table.of(f"{title_of(preset)}, {'; '.join(texts)}", rows, list(notes))]


def memory(preset: Preset, records: Records) -> list[Table]:
    """The peak memory of both services together, and its mean excess over plain decoding's."""
    published = _published(preset)
    ours: dict[str, dict[str, float]] = {}
    papers: dict[str, dict[str, float]] = {}
    for experiment, report in records.items():
        for row in (AR, *experiment.rows):
            peaks = [_peak(run.get("peak_memory")) for run in report["runs"] if run["label"] == row.method.label]
            known = [peak for peak in peaks if peak is not None]
            if known:
                ours.setdefault(row.paper, {})[experiment.data_set] = max(known) / 1e6
            paper = _row(published, experiment, row).get("peak MB")
            if paper:
                papers.setdefault(row.paper, {})[experiment.data_set] = float(paper)
    rows = []
    for name, by_data_set in ours.items():
        line = {"method": name}
        for data_set, peak in by_data_set.items():
            line[f"{DATA_SETS[data_set]}, MB"] = f"{peak:.1f}"
            line[f"{DATA_SETS[data_set]}, paper"] = f"{papers[name][data_set]:.1f}" if name in papers else NONE
        line["over plain"] = _over(ours, name)
        line["over plain, paper"] = _over(papers, name)
        rows.append(line)
    note = "Ours is the resident memory of both processes; the papers' is what torch allocated on the GPU."
    texts = dict.fromkeys(where(report) for report in records.values())
    return [Table.of(f"{title_of(preset)}, {'; '.join(texts)}", rows, [note])]


def _peak(memory: Mapping[str, int | None] | None) -> int | None:
    sizes = [(memory or {}).get(name) for name in ("verify", "draft")]
    return sum(size for size in sizes if size) if all(sizes) else None


def _over(peaks: Mapping[str, Mapping[str, float]], name: str) -> str:
    if name not in peaks or AR.paper not in peaks:
        return NONE
    mine, plain = (sum(peaks[each].values()) / len(peaks[each]) for each in (name, AR.paper))
    return f"{100 * (mine / plain - 1):+.2f} %"
