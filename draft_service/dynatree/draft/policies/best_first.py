"""Best-first growth: the nodes of highest value under a budget (DySpec, Algorithm 1)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from dynatree.common.tree import ROOT
from dynatree.draft.policies.growing_tree import GrowingTree


def best_nodes(tree: GrowingTree, count: int) -> Sequence[int]:
    """The `count` nodes of highest value, in the tree's order; ties go to the earlier node, so parents are included."""
    if len(tree) <= count:
        return range(len(tree))
    return sorted(heapq.nsmallest(count, range(len(tree)), key=lambda node: (-tree.value(node), node)))


class BestFirst:
    """Grows and selects the `max_nodes` nodes of highest value:

        max over trees T of at most n nodes of the sum of v(u) over u in T

    The paper calls the draft model once for every node that its heap pops. Here each forward pass expands all nodes
    that are among the best so far and whose children could be among the best too. Growth ends when there is no such
    node. The result is the heap's tree, with at most one forward pass per level of the tree.
    """

    def __init__(self, max_nodes: int, max_depth: int) -> None:
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._expanded: set[int] = set()

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add a level's children that may be among the best, and return the best nodes that are worth expanding."""
        if ROOT in level:
            self._expanded.clear()
        self._expanded.update(level)
        threshold = self._threshold(tree, self.best(tree))
        for node in level:
            for proposal in tree.proposals(node):
                if tree.next_value(node, proposal.log_prob) > threshold and not tree.has_child(node, proposal.token):
                    tree.add(node, proposal)
        best = self.best(tree)
        threshold = self._threshold(tree, best)
        return [node for node in best if self._may_lead_above(tree, node, threshold)]

    def best(self, tree: GrowingTree) -> Sequence[int]:
        """The best of all nodes that were added."""
        return best_nodes(tree, self._budget(tree))

    def _budget(self, tree: GrowingTree) -> int:
        return min(self._max_nodes, tree.max_nodes)

    def _threshold(self, tree: GrowingTree, best: Sequence[int]) -> float:
        """The value that a new node must exceed; 0 while the budget has room."""
        if len(best) < self._budget(tree):
            return 0.0
        return min(map(tree.value, best), default=0.0)

    def _may_lead_above(self, tree: GrowingTree, node: int, threshold: float) -> bool:
        """Whether a node can be expanded, and its best child could exceed the threshold."""
        if node in self._expanded or tree.parent(node) not in self._expanded:
            return False
        if tree.depth(node) >= self._max_depth:
            return False
        return min(tree.value(node), math.exp(tree.path_log_prob(node))) > threshold
