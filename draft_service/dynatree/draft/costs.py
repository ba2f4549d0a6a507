"""What rounds cost on this pair of services, learnt from the rounds themselves; shared by all sessions."""

from __future__ import annotations

from collections import deque

import numpy as np

ROUNDS = 128  # remembered; older ones were measured under another load
PRIOR_SLOPE = 1 / 64  # of a plain step, for each node, until measured
PRIOR_WEIGHT = 4.0


class Costs:
    """Seconds of verifying n nodes, and of a draft forward.

    Verification is fitted as `plain + slope * n` over the last rounds, by least squares with a prior on the slope. The
    arguments and results are seconds; before anything is measured a plain step counts as `plain`.
    """

    def __init__(self, plain: float = 0.05, level: float = 0.002) -> None:
        self._plain = plain
        self._slope = PRIOR_SLOPE * plain
        self._level = level
        self._rounds: deque[tuple[int, float]] = deque(maxlen=ROUNDS)
        self._levels: deque[float] = deque(maxlen=ROUNDS)

    def observe(self, nodes: int, verify_seconds: float, levels: int, draft_seconds: float) -> None:
        """Take in one round."""
        self._rounds.append((nodes, verify_seconds))
        if levels:
            self._levels.append(draft_seconds / levels)
            self._level = float(np.median(self._levels))
        self._fit()

    def verify(self, nodes: int) -> float:
        """Seconds to verify a tree of so many nodes; 0 nodes is a plain step."""
        return self._plain + self._slope * nodes

    @property
    def slope(self) -> float:
        """Seconds that one more node costs."""
        return self._slope

    @property
    def level(self) -> float:
        """Seconds of one draft forward with what goes with it."""
        return self._level

    def _fit(self) -> None:
        nodes, times = np.array(self._rounds, dtype=float).T
        times = np.minimum(times, 3 * np.median(times))  # a stall says nothing about nodes
        spread = nodes - nodes.mean()
        prior = PRIOR_SLOPE * times.mean()
        weight = PRIOR_WEIGHT * max(1.0, nodes.mean()) ** 2
        slope = (spread @ (times - times.mean()) + weight * prior) / (spread @ spread + weight)
        self._slope = max(float(slope), 1e-3 * prior)
        self._plain = max(float(times.mean() - self._slope * nodes.mean()), 0.1 * float(times.mean()))
