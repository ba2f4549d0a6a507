"""Sequoia: the best static tree shape for given acceptance rates by rank (Chen et al. 2024, sections 4.1 and 4.3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MOST_TREE_NODES
from dynatree.common.tree import ROOT
from dynatree.draft.control.round_costs import Costs
from dynatree.draft.control.verify_cost import largest_tree
from dynatree.draft.policies.base import DrawingSettings, Outcome, Policy, check_length, check_range, cost_of
from dynatree.draft.policies.growing_tree import GrowingTree

MAX_RANKS = 8  # the time of the dynamic programme grows with the ranks


@dataclass(frozen=True)
class SequoiaSettings(DrawingSettings):
    """Node budget, depth, and the rates at which the target chooses the draft's first, second ... guess.

    With `max_nodes` of 0 the measured costs choose both size and depth, up to the services' node limit and `max_depth`.
    `dynatree bench ranks` measures the rates of a pair. The defaults are those of the embedded pair, under greedy
    decoding on a book outside its training data.
    """

    max_nodes: int = 64
    max_depth: int = 12
    rates: tuple[float, ...] = (0.732, 0.146, 0.054, 0.017, 0.015, 0.006, 0.005, 0.005)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("max_nodes", self.max_nodes, 0, MOST_TREE_NODES)
        check_range("max_depth", self.max_depth, 1, 32)
        check_length("rates", self.rates, MAX_RANKS)
        for rank, rate in enumerate(self.rates):
            check_range(f"rates[{rank}]", rate, 0.0, 1.0)
        if sum(self.rates) > 1.0 + 1e-6:
            raise InvalidArgumentError(f"rates sum to {sum(self.rates):g}, expected at most 1")


@dataclass(frozen=True)
class Shape:
    """A tree by ranks, its nodes breadth first from the root: a node's k-th child has the draft's k-th best token.

    Attributes:
        widths: The number of children of each node.
        first: The index of each node's first child; the other children follow it.
        expected: The expected accepted length.
        depth: The number of levels below the root.
    """

    widths: tuple[int, ...]
    first: tuple[int, ...]
    expected: float
    depth: int


class Sequoia(Policy):
    """The same shape in every round: the tree of n nodes with the greatest expected accepted length.

        p(u) = product of rates[rank of w among its siblings] over the nodes w of u's path,   max sum of p(u)

    Only the tokens depend on the draft. If the costs choose n and the depth d, they do so at a session's first tree:

        max over n and d of (1 + the sum for n and d) / (V(n) + d D)

    V(n) and D are seconds of a verification and of a draft forward pass (`Costs`); each of the d levels takes one pass.
    """

    supports_residual = True

    def __init__(self, settings: SequoiaSettings, costs: Costs) -> None:
        self._settings = settings
        self._costs = costs
        self.learns_from_others = not settings.max_nodes
        self._shape: Shape | None = None
        self.breadth = len(settings.rates)
        self._places: dict[int, int] = {}

    def start(self, tree: GrowingTree) -> list[int]:
        """Expand the root. If the costs choose the shape, the first tree fixes it for the whole session."""
        settings = self._settings
        if settings.max_nodes:
            self._shape = best_shape(settings.rates, min(settings.max_nodes, tree.max_nodes), settings.max_depth)
        elif self._shape is None:
            self._shape = fastest_shape(settings.rates, tree.max_nodes, settings.max_depth, self._costs)
        return [ROOT]

    def observe(self, outcome: Outcome) -> None:
        """Learn the costs, if they choose the shapes of later sessions."""
        if not self._settings.max_nodes:
            self._costs.observe(cost_of(outcome))

    def parameters(self) -> dict[str, float]:
        """Size and depth of the shape that the costs chose."""
        if self._settings.max_nodes or self._shape is None:
            return {}
        return {"nodes": len(self._shape.widths) - 1.0, "depth": float(self._shape.depth)}

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Give each node of the level the children of its place in the shape."""
        shape = self._shape
        assert shape is not None, "a tree starts before it grows"
        if ROOT in level:
            self._places = {ROOT: 0}
        added = []
        for node in level:
            place = self._places[node]
            for rank, proposal in enumerate(tree.proposals(node)[: shape.widths[place]]):
                added.append(tree.add(node, proposal))
                self._places[added[-1]] = shape.first[place] + rank
        return [node for node in added if shape.widths[self._places[node]]]


@lru_cache(maxsize=64)
def best_shape(rates: tuple[float, ...], max_nodes: int, max_depth: int) -> Shape:
    """The shape of at most `max_nodes` nodes and `max_depth` levels with the greatest expected accepted length."""
    return _unfold(_programme(rates, max_nodes, max_depth), max_nodes)


def fastest_shape(rates: tuple[float, ...], max_nodes: int, max_depth: int, costs: Costs) -> Shape:
    """The shape with the most expected tokens per second, the target's own token included (Sequoia, section 4.3).

    V is constant within a bucket of sizes, so the best tree of a depth has a bucket's largest size or `max_nodes`.
    """
    levels = _programme(rates, max_nodes, max_depth)
    sizes = {min(largest_tree(nodes), max_nodes) for nodes in range(1, max_nodes + 1)}

    def rate(nodes: int, depth: int) -> float:
        seconds = costs.verify(nodes) + depth * costs.draft_forward_seconds
        return (1.0 + levels[depth - 1].expected[nodes]) / seconds

    nodes, depth = max(product(sorted(sizes), range(1, max_depth + 1)), key=lambda size: rate(*size))
    return _unfold(levels[:depth], nodes)


@dataclass(frozen=True)
class _Level:
    """The best trees of a fixed number of levels, by their number of nodes.

    Attributes:
        expected: The expected accepted length, by number of nodes.
        taken: The size of the tree of a rank, by rank and number of nodes left; 0 ends the forest.
    """

    expected: Sequence[float]
    taken: Sequence[Sequence[int]]


@lru_cache(maxsize=16)
def _programme(rates: tuple[float, ...], max_nodes: int, max_depth: int) -> Sequence[_Level]:
    """Compute the best trees of 1, 2, ... `max_depth` levels and of at most `max_nodes` nodes.

    A node whose ranks from the root are k1, k2, ... is accepted with probability rates[k1] * rates[k2] * ... The
    expected length of the accepted path is the sum of these probabilities over all nodes. The dynamic programme
    (Sequoia, section 4.1.2) is over

        F(d, k, m): the best forest of at most m nodes and d levels whose trees have the ranks k, k + 1, ...
                  = max(0, max over 1 <= j <= m of rates[k] * (1 + F(d - 1, 0, j - 1)) + F(d, k + 1, m - j))
    """
    import numpy as np  # the import takes a tenth of a second, which help and errors of other policies must not pay

    below = np.zeros(max_nodes + 1)  # F(d - 1, 0, m) by m
    levels: list[_Level] = []
    for _ in range(max_depth):
        forest = np.zeros(max_nodes + 1)
        taken: list[list[int]] = []
        for rate in reversed(rates):
            best, size = np.zeros(max_nodes + 1), [0] * (max_nodes + 1)
            for room in range(1, max_nodes + 1):
                values = rate * (1.0 + below[:room]) + forest[room - 1 :: -1]
                most = int(values.argmax())
                if values[most] > 0.0:
                    best[room], size[room] = values[most], most + 1
            forest = best
            taken.insert(0, size)
        below = forest
        levels.append(_Level(below.tolist(), taken))
    return tuple(levels)


def _unfold(below: Sequence[_Level], max_nodes: int) -> Shape:
    """The shape of the best tree of `len(below)` levels and at most `max_nodes` nodes."""
    widths: list[int] = []
    first: list[int] = []
    queue = deque([(len(below), max_nodes)])  # levels below a node, and nodes to place there
    placed, least = 1, len(below)
    while queue:
        levels, room = queue.popleft()
        least = min(least, levels)
        children = []
        for taken in below[levels - 1].taken if levels else ():
            if not taken[room]:
                break
            children.append((levels - 1, taken[room] - 1))
            room -= taken[room]
        first.append(placed)
        widths.append(len(children))
        placed += len(children)
        queue.extend(children)
    return Shape(tuple(widths), tuple(first), below[-1].expected[max_nodes], len(below) - least)
