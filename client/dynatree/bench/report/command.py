"""`dynatree bench report`: a folder of measurements as one report."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from dynatree.bench.record import load
from dynatree.bench.report.content import Content
from dynatree.bench.report.costs import memory, round_times, verify_costs
from dynatree.bench.report.load import many_clients
from dynatree.bench.report.measured import tables_by_file, what_was_measured
from dynatree.bench.report.observations import Record
from dynatree.bench.report.speed import by_length, by_prompt_length, matrix, throughput
from dynatree.bench.report.trees import acceptance, sweeps

SECTIONS = (
    what_was_measured,
    throughput,
    matrix,
    by_length,
    by_prompt_length,
    many_clients,
    sweeps,
    acceptance,
    round_times,
    verify_costs,
    memory,
    tables_by_file,
)


def write_report(folder: Path, out: Path, title: str) -> None:
    """Read every measurement in a folder, and write report.md, report.html and plots/ to `out`.

    Raises:
        SystemExit: The folder has no measurement, matplotlib is not installed, or a file cannot be written.
    """
    writing = _import_writing()
    content = build(read_records(folder), title)
    try:
        out.mkdir(parents=True, exist_ok=True)
        writing.write_markdown(content, out)
        (out / "report.html").write_text(writing.to_page(content), encoding="utf-8", newline="\n")
    except OSError as error:
        raise SystemExit(f"{error.filename or out} cannot be written: {error.strerror}") from None
    print(out / "report.html")


def _import_writing() -> ModuleType:
    """The module that draws, and with it matplotlib."""
    try:
        return importlib.import_module("dynatree.bench.report.writing")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("matplotlib"):
            raise
        raise SystemExit("a report needs matplotlib: pip install 'dynatree[bench]'") from None


def read_records(folder: Path) -> list[Record]:
    """The measurements of a folder, by name; other JSON, and copies, are left out with a remark on standard error.

    Raises:
        SystemExit: There is none, or no such folder.
    """
    if not folder.is_dir():
        raise SystemExit(f"there is no folder {folder}")
    records: list[Record] = []
    for path in sorted(folder.glob("*.json")):
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


def build(records: Sequence[Record], title: str) -> Content:
    """The report of these measurements: the sections for which there is something to show."""
    sections = (section(records) for section in SECTIONS)
    return Content(title, [section for section in sections if section.groups])
