"""N-gram and model candidates in one tree, under one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT
from dynatree.draft.control import ControlSettings
from dynatree.draft.growing_tree import GrowingTree
from dynatree.draft.policies.base import Policy, check_range
from dynatree.draft.policies.best_first import BestFirst
from dynatree.draft.policies.lookup import NGramSettings
from dynatree.draft.policies.merged import MergedNGrams


@dataclass(frozen=True)
class HybridSettings:
    """The node budget, the limits of the model's part as in `dyspec`, and the n-grams as in `ngram`."""

    max_nodes: int = 32
    max_depth: int = 8
    breadth: int = 8
    longest: int = 4
    shortest: int = 2
    ngram_depth: int = 24
    branches: int = 2

    def __post_init__(self) -> None:
        check_range("max_nodes", self.max_nodes, 1, 256)
        check_range("max_depth", self.max_depth, 1, 64)
        check_range("breadth", self.breadth, 1, 64)
        check_range("ngram_depth", self.ngram_depth, 1, 64)
        self.ngrams()

    def ngrams(self) -> NGramSettings:
        """The n-grams' own settings."""
        return NGramSettings(self.longest, self.shortest, self.ngram_depth, self.branches, self.max_nodes)


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
