"""Static shapes: the fixed tree and the chain, DynaTree's baselines (DynaTree section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.limits import MOST_TREE_NODES
from dynatree.draft.policies.base import DrawingSettings, Policy, check_range
from dynatree.draft.policies.growing_tree import GrowingTree
from dynatree.draft.policies.level_growth import Prune, Root, grow_level


@dataclass(frozen=True)
class FixedSettings(DrawingSettings):
    """Depth D, breadth B, pruning threshold tau and node budget N_max. The defaults are DynaTree's tuned baseline.

    `root` single and `prune` expand make the tree of Algorithm 1, as in the authors' fixed tree. With `calibrated`, tau
    prunes by calibrated path probabilities.
    """

    depth: int = 8
    breadth: int = 3
    tau: float = 0.1
    max_nodes: int = 256
    root: Root = Root.COMMITTED
    prune: Prune = Prune.REMOVE
    calibrated: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("depth", self.depth, 1, 64)
        check_range("breadth", self.breadth, 1, 64)
        check_range("tau", self.tau, 0.0, 1.0)
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)


class Fixed(Policy):
    """The complete tree, pruned:

    B(u) = B        u is expanded iff d(u) < D and p(u) >= tau        u is kept iff p(u) >= tau

    With `prune` expand every child is kept.
    """

    supports_residual = True

    def __init__(self, settings: FixedSettings) -> None:
        self.breadth = settings.breadth
        self._settings = settings
        self._log_tau = math.log(settings.tau) if settings.tau > 0 else -math.inf

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Grow one level, breadth first."""
        return grow_level(
            tree,
            level,
            max_nodes=self._settings.max_nodes,
            children_of=lambda _: self.breadth,
            keeps=lambda path_log_prob: path_log_prob >= self._log_tau,
            expands=lambda _, depth: depth < self._settings.depth,
            root=self._settings.root,
            prune=self._settings.prune,
        )


@dataclass(frozen=True)
class LinearSettings(DrawingSettings):
    """The chain's length K. The default is 8, as in DynaTree's Table 1 on WikiText-2 (versions 000, 001 and 003)."""

    depth: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("depth", self.depth, 1, 64)


def linear(settings: LinearSettings) -> Fixed:
    """A chain of K tokens, linear speculative decoding: the fixed tree of D = K, B = 1 and tau = 0."""
    return Fixed(FixedSettings(depth=settings.depth, breadth=1, tau=0.0))
