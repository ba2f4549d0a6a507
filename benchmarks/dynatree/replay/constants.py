"""The worth of each tuned constant of the policies: each is varied alone, on every machine and group of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from dynatree.bench.table import NONE, Table
from dynatree.draft.control.constants import DEFAULT_CONTROL, ControlSettings
from dynatree.replay.runs import Result, Settings, Task

HALF, DOUBLE, NEUTRAL = "half", "double", "neutral"
WEIGHT_OF_PAST = "share a "  # prefix of the units of constants that weigh the past
AT_MOST_ONE = ("share", "probability", "node values")  # units of constants that are at most 1


@dataclass(frozen=True)
class Variant:
    """One constant with another value.

    Attributes:
        name: Name of the constant.
        kind: `HALF`, `DOUBLE` or `NEUTRAL`.
        value: The other value.
        control: All constants, with the other value for this one.
    """

    name: str
    kind: str
    value: Any
    control: ControlSettings


@dataclass(frozen=True)
class Change:
    """Relative change in speed of a variant: speed / speed with the defaults - 1.

    A cell is one machine and group of runs; its change is the geometric mean over its runs.

    Attributes:
        variant: The variant.
        cells: The change in each cell.
        stood_in: Share of expanded nodes that were not recorded.
    """

    variant: Variant
    cells: tuple[float, ...]
    stood_in: float

    @property
    def mean(self) -> float:
        """Mean change over the cells."""
        return fmean(self.cells)


def variants(control: ControlSettings = DEFAULT_CONTROL) -> list[Variant]:
    """Every constant at half its value, at twice its value and at its neutral value; switches are inverted.

    A weight of the past (0.9, say) forgets half and twice as much (0.95, 0.8). If twice a share or a probability
    exceeds 1, it goes half of the way to 1. A list is halved by dropping every second entry and doubled by adding the
    values midway between entries.
    """
    found = []
    for field in fields(control):
        default = getattr(control, field.name)
        unit, neutral = field.metadata["unit"], field.metadata["neutral"]
        values = {NEUTRAL: neutral, HALF: _half(default, unit), DOUBLE: _double(default, unit)}
        different: list[Any] = [default, None]
        for kind, value in values.items():
            if value not in different:
                different.append(value)
                found.append(Variant(field.name, kind, value, replace(control, **{field.name: value})))
    return found


def _half(value: Any, unit: str) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return value[::2] if len(value) > 1 else value
    if isinstance(value, int):
        return max(round(value / 2), 1)
    return (1.0 + value) / 2 if unit.startswith(WEIGHT_OF_PAST) else value / 2


def _double(value: Any, unit: str) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return _finer(value)
    if isinstance(value, int):
        return 2 * value
    if unit.startswith(WEIGHT_OF_PAST):
        return max(1.0 - 2 * (1.0 - value), 0.0)
    return (1.0 + value) / 2 if unit in AT_MOST_ONE and 2 * value > 1 else 2 * value


def _finer(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values and the midpoints between neighbours; whole numbers stay whole."""
    kind = type(values[0])
    middles = (kind((low + high) / 2) for low, high in pairwise(values))
    return tuple(sorted({*values, *middles}))


Run = Callable[[Sequence[Task]], Iterator[Result]]


def changes(tasks: Sequence[Task], run: Run) -> Iterator[Change]:
    """The change of each variant on these tasks, which have the default constants; `run` runs tasks in order."""
    varied = variants(tasks[0].settings.control)
    every = [*tasks, *(_with(task, variant.control) for variant in varied for task in tasks)]
    results = run(every)
    defaults = [next(results) for _ in tasks]
    for variant in varied:
        yield _change(variant, defaults, [next(results) for _ in tasks])


def _with(task: Task, control: ControlSettings) -> Task:
    settings: Settings = replace(task.settings, control=control)
    return replace(task, settings=settings)


def _change(variant: Variant, defaults: Sequence[Result], varied: Sequence[Result]) -> Change:
    cells = [
        math.exp(fmean(math.log(new / old) for new, old in zip(after.speedups, before.speedups, strict=True))) - 1.0
        for before, after in zip(defaults, varied, strict=True)
    ]
    runs = [run for result in varied for run in result.runs]
    expanded = sum(run.expanded for run in runs)
    return Change(variant, tuple(cells), sum(run.stood_in for run in runs) / expanded if expanded else 0.0)


def worth(of_constant: Sequence[Change]) -> float:
    """Relative slowdown at the constant's neutral value, or, if it has none, at the worse of its other values."""
    neutral = [-change.mean for change in of_constant if change.variant.kind == NEUTRAL]
    return max(neutral or (-change.mean for change in of_constant))


def table(found: Sequence[Change], control: ControlSettings = DEFAULT_CONTROL) -> Table:
    """A table with a row for each constant, those worth most first."""
    names = dict.fromkeys(change.variant.name for change in found)
    of_constants = {name: [change for change in found if change.variant.name == name] for name in names}
    rows = [
        {
            "constant": name,
            "default": _text(getattr(control, name)),
            "worth": f"{_percent(worth(same))} %",
            **{
                f"{kind}: mean (worst to best), %": _cell([change for change in same if change.variant.kind == kind])
                for kind in (HALF, DOUBLE, NEUTRAL)
            },
        }
        for name, same in sorted(of_constants.items(), key=lambda item: -worth(item[1]))
    ]
    return Table.of("What the constants are worth, by speed", rows)


def _cell(found: Sequence[Change]) -> str:
    if not found:
        return NONE
    (change,) = found
    return f"{_percent(change.mean)} ({_percent(min(change.cells))} to {_percent(max(change.cells))})"


def _percent(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f}"  # + 0.0: no -0.0


def _text(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, tuple) else f"{value:.3g}"


def to_dict(change: Change) -> dict[str, Any]:
    """A change as a JSON object; infinity becomes null."""
    value = change.variant.value
    return {
        "constant": change.variant.name,
        "kind": change.variant.kind,
        "value": None if value == math.inf else value,
        "mean": change.mean,
        "cells": change.cells,
        "not_recorded": change.stood_in,
    }
