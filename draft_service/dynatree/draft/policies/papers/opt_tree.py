"""OPT-Tree: a beam search with the draft model, and the best of all its nodes (Wang et al. 2025, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.limits import MOST_TREE_NODES
from dynatree.common.tree import ROOT
from dynatree.draft.policies.base import Policy, check_range
from dynatree.draft.policies.best_first import best_nodes
from dynatree.draft.policies.growing_tree import GrowingTree


@dataclass(frozen=True)
class OptTreeSettings:
    """Nodes sent, nodes expanded per level, levels, and the gain in expected length below which growth ends (delta).

    With `calibrated`, expected lengths are sums of calibrated path probabilities.
    """

    max_nodes: int = 50
    width: int = 10
    max_depth: int = 10
    delta: float = 0.2
    calibrated: bool = False

    def __post_init__(self) -> None:
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)
        check_range("width", self.width, 1, 64)
        check_range("max_depth", self.max_depth, 1, 64)
        check_range("delta", self.delta, 0.0, 1.0)


class OptTree(Policy):
    """Expands only the likeliest nodes of each level, and sends the likeliest nodes of all levels.

        E(T_d) = sum of p(u) over the n best nodes after level d;   growth ends when E(T_d) - E(T_(d-1)) < delta

    Unlike `dyspec` it never returns to an earlier level, so a forward pass expands at most `width` nodes.
    """

    def __init__(self, settings: OptTreeSettings) -> None:
        self.breadth = settings.width
        self._settings = settings
        self._expected = 0.0  # E(T_d)

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add the best children of the level, and return the best of them to expand next."""
        before = 0.0 if ROOT in level else self._expected
        children = [(node, proposal) for node in level for proposal in tree.proposals(node)]
        children.sort(key=lambda child: -(tree.path_log_prob(child[0]) + child[1].log_prob))
        added = [tree.add(*child) for child in children[: self._settings.max_nodes]]
        self._expected = sum(tree.value(node) for node in self.select(tree))
        if self._expected - before < self._settings.delta:
            return []
        return [node for node in added[: self._settings.width] if tree.depth(node) < self._settings.max_depth]

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Choose the likeliest nodes."""
        return best_nodes(tree, min(self._settings.max_nodes, tree.max_nodes))
