"""What rounds cost on this pair of services, learnt from the rounds themselves; shared by all sessions."""

from __future__ import annotations

from collections import deque

from dynatree.draft.calibration import Calibration

MEMORY = 16  # rounds that count; older ones were measured under another load
TRIALS = 2  # rounds of a size, until a slow one among them can no longer be a stall
FRESH = 64  # rounds for which a figure can be compared with those of now
STALE = 256  # rounds after which a size that was not sent is worth another trial
PRIOR_SLOPE = 1 / 8  # of a plain step, for each row, until measured: smaller trees are tried first
PLAIN_SLOPE = 1 / 64  # the same, going down from a tree to a plain step that was not seen
LEAST_SLOPE = 1 / 1024
PRIOR_YIELD = 0.7


class Usual:
    """The median of the last `MEMORY` values, the lower of two: a stall hardly counts, and a lasting change does.

    Values that nothing followed for `FRESH` rounds are forgotten when one comes: they were measured under another load.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.last = 0
        self._values: deque[float] = deque(maxlen=MEMORY)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float, round_: int) -> None:
        """Take in the value of a round, which is later than all before."""
        if round_ - self.last > FRESH:
            self._values.clear()
        self.last = round_
        self._values.append(value)
        self.value = sorted(self._values)[(len(self._values) - 1) // 2]

    def replace(self, value: float, round_: int) -> None:
        """Forget all others."""
        self._values.clear()
        self.add(value, round_)

    def is_sure(self, round_: int) -> bool:
        """Whether enough was measured of late."""
        return len(self) >= TRIALS and round_ - self.last <= FRESH


class _Size:
    """What trees of one size took to verify: without the draft before, and after draft forwards."""

    def __init__(self) -> None:
        self.alone = Usual()
        self.drafted = Usual()

    def __len__(self) -> int:
        return len(self.alone) + len(self.drafted)

    @property
    def last(self) -> int:
        """The last round of this size."""
        return max(self.alone.last, self.drafted.last)

    @property
    def value(self) -> float:
        """What it takes without the draft: not more than after it, of what was measured at about one time."""
        return min(times.value for times in (self.alone, self.drafted) if times and self.last - times.last <= FRESH)


class Costs:
    """Seconds of verifying a tree, and of a draft forward; and what sessions found the draft's guesses to be worth.

    A forward's time hardly depends on its rows within one tile of the matrix kernels, and jumps from one to the next.
    So verification has one figure for each power of two of rows (a tree's nodes and its root): what rounds of more than
    half as many rows usually take. Sizes that were never tried lie on the line from a plain step through the nearest
    that was, and cost no more than a larger one; where that promises a gain the size is tried, and then it is known.
    Until it was tried a few times, and after it was not for long, the line counts if it promises more: a stall in the
    only round of a size must not rule it out. A plain step is what all else is compared with, so it is due
    (`plain_is_due`) where it was not seen.
    Where a size was verified without the draft of late, what it takes longer after draft forwards is theirs (`wake`).

    Arguments and results are seconds; before anything is measured a plain step counts as `plain`.

    Attributes:
        calibration: Of all sessions' nodes.
        share: What the model's children of a read node last added, as a share of the node's own value.
        pause: Rounds that a session last left the draft model out for, since asking it did not pay.
    """

    def __init__(self, plain: float = 0.05, level: float = 0.002) -> None:
        self.calibration = Calibration()
        self.share = PRIOR_YIELD
        self.pause = 1
        self._plain = plain
        self._level = Usual()
        self._first_level = level
        self._sizes: dict[int, _Size] = {}
        self._wake = Usual()
        self._rounds = 0

    def observe(
        self, nodes: int, verify_seconds: float, levels: int, draft_seconds: float, caught_up: bool = True
    ) -> None:
        """Take in one round.

        Unless `caught_up`, its draft forwards also read what a pause had left unread, and are no more than an upper
        bound of what a forward costs.
        """
        size = self._sizes.setdefault(_size(nodes), _Size())
        self._rounds += 1
        now = self._rounds
        if not levels:
            size.alone.add(verify_seconds, now)
            return
        size.drafted.add(verify_seconds, now)
        if size.alone.is_sure(now):
            self._wake.add(verify_seconds - size.alone.value, now)
        level = draft_seconds / levels
        if caught_up:
            self._level.add(level, now)
        elif level < self.level:
            self._level.replace(level, now)

    def verify(self, nodes: int) -> float:
        """Seconds to verify a tree of so many nodes; 0 nodes is a plain step."""
        place = _size(nodes)
        plain, slope = self._line(place)
        larger = [size.value for each, size in self._sizes.items() if each > place and self._is_fresh(size)]
        expected = min([plain * (1.0 + slope * (_rows(place) - 1)), *larger])
        size = self._sizes.get(place)
        if place == 0 or size is None:
            return expected
        sure = len(size) >= TRIALS and self._rounds - size.last <= STALE
        return size.value if sure else min(size.value, expected)

    @property
    def plain_is_due(self) -> bool:
        """Whether the next round had better be a plain step, to know what it costs."""
        plain = self._sizes.get(0)
        if plain is None or len(plain) < TRIALS:
            return self._rounds >= TRIALS
        return self._rounds - plain.last > STALE

    @property
    def wake(self) -> float:
        """Seconds that a verification takes longer after draft forwards: where both share caches and cores."""
        return max(self._wake.value, 0.0) if self._wake.is_sure(self._rounds) else 0.0

    @property
    def level(self) -> float:
        """Seconds of one draft forward with what goes with it."""
        return self._level.value if self._level else self._first_level

    def _is_fresh(self, size: _Size) -> bool:
        return self._rounds - size.last <= FRESH

    def _line(self, place: int) -> tuple[float, float]:
        """A plain step, and what each further row costs of it, going by the measured size nearest to this one."""
        others = [each for each in self._sizes if each not in (0, place)]
        plain = None
        if 0 in self._sizes:
            plain = min([self._sizes[0].value, *[size.value for size in self._sizes.values() if self._is_fresh(size)]])
        if not others:
            return plain or self._plain, PRIOR_SLOPE
        nearest = min(others, key=lambda each: abs(each - place))
        rows, seconds = _rows(nearest) - 1, self._sizes[nearest].value
        if plain is None:
            return seconds / (1.0 + PLAIN_SLOPE * rows), PRIOR_SLOPE
        return plain, max((seconds / plain - 1.0) / rows, LEAST_SLOPE)


def largest_tree(nodes: int) -> int:
    """The most nodes that cost what so many do."""
    return _rows(_size(nodes)) - 1


def _size(nodes: int) -> int:
    return nodes.bit_length()  # 1 row: 0; 2 rows: 1; 3 and 4 rows: 2; 5 to 8 rows: 3 ...


def _rows(size: int) -> int:
    return int(2**size)
