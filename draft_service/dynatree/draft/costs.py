"""What rounds cost on this pair of services, learnt from the rounds themselves; shared by all sessions."""

from __future__ import annotations

MEMORY = 16  # rounds of one size that count; older ones were measured under another load
STALL = 3.0  # times the usual; such a round says nothing about its size
TRIALS = 2  # rounds of a size, until a slow one among them can no longer be a stall
STALE = 256  # rounds after which a size that was not sent is worth another trial
PRIOR_SLOPE = 1 / 64  # of a plain step, for each row, until measured
LEAST_SLOPE = 1 / 1024


class Average:
    """A mean that forgets: the last `MEMORY` values or so count. `count` is how many there were, up to that."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0

    def add(self, value: float) -> None:
        """Take in one value; one that is far above all others counts as a stall."""
        if self.count:
            value = min(value, STALL * self.value)
        self.count = min(self.count + 1, MEMORY)
        self.value += (value - self.value) / self.count


class Costs:
    """Seconds of verifying a tree, and of a draft forward.

    A forward's time hardly depends on its rows within one tile of the matrix kernels, and jumps from one to the next.
    So verification has one figure for each power of two of rows (a tree's nodes and its root): what rounds of more than
    half as many rows have taken. Sizes that were never tried lie on the line from a plain step through the nearest that
    was; where that promises a gain the size is tried, and then it is known. Until it was tried a few times, and after
    it was not for long, the line counts if it promises more: a stall in the only round of a size must not rule it out.
    Where a size was verified without the draft before, what it takes longer after draft forwards is theirs (`wake`).

    Arguments and results are seconds; before anything is measured a plain step counts as `plain`.
    """

    def __init__(self, plain: float = 0.05, level: float = 0.002) -> None:
        self.pause = 1  # rounds that a session last left the draft model out for, since asking it did not pay
        self._plain = plain
        self._level = Average()
        self._first_level = level
        self._sizes: list[Average] = []
        self._last: list[int] = []  # by size: the last round of it
        self._alone: list[int] = []  # by size: its rounds that the draft model was left out of
        self._wake = Average()
        self._rounds = 0

    def observe(self, nodes: int, verify_seconds: float, levels: int, draft_seconds: float) -> None:
        """Take in one round."""
        size = nodes.bit_length()  # 1 row: 0; 2 rows: 1; 3 and 4 rows: 2; 5 to 8 rows: 3 ...
        while len(self._sizes) <= size:
            self._sizes.append(Average())
            self._last.append(0)
            self._alone.append(0)
        self._rounds += 1
        self._last[size] = self._rounds
        known = self._alone[size] >= TRIALS
        if levels and known:
            self._wake.add(max(verify_seconds - self._sizes[size].value, 0.0))
        if not levels or not known or verify_seconds < self._sizes[size].value:
            self._sizes[size].add(verify_seconds)
        if levels:
            self._level.add(draft_seconds / levels)
        else:
            self._alone[size] += 1

    def verify(self, nodes: int) -> float:
        """Seconds to verify a tree of so many nodes; 0 nodes is a plain step."""
        size = nodes.bit_length()
        plain, slope = self._line(size)
        expected = plain * (1.0 + slope * (_rows(size) - 1))
        if size >= len(self._sizes) or not self._sizes[size]:
            return expected
        measured = self._sizes[size]
        sure = measured.count >= TRIALS and self._rounds - self._last[size] <= STALE
        return measured.value if sure or size == 0 else min(measured.value, expected)

    @property
    def wake(self) -> float:
        """Seconds that a verification takes longer after draft forwards: where both share caches and cores."""
        return self._wake.value

    @property
    def level(self) -> float:
        """Seconds of one draft forward with what goes with it."""
        return self._level.value if self._level else self._first_level

    def _line(self, size: int) -> tuple[float, float]:
        """A plain step, and what each further row costs of it, going by the measured size nearest to this one."""
        others = [each for each, average in enumerate(self._sizes) if average and each not in (0, size)]
        plain = self._sizes[0].value if self._sizes and self._sizes[0] else None
        if not others:
            return plain or self._plain, PRIOR_SLOPE
        nearest = min(others, key=lambda each: abs(each - size))
        rows, seconds = _rows(nearest) - 1, self._sizes[nearest].value
        if plain is None:
            return seconds / (1.0 + PRIOR_SLOPE * rows), PRIOR_SLOPE
        return plain, max((seconds / plain - 1.0) / rows, LEAST_SLOPE)


def largest_tree(nodes: int) -> int:
    """The most nodes that cost what so many do."""
    return _rows(nodes.bit_length()) - 1


def _rows(size: int) -> int:
    return int(2**size)
