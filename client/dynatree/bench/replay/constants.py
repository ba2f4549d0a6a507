"""What each tuned constant of the policies is worth: every one varied alone, on every machine and group of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from dynatree.bench.replay.runs import Result, Settings, Task
from dynatree.bench.table import NONE, Table
from dynatree.draft.control import DEFAULT_CONTROL, ControlSettings

HALF, DOUBLE, NEUTRAL = "half", "double", "neutral"
WEIGHT_OF_PAST = "share a "  # how the units of those constants begin
AT_MOST_ONE = ("share", "probability", "node values")  # units


@dataclass(frozen=True)
class Variant:
    """One constant with another value.

    Attributes:
        name: The constant's.
        kind: `HALF`, `DOUBLE` or `NEUTRAL`.
        value: The other value.
        control: All constants, this one with it.
    """

    name: str
    kind: str
    value: Any
    control: ControlSettings


@dataclass(frozen=True)
class Change:
    """What a variant changes: speed / speed with the defaults - 1.

    Each figure is of one machine and group of runs, a cell: the geometric mean over its runs.

    Attributes:
        variant: The variant.
        cells: Its changes.
        stood_in: The share of expanded nodes that were not recorded.
    """

    variant: Variant
    cells: tuple[float, ...]
    stood_in: float

    @property
    def mean(self) -> float:
        """The mean over the cells."""
        return fmean(self.cells)


def variants(control: ControlSettings = DEFAULT_CONTROL) -> list[Variant]:
    """Every constant at half and twice its value, and at its neutral one; switches the other way round.

    A weight of the past (0.9, say) forgets half and twice as much (0.95, 0.8). Where twice a share or a probability
    passes 1, it goes half of the way to 1. Of a list every second entry is left out, and values between are put in.
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
    """The values and those in the middle between two; whole numbers stay whole."""
    kind = type(values[0])
    middles = (kind((low + high) / 2) for low, high in pairwise(values))
    return tuple(sorted({*values, *middles}))


Run = Callable[[Sequence[Task]], Iterator[Result]]


def changes(tasks: Sequence[Task], run: Run) -> Iterator[Change]:
    """What each variant changes on these tasks, which have the default constants; `run` runs tasks in order."""
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
    """How much slower it is without the constant, at its neutral value; where it has none, at the worse other value."""
    neutral = [-change.mean for change in of_constant if change.variant.kind == NEUTRAL]
    return max(neutral or (-change.mean for change in of_constant))


def table(found: Sequence[Change], control: ControlSettings = DEFAULT_CONTROL) -> Table:
    """A row for each constant, the one that is worth most first."""
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
    """A change in JSON; infinity is null."""
    value = change.variant.value
    return {
        "constant": change.variant.name,
        "kind": change.variant.kind,
        "value": None if value == math.inf else value,
        "mean": change.mean,
        "cells": change.cells,
        "not_recorded": change.stood_in,
    }
