"""The calibrated value: what the draft's word has proved to be worth, in place of the word itself."""

from __future__ import annotations

from dynatree.common.tree import ROOT
from dynatree.draft.calibration import Calibration
from dynatree.draft.control import ControlSettings
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import Outcome
from dynatree.draft.track_record import TrackRecord


class CalibratedValue:
    """Values a session's trees by calibrated probabilities:

        p(u) = product over the path of q(p_D(v | parent)),   q the share of such nodes that the target accepted

    A session begins with the calibration of all sessions before it, and adds to both.
    """

    def __init__(self, track_record: TrackRecord, control: ControlSettings) -> None:
        self._shared = track_record.calibration
        self._own = Calibration(track_record.calibration, control)
        self._tree: GrowingTree | None = None

    def start(self, tree: GrowingTree) -> None:
        """Value this round's tree."""
        tree.calibrate(self._own.log_prob)
        self._tree = tree

    def observe(self, outcome: Outcome) -> None:
        """Learn from the draft's nodes of the tree whose parents were accepted."""
        if self._tree is None:
            return
        accepted = {ROOT, *outcome.accepted}
        for node, parent in enumerate(outcome.tree.parents):
            log_prob = self._tree.draft_log_prob(self._tree.sent[node])
            if log_prob is not None and parent in accepted:
                self._own.observe(log_prob, node in accepted)
                self._shared.observe(log_prob, node in accepted)
