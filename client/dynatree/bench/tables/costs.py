"""The tables of what a round costs."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from dynatree.bench.figures import by, quartiles_of
from dynatree.bench.record import Point, Report
from dynatree.bench.tables.cells import floor_line, milliseconds, quartiles
from dynatree.bench.tables.table import NONE, Table

CURVES = {
    "nodes": "Verifying by nodes of the tree",
    "context": "Verifying by length of the context",
    "sessions": "Verifying by sessions in one forward",
    "draft": "A draft forward by rows",
}


def costs(report: Report) -> Iterator[Table]:
    """A table for each curve: medians over repetitions, beside plain decoding's step."""
    measured = report["costs"]
    if not measured["points"]:  # interrupted at once
        return
    plain, floor = median(measured["plain_seconds"]), measured["floor"]
    notes = [floor_line(plain, floor["weight_bytes"], floor["read_bandwidth"])]
    for curve, points in by(measured["points"], lambda point: point["curve"]).items():
        rows = [_cost_row(point, plain) for point in points]
        headings = ["nodes", "context", "sessions", "round\nms", "quartiles\nms", "forward\nms", "x plain\nstep"]
        yield Table(CURVES[curve], headings, rows, notes)


def _cost_row(point: Point, plain: float) -> list[str]:
    seconds = quartiles_of(point["seconds"])
    return [
        *(str(point[name]) for name in ("nodes", "context", "sessions")),
        milliseconds(seconds),
        quartiles(seconds, milliseconds) if len(point["seconds"]) > 1 else NONE,
        milliseconds(quartiles_of(point["forward_seconds"])),
        f"{seconds.median / plain:.2f}",
    ]
