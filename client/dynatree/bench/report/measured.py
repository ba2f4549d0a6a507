"""The sections about the measurements themselves: what was measured, and each file's own tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dynatree.bench.figures import by
from dynatree.bench.record import Report
from dynatree.bench.report.content import Section
from dynatree.bench.report.observations import Record
from dynatree.bench.tables import remarks, tables
from dynatree.bench.tables.cells import megabytes
from dynatree.bench.tables.table import NONE, Table


def what_was_measured(records: Sequence[Record]) -> Section:
    """Files, models, machines and software."""
    return Section(
        "What was measured",
        "Every figure below comes from these files alone. Prompt tokens are the median over prompts.",
        {"": [_files(records), _models(records), _machines(records), _software(records)]},
    )


def tables_by_file(records: Sequence[Record]) -> Section:
    """What `dynatree bench show` prints of each file."""
    return Section(
        "Tables by file",
        "What dynatree bench show prints. Unless a heading says otherwise figures are means over runs; tokens/s, "
        "speedups, TTFT and round cost are medians. TPOT percentiles are over all tokens, those that arrive together "
        "sharing the time since the arrival before. Round cost is the time of a round in plain decoding steps.",
        {record.file: tables(record.report) for record in records},
    )


def _files(records: Sequence[Record]) -> Table:
    rows = [_file_row(record) for record in records]
    headings = ["file", "command", "started", "data set", "prompts", "prompt tokens", "new tokens", "runs", "complete"]
    notes = [type(remark)(f"{record.file}: {remark}") for record in records for remark in remarks(record.report)]
    return Table("Files", headings, rows, notes)


def _file_row(record: Record) -> list[str]:
    report = record.report
    complete = "yes" if report["complete"] else "no"
    started = report["started"][:16].replace("T", " ")
    if report["command"] == "costs":
        return [record.file, "costs", started, *[NONE] * 5, complete]
    return [
        record.file,
        report["command"],
        started,
        record.data_set,
        str(report["prompts"]["count"]),
        str(record.prompt_tokens),
        str(report["options"]["max_new_tokens"]),
        str(len(report["runs"])),
        complete,
    ]


def _models(records: Sequence[Record]) -> Table:
    rows = [[*_model_row(record.report["models"][role], role)] for record in records for role in ("target", "draft")]
    headings = ["model", "role", "architecture", "dtype", "device", "parameters", "weights MB", "context"]
    return Table("Models", headings, _distinct(rows)).without_empty_columns()


def _model_row(model: dict[str, Any], role: str) -> list[str]:
    parameters = model.get("parameters")
    return [
        model["name"],
        role,
        _text(model.get("architecture")),
        model["dtype"],
        model["device"],
        f"{parameters:,}" if parameters else NONE,
        megabytes(model.get("weight_bytes")),
        _text(model.get("context_length")),
    ]


def _machines(records: Sequence[Record]) -> Table:
    rows = [_machine_row(record.report.get("machine", {})) for record in records]
    headings = ["platform", "CPU", "cores", "threads", "memory MB", "read GB/s"]
    return Table("Machines, of the clients", headings, _distinct(rows)).without_empty_columns()


def _machine_row(machine: dict[str, Any]) -> list[str]:
    bandwidth = machine.get("read_bandwidth")
    return [
        _text(machine.get("platform")),
        _text(machine.get("cpu")),
        _text(machine.get("cpu_count")),
        _text(machine.get("threads")),
        megabytes(machine.get("memory_bytes")),
        f"{bandwidth / 1e9:.1f}" if bandwidth else NONE,
    ]


def _software(records: Sequence[Record]) -> Table:
    groups = by(records, lambda record: _software_row(record.report))
    rows = [[*row, str(len(group))] for row, group in groups.items()]
    return Table("Software", ["dynatree", "commit", "torch", "transformers", "python", "files"], rows)


def _software_row(report: Report) -> tuple[str, ...]:
    versions, git = report.get("versions", {}), report.get("git")
    commit = git["commit"][:12] + (", modified" if git["modified"] else "") if git else NONE
    return (
        _text(versions.get("dynatree")),
        commit,
        *(_text(versions.get(name)) for name in ("torch", "transformers", "python")),
    )


def _text(value: object) -> str:
    return NONE if value is None else str(value)


def _distinct(rows: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(map(tuple, rows)))
