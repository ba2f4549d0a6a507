"""N-gram and model candidates in one tree, under one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT
from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.policies.base import Outcome, Policy
from dynatree.draft.policies.best_first import BestFirst
from dynatree.draft.policies.growing_tree import GrowingTree
from dynatree.draft.policies.merged import MergedNGrams, MergedSettings


@dataclass(frozen=True)
class HybridSettings(MergedSettings):
    """The node budget, the draft model's part as in `dyspec`, the n-grams as in `ngram`, and calibrated values."""

    max_nodes: int = 32
    max_depth: int = 8
    breadth: int = 8
    longest: int = 4
    shortest: int = 2
    ngram_depth: int = 24
    branches: int = 2
    calibrated: bool = False


class Hybrid(Policy):
    """Sends the n nodes of highest value v(u) from both sources.

    The probability of a continuation's token is the rate at which such tokens were right in this session. So long
    matches in looping text fill the budget, and poor matches leave it to the draft model.
    """

    def __init__(self, settings: HybridSettings, control: ControlSettings) -> None:
        self.breadth = settings.breadth
        self._ngrams = MergedNGrams(settings.ngrams(), settings.max_depth, control)
        self._growth = BestFirst(settings.max_nodes, settings.max_depth)

    def start(self, tree: GrowingTree) -> list[int]:
        """Add the continuations, and expand the root together with the beginning of the likeliest continuation."""
        return [ROOT, *self._ngrams.add_to(tree)]

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add the draft model's proposals that may be among the best."""
        if ROOT in level:
            self._ngrams.revalue(tree, level)
        return self._growth.grow(tree, level)

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """Choose the best nodes."""
        return self._growth.best(tree)

    def observe(self, outcome: Outcome) -> None:
        """Learn which guesses were right."""
        self._ngrams.observe(outcome)

    def parameters(self) -> dict[str, float]:
        """The rates at which continuations' tokens are right, by the length of the match before them."""
        return self._ngrams.rates()
