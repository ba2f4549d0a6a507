"""The history controller: drafting parameters follow recent acceptance (DynaTree section 3.3)."""

from __future__ import annotations

from collections import deque


class HistoryController:
    """Proportional control of the base depth D_0 and the high-confidence threshold tau_h.

        D_0   <- clip(D_0   + eta_D (mean(a) - a*), 1, D_max - 1)
        tau_h <- clip(tau_h - eta_h (mean(a) - a*), 0, 1)

    mean(a) is the mean of a_r over the last W rounds that drafted anything. The paper calls a_r in [0, 1] the "fraction
    of drafted tokens committed", and leaves open which tokens count as drafted:

        a_r = accepted nodes / depth of the tree         the share of the longest path that a round could commit
        a_r = accepted nodes / nodes of the tree         the share of all nodes

    The first is meant. The paper's Table 3 gives DynaTree an acceptance of 102.2 and 92.2 %, and its target a* is 0.7.
    One path of a tree can be accepted, so a tree of two children a node commits at most half of its nodes and cannot
    come near 0.7: under the second reading D_0 only falls and tau_h only rises.
    """

    def __init__(
        self,
        *,
        base_depth: float,
        max_depth: int,
        tau_high: float,
        window: int,
        target: float,
        depth_step: float,
        tau_step: float,
    ) -> None:
        self.base_depth = base_depth
        self.tau_high = tau_high
        self._max_depth = max_depth
        self._target = target
        self._depth_step = depth_step
        self._tau_step = tau_step
        self._acceptance: deque[float] = deque(maxlen=window)

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in one round, a_r = accepted / drafted, and adjust; a round that drafted nothing is left out."""
        if drafted == 0:
            return
        self._acceptance.append(accepted / drafted)
        error = sum(self._acceptance) / len(self._acceptance) - self._target
        self.base_depth = min(max(self.base_depth + self._depth_step * error, 1.0), self._max_depth - 1.0)
        self.tau_high = min(max(self.tau_high - self._tau_step * error, 0.0), 1.0)
