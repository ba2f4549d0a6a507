"""Costs of rounds on this pair of services, learnt from the rounds and shared by all sessions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynatree.common.model_info import ForwardCost
from dynatree.draft.control.constants import DEFAULT_CONTROL, ControlSettings
from dynatree.draft.control.rolling_median import RollingMedian
from dynatree.draft.control.track_record import TrackRecord
from dynatree.draft.control.verify_cost import VerifyCost, measured_curve


@dataclass(frozen=True)
class RoundCost:
    """The cost of one round.

    Attributes:
        nodes: Number of nodes of the tree.
        verify_seconds: Seconds of the verification.
        draft_forwards: Number of draft forward passes that grew the tree.
        draft_seconds: Seconds of the draft's work; a forward pass that sessions share counts in full.
        caught_up: Whether the draft had already read all tokens before the last round's. If not, its forward passes
            also read the tokens of a pause, and their time is only an upper bound.
        shared: Whether other sessions were open on the target. Then its pass may have trimmed this tree or verified
            other trees too, so its time says nothing about this tree.
    """

    nodes: int
    verify_seconds: float
    draft_forwards: int = 0
    draft_seconds: float = 0.0
    caught_up: bool = True
    shared: bool = False


class Costs:
    """The cost model: V(n) of a verification, D of a draft forward pass, and the contention between them.

    All trees are compared with a plain step, V(0). A plain step is due (`plain_is_due`) while too few have been
    measured, and again after `stale_rounds` without one.

    Args:
        target: Forward costs that the verify service measured at startup.
        draft: Forward costs that the draft service measured at startup.
        control: The tuned constants.

    Attributes:
        track_record: The draft model's track record over all sessions.
        row_price: The last known price of a row of a pass, in tokens; None if that session was alone.
        open_sessions: Sessions open on the target, as far as the last pass and the ends since then tell.
    """

    def __init__(
        self,
        target: Iterable[ForwardCost] = (),
        draft: Iterable[ForwardCost] = (),
        control: ControlSettings = DEFAULT_CONTROL,
    ) -> None:
        self.track_record = TrackRecord(control)
        self.row_price: float | None = None
        self.open_sessions = 0
        self._control = control
        target = tuple(target)
        self._measured = measured_curve(target)  # fewest rows first, so the first point is a plain step
        self._verify = VerifyCost(target, control)
        self._plain_due = control.fresh_rounds if self._verify.is_measured else control.cost_trials
        self._draft_forward = RollingMedian(control)
        self._first_forward = max(
            (seconds for _, seconds in measured_curve(draft)), default=control.prior_draft_seconds
        )
        self._contention = RollingMedian(control)
        self._rounds = 0

    def observe(self, cost: RoundCost) -> None:
        """Update the costs with one round."""
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
        """Number of nodes of the largest tree whose verification took at most `steps` plain steps at startup."""
        if not self._measured:
            return 0
        plain = self._measured[0][1]
        return max(int(rows) for rows, seconds in self._measured if seconds <= steps * plain) - 1

    @property
    def draft_forward_seconds(self) -> float:
        """D: seconds of one draft forward pass and the work around it."""
        return self._draft_forward.value if self._draft_forward else self._first_forward

    @property
    def draft_contention(self) -> float:
        """Extra seconds of a verification after draft forward passes, because both share caches and cores."""
        return max(self._contention.value, 0.0) if self._contention.is_sure(self._rounds) else 0.0

    @property
    def plain_is_due(self) -> bool:
        """Whether the next round should be a plain step, to measure V(0)."""
        if self._verify.rounds_of(0) < self._control.cost_trials:
            return self._rounds >= self._plain_due
        return self._rounds - self._verify.last_round_of(0) > self._control.stale_rounds
