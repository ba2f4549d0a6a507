"""Prompt lookup: what followed the same tokens before, without a draft model."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.tree import ROOT
from dynatree.draft.growing_tree import GrowingTree, Proposal
from dynatree.draft.ngram_index import NGramIndex
from dynatree.draft.policies.base import Outcome, Policy, check_range

MATCH_BINS = (1, 2, 3, 4, 6, 9, 13, 17, 25, 33)  # the shortest match of each bin
PRIOR_TRIALS = 4.0  # that say: 1 - 1 / match, which natural text comes near
PRIOR_SINGLE = 0.25
FADE = 0.99


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
    """One session's continuations, and how often tokens of them are accepted.

    A token goes by the match before it: what the context matched, and the tokens of the continuation up to there. So
    after a short match the first token is doubtful, and what follows it, once it was right, is not.
    """

    def __init__(self, settings: NGramSettings) -> None:
        self._settings = settings
        self._index = NGramIndex(settings.shortest, settings.longest)
        self._accepted = [0.0] * len(MATCH_BINS)
        self._tried = [0.0] * len(MATCH_BINS)
        self._last: list[tuple[int, list[int]]] = []

    def chains(self, tokens: Sequence[int]) -> list[list[Proposal]]:
        """The round's continuations of `tokens`, each token with its log-probability where all before it are right."""
        self._last = self._index.continuations(tokens, self._settings.depth, self._settings.branches)
        deepest = max((length for length, _ in self._last), default=0) + self._settings.depth
        log_probs = [math.log(self.rate(match)) for match in range(1, deepest + 1)]
        return [
            [Proposal(token, log_prob) for token, log_prob in zip(chain, log_probs[length - 1 :], strict=False)]
            for length, chain in self._last
        ]

    def rate(self, match: int) -> float:
        """The share of tokens that are accepted after a match of so many; in (0, 1)."""
        place = bisect_right(MATCH_BINS, match) - 1
        prior = 1.0 - 1.0 / match if match > 1 else PRIOR_SINGLE
        return (self._accepted[place] + PRIOR_TRIALS * prior) / (self._tried[place] + PRIOR_TRIALS)

    def rates(self) -> dict[str, float]:
        """The rate at the first length of every bin, by name."""
        return {f"rate_{match}": self.rate(match) for match in MATCH_BINS}

    def observe(self, outcome: Outcome) -> None:
        """Learn from the accepted path how far each continuation was right, as far as the tree carried it.

        The last 100 tokens or so of each bin count.
        """
        accepted = [outcome.tree.token_ids[node] for node in outcome.accepted]
        for length, chain in self._last:
            for depth in range(_sent(outcome, chain)):
                right = depth < len(accepted) and accepted[depth] == chain[depth]
                place = bisect_right(MATCH_BINS, length + depth) - 1
                self._accepted[place] = FADE * self._accepted[place] + right
                self._tried[place] = FADE * self._tried[place] + 1.0
                if not right:
                    break


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

    def start(self, tree: GrowingTree) -> list[int]:
        """Add this round's continuations; no two begin with the same token."""
        budget = min(self._settings.max_nodes, tree.max_nodes)
        for chain in self._lookup.chains(tree.context):
            node = ROOT
            for proposal in chain[: min(tree.max_depth, budget - len(tree))]:
                node = tree.add(node, proposal)
        return []

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Nothing is ever expanded."""
        return []

    def observe(self, outcome: Outcome) -> None:
        """Learn how far the continuations were right."""
        self._lookup.observe(outcome)

    def parameters(self) -> dict[str, float]:
        """The acceptance of continuations' tokens by the match before them."""
        return self._lookup.rates()
