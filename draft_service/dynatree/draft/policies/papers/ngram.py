"""Prompt lookup: drafting from earlier matches without a draft model (Saxena 2023; LLMA, Yang et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.policies.base import Policy
from dynatree.draft.policies.growing_tree import GrowingTree
from dynatree.draft.policies.lookup import Lookup, NGramSettings


class NGram(Policy):
    """Merges continuations from the session's own text into one tree; the tree is empty if nothing matches."""

    breadth = 0

    def __init__(self, settings: NGramSettings, control: ControlSettings) -> None:
        self._settings = settings
        self._lookup = Lookup(settings, control)

    def start(self, tree: GrowingTree) -> list[int]:
        """Add this round's continuations; no two begin with the same token."""
        self._lookup.add_to(tree, budget=min(self._settings.max_nodes, tree.max_nodes))
        return []

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Do nothing, since `start` names no nodes to expand."""
        return []

    def parameters(self) -> dict[str, float]:
        """The rates at which continuations' tokens are right, by the length of the match before them."""
        return self._lookup.rates()
