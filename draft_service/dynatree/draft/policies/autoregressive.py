"""No drafting: every tree is empty, and every round is one plain decoding step of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.draft.policies.base import Policy
from dynatree.draft.policies.growing_tree import GrowingTree


@dataclass(frozen=True)
class AutoregressiveSettings:
    """No settings."""


class Autoregressive(Policy):
    """Plain decoding through the same services: the baseline of all speedups."""

    breadth = 0
    supports_residual = True

    def start(self, tree: GrowingTree) -> list[int]:
        """Expand nothing."""
        return []

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add nothing."""
        return []
