"""No drafting: every tree is empty, and every round is one plain decoding step of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import Policy


@dataclass(frozen=True)
class AutoregressiveSettings:
    """There is nothing to set."""


class Autoregressive(Policy):
    """Plain decoding through the same services: the baseline of every speedup."""

    breadth = 0
    supports_residual = True

    def start(self, tree: GrowingTree) -> list[int]:
        """Expand nothing."""
        return []

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add nothing."""
        return []
