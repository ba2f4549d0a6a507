"""Control on speed: nodes while the expected gain of one more exceeds what it costs, measured on this machine."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT
from dynatree.draft.costs import Costs
from dynatree.draft.growing_tree import GrowingTree, Proposal
from dynatree.draft.policies.base import Outcome
from dynatree.draft.policies.hybrid import Hybrid, HybridSettings

BIN_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995)
PRIOR_TRIALS = 8.0
FADE = 0.998
MAX_PAUSE = 64  # rounds without the draft, at most, before it is tried again


@dataclass(frozen=True)
class ThroughputSettings(HybridSettings):
    """Upper limits of what control may choose; as `hybrid`'s, and wider."""

    max_nodes: int = 64
    max_depth: int = 16
    ngram_depth: int = 32


class Calibration:
    """The draft's probabilities against what became of them: the share accepted, by bins of the probability.

    Only nodes whose parent was accepted say anything about themselves.
    """

    def __init__(self) -> None:
        middles = [(low + high) / 2 for low, high in zip((0.0, *BIN_EDGES), (*BIN_EDGES, 1.0), strict=True)]
        self._accepted = [PRIOR_TRIALS * middle for middle in middles]
        self._tried = [PRIOR_TRIALS] * len(middles)

    def log_prob(self, log_prob: float) -> float:
        """The calibrated log-probability."""
        place = bisect_right(BIN_EDGES, math.exp(log_prob))
        return min(0.0, math.log(self._accepted[place] / self._tried[place]))

    def observe(self, log_prob: float, accepted: bool) -> None:
        """Take in one node whose parent was accepted."""
        place = bisect_right(BIN_EDGES, math.exp(log_prob))
        self._accepted[place] = max(self._accepted[place] * FADE + accepted, 1e-3)
        self._tried[place] = self._tried[place] * FADE + 1.0


class Throughput(Hybrid):
    """Maximises expected tokens a second, (1 + sum of values) / (draft + verify seconds), over trees of any size.

    Values are calibrated path probabilities. A node is sent when it raises the ratio, which for the best nodes in order
    is when its value exceeds its marginal cost times the ratio so far. A level is read while what it may add exceeds
    what the forward costs. Where even the best tree is expected to be slower than a plain step, the draft pauses, for
    longer each time.
    """

    def __init__(self, settings: ThroughputSettings, costs: Costs) -> None:
        super().__init__(settings)
        self._most = settings.breadth
        self._costs = costs
        self._calibration = Calibration()
        self._yield = 0.6  # what the children of a read node add, as a share of its own value
        self._levels = 0
        self._raw: dict[int, float] = {}  # the draft's own log-probability of each node that it proposed
        self._sent: Sequence[int] = ()
        self._pause = 1
        self._paused = 0

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add candidates of both sources; read on where that pays."""
        if ROOT in level:
            self._raw.clear()
            self._levels = 0
        before = len(tree)
        candidates = super().grow(tree, level)
        if not self.breadth:
            return []
        self._levels += 1
        read = sum(1.0 if node == ROOT else tree.value(node) for node in level)
        proposed = sum(tree.value(node) for node in range(before, len(tree)) if node in self._raw)
        self._yield += 0.05 * (proposed / read - self._yield)
        rate, _ = self._best_prefix(tree)
        worthwhile = [node for node in candidates if tree.value(node) > rate * self._costs.slope]
        gain = self._yield * sum(map(tree.value, worthwhile))
        return worthwhile if gain > rate * self._costs.level else []

    def judge(self, proposal: Proposal) -> float:
        """The calibrated log-probability."""
        return self._calibration.log_prob(proposal.log_prob)

    def added(self, node: int, proposal: Proposal) -> None:
        """Remember what the draft itself said of a node."""
        self._raw[node] = proposal.log_prob

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Of the best nodes, as many as raise the rate; where none of that beats a plain step, the draft pauses."""
        rate, nodes = self._best_prefix(tree)
        if self.breadth:
            pays = rate > 1.0 / self._costs.verify(0)
            self._pause = 1 if pays else min(2 * self._pause, MAX_PAUSE)
            self._paused = 0 if pays else self._pause
        else:
            self._paused -= 1
        self.breadth = 0 if self._paused else self._most
        self._sent = sorted(nodes)
        return self._sent

    def observe(self, outcome: Outcome) -> None:
        """Learn the costs, and what became of the nodes whose parents were accepted."""
        self._costs.observe(len(outcome.tree), outcome.verify_seconds, outcome.levels, outcome.draft_seconds)
        super().observe(outcome)
        accepted = {ROOT, *outcome.accepted}
        for node, parent in enumerate(outcome.tree.parents):
            raw = self._raw.get(self._sent[node])
            if raw is not None and parent in accepted:
                self._calibration.observe(raw, node in accepted)

    def parameters(self) -> dict[str, float]:
        """What the last tree was judged by."""
        return {
            "plain_ms": 1e3 * self._costs.verify(0),
            "node_ms": 1e3 * self._costs.slope,
            "level_ms": 1e3 * self._costs.level,
            "levels": float(self._levels),
            "paused": float(self._paused),
            **super().parameters(),
        }

    def _best_prefix(self, tree: GrowingTree) -> tuple[float, Sequence[int]]:
        """The highest expected rate in tokens a second, and the nodes that give it."""
        drafting = self._levels * self._costs.level
        best, count, expected = 1.0 / (drafting + self._costs.verify(0)), 0, 1.0
        ranked = sorted(self.best(tree), key=lambda node: (-tree.value(node), node))
        for size, node in enumerate(ranked, start=1):
            expected += tree.value(node)
            rate = expected / (drafting + self._costs.verify(size))
            if rate > best:
                best, count = rate, size
        return best, ranked[:count]
