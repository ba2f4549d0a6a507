"""The cost of rounds on a machine: the curves from which `dynatree bench replay` computes time.

A machines file is JSON, version 1: {"version", "machines": [MACHINE]}, MACHINE =

    name            a short name
    measured        false if the figures are estimates, not measurements
    sources         {figure: its origin}, for human readers
    verify          [[rows, seconds], ...]: the target's forward pass over a tree and its root, by rows, fewest first
    draft           [[rows, seconds], ...]: the draft's forward pass, by rows, fewest first
    round_seconds   time of a round without a tree, less the target's forward pass
    level_seconds   time that each draft forward pass adds to a round, less the forward pass itself
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

VERSION = 1

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Machine:
    """The cost of rounds on one machine; see the module. All times are in seconds."""

    name: str
    measured: bool
    sources: dict[str, str]
    verify: Curve
    draft: Curve
    round_seconds: float
    level_seconds: float

    def __post_init__(self) -> None:
        for curve in (self.verify, self.draft):
            rows = [point[0] for point in curve]
            if not rows or rows != sorted(set(rows)) or min(rows) < 1 or min(seconds for _, seconds in curve) <= 0:
                raise ValueError(
                    f"machine {self.name} has a curve that is not a list of increasing rows and their seconds"
                )

    @property
    def plain_seconds(self) -> float:
        """Seconds of a round without a tree, the time of plain decoding for one token."""
        return seconds_on(self.verify, 1) + self.round_seconds


@cache
def seconds_on(curve: Curve, rows: int) -> float:
    """Seconds of a forward pass over `rows` rows: linear between the points, and at the mean slope beyond the last.

    The mean slope is used because the last two points may be one row apart, too close to extrapolate from.
    """
    first, last = curve[0], curve[-1]
    if len(curve) == 1 or rows <= first[0]:
        return first[1]
    if rows > last[0]:
        return last[1] + (last[1] - first[1]) * (rows - last[0]) / (last[0] - first[0])
    after = bisect_left(curve, (rows,))
    (low, least), (high, most) = curve[after - 1 : after + 1]
    return least + (most - least) * (rows - low) / (high - low)


def load_machines(path: Path) -> list[Machine]:
    """Read the machines of a file.

    Raises:
        SystemExit: The file cannot be read, or is not a machines file.
    """
    try:
        value = json.loads(path.read_bytes())
        if value["version"] != VERSION:
            raise SystemExit(f"{path} has version {value['version']}, expected {VERSION}")
        return [_machine(each) for each in value["machines"]]
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is not a file of machines: {error}") from None


def to_json(machines: Sequence[Machine]) -> str:
    """The text of a machines file, with each figure of a machine on its own line."""
    described = (
        ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(machine).items())
        for machine in machines
    )
    joined = ",\n".join(f" {{\n{lines}\n }}" for lines in described)
    return f'{{"version": {VERSION}, "machines": [\n{joined}\n]}}\n'


def _machine(value: dict[str, Any]) -> Machine:
    curves = {name: tuple((rows, seconds) for rows, seconds in value[name]) for name in ("verify", "draft")}
    return Machine(**{**value, **curves})
