"""Plots of measurements. The colours are Okabe and Ito's, which colour-blind readers can tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from dynatree.bench.figures import Cell

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#f0e442",
)
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
INK, MUTED, RULE = "#1b1f23", "#5a636b", "#d5d9dd"
STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # labels may hold dollar signs
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelcolor": MUTED,
    "axes.edgecolor": RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "svg.hashsalt": "dynatree",  # equal pictures give equal files
}
WIDTH = 8.0  # inches

Line = Sequence[tuple[float, Cell]]  # a cell at each x


@matplotlib.rc_context(STYLE)
def save(figure: Figure, path: Path) -> None:
    """Write an SVG or PNG file, by the path's suffix; equal figures give equal SVG files."""
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, format=path.suffix.removeprefix("."), dpi=150, bbox_inches="tight", metadata=metadata)


@matplotlib.rc_context(STYLE)
def bars(title: str, axis: str, series: Mapping[str, Mapping[str, Cell]], reference: str = "") -> Figure:
    """Horizontal bars with ranges, one per label and series; `reference` names a line at 1."""
    labels = list(dict.fromkeys(label for cells in series.values() for label in cells))
    thickness = 0.8 / max(1, len(series))
    figure, axes = _new(1.0 + len(labels) * max(0.26, 0.13 * len(series)))
    for number, (name, cells) in enumerate(series.items()):
        places = [labels.index(label) - 0.4 + (number + 0.5) * thickness for label in cells]
        axes.barh(
            places,
            [cell.median for cell in cells.values()],
            height=thickness * 0.92,
            xerr=_whiskers(list(cells.values())),
            error_kw={"ecolor": INK, "elinewidth": 0.7, "capsize": 1.5, "capthick": 0.7},
            color=COLOURS[number % len(COLOURS)],
            label=name,
        )
    if reference:
        axes.axvline(1.0, color=INK, linewidth=1, linestyle="--", label=reference)
    _finish_bars(axes, labels, title, axis)
    return figure


@matplotlib.rc_context(STYLE)
def stacked(title: str, axis: str, frame: DataFrame) -> Figure:
    """Stacked horizontal bars: a row of `frame` for each label, a column for each part."""
    figure, axes = _new(1.0 + 0.26 * len(frame))
    left = [0.0] * len(frame)
    for name, colour in zip(frame, cycle((*COLOURS, YELLOW, MUTED)), strict=False):
        axes.barh(range(len(frame)), frame[name], left=left, height=0.75, color=colour, label=str(name))
        left = [start + value for start, value in zip(left, frame[name], strict=True)]
    _finish_bars(axes, [str(label) for label in frame.index], title, axis)
    return figure


@matplotlib.rc_context(STYLE)
def lines(
    title: str, x_axis: str, y_axis: str, named: Mapping[str, Line], references: Mapping[str, float] | None = None
) -> Figure:
    """Medians and ranges over x, one line per name, on an axis from 0; `references` are horizontal lines."""
    figure, axes = _new(max(3.4, 0.24 * len(named)))
    styles = zip(cycle(COLOURS), cycle("os^DvpX"), strict=False)
    for (name, line), (colour, marker) in zip(named.items(), styles, strict=False):
        axes.errorbar(
            [x for x, _ in line],
            [y.median for _, y in line],
            yerr=_whiskers([y for _, y in line]),
            color=colour,
            marker=marker,
            markersize=3.5,
            linewidth=1.4,
            elinewidth=0.6,
            capsize=1.5,
            label=name,
        )
    for (name, value), dashes in zip((references or {}).items(), cycle(("--", ":")), strict=False):
        axes.axhline(value, color=INK, linewidth=1, linestyle=dashes, label=name)
    axes.set(title=title, xlabel=x_axis, ylabel=y_axis)
    axes.set_ylim(bottom=0)
    axes.grid(axis="both")
    _legend(axes)
    return figure


def _new(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.add_subplot()


def _finish_bars(axes: Axes, labels: Sequence[str], title: str, axis: str) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="x")
    axes.set(title=title, xlabel=axis)
    _legend(axes)


def _legend(axes: Axes) -> None:
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


def _whiskers(cells: Sequence[Cell]) -> list[list[float]] | None:
    """Distances of the ranges' ends below and above the medians; None if every range is a point."""
    if all(cell.low == cell.high for cell in cells):
        return None
    return [[cell.median - cell.low for cell in cells], [cell.high - cell.median for cell in cells]]
