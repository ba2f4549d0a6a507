"""Static shapes: the fixed tree and the chain that DynaTree is compared with (DynaTree section 4.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import LevelPolicy, check_range


@dataclass(frozen=True)
class FixedSettings:
    """Depth D, breadth B, pruning threshold tau and node budget N_max. The defaults are DynaTree's tuned baseline."""

    depth: int = 8
    breadth: int = 3
    tau: float = 0.1
    max_nodes: int = 256

    def __post_init__(self) -> None:
        check_range("depth", self.depth, 1, 64)
        check_range("breadth", self.breadth, 1, 64)
        check_range("tau", self.tau, 0.0, 1.0)
        check_range("max_nodes", self.max_nodes, 1, 256)


class Fixed(LevelPolicy):
    """Every node gets B children down to depth D, where its path is likelier than tau."""

    def __init__(self, settings: FixedSettings) -> None:
        self.breadth = settings.breadth
        self.max_nodes = settings.max_nodes
        self._depth = settings.depth
        self._log_tau = math.log(settings.tau) if settings.tau > 0 else -math.inf

    def children_of(self, tree: GrowingTree, node: int) -> int:
        """B, everywhere."""
        return self.breadth

    def expands(self, tree: GrowingTree, node: int) -> bool:
        """Down to depth D."""
        return tree.depth(node) < self._depth

    def keeps(self, path_log_prob: float) -> bool:
        """Prune what is less likely than tau."""
        return path_log_prob >= self._log_tau


@dataclass(frozen=True)
class LinearSettings:
    """The chain's length K. The default is the paper's on WikiText-2."""

    depth: int = 8

    def __post_init__(self) -> None:
        check_range("depth", self.depth, 1, 64)


class Linear(Fixed):
    """A chain of K tokens: linear speculative decoding."""

    def __init__(self, settings: LinearSettings) -> None:
        super().__init__(FixedSettings(depth=settings.depth, breadth=1, tau=0.0, max_nodes=256))
