"""The tables of presets: what was measured, and beside each figure the paper's.

A figure is the mean over prompts, with the (population) standard deviation over prompts where the papers print one; a
prompt's own figure is the mean over its repetitions. A speedup is the ratio of the mean rates, as in the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pandas import DataFrame, Series

from dynatree.bench.figures import Cell, frame
from dynatree.bench.methods import PLAIN
from dynatree.bench.paper.presets import DATA_SETS, Experiment, Preset, Row
from dynatree.bench.paper.published import PUBLISHED, Figures
from dynatree.bench.record import Report
from dynatree.bench.table import NONE, Table

Records = Mapping[Experiment, Report]
AR = Row(PLAIN, "AR")
_DRAWN = {"bars": "table 1", "progression": "table 4"}  # the tables that figures draw


@dataclass(frozen=True)
class Runs:
    """The runs of one method of an experiment, those of plain decoding and those of the experiment's first row."""

    same: DataFrame
    plain: DataFrame
    first: DataFrame

    @property
    def drafts(self) -> bool:
        """Whether it is not plain decoding."""
        return len(self.same) > 0 and self.same["label"].iloc[0] != PLAIN.label


@dataclass(frozen=True)
class Column:
    """A figure of a method: of a plot, and as text."""

    of: Callable[[Runs], Cell]
    text: Callable[[Cell], str]
    drafted: bool = False  # plain decoding has none

    def cell(self, runs: Runs) -> Cell | None:
        """None where there is none."""
        return self.of(runs) if runs.drafts or not self.drafted else None

    def show(self, runs: Runs) -> str:
        """As the papers print it."""
        cell = self.cell(runs)
        return NONE if cell is None else self.text(cell)


def _of(figure: str, factor: float = 1.0) -> Callable[[Runs], Cell]:
    """The mean over prompts, and a standard deviation below and above it."""

    def cell(runs: Runs) -> Cell:
        values = factor * _by_prompt(runs.same, figure)
        mean, deviation = float(values.mean()), float(values.std(ddof=0))
        return Cell(mean, mean - deviation, mean + deviation, len(values))

    return cell


def _ratio(base: Callable[[Runs], DataFrame]) -> Callable[[Runs], Cell]:
    """The ratio of mean rates."""

    def cell(runs: Runs) -> Cell:
        ratio = float(_by_prompt(runs.same, "rate").mean() / _by_prompt(base(runs), "rate").mean())
        return Cell(ratio, ratio, ratio, runs.same["prompt"].nunique())

    return cell


def _by_prompt(runs: DataFrame, figure: str) -> Series[float]:
    return runs.groupby("prompt")[figure].mean()


def _mean(digits: int, suffix: str = "") -> Callable[[Cell], str]:
    return lambda cell: f"{cell.median:.{digits}f}{suffix}"


def _spread(digits: int) -> Callable[[Cell], str]:
    return lambda cell: f"{cell.median:.{digits}f} ± {cell.high - cell.median:.{digits}f}"


COLUMNS: Mapping[str, Column] = {
    "tokens/s": Column(_of("rate"), _spread(1)),
    "speedup": Column(_ratio(lambda runs: runs.plain), _mean(2)),
    "TTFT ms": Column(_of("ttft", 1e3), _spread(1)),
    "TPOT ms": Column(_of("tpot", 1e3), _spread(2)),
    "Accept.": Column(_of("committed_per_level", 100), _mean(1, " %"), drafted=True),
    "L-bar": Column(_of("tokens_per_round"), _mean(2)),
    "l-bar": Column(_of("mean_path_length"), _mean(2), drafted=True),
    "#Iter.": Column(_of("rounds"), _mean(0)),
    "delta vs fixed": Column(
        _ratio(lambda runs: runs.first), lambda cell: f"{100 * (cell.median - 1):+.1f} %", drafted=True
    ),
    "s/token": Column(_of("seconds_per_token"), _mean(5)),
}


def runs_of(experiment: Experiment, report: Report) -> dict[Row, Runs]:
    """Plain decoding first."""
    runs = frame(report)
    runs = runs.assign(seconds_per_token=1 / runs["rate"])
    found = {row: runs[runs["label"] == row.method.label] for row in (AR, *experiment.rows)}
    first = found[experiment.rows[0]]
    return {row: Runs(same, found[AR], first) for row, same in found.items() if len(same)}


def title_of(preset: Preset) -> str:
    """As `Table 1 of DynaTree 003: Main results`."""
    paper = "DySpec" if preset.version == "dyspec" else f"DynaTree {preset.version}"
    return f"{preset.item.capitalize()} of {paper}: {preset.title}"


def where(report: Report, same_length: bool = True) -> str:
    """The text that was measured, and by how much less than the preset's."""
    told = report["options"]["paper"]
    name = DATA_SETS[told["data_set"]]
    measured = report["prompts"]["data_set"]
    text = name if measured == told["data_set"] else f"{measured} for {name}"
    scaled = [each for each in told["scaled"] if same_length or "tokens" not in each]
    return f"{text}; scaled: {', '.join(scaled)}" if scaled else text


def beside(preset: Preset, records: Records, columns: Sequence[str], plain: bool = True) -> list[Table]:
    """A table for each experiment: a method a row, and of each column ours and the paper's."""
    published = _published(preset)
    tables = []
    for experiment, report in records.items():
        rows = []
        for row, runs in runs_of(experiment, report).items():
            if plain or runs.drafts:
                line = {"method": row.method.label}
                for column in columns:
                    line[column] = COLUMNS[column].show(runs)
                    line[f"{column}, paper"] = _row(published, experiment, row).get(column, NONE)
                rows.append(line)
        tables.append(Table.of(f"{title_of(preset)}, {where(report)}", rows, _notes(experiment, report)))
    return tables


def _published(preset: Preset) -> Figures:
    """The paper's, of the table itself or of the one that a figure draws."""
    return PUBLISHED.get((preset.version, _DRAWN.get(preset.name, preset.item)), {})


def _row(published: Figures, experiment: Experiment, row: Row) -> Mapping[str, str]:
    return published.get((experiment.data_set, row.paper), {})


def _notes(experiment: Experiment, report: Report) -> list[str]:
    """The experiment's sizes."""
    tokens = sorted({min(report["prompts"]["tokens"]), max(report["prompts"]["tokens"])})
    options = report["options"]
    how = "greedy" if experiment.temperature == 0 else f"temperature {experiment.temperature:g}, {experiment.scheme}"
    return [
        f"{report['prompts']['count']} prompts of {' to '.join(map(str, tokens))} tokens, "
        f"T = {options['max_new_tokens']}, {options['warmup']} warm-ups, {how}; "
        "means over prompts, ± their standard deviation"
    ]


def latency_per_token(preset: Preset, records: Records) -> list[Table]:
    """DySpec's, a row for each data set, temperature and method."""
    published = _published(preset)
    column = "s/token (tokens a step)"
    rows = []
    for experiment, report in records.items():
        for row, runs in runs_of(experiment, report).items():
            steps = f" ({COLUMNS['L-bar'].show(runs)})" if runs.drafts else ""
            paper = published.get((experiment.data_set, f"{row.paper}, {experiment.temperature:g}"), {})
            rows.append(
                {
                    "data set": DATA_SETS[experiment.data_set],
                    "temperature": f"{experiment.temperature:g}",
                    "method": row.method.label,
                    column: COLUMNS["s/token"].show(runs) + steps,
                    f"{column}, paper": paper.get(column, NONE),
                }
            )
    texts = dict.fromkeys(where(report) for report in records.values())
    notes = dict.fromkeys(note for experiment, report in records.items() for note in _notes(experiment, report))
    return [Table.of(f"{title_of(preset)}, {'; '.join(texts)}", rows, list(notes))]


def memory(preset: Preset, records: Records) -> list[Table]:
    """The peak of both services together, and by how much it is above plain decoding's, over the data sets."""
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
