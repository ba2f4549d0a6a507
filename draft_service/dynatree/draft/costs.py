"""What rounds cost on this pair of services, learnt from the rounds themselves; shared by all sessions."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence

from dynatree.common.model_info import SIZES, ForwardCost
from dynatree.draft.calibration import Calibration

MEMORY = 16  # rounds that count; older ones were measured under another load
TRIALS = 2  # rounds of a size, until a slow one among them can no longer be a stall
FRESH = 64  # rounds for which a figure can be compared with those of now
TOGETHER = 8  # rounds within which a figure may be blamed for being larger than another
MUCH_LESS = 0.6  # of the usual value: then what made it larger is over
STALE = 256  # rounds after which a size that was not sent is worth another trial
PRIOR_CURVE = ((1, 0.05), (9, 0.1))  # rows, seconds; where none were measured smaller trees are tried first
PRIOR_CURVE_DOWN = ((1, 0.05), (65, 0.1))  # the same, from a tree that was tried to smaller ones: less is saved
PRIOR_LEVEL = 0.002
PRIOR_SHARES = (0.6, 0.7)


class Usual:
    """The median of the last `MEMORY` values, the lower of two: a stall hardly counts, and a lasting change does.

    Values are forgotten, since they were measured under another load, when one comes after `FRESH` rounds without any,
    and when a much smaller one comes: a stall may hold a forward up, but nothing makes one fast.
    """

    def __init__(self) -> None:
        self.value = 0.0
        self.last = 0
        self._values: deque[float] = deque(maxlen=MEMORY)

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float, round_: int) -> None:
        """Take in the value of a round, which is later than all before."""
        if round_ - self.last > FRESH or value < MUCH_LESS * self.value:
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
    So verification has one figure for each of `SIZES` rows (a tree's nodes and its root): what rounds of that many, or
    of more than the size before, usually take. Sizes that were never tried are to the nearest that was as they were
    when the verify service started and measured them, and cost no more than a larger one; where that promises a gain
    the size is tried, and then it is known. Until it was tried a few times, and after it was not for long, the promise
    counts if it is better: a stall in the only round of a size must not rule it out. A plain step is what all else is
    compared with, so it is due (`plain_is_due`) where it was not seen.
    Where a size was verified without the draft of late, what it takes longer after draft forwards is theirs (`wake`).

    Arguments and results are seconds. `target` and `draft` are what forwards took when the services started.

    Attributes:
        calibration: Of all sessions' nodes.
        shares: What the best child of a read node, and all its children, were last worth, of the node's own value.
        pause: Rounds that a session last left the draft model out for, since asking it did not pay.
    """

    def __init__(self, target: Iterable[ForwardCost] = (), draft: Iterable[ForwardCost] = ()) -> None:
        self.calibration = Calibration()
        self.shares = PRIOR_SHARES
        self.pause = 1
        curve = _curve(target)
        self._curve = curve if len(curve) > 1 else PRIOR_CURVE
        self._curve_down = curve if len(curve) > 1 else PRIOR_CURVE_DOWN
        self._plain_due = FRESH if len(curve) > 1 else TRIALS
        self._level = Usual()
        self._first_level = max((seconds for _, seconds in _curve(draft)), default=PRIOR_LEVEL)
        self._sizes: dict[int, _Size] = {}
        self._answers: dict[int, float] = {}  # of `verify`, until the next round
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
        self._answers.clear()
        self._rounds += 1
        now = self._rounds
        if not levels:
            size.alone.add(verify_seconds, now)
            return
        size.drafted.add(verify_seconds, now)
        if size.alone.is_sure(now):
            longer = verify_seconds - size.alone.value
            if longer < self._wake.value or now - size.alone.last <= TOGETHER:
                self._wake.add(longer, now)
        level = draft_seconds / levels
        if caught_up:
            self._level.add(level, now)
        elif level < self.level:
            self._level.replace(level, now)

    def verify(self, nodes: int) -> float:
        """Seconds to verify a tree of so many nodes; 0 nodes is a plain step."""
        place = _size(nodes)
        if place not in self._answers:
            self._answers[place] = self._verify(place)
        return self._answers[place]

    def _verify(self, place: int) -> float:
        size = self._sizes.get(place)
        if size is None:
            return min(self._expected(place), self._larger(place))
        if place == 0:
            return min(size.value, self._larger(place))
        sure = len(size) >= TRIALS and self._rounds - size.last <= STALE
        return size.value if sure else min(size.value, self._expected(place), self._larger(place))

    @property
    def plain_is_due(self) -> bool:
        """Whether the next round had better be a plain step, to know what it costs."""
        plain = self._sizes.get(0)
        if plain is None or len(plain) < TRIALS:
            return self._rounds >= self._plain_due
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

    def _larger(self, place: int) -> float:
        """The least that a larger tree took of late."""
        fresh = [size.value for each, size in self._sizes.items() if each > place and self._is_fresh(size)]
        return min(fresh, default=math.inf)

    def _expected(self, place: int) -> float:
        """What the nearest other size says of this one: the freshest word first."""
        others = [each for each in self._sizes if each != place]
        fresh = [each for each in others if self._is_fresh(self._sizes[each])]
        nearest = min(fresh or others, key=lambda each: abs(each - place), default=None)
        if nearest is None:
            return _on(self._curve, place)
        curve = self._curve_down if place < nearest else self._curve
        return self._sizes[nearest].value * _on(curve, place) / _on(curve, nearest)


def _curve(costs: Iterable[ForwardCost]) -> Sequence[tuple[int, float]]:
    """Rows and seconds, fewest rows first; no forward takes longer than one over more rows."""
    seconds_by_rows = {cost.rows: cost.seconds for cost in costs if cost.rows and 0.0 < cost.seconds < math.inf}
    points = sorted(seconds_by_rows.items())
    return [(rows, min(seconds for _, seconds in points[place:])) for place, (rows, _) in enumerate(points)]


def _on(curve: Sequence[tuple[int, float]], place: int) -> float:
    """The seconds of a size: on straight lines between the curve's points, and on through the last two."""
    rows = _rows(place)
    after = min(max(bisect_left(curve, (rows,)), 1), len(curve) - 1)
    (low, least), (high, most) = curve[after - 1 : after + 1]
    return least + (most - least) * (rows - low) / (high - low)


def largest_tree(nodes: int) -> int:
    """The most nodes that cost what so many do."""
    return _rows(_size(nodes)) - 1


def _size(nodes: int) -> int:
    return bisect_left(SIZES, nodes + 1)


def _rows(size: int) -> int:
    return SIZES[size]
