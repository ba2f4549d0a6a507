"""DySpec's dynamic trees: the best nodes under a budget (Algorithm 1), or above a threshold (Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.limits import MOST_TREE_NODES
from dynatree.common.tree import MAX_CANDIDATES
from dynatree.draft.policies.base import DrawingSettings, Policy, check_range
from dynatree.draft.policies.best_first import BestFirst
from dynatree.draft.policies.growing_tree import GrowingTree


@dataclass(frozen=True)
class DySpecSettings(DrawingSettings):
    """The node budget (the paper's guess length, 64), limits that the paper does not have, and calibrated values.

    The paper evaluates 64 and 768 nodes with `draft_temperature` 0.6 at every temperature of the target (sections 5.1
    and B.1). It draws from the whole distribution, and limits neither depth nor breadth; its depths are "usually less
    than 30" (section 4.3). `max_depth` 64, `breadth` 256 and `candidates` 256 come nearest to that.
    """

    max_nodes: int = 64
    max_depth: int = 16
    breadth: int = 16
    calibrated: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)
        check_range("max_depth", self.max_depth, 1, 64)
        check_range("breadth", self.breadth, 1, MAX_CANDIDATES)


class DySpec(Policy):
    """Algorithm 1, a greedy heap under a fixed budget: the n nodes of highest value v(u).

    The listing multiplies values by the renormalised R[y]. Along siblings these products telescope to the values of
    `GrowingTree.value` (appendix D, equations 9 to 11). Draws are from the `candidates` likeliest tokens, renormalised.
    """

    supports_residual = True

    def __init__(self, settings: DySpecSettings) -> None:
        self.breadth = settings.breadth
        self._growth = BestFirst(settings.max_nodes, settings.max_depth)

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add the level's children that may be among the best."""
        return self._growth.grow(tree, level)

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Choose the best nodes."""
        return self._growth.best(tree)


@dataclass(frozen=True)
class DySpecThresholdSettings(DrawingSettings):
    """The threshold, "typically around 1/n" for n nodes (section 4.4), hard limits, and calibrated values."""

    threshold: float = 1 / 64
    max_nodes: int = 256
    max_depth: int = 16
    breadth: int = 16
    calibrated: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("threshold", self.threshold, 0.0, 1.0, open_low=True)
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)
        check_range("max_depth", self.max_depth, 1, 64)
        check_range("breadth", self.breadth, 1, MAX_CANDIDATES)


class DySpecThreshold(Policy):
    """Algorithm 2, level by level: u is added iff v(u) >= threshold, and expanded iff p(u) >= threshold.

    The listing prints the loop's condition as `v_i < t`, but the text says that nodes above the threshold are extended.
    We follow the text.
    """

    supports_residual = True

    def __init__(self, settings: DySpecThresholdSettings) -> None:
        self.breadth = settings.breadth
        self._settings = settings

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Give each node of the level its children above the threshold, up to the budget."""
        budget = min(self._settings.max_nodes, tree.max_nodes)
        added = []
        for node in level:
            for proposal in tree.proposals(node):
                if len(tree) < budget and tree.next_value(node, proposal.log_prob) >= self._settings.threshold:
                    added.append(tree.add(node, proposal))
        return [node for node in added if self._expands(tree, node)]

    def _expands(self, tree: GrowingTree, node: int) -> bool:
        path = math.exp(tree.path_log_prob(node))
        return path >= self._settings.threshold and tree.depth(node) < self._settings.max_depth
