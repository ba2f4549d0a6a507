"""The cost of a verification by the size of its tree: V(n)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from dynatree.common.model_info import FORWARD_SIZES, ForwardCost
from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.control.rolling_median import RollingMedian

ROW_BUCKETS = FORWARD_SIZES  # rows of the forward passes that both services measure at startup

Curve = Sequence[tuple[float, float]]  # (rows, seconds), fewest rows first


class VerifyCost:
    """Seconds of a verification by the rows of its forward pass: the tree's nodes and its root.

    The time of a forward pass hardly depends on its rows within one tile of the matrix kernels, and jumps at the next
    tile. So each of `ROW_BUCKETS` has one figure: the median of the rounds that fell into the bucket.

    The estimate for a bucket without rounds is scaled from the nearest bucket with rounds, by the curve that the verify
    service measured at startup, and is never above a larger bucket's figure. If it promises a gain, a policy tries the
    size. A bucket with fewer than `cost_trials` rounds, or with none for `stale_rounds`, also uses this estimate if it
    is lower: a stall in a bucket's only round must not rule the bucket out.
    """

    def __init__(self, measured: Iterable[ForwardCost], control: ControlSettings) -> None:
        self._control = control
        curve = measured_curve(measured)
        self.is_measured = len(curve) > 1
        step = control.prior_plain_seconds
        self._curve_up = curve if self.is_measured else ((1, step), (1 + 1 / control.prior_row_up, 2 * step))
        self._curve_down = curve if self.is_measured else ((1, step), (1 + 1 / control.prior_row_down, 2 * step))
        self._buckets: dict[int, _Bucket] = {}
        self._now = 0
        self._known: dict[int, float] = {}  # cached results of `seconds`, until the next round

    def observe(self, nodes: int, seconds: float, *, after_draft: bool, now: int) -> None:
        """Take in the verification of round `now`."""
        bucket = self._buckets.setdefault(bucket_of(nodes), _Bucket(self._control))
        (bucket.after_draft if after_draft else bucket.alone).add(seconds, now)
        self._now = now
        self._known.clear()

    def seconds(self, nodes: int) -> float:
        """V(n): seconds to verify a tree of `nodes` nodes; 0 nodes is a plain step."""
        bucket = bucket_of(nodes)
        if bucket not in self._known:
            self._known[bucket] = self._estimate(bucket)
        return self._known[bucket]

    def alone(self, nodes: int) -> RollingMedian:
        """Median of the verifications of that size that followed no draft forward pass."""
        bucket = self._buckets.get(bucket_of(nodes))
        return RollingMedian(self._control) if bucket is None else bucket.alone

    def rounds_of(self, nodes: int) -> int:
        """Number of verifications of that size within the windows of the medians."""
        bucket = self._buckets.get(bucket_of(nodes))
        return 0 if bucket is None else len(bucket)

    def last_round_of(self, nodes: int) -> int:
        """The last round of that size; 0 before the first."""
        bucket = self._buckets.get(bucket_of(nodes))
        return 0 if bucket is None else bucket.last

    def _estimate(self, bucket: int) -> float:
        tried = self._buckets.get(bucket)
        if tried is None:
            return min(self._scaled(bucket), self._larger(bucket))
        if bucket == 0:
            return min(tried.value, self._larger(bucket))
        enough = len(tried) >= self._control.cost_trials and self._now - tried.last <= self._control.stale_rounds
        return tried.value if enough else min(tried.value, self._scaled(bucket), self._larger(bucket))

    def _is_fresh(self, bucket: _Bucket) -> bool:
        return self._now - bucket.last <= self._control.fresh_rounds

    def _larger(self, bucket: int) -> float:
        """Lowest recent figure of a larger bucket."""
        fresh = [other.value for index, other in self._buckets.items() if index > bucket and self._is_fresh(other)]
        return min(fresh, default=math.inf)

    def _scaled(self, bucket: int) -> float:
        """Figure of the nearest other bucket, scaled by the curve; fresh buckets come first."""
        others = [index for index in self._buckets if index != bucket]
        fresh = [index for index in others if self._is_fresh(self._buckets[index])]
        nearest = min(fresh or others, key=lambda index: abs(index - bucket), default=None)
        if nearest is None:
            return _on(self._curve_up, bucket)
        curve = self._curve_down if bucket < nearest else self._curve_up
        return self._buckets[nearest].value * _on(curve, bucket) / _on(curve, nearest)


class _Bucket:
    """Verifications of one bucket, with and without preceding draft forward passes."""

    def __init__(self, control: ControlSettings) -> None:
        self.alone = RollingMedian(control)
        self.after_draft = RollingMedian(control)
        self._fresh_rounds = control.fresh_rounds

    def __len__(self) -> int:
        return len(self.alone) + len(self.after_draft)

    @property
    def last(self) -> int:
        """The last round of this bucket."""
        return max(self.alone.last, self.after_draft.last)

    @property
    def value(self) -> float:
        """Seconds without draft forward passes: the lower of both medians, or the fresh one if the other is stale."""
        kinds = (self.alone, self.after_draft)
        return min(times.value for times in kinds if times and self.last - times.last <= self._fresh_rounds)


def largest_tree(nodes: int) -> int:
    """Number of nodes of the largest tree in the bucket of a tree of `nodes` nodes."""
    return ROW_BUCKETS[bucket_of(nodes)] - 1


def bucket_of(nodes: int) -> int:
    """Index in `ROW_BUCKETS` of a tree of `nodes` nodes and its root."""
    return bisect_left(ROW_BUCKETS, nodes + 1)


def measured_curve(measured: Iterable[ForwardCost]) -> Curve:
    """Turn the usable measurements into a curve that never falls as rows increase."""
    seconds_by_rows = {each.rows: each.seconds for each in measured if each.rows and 0.0 < each.seconds < math.inf}
    points = sorted(seconds_by_rows.items())
    return [(rows, min(seconds for _, seconds in points[index:])) for index, (rows, _) in enumerate(points)]


def _on(curve: Curve, bucket: int) -> float:
    """Seconds of a bucket by linear interpolation of the curve, extrapolated through its outermost two points."""
    rows = ROW_BUCKETS[bucket]
    after = min(max(bisect_left(curve, (rows,)), 1), len(curve) - 1)
    (low, least), (high, most) = curve[after - 1 : after + 1]
    return least + (most - least) * (rows - low) / (high - low)
