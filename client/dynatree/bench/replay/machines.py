"""What rounds cost on a machine: the curves by which `dynatree bench replay` counts time.

A machines file is JSON, version 1: {"version", "machines": [MACHINE]}, MACHINE =

    name            a short name
    measured        false where the figures are expected, and not measured
    sources         {figure: where it comes from}, for people
    verify          [[rows, seconds], ...]: the target's forward over a tree and its root, by rows, fewest first
    draft           [[rows, seconds], ...]: the draft's forward
    round_seconds   what a round without a tree takes beside the target's forward
    level_seconds   what each draft forward makes a round longer, beside the forward itself
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
    """What rounds cost on one machine; see the module. All times are in seconds."""

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
                raise ValueError(f"machine {self.name} has a curve that is no list of rows, rising, and seconds")

    @property
    def plain_seconds(self) -> float:
        """A round without a tree: what plain decoding takes for a token."""
        return seconds_on(self.verify, 1) + self.round_seconds


@cache
def seconds_on(curve: Curve, rows: int) -> float:
    """The seconds of a forward over so many rows: on straight lines between the points, then on by the mean slope.

    The last two points may be a row apart, so that their slope says nothing of larger forwards.
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
    """The machines of a file.

    Raises:
        SystemExit: It cannot be read, or is no machines file.
    """
    try:
        value = json.loads(path.read_bytes())
        if value["version"] != VERSION:
            raise SystemExit(f"{path} has version {value['version']}, expected {VERSION}")
        return [_machine(each) for each in value["machines"]]
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} is no file of machines: {error}") from None


def to_json(machines: Sequence[Machine]) -> str:
    """The file's text, each figure of a machine on a line."""
    described = (
        ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(machine).items())
        for machine in machines
    )
    joined = ",\n".join(f" {{\n{lines}\n }}" for lines in described)
    return f'{{"version": {VERSION}, "machines": [\n{joined}\n]}}\n'


def _machine(value: dict[str, Any]) -> Machine:
    curves = {name: tuple((rows, seconds) for rows, seconds in value[name]) for name in ("verify", "draft")}
    return Machine(**{**value, **curves})
