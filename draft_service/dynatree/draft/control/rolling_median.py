"""A robust estimate of a noisy measurement."""

from __future__ import annotations

from collections import deque

from dynatree.draft.control.constants import ControlSettings


class RollingMedian:
    """The lower median of the last `cost_window` values: a stall hardly counts, a lasting change does.

    Earlier values are dropped in two cases, because they stem from another load: `fresh_rounds` have passed without a
    value, or a value is below `reset_ratio` of the median. A stall may prolong a forward pass, but nothing shortens it.

    Attributes:
        value: The median, in the unit of the values; 0 before the first.
        last: The round of the last value.
    """

    def __init__(self, control: ControlSettings) -> None:
        self.value = 0.0
        self.last = 0
        self._control = control
        self._values: deque[float] = deque(maxlen=control.cost_window)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float, now: int) -> None:
        """Take in the value of round `now`, which is later than all earlier ones."""
        if now - self.last > self._control.fresh_rounds or value < self._control.reset_ratio * self.value:
            self._values.clear()
        self.last = now
        self._values.append(value)
        self.value = sorted(self._values)[(len(self._values) - 1) // 2]

    def replace(self, value: float, now: int) -> None:
        """Drop all earlier values, and take in this one."""
        self._values.clear()
        self.add(value, now)

    def is_sure(self, now: int) -> bool:
        """Whether there are at least `cost_trials` values, the last of them fresh."""
        return len(self) >= self._control.cost_trials and now - self.last <= self._control.fresh_rounds
