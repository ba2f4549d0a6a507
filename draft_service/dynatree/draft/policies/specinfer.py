"""SpecInfer's fixed expansion configuration: so many children for every node of a level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.limits import MOST_TREE_NODES
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import Policy, check_length, check_range
from dynatree.draft.policies.level_growth import grow_level


@dataclass(frozen=True)
class SpecInferSettings:
    """Children of each node at depth 0, 1, 2 and so on, and the node budget.

    The default is the configuration <1, 1, 3, 1, 1, 1, 1, 1> of SpecInfer (Miao et al. 2023, section 6).
    """

    widths: tuple[int, ...] = (1, 1, 3, 1, 1, 1, 1, 1)
    max_nodes: int = 256

    def __post_init__(self) -> None:
        check_length("widths", self.widths)
        for depth, width in enumerate(self.widths):
            check_range(f"widths[{depth}]", width, 1, 64)
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)


class SpecInfer(Policy):
    """A tree whose levels have fixed numbers of children a node: B(u) = widths[d(u)]."""

    supports_residual = True

    def __init__(self, settings: SpecInferSettings) -> None:
        self._widths = settings.widths
        self._max_nodes = settings.max_nodes
        self.breadth = max(self._widths)

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """One level, breadth first, whatever the draft's probabilities."""
        return grow_level(
            tree,
            level,
            max_nodes=self._max_nodes,
            children_of=lambda node: self._widths[tree.depth(node)],
            keeps=lambda _: True,
            expands=lambda _, depth: depth < len(self._widths),
        )
