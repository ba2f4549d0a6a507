"""N-gram candidates: the continuations of earlier matches, and the rates at which they are right."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MOST_TREE_NODES
from dynatree.draft.control.constants import DEFAULT_CONTROL, LEAST_PROB, ControlSettings
from dynatree.draft.policies.base import check_range
from dynatree.draft.policies.growing_tree import Proposal
from dynatree.draft.policies.ngram_index import NGramIndex


@dataclass(frozen=True)
class NGramSettings:
    """Lengths of matches (`shortest` to `longest`) and continuations, continuations per round, and a node budget."""

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
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)
        if self.shortest > self.longest:
            raise InvalidArgumentError(
                f"shortest is {self.shortest} and longest is {self.longest}, expected shortest <= longest"
            )


@dataclass(frozen=True)
class Continuation:
    """Tokens that may follow, each with its log-probability given that all tokens before it are right.

    `matches[i]` is the length of the match before token i: the matched tokens of the context, plus the continuation's
    own tokens before i. For the first token it is 1 if a longer or a later match continues with another token.
    """

    proposals: Sequence[Proposal]
    matches: Sequence[int]


class Lookup:
    """One session's continuations, and the rates at which their tokens are right.

        P(token is right | all before it are right) = right tokens / tokens, in the same bin of match lengths

    A bin's rate begins at 1 - 1 / match. The first token after a short match is doubtful; if it is right, the next
    token is less so. The first token of a second continuation contradicts the first continuation, so it has a separate
    rate.
    """

    def __init__(self, settings: NGramSettings, control: ControlSettings = DEFAULT_CONTROL) -> None:
        self._settings = settings
        self._index = NGramIndex(settings.shortest, settings.longest)
        self._bins = control.match_bins
        self._rates = {match: _Rate(1.0 - 1.0 / match, control) for match in self._bins}
        self._others = _Rate(control.prior_others_rate, control)
        self._last: list[tuple[int, list[int]]] = []
        self._known = 0

    def continuations(self, tokens: Sequence[int]) -> list[Continuation]:
        """Find continuations of `tokens`, which extend those of the last call; learn from the new tokens first."""
        self._learn(tokens[self._known :])
        self._known = len(tokens)
        self._last = self._index.continuations(tokens, self._settings.depth, self._settings.branches)
        found = []
        for rank, (length, chain) in enumerate(self._last):
            rates = [self._rate(rank, length, depth) for depth in range(len(chain))]
            proposals = [Proposal(token, math.log(rate.value)) for token, rate in zip(chain, rates, strict=True)]
            first = 1 if rank else length
            found.append(Continuation(proposals, [first, *range(length + 1, length + len(chain))]))
        return found

    def rates(self) -> dict[str, float]:
        """The rate of each bin, by its shortest match, and of the first tokens of second continuations."""
        return {f"rate_{match}": rate.value for match, rate in self._rates.items()} | {
            "rate_others": self._others.value
        }

    def _rate(self, rank: int, length: int, depth: int) -> _Rate:
        """Return the measured acceptance rate of a token.

        Args:
            rank: Rank of the token's continuation; 0 is the latest.
            length: Length in tokens of the match that the continuation follows.
            depth: Place of the token in the continuation.
        """
        if rank and not depth:
            return self._others
        return self._rates[self._bins[bisect_right(self._bins, length + depth) - 1]]

    def _learn(self, tokens: Sequence[int]) -> None:
        """Count the tokens of the last continuations, sent or not, up to the first wrong token of each."""
        for rank, (length, chain) in enumerate(self._last):
            for depth, (guess, token) in enumerate(zip(chain, tokens, strict=False)):
                self._rate(rank, length, depth).add(guess == token)
                if guess != token:
                    break


class _Rate:
    """The share of right tokens, in (0, 1); it starts with `prior_trials` tokens at the prior rate."""

    def __init__(self, prior: float, control: ControlSettings) -> None:
        self._right = control.prior_trials * prior
        self._tried = control.prior_trials

    @property
    def value(self) -> float:
        return min(max(self._right / self._tried, LEAST_PROB), 1.0 - LEAST_PROB)

    def add(self, right: bool) -> None:
        self._right += right
        self._tried += 1.0
