"""Charts as pictures, with matplotlib. The colours are Okabe and Ito's, which colour-blind readers can tell apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from io import BytesIO
from itertools import cycle, islice, product
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dynatree.bench.figures import Spread
from dynatree.bench.report.charts import Bars, Chart, HeatMap, Lines, Stacked

BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#f0e442",
)
_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)
_INK, _MUTED, _RULE = "#1b1f23", "#5a636b", "#d5d9dd"
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # labels are shown as they are
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _RULE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "svg.hashsalt": "dynatree",  # the same picture is the same file
}
_WIDTH, _SMALL_WIDTH = 8.0, 3.8  # inches


def picture(chart: Chart, kind: Literal["png", "svg"]) -> bytes:
    """A chart as the bytes of a file."""
    with matplotlib.rc_context(_STYLE):
        file = BytesIO()
        metadata = {"Software": None} if kind == "png" else {"Date": None}
        _draw(chart).savefig(file, format=kind, dpi=150, bbox_inches="tight", metadata=metadata)
    return file.getvalue()


@singledispatch
def _draw(chart: Chart) -> Figure:
    raise TypeError(f"{chart!r} is no chart")


@_draw.register
def _bars(chart: Bars) -> Figure:
    thickness = 0.8 / len(chart.series)
    figure, axes = _new(_WIDTH, 1.0 + len(chart.labels) * max(0.26, 0.13 * len(chart.series)))
    for number, (name, values) in enumerate(chart.series.items()):
        places = [row - 0.4 + (number + 0.5) * thickness for row in range(len(chart.labels))]
        known = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
        axes.barh(
            [place for place, _ in known],
            [value.median for _, value in known],
            height=thickness * 0.92,
            xerr=_whiskers([value for _, value in known]),
            error_kw={"ecolor": _INK, "elinewidth": 0.7, "capsize": 1.5, "capthick": 0.7},
            color=_COLOURS[number % len(_COLOURS)],
            hatch="///" if number >= len(_COLOURS) else None,
            label=name,
        )
    _rows(axes, chart.labels)
    axes.set(title=chart.title, xlabel=chart.axis)
    if chart.reference is not None:
        axes.axvline(chart.reference.value, color=_INK, linewidth=1, linestyle="--", label=chart.reference.name)
    if len(chart.series) > 1 or chart.reference:
        _legend(axes)
    return figure


@_draw.register
def _stacked(chart: Stacked) -> Figure:
    figure, axes = _new(_WIDTH, 1.0 + 0.26 * len(chart.labels))
    left = [0.0] * len(chart.labels)
    for (name, values), colour in zip(chart.parts.items(), cycle((*_COLOURS, YELLOW, _MUTED)), strict=False):
        axes.barh(range(len(chart.labels)), values, left=left, height=0.75, color=colour, label=name)
        left = [start + value for start, value in zip(left, values, strict=True)]
    _rows(axes, chart.labels)
    axes.set(title=chart.title, xlabel=chart.axis)
    _legend(axes)
    return figure


@_draw.register
def _lines(chart: Lines) -> Figure:
    figure, axes = _new(_SMALL_WIDTH, 2.6) if chart.small else _new(_WIDTH, max(3.6, 0.3 * len(chart.lines)))
    styles = islice(cycle(product(("-", "--", ":"), zip(_COLOURS, "os^Dvp", strict=True))), len(chart.lines))
    for (name, points), (dashes, (colour, marker)) in zip(chart.lines.items(), styles, strict=True):
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.errorbar(
            xs,
            [y.median for y in ys],
            yerr=_whiskers(ys),
            color=colour,
            linestyle=dashes,
            marker=marker,
            markersize=3.5,
            linewidth=1.4,
            elinewidth=0.6,
            capsize=1.5,
            label=name,
        )
    for reference, dashes in zip(chart.references, cycle(("--", ":")), strict=False):
        axes.axhline(reference.value, color=_INK, linewidth=1, linestyle=dashes, label=reference.name)
    axes.set(title=chart.title, xlabel=chart.x_axis, ylabel=chart.y_axis)
    axes.grid(axis="both")
    if chart.from_zero:
        tops = [y.high for line in chart.lines.values() for _, y in line] + [each.value for each in chart.references]
        axes.set_ylim(0, 1.05 * max(tops))
    if not chart.small:
        _legend(axes)
    return figure


@_draw.register
def _heat_map(chart: HeatMap) -> Figure:
    xs, ys = (sorted({place[axis] for place in chart.cells}) for axis in (0, 1))
    figure, axes = _new(1.6 + 0.75 * len(xs), 1.2 + 0.45 * len(ys))
    grid = [[chart.cells.get((x, y), float("nan")) for x in xs] for y in ys]
    axes.imshow(grid, cmap="cividis", aspect="auto", origin="lower")
    middle = (min(chart.cells.values()) + max(chart.cells.values())) / 2
    for (x, y), value in chart.cells.items():
        light = value > middle
        axes.text(xs.index(x), ys.index(y), f"{value:.2f}", ha="center", va="center", color=_INK if light else "white")
    axes.set_xticks(range(len(xs)), [f"{x:g}" for x in xs])
    axes.set_yticks(range(len(ys)), [f"{y:g}" for y in ys])
    axes.set(title=chart.title, xlabel=chart.x_axis, ylabel=chart.y_axis)
    return figure


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="x")


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


def _whiskers(values: Sequence[Spread]) -> list[list[float]] | None:
    """How far the quartiles are below and above the medians; None where they are all the same."""
    if all(value.low == value.high for value in values):
        return None
    return [[value.median - value.low for value in values], [value.high - value.median for value in values]]
