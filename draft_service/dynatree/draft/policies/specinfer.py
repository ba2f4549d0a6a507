"""SpecInfer's fixed expansion configuration: so many children for every node of a level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import Policy, check_range
from dynatree.draft.policies.level_growth import grow_level


@dataclass(frozen=True)
class SpecInferSettings:
    """Children of each node at depth 0, 1, 2 and so on; the first 0 ends the tree.

    The default is the configuration <1, 1, 3, 1, 1, 1, 1, 1> of SpecInfer (Miao et al. 2023, section 6).
    """

    k1: int = 1
    k2: int = 1
    k3: int = 3
    k4: int = 1
    k5: int = 1
    k6: int = 1
    k7: int = 1
    k8: int = 1
    k9: int = 0
    k10: int = 0
    k11: int = 0
    k12: int = 0
    k13: int = 0
    k14: int = 0
    k15: int = 0
    k16: int = 0
    max_nodes: int = 256

    def __post_init__(self) -> None:
        check_range("k1", self.k1, 1, 64)
        for field in fields(self)[1:-1]:
            check_range(field.name, getattr(self, field.name), 0, 64)
        check_range("max_nodes", self.max_nodes, 1, 256)

    def expansion(self) -> tuple[int, ...]:
        """The configuration, up to its first 0."""
        widths = [getattr(self, field.name) for field in fields(self)[:-1]] + [0]
        return tuple(widths[: widths.index(0)])


class SpecInfer(Policy):
    """A tree whose levels have fixed numbers of children a node: B(u) = k_(d(u) + 1)."""

    supports_residual = True

    def __init__(self, settings: SpecInferSettings) -> None:
        self._expansion = settings.expansion()
        self._max_nodes = settings.max_nodes
        self.breadth = max(self._expansion)

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """One level, breadth first, whatever the draft's probabilities."""
        return grow_level(
            tree,
            level,
            max_nodes=self._max_nodes,
            children_of=lambda node: self._expansion[tree.depth(node)],
            keeps=lambda _: True,
            expands=lambda node: tree.depth(node) < len(self._expansion),
        )
