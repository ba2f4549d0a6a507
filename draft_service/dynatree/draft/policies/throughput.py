"""Control on speed: what to read and what to send, by what it is expected to gain and what it costs on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT
from dynatree.draft.calibration import Calibration
from dynatree.draft.costs import Costs, largest_tree
from dynatree.draft.growing_tree import GrowingTree, Proposal
from dynatree.draft.policies.base import Outcome
from dynatree.draft.policies.hybrid import Hybrid, HybridSettings

MAX_PAUSE = 64  # rounds without the draft, at most, before it is tried again
MAX_FIRST_PAUSE = 8  # the same at a session's start, where the sessions before it had little use for the draft
YIELD_STEP = 0.1
RATE_FADE = 0.9  # of the rounds that the session's rate is taken over


@dataclass(frozen=True)
class ThroughputSettings(HybridSettings):
    """Upper limits of what control may choose, and the n-grams as in `hybrid`."""

    max_nodes: int = 63
    max_depth: int = 16
    breadth: int = 4
    longest: int = 8
    ngram_depth: int = 63


class Throughput(Hybrid):
    """Maximises tokens a second over the session, over trees of any size, the empty one included.

    A second is worth the session's own rate of tokens (renewal-reward: a round that takes t seconds costs rate * t
    tokens), and never less than that of plain decoding. So a level of the tree is read while what its nodes are
    expected to add exceeds rate * the forward's time, and of the best nodes as many are sent as make the sum of their
    values - rate * the verification's time largest. Values are calibrated path probabilities. Where the model is not
    expected to pay, it is left out, and tried again after a pause that doubles each time. A session begins with what
    those before it found the draft to be worth, and with a pause where they came to long ones.
    """

    def __init__(self, settings: ThroughputSettings, costs: Costs) -> None:
        super().__init__(settings)
        self._costs = costs
        self._calibration = Calibration(costs.calibration)
        self._yield = costs.share
        self._raw: dict[int, float] = {}  # the draft's own log-probability of each node that it proposed
        self._sent: Sequence[int] = ()
        self._levels = 0
        self._fruitless = False  # whether nothing was sent of what was read last
        self._keeps_up = True  # whether the draft had read all but the last round's tokens when this round began
        self._pause = min(max(costs.pause // 4, 1), MAX_FIRST_PAUSE)
        self._paused = 0
        self._tokens = 0.0
        self._seconds = 0.0

    def start(self, tree: GrowingTree) -> list[int]:
        """Read the root, unless the continuations alone, or no tree at all, are expected to do as well."""
        reading = super().start(tree)
        self._raw.clear()
        self._keeps_up = self._levels > 0 or not self._seconds
        self._levels = 0
        if self._costs.plain_is_due:
            return []
        known = sum(math.exp(chain[0].log_prob) for chain in self._chains)
        missing = 1.0 - min(known, 1.0)
        price = self._price(tree, [ROOT])
        if missing * self._yield > price and not self._fruitless:
            self._pause = self._costs.pause = 1
            return reading
        self._paused += 1
        if self._paused >= (self._pause if missing > price else MAX_PAUSE):  # a perfect draft may pay, or not even that
            self._paused = 0
            self._pause = self._costs.pause = min(2 * self._pause, MAX_PAUSE)
            return reading
        self.add_chains(tree, ())
        return []

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add candidates of both sources; read on where that pays."""
        before = len(tree)
        read = sum(1.0 if node == ROOT else tree.value(node) for node in level)
        candidates = super().grow(tree, level)
        self._levels += 1
        proposed = sum(tree.value(node) for node in range(before, len(tree)) if node in self._raw)
        self._yield += YIELD_STEP * (proposed / read - self._yield)
        self._costs.share = self._yield
        worthwhile = self._worthwhile(tree, candidates)
        gain = self._yield * sum(map(tree.value, worthwhile))
        return worthwhile if gain > self._price(tree, worthwhile) else []

    def judge(self, proposal: Proposal) -> float:
        """The calibrated log-probability."""
        return self._calibration.log_prob(proposal.log_prob)

    def added(self, node: int, proposal: Proposal) -> None:
        """Remember what the draft itself said of a node."""
        self._raw[node] = proposal.log_prob

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Of the best nodes, as many as gain more than they cost."""
        ranked = self._ranked(tree)
        self._sent = sorted(ranked[: self._best_size(tree, ranked)])
        if self._levels:
            self._fruitless = not any(node in self._raw for node in self._sent)
        return self._sent

    def observe(self, outcome: Outcome) -> None:
        """Learn the costs, the rate, and what became of the nodes whose parents were accepted."""
        self._costs.observe(
            len(outcome.tree), outcome.verify_seconds, outcome.levels, outcome.draft_seconds, self._keeps_up
        )
        seconds = outcome.draft_seconds + outcome.waited_seconds + outcome.verify_seconds
        self._tokens = RATE_FADE * self._tokens + len(outcome.accepted) + 1
        self._seconds = RATE_FADE * self._seconds + seconds
        super().observe(outcome)
        accepted = {ROOT, *outcome.accepted}
        for node, parent in enumerate(outcome.tree.parents):
            raw = self._raw.get(self._sent[node])
            if raw is not None and parent in accepted:
                for calibration in (self._calibration, self._costs.calibration):
                    calibration.observe(raw, node in accepted)

    def parameters(self) -> dict[str, float]:
        """What the last tree was judged by."""
        return {
            "plain_ms": 1e3 * self._costs.verify(0),
            "level_ms": 1e3 * self._costs.level,
            "wake_ms": 1e3 * self._costs.wake,
            "rate": self._rate,
            "yield": self._yield,
            "levels": float(self._levels),
            "paused": float(self._paused),
            **super().parameters(),
        }

    @property
    def _rate(self) -> float:
        """Tokens that a second is worth."""
        plain = 1.0 / self._costs.verify(0)
        return max(plain, self._tokens / self._seconds) if self._seconds else plain

    def _price(self, tree: GrowingTree, level: Sequence[int]) -> float:
        """The tokens that the time of a level's forward is worth; none where all of it was read before."""
        if all(map(tree.is_read, level)):
            return 0.0
        first = self._costs.wake if level == [ROOT] else 0.0
        return self._rate * (self._costs.level + first)

    def _worthwhile(self, tree: GrowingTree, candidates: Sequence[int]) -> list[int]:
        """The candidates whose children may be sent, were the tree as large as it is best for it to be now."""
        ranked = self._ranked(tree)
        room = largest_tree(self._best_size(tree, ranked))
        bar = tree.value(ranked[room]) if room < len(ranked) else 0.0
        return [node for node in candidates if tree.value(node) > bar]

    def _ranked(self, tree: GrowingTree) -> list[int]:
        return sorted(self.best(tree), key=lambda node: (-tree.value(node), node))

    def _best_size(self, tree: GrowingTree, ranked: Sequence[int]) -> int:
        """How many of the best nodes to send; only the largest of each price are looked at."""
        rate = self._rate
        best, best_gain = 0, -rate * self._costs.verify(0)
        size, value = 0, 0.0
        while size < len(ranked):
            larger = min(largest_tree(size + 1), len(ranked))
            value += sum(tree.value(node) for node in ranked[size:larger])
            size = larger
            gain = value - rate * self._costs.verify(size)
            if gain > best_gain:
                best, best_gain = size, gain
        return best
