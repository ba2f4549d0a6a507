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
from dynatree.draft.policies.base import Policy, check_range

MATCH_BINS = (1, 2, 3, 4, 6, 9, 13, 17, 25, 33)  # the shortest match of each bin
PRIOR_TRIALS = 4.0  # that say: 1 - 1 / match, which natural text comes near
PRIOR_SINGLE = 0.25
PRIOR_OTHERS = 0.1  # measured on natural text: 0.05 to 0.1
LEAST_RATE = 1e-3
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


@dataclass(frozen=True)
class Continuation:
    """Tokens that may follow, each with its log-probability where all before it are right.

    `matches` are the numbers of tokens before each that have stood before it already: the context's, and those of the
    continuation up to there. 1 for the first token, where a longer or a later match goes on with another one.
    """

    proposals: Sequence[Proposal]
    matches: Sequence[int]


class Lookup:
    """One session's continuations, and how often their tokens are right.

    A token goes by the match before it. So after a short match the first token is doubtful, and what follows it, once
    it was right, is not. Only the first continuation's first token does: the others' contradict it, and have a rate of
    their own.
    """

    def __init__(self, settings: NGramSettings) -> None:
        self._settings = settings
        self._index = NGramIndex(settings.shortest, settings.longest)
        self._rates = {match: _Rate(1.0 - 1.0 / match if match > 1 else PRIOR_SINGLE) for match in MATCH_BINS}
        self._others = _Rate(PRIOR_OTHERS)
        self._last: list[tuple[int, list[int]]] = []
        self._known = 0

    def continuations(self, tokens: Sequence[int]) -> list[Continuation]:
        """What may follow `tokens`, which begin with those of the call before: what came after them is learnt from."""
        self._learn(tokens[self._known :])
        self._known = len(tokens)
        self._last = self._index.continuations(tokens, self._settings.depth, self._settings.branches)
        found = []
        for place, (length, chain) in enumerate(self._last):
            rates = [self._rate(place, length, depth) for depth in range(len(chain))]
            proposals = [Proposal(token, math.log(rate.value)) for token, rate in zip(chain, rates, strict=True)]
            first = 1 if place else length
            found.append(Continuation(proposals, [first, *range(length + 1, length + len(chain))]))
        return found

    def rates(self) -> dict[str, float]:
        """The share of right tokens at the first length of every bin, and of others, by name."""
        return {f"rate_{match}": rate.value for match, rate in self._rates.items()} | {
            "rate_others": self._others.value
        }

    def _rate(self, place: int, length: int, depth: int) -> _Rate:
        if place and not depth:
            return self._others
        return self._rates[MATCH_BINS[bisect_right(MATCH_BINS, length + depth) - 1]]

    def _learn(self, tokens: Sequence[int]) -> None:
        for place, (length, chain) in enumerate(self._last):
            for depth, (guess, token) in enumerate(zip(chain, tokens, strict=False)):
                self._rate(place, length, depth).add(guess == token)
                if guess != token:
                    break


class _Rate:
    """The share of right ones among the last 100 or so, in (0, 1)."""

    def __init__(self, prior: float) -> None:
        self._right = PRIOR_TRIALS * prior
        self._tried = PRIOR_TRIALS

    @property
    def value(self) -> float:
        return min(max(self._right / self._tried, LEAST_RATE), 1.0 - LEAST_RATE)

    def add(self, right: bool) -> None:
        self._right = FADE * self._right + right
        self._tried = FADE * self._tried + 1.0


class NGram(Policy):
    """Continuations of the session's own text, merged into one tree; an empty tree where nothing matches."""

    breadth = 0

    def __init__(self, settings: NGramSettings) -> None:
        self._settings = settings
        self._lookup = Lookup(settings)

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
        """How often continuations' tokens are right, by the match before them."""
        return self._lookup.rates()
