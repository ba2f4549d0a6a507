"""DySpec's dynamic trees: the best nodes under a budget (Algorithm 1), or above a threshold (Algorithm 2)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import Policy, check_range


class BestFirst(Policy):
    """The `max_nodes` nodes of highest value, whatever their depth: DySpec's Algorithm 1.

    The paper calls the draft model once for every node that its heap gives out. Here each forward reads all nodes that
    are among the best so far and whose children could still be; it ends when there is none, which gives the heap's
    tree with at most as many forwards as the tree has levels.
    """

    takes_draws = True

    def __init__(self, max_nodes: int, max_depth: int, breadth: int) -> None:
        self.breadth = breadth
        self._max_nodes = max_nodes
        self._max_depth = max_depth
        self._expanded: set[int] = set()

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add what may be among the best; the best that have not been expanded come next."""
        if ROOT in level:
            self._expanded.clear()
        self._expanded.update(level)
        bar = self._bar(tree, self.best(tree))
        for node in level:
            self.add_children(tree, node, bar)
        best = self.best(tree)
        bar = self._bar(tree, best)
        return [node for node in best if self._may_lead_above(tree, node, bar)]

    def add_children(self, tree: GrowingTree, node: int, bar: float) -> None:
        """Add the children of a node whose value is above the bar."""
        for proposal in tree.proposals(node):
            if tree.next_value(node, proposal.log_prob) > bar:
                tree.add(node, proposal)

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """The best nodes."""
        return self.best(tree)

    def best(self, tree: GrowingTree) -> Sequence[int]:
        """The nodes of highest value under the budget; of equals the earlier, so every node comes with its parent."""
        budget = min(self._max_nodes, tree.max_nodes)
        if len(tree) <= budget:
            return range(len(tree))
        return sorted(heapq.nsmallest(budget, range(len(tree)), key=lambda node: (-tree.value(node), node)))

    def _bar(self, tree: GrowingTree, best: Sequence[int]) -> float:
        """The value that a new node must exceed; 0 while there is room."""
        if len(best) < min(self._max_nodes, tree.max_nodes):
            return 0.0
        return min(map(tree.value, best), default=0.0)

    def _may_lead_above(self, tree: GrowingTree, node: int, bar: float) -> bool:
        if node in self._expanded or tree.parent(node) not in self._expanded:
            return False
        if tree.depth(node) >= self._max_depth:
            return False
        return min(tree.value(node), math.exp(tree.path_log_prob(node))) > bar


@dataclass(frozen=True)
class DySpecSettings:
    """The node budget (the paper's guess length, 64), and limits that the paper does not have."""

    max_nodes: int = 64
    max_depth: int = 16
    breadth: int = 16

    def __post_init__(self) -> None:
        check_range("max_nodes", self.max_nodes, 1, 256)
        check_range("max_depth", self.max_depth, 1, 64)
        check_range("breadth", self.breadth, 1, 64)


class DySpec(BestFirst):
    """Algorithm 1: a greedy heap under a fixed budget."""

    def __init__(self, settings: DySpecSettings) -> None:
        super().__init__(settings.max_nodes, settings.max_depth, settings.breadth)


@dataclass(frozen=True)
class DySpecThresholdSettings:
    """The threshold, "typically around 1/n" for n nodes (section 4.3), and a hard budget."""

    threshold: float = 1 / 64
    max_nodes: int = 256
    max_depth: int = 16
    breadth: int = 16

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0.0, 1.0, open_low=True)
        check_range("max_nodes", self.max_nodes, 1, 256)
        check_range("max_depth", self.max_depth, 1, 64)
        check_range("breadth", self.breadth, 1, 64)


class DySpecThreshold(Policy):
    """Algorithm 2: level by level, every node whose value reaches the threshold.

    The listing prints the loop's condition as `v_i < t`; the text says that nodes above the threshold are extended, and
    so they are here.
    """

    takes_draws = True

    def __init__(self, settings: DySpecThresholdSettings) -> None:
        self.breadth = settings.breadth
        self._settings = settings

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Give each node of the level its children above the threshold."""
        added = []
        for node in level:
            for proposal in tree.proposals(node):
                full = len(tree) == min(self._settings.max_nodes, tree.max_nodes)
                if not full and tree.next_value(node, proposal.log_prob) >= self._settings.threshold:
                    added.append(tree.add(node, proposal))
        return [node for node in added if self._expands(tree, node)]

    def _expands(self, tree: GrowingTree, node: int) -> bool:
        path = math.exp(tree.path_log_prob(node))
        return path >= self._settings.threshold and tree.depth(node) < self._settings.max_depth
