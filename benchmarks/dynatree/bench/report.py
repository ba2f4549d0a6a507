"""`dynatree bench report`: a folder of measurements as one report, in Markdown and as a page, with plots beside it."""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pandas as pd
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from pandas import DataFrame

from dynatree.bench import plots
from dynatree.bench.figures import (
    DEFINITION,
    INTERVALS,
    TRANSFORMERS,
    Cell,
    by,
    by_label,
    by_temperature,
    cells,
    frame,
    rate_until,
)
from dynatree.bench.load.figures import LoadRuns, load_runs
from dynatree.bench.methods import PLAIN
from dynatree.bench.printing import heading, remarks
from dynatree.bench.record import PARTS, Report, formats_of, load, precision_of
from dynatree.bench.table import NONE, Marked, Table, figure, markdown_text, to_markdown
from dynatree.bench.tables import CURVES, tables

LENGTHS = (100, 200, 300, 500, 750, 1000, 1500)  # new tokens
_METHODS = ("compare", "ablation")  # the commands that measure whole methods side by side
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src 'self'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; display: block; overflow-x: auto }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid #8884; white-space: nowrap }}
img {{ max-width: 100%; background: #fff }}
</style>
</head>
<body>
{body}</body>
</html>
"""

Block = str | Table | tuple[str, Figure]  # a paragraph, a table, or a plot and its title


@dataclass(frozen=True)
class Record:
    """A measurement and the name of its file."""

    file: str
    report: Report


@dataclass(frozen=True)
class Section:
    """A heading and the blocks below it."""

    title: str
    blocks: Sequence[Block]


def write_report(folder: Path, out: Path, title: str) -> None:
    """Read every measurement in a folder, and write report.md, report.html and plots/ to `out`.

    Raises:
        SystemExit: The folder has no measurement, or a file cannot be written.
    """
    content = sections(read_records(folder))
    try:
        (out / "plots").mkdir(parents=True, exist_ok=True)
        text = "\n\n".join([f"# {markdown_text(title)}", *_markdown(content, out / "plots")]) + "\n"
        (out / "report.md").write_text(text, encoding="utf-8", newline="\n")
        body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
        page = _PAGE.format(title=html.escape(title), body=body)
        (out / "report.html").write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        raise SystemExit(f"{error.filename or out} cannot be written: {error.strerror}") from None
    print(out / "report.html")


def read_records(folder: Path) -> list[Record]:
    """The measurements of a folder, by name; standard error names the copies and other JSON files left out.

    Raises:
        SystemExit: The folder does not exist or has no measurement.
    """
    if not folder.is_dir():
        raise SystemExit(f"there is no folder {folder}")
    records: list[Record] = []
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")]):
        try:
            record = Record(path.name, load(path))
        except SystemExit as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        copied = [other.file for other in records if other.report == record.report]
        if copied:
            print(f"left out: {path} is a copy of {copied[0]}", file=sys.stderr)
        else:
            records.append(record)
    if not records:
        raise SystemExit(f"{folder} has no measurement of dynatree bench (*.json)")
    return records


def sections(records: Sequence[Record]) -> list[Section]:
    """The sections of the report that have content."""
    found = [
        Section("What was measured", list(_measured(records))),
        Section("Speed", list(_speed(records))),
        Section("Speed by length of the output", list(_by_length(records))),
        Section("Many clients", list(_many_clients(records))),
        Section("Acceptance by depth", list(_acceptance(records))),
        Section("Time of a round", list(_round_times(records))),
        Section("Cost of verifying and drafting", list(_costs(records))),
        Section("Tables by file", list(_files(records))),
    ]
    return [section for section in found if section.blocks]


def _markdown(content: Sequence[Section], folder: Path) -> Iterator[str]:
    for section in content:
        yield f"## {markdown_text(section.title)}"
        for number, block in enumerate(section.blocks, start=1):
            if isinstance(block, Table):
                yield to_markdown(block)
            elif isinstance(block, str):
                yield markdown_text(block)
            else:
                title, drawn = block
                name = re.sub("[^a-z]+", "-", section.title.lower()) + f"-{number}.svg"
                plots.save(drawn, folder / name)
                yield f"![{markdown_text(title)}]({folder.name}/{name})"


def _measured(records: Sequence[Record]) -> Iterator[Block]:
    yield "Every figure below comes from these files alone."
    rows = []
    for record in records:
        report, machine = record.report, record.report["machine"]
        git = report["git"]
        rows.append(
            {
                "file": record.file,
                "command": report["command"],
                "started": report["started"][:16].replace("T", " "),
                "models": _models(report),
                "prompts": f"{report['prompts']['count']} of {report['prompts']['data_set']}",
                "new tokens": str(report["options"].get("max_new_tokens", NONE)),
                "runs": str(len(report["runs"])),
                "complete": "yes" if report["complete"] else Marked("no"),
                "processor": machine["cpu"] or NONE,
                "threads": str(machine["threads"] or NONE),
                "GB/s": f"{machine['read_bandwidth'] / 1e9:.1f}" if machine["read_bandwidth"] else NONE,
                "torch": report["versions"]["torch"] or NONE,
                "transformers": report["versions"]["transformers"] or NONE,
                "commit": git["commit"][:12] + (", modified" if git["modified"] else "") if git else NONE,
            }
        )
    notes = [type(remark)(f"{record.file}: {remark}") for record in records for remark in remarks(record.report)]
    yield Table.of("Files", rows, notes)


def _models(report: Report) -> str:
    target, draft = report["models"]["target"], report["models"]["draft"]
    formats = f" ({formats_of(draft)})" if formats_of(draft) else ""
    return f"{target['name']} with {draft['name']}{formats}, {precision_of(target)} on {target['device']}"


def _settings(records: Sequence[Record], *commands: str) -> dict[str, dict[str, DataFrame]]:
    """Group the runs of these commands by the settings that comparable runs share, and by data set."""
    groups: dict[str, dict[str, DataFrame]] = {}
    for record in records:
        report = record.report
        if report["command"] in commands and report["runs"]:
            for temperature, runs in by_temperature(frame(report)).items():
                place = f"{_models(report)}, {report['machine']['cpu']}; {temperature}"
                place += f"; {report['options']['max_new_tokens']} new tokens"
                data_sets = groups.setdefault(place, {})
                name = f"{report['prompts']['data_set']}, {median(report['prompts']['tokens']):.0f} tokens"
                data_sets[name if name not in data_sets else f"{name} ({record.file})"] = runs
    return groups


def _speed(records: Sequence[Record]) -> Iterator[Block]:
    groups = _settings(records, *_METHODS)
    if groups:
        yield f"{DEFINITION} {INTERVALS}"
    for place, data_sets in groups.items():
        over = {name: cells(runs, "rate", over=PLAIN.label) for name, runs in data_sets.items()}
        over = {name: _sorted(each) for name, each in over.items() if each}
        if over:
            yield place, plots.bars(f"{place}: over plain decoding", "x plain", over, "plain decoding")
            yield _matrix(f"x plain: {place}", over)


def _sorted(cells: Mapping[str, Cell]) -> dict[str, Cell]:
    return dict(sorted(cells.items(), key=lambda item: -item[1].median))


def _matrix(title: str, over: Mapping[str, Mapping[str, Cell]]) -> Table:
    """Speedups of each method on each data set, with intervals; slowdowns are marked."""
    labels = dict.fromkeys(label for each in over.values() for label in each)
    rows = [{"method": label} | {name: _speedup(each.get(label)) for name, each in over.items()} for label in labels]
    return Table.of(title, rows)


def _speedup(cell: Cell | None) -> str:
    text = figure(cell, interval=True)
    return Marked(text) if cell and cell.median < 1 else text


def _by_length(records: Sequence[Record]) -> Iterator[Block]:
    """Plot the rate over the first T tokens, divided by the reference's on the same prompt and repetition."""
    for record in records:
        report = record.report
        if report["command"] not in _METHODS or report["options"]["max_new_tokens"] < LENGTHS[1]:
            continue
        for reference in (PLAIN.label, TRANSFORMERS):
            lines: dict[str, list[tuple[float, Cell]]] = {}
            for length in LENGTHS:
                until = pd.Series([rate_until(run, length) for run in report["runs"]], dtype=float)
                runs = frame(report).assign(until=until)
                greedy = runs[runs["temperature"] == 0]
                for label, cell in cells(greedy, "until", over=reference).items():
                    lines.setdefault(label, []).append((length, cell))
            if lines:
                title = f"{report['prompts']['data_set']}: over {reference}"
                yield title, plots.lines(title, "new tokens", "ratio", lines)


def _many_clients(records: Sequence[Record]) -> Iterator[Block]:
    for record in records:
        if record.report["command"] != "load" or not record.report["runs"]:
            continue
        measured = load_runs(record.report)
        title = f"{_models(record.report)} ({record.file})"
        by_clients = {
            label: [(one.clients, one.throughput) for one in each if one.clients and one.throughput]
            for label, each in by(measured, lambda one: one.label).items()
        }
        if any(by_clients.values()):
            yield f"Throughput, {title}", plots.lines(f"Throughput, {title}", "clients", "tokens/s", by_clients)
        latencies = {
            f"{label}, TTFT p{percent}": _latencies(each, percent)
            for label, each in by(measured, lambda one: one.label).items()
            for percent in (50, 99)
        }
        if any(latencies.values()):
            yield f"TTFT, {title}", plots.lines(f"TTFT, {title}", "requests a second", "ms", latencies)


def _latencies(each: Sequence[LoadRuns], percent: int) -> list[tuple[float, Cell]]:
    known = [(one.rate, one.ttft(percent)) for one in each if one.rate is not None]
    return [(rate, Cell(1e3 * first, 1e3 * first, 1e3 * first, 1)) for rate, first in known if first is not None]


def _acceptance(records: Sequence[Record]) -> Iterator[Block]:
    """Plot the share of accepted paths that reached a depth, among rounds whose trees did; weighted by rounds."""
    for place, data_sets in _settings(records, *_METHODS).items():
        runs = pd.concat(data_sets.values())
        if "acceptance_by_depth" not in runs:
            continue
        lines = {}
        for label, same in by_label(runs.dropna(subset=["acceptance_by_depth"])).items():
            shares = DataFrame([dict(enumerate(each)) for each in same["acceptance_by_depth"]])
            weights = shares.notna().mul(same["rounds"].to_numpy(), axis=0)
            line = (shares.fillna(0) * weights).sum() / weights.sum()
            reached = shares.notna().mean() >= 0.5
            if reached.any():
                lines[label] = [(depth, Cell(share, share, share, 1)) for depth, share in enumerate(line[reached], 1)]
        if lines:
            yield place, plots.lines(f"Acceptance by depth: {place}", "depth", "share of rounds", lines)


def _round_times(records: Sequence[Record]) -> Iterator[Block]:
    """Plot the mean milliseconds of each part of a round; "other" is the time that no part counts."""
    for place, data_sets in _settings(records, *_METHODS).items():
        runs = pd.concat(data_sets.values())
        chart = part_times(runs)
        if len(chart):
            yield place, plots.stacked(f"Time of a round: {place}", "ms per round", chart)


def part_times(runs: DataFrame) -> DataFrame:
    """Milliseconds per round: a row for each method that reports them, a column for each part."""
    if "round_parts" not in runs:
        return DataFrame()
    timed = runs[runs["round_parts"].map(bool) & runs["round_seconds"].notna()].dropna(subset=["round_parts"])
    rows = {}
    for label, same in by_label(timed).items():
        rounds = same["rounds"].sum()
        totals = DataFrame([{part: each[part]["total_seconds"] for part in PARTS} for each in same["round_parts"]])
        parts = totals.sum() / rounds
        whole = (same["rounds"] * same["round_seconds"]).sum() / rounds
        rows[label] = 1e3 * pd.concat([parts, pd.Series({"other": max(0.0, whole - parts.sum())})])
    chart = DataFrame(rows).T.rename(columns=lambda name: str(name).replace("_", " "))
    return chart.loc[chart.sum(axis=1).sort_values().index] if rows else DataFrame()


def _costs(records: Sequence[Record]) -> Iterator[Block]:
    for record in records:
        if "costs" in record.report and record.report["costs"]["points"]:
            for curve in CURVES:
                title = f"{CURVES[curve]}, {_models(record.report)} ({record.file})"
                yield title, cost_curve(record.report, curve, title)


def cost_curve(report: Report, curve: str, title: str) -> Figure:
    """Plot one of `CURVES` in milliseconds, beside a plain step and the floor."""
    costs, x = report["costs"], {"draft": "nodes"}.get(curve, curve)
    lines: dict[str, list[tuple[float, Cell]]] = {}
    for point in costs["points"]:
        if point["curve"] == curve:
            name = f"round, {point['nodes']} nodes" if curve == "context" else "forward" if x != curve else "round"
            lines.setdefault(name, []).append((point[x], _milliseconds(point["seconds"])))  # type: ignore[literal-required]
    plain = {"plain step": 1e3 * median(costs["plain_seconds"]), "floor": 1e3 * costs["floor"]["seconds"]}
    return plots.lines(title, x, "ms", lines, None if curve == "draft" else plain)


def _milliseconds(seconds: Sequence[float]) -> Cell:
    return Cell(median(seconds), min(seconds), max(seconds), 1).times(1e3)


def _files(records: Sequence[Record]) -> Iterator[Block]:
    for record in records:
        yield f"{record.file}: {heading(record.report)}"
        yield from tables(record.report)
