"""What rounds cost on this pair of services, learnt from the rounds themselves; shared by all sessions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynatree.common.model_info import ForwardCost
from dynatree.draft.control import DEFAULT_CONTROL, ControlSettings
from dynatree.draft.rolling_median import RollingMedian
from dynatree.draft.track_record import TrackRecord
from dynatree.draft.verify_cost import VerifyCost, measured_curve


@dataclass(frozen=True)
class RoundCost:
    """What one round took.

    Attributes:
        nodes: Nodes of its tree.
        verify_seconds: Seconds of the verification.
        draft_forwards: Draft forwards that growing the tree took.
        draft_seconds: Seconds of the draft's work; draft forwards that sessions share count whole.
        caught_up: Whether the draft had read all but the last round's tokens before. If not, its forwards also read
            what a pause had left unread, and their time is no more than an upper bound.
        shared: Whether other sessions were open on the target: it may have verified less than the tree, or more
            besides, so that its time says nothing of this tree.
    """

    nodes: int
    verify_seconds: float
    draft_forwards: int = 0
    draft_seconds: float = 0.0
    caught_up: bool = True
    shared: bool = False


class Costs:
    """The cost model: V(n) of a verification, D of a draft forward, and the contention of the two.

    A plain step, V(0), is what all trees are compared with. It is due (`plain_is_due`) while too few were seen, and
    again after `stale_rounds` without one.

    Args:
        target: What the verify service's forwards took when it started.
        draft: What the draft's forwards took when the draft service started.
        control: The tuned constants.

    Attributes:
        track_record: What the sessions found the draft model to be worth.
    """

    def __init__(
        self,
        target: Iterable[ForwardCost] = (),
        draft: Iterable[ForwardCost] = (),
        control: ControlSettings = DEFAULT_CONTROL,
    ) -> None:
        self.track_record = TrackRecord(control)
        self._control = control
        target = tuple(target)
        self._measured = measured_curve(target)  # fewest rows first: a plain step
        self._verify = VerifyCost(target, control)
        self._plain_due = control.fresh_rounds if self._verify.is_measured else control.cost_trials
        self._draft_forward = RollingMedian(control)
        self._first_forward = max(
            (seconds for _, seconds in measured_curve(draft)), default=control.prior_draft_seconds
        )
        self._contention = RollingMedian(control)
        self._rounds = 0

    def observe(self, cost: RoundCost) -> None:
        """Take in one round."""
        self._rounds += 1
        now = self._rounds
        if not cost.shared:
            self._verify.observe(cost.nodes, cost.verify_seconds, after_draft=cost.draft_forwards > 0, now=now)
        if not cost.draft_forwards:
            return
        alone = self._verify.alone(cost.nodes)
        if alone.is_sure(now) and not cost.shared:
            longer = cost.verify_seconds - alone.value
            if longer < self._contention.value or now - alone.last <= self._control.contention_rounds:
                self._contention.add(longer, now)
        seconds = cost.draft_seconds / cost.draft_forwards
        if cost.caught_up:
            self._draft_forward.add(seconds, now)
        elif seconds < self.draft_forward_seconds:
            self._draft_forward.replace(seconds, now)

    def verify(self, nodes: int) -> float:
        """V(n): seconds to verify a tree of `nodes` nodes; 0 nodes is a plain step."""
        return self._verify.seconds(nodes)

    def nodes_within(self, steps: float) -> int:
        """The nodes of the largest tree that took so many plain steps at most when the verify service started."""
        if not self._measured:
            return 0
        plain = self._measured[0][1]
        return max(int(rows) for rows, seconds in self._measured if seconds <= steps * plain) - 1

    @property
    def draft_forward_seconds(self) -> float:
        """D: seconds of one draft forward and the work around it."""
        return self._draft_forward.value if self._draft_forward else self._first_forward

    @property
    def draft_contention(self) -> float:
        """Seconds that a verification takes longer after draft forwards, because the two share caches and cores."""
        return max(self._contention.value, 0.0) if self._contention.is_sure(self._rounds) else 0.0

    @property
    def plain_is_due(self) -> bool:
        """Whether the next round should be a plain step, to measure it."""
        if self._verify.rounds_of(0) < self._control.cost_trials:
            return self._rounds >= self._plain_due
        return self._rounds - self._verify.last_round_of(0) > self._control.stale_rounds
