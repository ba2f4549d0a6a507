"""Calibration of the draft's probabilities against the target's acceptance."""

from __future__ import annotations

import math
from bisect import bisect_right

from dynatree.draft.control.constants import DEFAULT_CONTROL, LEAST_PROB, ControlSettings


class Calibration:
    """The share of nodes that the target accepted, by bins of the probability that the draft gave them.

        q(p) = accepted nodes of p's bin / tried nodes of p's bin

    A node is tried if its parent was accepted. Each bin starts with `prior_trials` trials. Their accepted share is the
    bin's share in the calibration `prior`, or without one the bin's centre, which is the draft's own probability.
    """

    def __init__(self, prior: Calibration | None = None, control: ControlSettings = DEFAULT_CONTROL) -> None:
        self._edges = control.calibration_edges
        self._fade = control.calibration_fade
        centres = [(low + high) / 2 for low, high in zip((0.0, *self._edges), (*self._edges, 1.0), strict=True)]
        shares = centres if prior is None else prior._shares()
        self._accepted = [control.prior_trials * share for share in shares]
        self._tried = [control.prior_trials] * len(shares)

    def log_prob(self, log_prob: float) -> float:
        """The calibrated natural log-probability, log q(p)."""
        bucket = bisect_right(self._edges, math.exp(log_prob))
        return min(0.0, math.log(self._accepted[bucket] / self._tried[bucket]))

    def observe(self, log_prob: float, accepted: bool) -> None:
        """Take in one node whose parent was accepted."""
        bucket = bisect_right(self._edges, math.exp(log_prob))
        self._accepted[bucket] = max(self._accepted[bucket] * self._fade + accepted, LEAST_PROB)
        self._tried[bucket] = self._tried[bucket] * self._fade + 1.0

    def _shares(self) -> list[float]:
        return [accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True)]
