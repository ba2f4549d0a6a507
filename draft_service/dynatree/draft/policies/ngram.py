"""Prompt lookup: what followed the same tokens before, without a draft model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.tree import ROOT
from dynatree.draft.growing_tree import GrowingTree, Proposal
from dynatree.draft.ngram_index import NGramIndex
from dynatree.draft.policies.base import Outcome, Policy, check_range

PRIOR_RATE, PRIOR_TRIALS = 0.5, 4.0


@dataclass(frozen=True)
class NGramSettings:
    """Matched tokens (`shortest` to `longest`), length of a continuation, continuations a round, and a node budget."""

    longest: int = 4
    shortest: int = 2
    depth: int = 16
    branches: int = 2
    max_nodes: int = 32

    def __post_init__(self) -> None:
        check_range("longest", self.longest, 1, 16)
        check_range("shortest", self.shortest, 1, 16)
        check_range("depth", self.depth, 1, 64)
        check_range("branches", self.branches, 1, 16)
        check_range("max_nodes", self.max_nodes, 1, 256)
        if self.shortest > self.longest:
            raise InvalidArgumentError(
                f"shortest is {self.shortest} and longest is {self.longest}, expected shortest <= longest"
            )


class Lookup:
    """One session's continuations, and how often tokens of them are accepted, by the length of the match."""

    def __init__(self, settings: NGramSettings) -> None:
        self._settings = settings
        self._index = NGramIndex(settings.shortest, settings.longest)
        self._accepted = [PRIOR_RATE * PRIOR_TRIALS] * (settings.longest + 1)
        self._tried = [PRIOR_TRIALS] * (settings.longest + 1)
        self._last: list[tuple[int, list[int]]] = []

    def chains(self, tokens: Sequence[int]) -> list[tuple[list[int], float]]:
        """The round's continuations of `tokens`, each with the log-probability of one more token of it."""
        self._last = self._index.continuations(tokens, self._settings.depth, self._settings.branches)
        return [(chain, math.log(self.rate(length))) for length, chain in self._last]

    def rate(self, length: int) -> float:
        """The share of a continuation's tokens that are accepted where all before them were, below 1."""
        return self._accepted[length] / self._tried[length]

    def rates(self) -> dict[str, float]:
        """Every length's rate, by name."""
        lengths = range(self._settings.shortest, self._settings.longest + 1)
        return {f"rate_{length}": self.rate(length) for length in lengths}

    def observe(self, outcome: Outcome) -> None:
        """Learn from the accepted path how far each continuation was right, as far as the tree carried it.

        The last 100 tokens or so count.
        """
        accepted = [outcome.tree.token_ids[node] for node in outcome.accepted]
        for length, chain in self._last:
            hits, sent = 0, _sent(outcome, chain)
            while hits < min(len(accepted), sent) and accepted[hits] == chain[hits]:
                hits += 1
            if sent:
                fade = 0.99 ** min(hits + 1, sent)
                self._accepted[length] = self._accepted[length] * fade + hits
                self._tried[length] = self._tried[length] * fade + min(hits + 1, sent)


def _sent(outcome: Outcome, chain: Sequence[int]) -> int:
    """How many tokens of a chain were in the tree."""
    node, sent = ROOT, 0
    for token in chain:
        child = outcome.tree.children.get((node, token))
        if child is None:
            break
        node, sent = child, sent + 1
    return sent


class NGram(Policy):
    """Continuations of the session's own text, merged into one tree; an empty tree where nothing matches."""

    breadth = 0

    def __init__(self, settings: NGramSettings) -> None:
        self._settings = settings
        self._lookup = Lookup(settings)

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add this round's continuations; no two begin with the same token."""
        budget = min(self._settings.max_nodes, tree.max_nodes)
        for chain, log_prob in self._lookup.chains(tree.context):
            node = ROOT
            for token in chain[: min(tree.max_depth, budget - len(tree))]:
                node = tree.add(node, Proposal(token, log_prob))
        return []

    def observe(self, outcome: Outcome) -> None:
        """Learn how far the continuations were right."""
        self._lookup.observe(outcome)

    def parameters(self) -> dict[str, float]:
        """The acceptance of continuations by length of the match."""
        return self._lookup.rates()
