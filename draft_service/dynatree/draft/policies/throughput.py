"""Control on speed: what to read and what to send, by what it is expected to gain and what it costs on this machine."""

from __future__ import annotations

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
SHARE_STEP = 0.1
FORESIGHT = (1, 2, 4, 8, 15)  # how many more levels are considered before one is read
LEAVES = 3  # of the nodes to read below the root, the likeliest, whose descendants are considered
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
    tokens), and never less than that of plain decoding. So of the best nodes as many are sent as make the sum of their
    values - rate * the verification's time largest; and a level of the tree is read where that sum, less rate * the
    forwards' time, is expected to grow with one more level or several, whose nodes are worth what such nodes were of
    late. Values are calibrated path probabilities. Where the model is not expected to pay, it is left out, and tried
    again after a pause that doubles each time. A session begins with what those before it found the draft to be worth,
    and with a pause where they came to long ones.
    """

    def __init__(self, settings: ThroughputSettings, costs: Costs) -> None:
        super().__init__(settings)
        self._costs = costs
        self._calibration = Calibration(costs.calibration)
        self._shares = costs.shares
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
        self._raw.clear()
        self._keeps_up = self._levels > 0 or not self._seconds
        self._levels = 0
        if self._costs.plain_is_due:
            return []
        reading = super().start(tree)
        if tree.is_read(ROOT):  # and costs nothing: nor shall what is read along with it
            reading = [node for node in reading if tree.is_read(node)]
        known = [tree.value(node) for node in self._ranked(tree)]
        missing = _missing(tree, reading)
        price = self._price(tree, reading)
        if self._bar_if_read(known, missing, price) is not None and not self._fruitless:
            self._pause = self._costs.pause = 1
            return reading
        self._paused += 1
        if self._paused >= (
            self._pause if sum(missing) > price else MAX_PAUSE
        ):  # a perfect draft may pay, or not even that
            self._paused = 0
            self._pause = self._costs.pause = min(2 * self._pause, MAX_PAUSE)
            return reading
        return []

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add candidates of both sources; read on where that pays."""
        candidates = super().grow(tree, level)
        self._levels += 1
        self._learn_shares(tree, level)
        if not candidates:
            return []
        values = [tree.value(node) for node in self._ranked(tree)]
        likeliest = sorted(_missing(tree, candidates), reverse=True)[:LEAVES]
        bar = self._bar_if_read(values, likeliest, self._price(tree, candidates))
        return [] if bar is None else [node for node in candidates if tree.value(node) > bar]

    def judge(self, proposal: Proposal) -> float:
        """The calibrated log-probability."""
        return self._calibration.log_prob(proposal.log_prob)

    def added(self, node: int, proposal: Proposal) -> None:
        """Remember what the draft itself said of a node."""
        self._raw[node] = proposal.log_prob

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Of the best nodes, as many as gain more than they cost."""
        ranked = self._ranked(tree)
        _, size = self._best_size([tree.value(node) for node in ranked])
        self._sent = sorted(ranked[:size])
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
            "share_best": self._shares[0],
            "share_all": self._shares[1],
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
        first = self._costs.wake if ROOT in level else 0.0
        return self._rate * (self._costs.level + first)

    def _learn_shares(self, tree: GrowingTree, level: Sequence[int]) -> None:
        read = sum(1.0 if node == ROOT else tree.value(node) for node in level)
        children = _children(tree, level)
        best = sum(max(values, default=0.0) for values in children) / read
        all_ = sum(map(sum, children)) / read
        old = self._shares
        self._shares = (old[0] + SHARE_STEP * (best - old[0]), old[1] + SHARE_STEP * (all_ - old[1]))
        self._costs.shares = self._shares

    def _bar_if_read(self, known: Sequence[float], leaves: Sequence[float], price: float) -> float | None:
        """What a node must be worth for its children to be sent if more is read; None if it is best to read no more.

        `known` are the values of the nodes at hand, highest first, `leaves` those of the nodes to read, and `price` the
        next forward's. A leaf is expected to have one likeliest descendant on each further level, and all the others.
        """
        highest, _ = self._best_size(known)
        rate, bar = self._rate, None
        best, all_ = self._shares
        others = max(all_ - best, 0.0)
        added: list[float] = []
        leaves = list(leaves)
        for levels in range(1, FORESIGHT[-1] + 1):
            added += [leaf * share for leaf in leaves for share in (best, others)]
            leaves = [leaf * best for leaf in leaves]
            if levels not in FORESIGHT:
                continue
            merged = sorted([*known, *added], reverse=True)[: self._max_nodes]
            gain, size = self._best_size(merged)
            gain -= price + (levels - 1) * rate * self._costs.level
            if gain > highest:
                room = largest_tree(size)
                highest, bar = gain, merged[room] if room < len(merged) else 0.0
        return bar

    def _ranked(self, tree: GrowingTree) -> list[int]:
        return sorted(self.best(tree), key=lambda node: (-tree.value(node), node))

    def _best_size(self, values: Sequence[float]) -> tuple[float, int]:
        """What the best number of nodes gains, and that number; only the largest of each price are looked at.

        `values` are the nodes', highest first.
        """
        rate, seconds = self._rate, self._costs.verify
        highest, best = -rate * seconds(0), 0
        size, value = 0, 0.0
        while size < len(values):
            larger = largest_tree(size + 1)
            value += sum(values[size:larger])
            size = min(larger, len(values))
            gain = value - rate * seconds(size)
            if gain > highest:
                highest, best = gain, size
        return highest, best


def _children(tree: GrowingTree, nodes: Sequence[int]) -> list[list[float]]:
    """The values of each node's children."""
    values: dict[int, list[float]] = {node: [] for node in nodes}
    for node in range(len(tree)):
        if tree.parent(node) in values:
            values[tree.parent(node)].append(tree.value(node))
    return list(values.values())


def _missing(tree: GrowingTree, nodes: Sequence[int]) -> list[float]:
    """For each node, the probability that the target comes to it and goes on otherwise than its children do."""
    values = [1.0 if node == ROOT else tree.value(node) for node in nodes]
    return [max(value - sum(known), 0.0) for value, known in zip(values, _children(tree, nodes), strict=True)]
