"""Sequoia: one static tree shape, the best for acceptance rates by rank (Chen et al. 2024, section 4.1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MOST_TREE_NODES
from dynatree.common.tree import ROOT
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import Policy, check_length, check_range

MAX_RANKS = 8  # the programme's time grows with the ranks


@dataclass(frozen=True)
class SequoiaSettings:
    """Node budget, depth, and the rates at which the target chooses the draft's first, second ... guess.

    `dynatree bench ranks` measures the rates on a pair; the defaults are the embedded pair's, greedy, on a book that it
    was not trained on.
    """

    max_nodes: int = 64
    max_depth: int = 12
    rates: tuple[float, ...] = (0.732, 0.146, 0.054, 0.017, 0.015, 0.006, 0.005, 0.005)

    def __post_init__(self) -> None:
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)
        check_range("max_depth", self.max_depth, 1, 32)
        check_length("rates", self.rates, MAX_RANKS)
        for rank, rate in enumerate(self.rates):
            check_range(f"rates[{rank}]", rate, 0.0, 1.0)
        if sum(self.rates) > 1.0 + 1e-6:
            raise InvalidArgumentError(f"rates sum to {sum(self.rates):g}, expected at most 1")


@dataclass(frozen=True)
class Shape:
    """A tree by ranks, its nodes breadth first from the root: a node's k-th child carries the draft's k-th best token.

    Attributes:
        widths: The number of children of each node.
        first: The index of each node's first child; its other children follow.
        expected: The expected accepted length.
    """

    widths: tuple[int, ...]
    first: tuple[int, ...]
    expected: float


class Sequoia(Policy):
    """The same shape in every round: the tree of n nodes with the greatest expected accepted length.

        p(u) = product of rates[rank of w among its siblings] over the nodes w of u's path,   max sum of p(u)

    Only the tokens follow the draft.
    """

    supports_residual = True

    def __init__(self, settings: SequoiaSettings) -> None:
        self._shape = best_shape(settings.rates, settings.max_nodes, settings.max_depth)
        self.breadth = max(1, *self._shape.widths)
        self._places: dict[int, int] = {}

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Give each node of the level the children that the shape has there."""
        if ROOT in level:
            self._places = {ROOT: 0}
        added = []
        for node in level:
            place = self._places[node]
            for rank, proposal in enumerate(tree.proposals(node)[: self._shape.widths[place]]):
                added.append(tree.add(node, proposal))
                self._places[added[-1]] = self._shape.first[place] + rank
        return [node for node in added if self._shape.widths[self._places[node]]]


@lru_cache(maxsize=64)
def best_shape(rates: tuple[float, ...], max_nodes: int, max_depth: int) -> Shape:
    """The shape of at most `max_nodes` nodes and `max_depth` levels with the greatest expected accepted length.

    A node whose ranks from the root are k1, k2, ... is accepted with probability rates[k1] * rates[k2] * ..., and
    the expected length is the sum over the nodes. The dynamic programme (Sequoia, section 4.1.2) is over

        F(d, k, m): the best forest of at most m nodes and d levels whose trees have the ranks k, k + 1, ...
                  = max(0, max over 1 <= j <= m of rates[k] * (1 + F(d - 1, 0, j - 1)) + F(d, k + 1, m - j))
    """
    import numpy as np  # takes a tenth of a second, which no other policy's help or errors should wait for

    below = np.zeros(max_nodes + 1)  # F(d - 1, 0, m) by m
    sizes: list[list[list[int]]] = []  # [level][rank][m]: nodes in the tree of that rank; 0 ends the forest
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
        sizes.append(taken)
    return _unfold(sizes, max_nodes, float(below[max_nodes]))


def _unfold(sizes: list[list[list[int]]], max_nodes: int, expected: float) -> Shape:
    widths: list[int] = []
    first: list[int] = []
    queue = deque([(len(sizes), max_nodes)])  # levels below a node, and nodes to place there
    placed = 1
    while queue:
        levels, room = queue.popleft()
        children = []
        for taken in sizes[levels - 1] if levels else ():
            if not taken[room]:
                break
            children.append((levels - 1, taken[room] - 1))
            room -= taken[room]
        first.append(placed)
        widths.append(len(children))
        placed += len(children)
        queue.extend(children)
    return Shape(tuple(widths), tuple(first), expected)
