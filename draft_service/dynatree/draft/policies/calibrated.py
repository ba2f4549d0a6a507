"""Calibrated values: measured acceptance rates in place of the draft's own probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from dynatree.common.tree import ROOT
from dynatree.draft.control.calibration import Calibration
from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.control.track_record import TrackRecord
from dynatree.draft.policies.base import Outcome, Policy
from dynatree.draft.policies.growing_tree import GrowingTree


class CalibratedValue:
    """Values a session's trees by calibrated probabilities:

        p(u) = product of q(p_D(w | parent of w)) over the nodes w of u's path,   c(u) = q(max p_D(. | u))

    with q(p) the share of the draft's nodes of probability p that the target accepted (`Calibration`). A session's own
    calibration begins with the shares of the calibration over all sessions; the session adds to both.

    Residual sampling stays exact: q changes only between rounds, and no draw is used in two rounds. Within a round, a
    draw is kept or dropped by its `value`, which depends on the path above it and its earlier siblings, never on its
    own token. A draw is accepted with another probability than a coupled guess, so residual sampling has a separate
    calibration.
    """

    def __init__(self, track_record: TrackRecord, control: ControlSettings) -> None:
        self._shared = {False: track_record.calibration, True: track_record.residual_calibration}
        self._own = {sampled: Calibration(shared, control) for sampled, shared in self._shared.items()}
        self._tree: GrowingTree | None = None

    def start(self, tree: GrowingTree) -> None:
        """Switch this round's tree to calibrated values."""
        tree.calibrate(self._own[tree.sampled].log_prob)
        self._tree = tree

    def observe(self, outcome: Outcome) -> None:
        """Learn from the draft's nodes whose parents were accepted."""
        if self._tree is None:
            return
        calibrations = (self._own[self._tree.sampled], self._shared[self._tree.sampled])
        accepted = {ROOT, *outcome.accepted}
        last = outcome.accepted[-1] if outcome.accepted else ROOT
        for node, parent in enumerate(outcome.tree.parents):
            log_prob = self._tree.draft_log_prob(self._tree.sent[node])
            if log_prob is not None and parent in accepted:
                # the target's next token also shows whether a node that was not verified is right
                right = node in accepted or (
                    parent == last and not self._tree.sampled and outcome.tree.token_ids[node] == outcome.next_token
                )
                for calibration in calibrations:
                    calibration.observe(log_prob, right)


class Calibrated(Policy):
    """Wraps a policy with calibrated values: its thresholds, budgets and breadths use q(p) in place of p."""

    learns_from_others = True

    def __init__(self, policy: Policy, value: CalibratedValue) -> None:
        self.breadth = policy.breadth
        self.supports_residual = policy.supports_residual
        self._policy = policy
        self._value = value

    def start(self, tree: GrowingTree) -> list[int]:
        """Switch the tree to calibrated values, and start the wrapped policy."""
        self._value.start(tree)
        return self._policy.start(tree)

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Grow as the wrapped policy."""
        return self._policy.grow(tree, level)

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Select as the wrapped policy."""
        return self._policy.select(tree)

    def observe(self, outcome: Outcome) -> None:
        """Update the calibrations, and let the wrapped policy learn."""
        self._value.observe(outcome)
        self._policy.observe(outcome)

    def end(self) -> None:
        """Let the wrapped policy learn from the completion."""
        self._policy.end()

    def parameters(self) -> dict[str, float]:
        """The wrapped policy's parameters."""
        return self._policy.parameters()
