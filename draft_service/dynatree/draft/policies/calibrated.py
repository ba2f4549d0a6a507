"""The calibrated value: what the draft's word has proved to be worth, in place of the word itself."""

from __future__ import annotations

from collections.abc import Sequence

from dynatree.common.tree import ROOT
from dynatree.draft.calibration import Calibration
from dynatree.draft.control import ControlSettings
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import Outcome, Policy
from dynatree.draft.track_record import TrackRecord


class CalibratedValue:
    """Values a session's trees by calibrated probabilities:

        p(u) = product of q(p_D(w | parent of w)) over the nodes w of u's path,   c(u) = q(max p_D(. | u))

    with q(p) the share of the draft's nodes of probability p that the target accepted (`Calibration`). A session begins
    with the calibration of all sessions before it, and adds to both.

    Residual sampling stays exact. q changes between rounds only, and no draw serves two rounds. Within a round a draw
    is kept or left out by its `value`, which knows the path above it and its earlier siblings, never its own token.
    A draw is accepted with another probability than a coupled guess, so residual sampling has a calibration of its own.
    """

    def __init__(self, track_record: TrackRecord, control: ControlSettings) -> None:
        self._shared = {False: track_record.calibration, True: track_record.residual_calibration}
        self._own = {sampled: Calibration(shared, control) for sampled, shared in self._shared.items()}
        self._tree: GrowingTree | None = None

    def start(self, tree: GrowingTree) -> None:
        """Value this round's tree."""
        tree.calibrate(self._own[tree.sampled].log_prob)
        self._tree = tree

    def observe(self, outcome: Outcome) -> None:
        """Learn from the draft's nodes of the tree whose parents were accepted."""
        if self._tree is None:
            return
        calibrations = (self._own[self._tree.sampled], self._shared[self._tree.sampled])
        accepted = {ROOT, *outcome.accepted}
        last = outcome.accepted[-1] if outcome.accepted else ROOT
        for node, parent in enumerate(outcome.tree.parents):
            log_prob = self._tree.draft_log_prob(self._tree.sent[node])
            if log_prob is not None and parent in accepted:
                # of a node that was not verified the target's next token tells as well
                right = node in accepted or (
                    parent == last and not self._tree.sampled and outcome.tree.token_ids[node] == outcome.next_token
                )
                for calibration in calibrations:
                    calibration.observe(log_prob, right)


class Calibrated(Policy):
    """Another policy, on calibrated values: its thresholds, budgets and breadths go by q(p) in place of p."""

    learns_from_others = True

    def __init__(self, policy: Policy, value: CalibratedValue) -> None:
        self.breadth = policy.breadth
        self.supports_residual = policy.supports_residual
        self._policy = policy
        self._value = value

    def start(self, tree: GrowingTree) -> list[int]:
        """The policy's own, on this value."""
        self._value.start(tree)
        return self._policy.start(tree)

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """The policy's own."""
        return self._policy.grow(tree, level)

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """The policy's own."""
        return self._policy.select(tree)

    def observe(self, outcome: Outcome) -> None:
        """Learn what became of the draft's nodes, and whatever the policy learns."""
        self._value.observe(outcome)
        self._policy.observe(outcome)

    def end(self) -> None:
        """The policy's own."""
        self._policy.end()

    def parameters(self) -> dict[str, float]:
        """The policy's own."""
        return self._policy.parameters()
