"""The draft's probabilities against what became of them."""

from __future__ import annotations

import math
from bisect import bisect_right

BIN_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
PRIOR_TRIALS = 8.0
FADE = 0.998


class Calibration:
    """The share of nodes accepted, by bins of the probability that the draft gave them.

    Only nodes whose parent was accepted say anything about themselves. Begins with `experience`, which counts as much
    as a few trials, or else with the draft's own word.
    """

    def __init__(self, experience: Calibration | None = None) -> None:
        middles = [(low + high) / 2 for low, high in zip((0.0, *BIN_EDGES), (*BIN_EDGES, 1.0), strict=True)]
        shares = middles if experience is None else experience._shares()
        self._accepted = [PRIOR_TRIALS * share for share in shares]
        self._tried = [PRIOR_TRIALS] * len(shares)

    def log_prob(self, log_prob: float) -> float:
        """The calibrated log-probability."""
        place = bisect_right(BIN_EDGES, math.exp(log_prob))
        return min(0.0, math.log(self._accepted[place] / self._tried[place]))

    def observe(self, log_prob: float, accepted: bool) -> None:
        """Take in one node whose parent was accepted."""
        place = bisect_right(BIN_EDGES, math.exp(log_prob))
        self._accepted[place] = max(self._accepted[place] * FADE + accepted, 1e-3)
        self._tried[place] = self._tried[place] * FADE + 1.0

    def _shares(self) -> list[float]:
        return [accepted / tried for accepted, tried in zip(self._accepted, self._tried, strict=True)]
