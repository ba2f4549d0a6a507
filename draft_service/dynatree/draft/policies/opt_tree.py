"""OPT-Tree: a beam down the draft model, and the best nodes of all that it saw (Wang et al. 2025, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT
from dynatree.draft.growing_tree import GrowingTree, Proposal
from dynatree.draft.policies.base import check_range
from dynatree.draft.policies.dyspec import BestFirst


@dataclass(frozen=True)
class OptTreeSettings:
    """Nodes sent, nodes expanded a level, levels, and the gain in expected length below which growth ends (delta)."""

    max_nodes: int = 50
    width: int = 10
    max_depth: int = 10
    delta: float = 0.2

    def __post_init__(self) -> None:
        check_range("max_nodes", self.max_nodes, 1, 256)
        check_range("width", self.width, 1, 64)
        check_range("max_depth", self.max_depth, 1, 64)
        check_range("delta", self.delta, 0.0, 1.0)


class OptTree(BestFirst):
    """Expands the likeliest nodes of each level only, and sends the likeliest of all levels.

    Unlike `dyspec` it never goes back to a level, so a forward reads at most `width` nodes, and it ends when a level
    adds less than delta to the expected accepted length.
    """

    takes_draws = False

    def __init__(self, settings: OptTreeSettings) -> None:
        super().__init__(settings.max_nodes, settings.max_depth, settings.width)
        self._settings = settings
        self._expected = 0.0

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add the best children of the level; the best of those come next."""
        before = 0.0 if ROOT in level else self._expected
        children = [(node, proposal) for node in level for proposal in tree.proposals(node)]
        children.sort(key=lambda child: -_path(tree, *child))
        added = [tree.add(*child) for child in children[: self._settings.max_nodes]]
        self._expected = sum(tree.value(node) for node in self.select(tree))
        if self._expected - before < self._settings.delta:
            return []
        return [node for node in added[: self._settings.width] if tree.depth(node) < self._settings.max_depth]


def _path(tree: GrowingTree, node: int, proposal: Proposal) -> float:
    return tree.path_log_prob(node) + proposal.log_prob
