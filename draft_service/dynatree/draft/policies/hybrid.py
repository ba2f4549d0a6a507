"""N-gram and model candidates in one tree, under one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT
from dynatree.draft.control import ControlSettings
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import Policy
from dynatree.draft.policies.best_first import BestFirst
from dynatree.draft.policies.merged import MergedNGrams, MergedSettings


@dataclass(frozen=True)
class HybridSettings(MergedSettings):
    """The node budget, the model's part as in `dyspec`, the n-grams as in `ngram`, and calibrated values."""

    max_nodes: int = 32
    max_depth: int = 8
    breadth: int = 8
    longest: int = 4
    shortest: int = 2
    ngram_depth: int = 24
    branches: int = 2
    calibrated: bool = False


class Hybrid(Policy):
    """The n nodes of highest value v(u), of both sources.

    A continuation's tokens are as likely as such tokens have proved in this session. So long matches in looping text
    fill the budget, and poor ones leave it to the model.
    """

    def __init__(self, settings: HybridSettings, control: ControlSettings) -> None:
        self.breadth = settings.breadth
        self._ngrams = MergedNGrams(settings.ngrams(), settings.max_depth, control)
        self._growth = BestFirst(settings.max_nodes, settings.max_depth)

    def start(self, tree: GrowingTree) -> list[int]:
        """Add the continuations; the likeliest one's beginning is expanded with the root."""
        return [ROOT, *self._ngrams.add_to(tree)]

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add the model's children that may be among the best."""
        if ROOT in level:
            self._ngrams.revalue(tree, level)
        return self._growth.grow(tree, level)

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """The best nodes."""
        return self._growth.best(tree)

    def parameters(self) -> dict[str, float]:
        """The rates at which continuations' tokens prove right, by the match before them."""
        return self._ngrams.rates()
