"""Prompt lookup: what followed the same tokens before, without a draft model (Saxena 2023; LLMA, Yang et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from dynatree.common.tree import ROOT
from dynatree.draft.control import ControlSettings
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import Policy
from dynatree.draft.policies.lookup import Lookup, NGramSettings


class NGram(Policy):
    """Continuations of the session's own text, merged into one tree; an empty tree where nothing matches."""

    breadth = 0

    def __init__(self, settings: NGramSettings, control: ControlSettings) -> None:
        self._settings = settings
        self._lookup = Lookup(settings, control)

    def start(self, tree: GrowingTree) -> list[int]:
        """Add this round's continuations; no two begin with the same token."""
        budget = min(self._settings.max_nodes, tree.max_nodes)
        for continuation in self._lookup.continuations(tree.context):
            node = ROOT
            for proposal in continuation.proposals[: min(tree.max_depth, budget - len(tree))]:
                node = tree.add(node, proposal)
        return []

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Nothing is ever expanded."""
        return []

    def parameters(self) -> dict[str, float]:
        """The rates at which continuations' tokens prove right, by the match before them."""
        return self._lookup.rates()
