"""SpecInfer's fixed expansion configuration: one number of children for all nodes of a level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynatree.common.limits import MOST_TREE_NODES
from dynatree.common.tree import MAX_DRAWS
from dynatree.draft.policies.base import DrawingSettings, Policy, check_length, check_range
from dynatree.draft.policies.drawing import Drawing
from dynatree.draft.policies.growing_tree import GrowingTree
from dynatree.draft.policies.level_growth import grow_level


@dataclass(frozen=True)
class SpecInferSettings(DrawingSettings):
    """Children of each node at depth 0, 1, 2 and so on, the node budget, and how children are drawn.

    The default is SpecInfer's configuration <1, 1, 3, 1, 1, 1, 1, 1> (Miao et al. 2023, section 6), a tree of 20 nodes.
    SpecInfer draws with `replacement`. Our default is without: then no draw is lost to a repetition, and the tree is a
    stronger baseline. DySpec compares with trees of 64 nodes, but does not give their widths.
    """

    widths: tuple[int, ...] = (1, 1, 3, 1, 1, 1, 1, 1)
    max_nodes: int = 256
    replacement: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length("widths", self.widths)
        for depth, width in enumerate(self.widths):
            check_range(f"widths[{depth}]", width, 1, MAX_DRAWS)
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)

    @property
    def drawing(self) -> Drawing:
        """Settings of the draft's distribution, with or without replacement."""
        return replace(super().drawing, replacement=self.replacement)


class SpecInfer(Policy):
    """A tree with a fixed number of children per node on each level: B(u) = widths[d(u)]."""

    supports_residual = True

    def __init__(self, settings: SpecInferSettings) -> None:
        self._widths = settings.widths
        self._max_nodes = settings.max_nodes
        self.breadth = max(self._widths)

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Grow one level, breadth first, whatever the draft's probabilities."""
        return grow_level(
            tree,
            level,
            max_nodes=self._max_nodes,
            children_of=lambda node: self._widths[tree.depth(node)],
            keeps=lambda _: True,
            expands=lambda _, depth: depth < len(self._widths),
        )
