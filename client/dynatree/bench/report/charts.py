"""What a plot shows, as values: nothing here draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynatree.bench.figures import Spread


@dataclass(frozen=True)
class Reference:
    """A value that others are held against, drawn as a line across."""

    name: str
    value: float


@dataclass(frozen=True)
class Bars:
    """Horizontal bars with quartiles: for each label one bar of each series, or none where it has no figure."""

    title: str
    axis: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[Spread | None]]
    reference: Reference | None = None


@dataclass(frozen=True)
class Stacked:
    """Horizontal bars whose parts add up, one for each label."""

    title: str
    axis: str
    labels: Sequence[str]
    parts: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Lines:
    """Medians and quartiles over x, a line for each name; a small one shows a detail beside others."""

    title: str
    x_axis: str
    y_axis: str
    lines: Mapping[str, Sequence[tuple[float, Spread]]]
    references: Sequence[Reference] = ()
    small: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class HeatMap:
    """A figure for each pair of settings, by (x, y)."""

    title: str
    x_axis: str
    y_axis: str
    cells: Mapping[tuple[float, float], float]


Chart = Bars | Stacked | Lines | HeatMap
