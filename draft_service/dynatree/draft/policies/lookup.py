"""N-gram candidates: what followed the same tokens before, and how often that proved right."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MOST_TREE_NODES
from dynatree.draft.control import DEFAULT_CONTROL, LEAST_PROB, ControlSettings
from dynatree.draft.growing_tree import Proposal
from dynatree.draft.ngram_index import NGramIndex
from dynatree.draft.policies.base import check_range


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
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)
        if self.shortest > self.longest:
            raise InvalidArgumentError(
                f"shortest is {self.shortest} and longest is {self.longest}, expected shortest <= longest"
            )


@dataclass(frozen=True)
class Continuation:
    """Tokens that may follow, each with its log-probability given that all before it are right.

    `matches[i]` is the length of the match before token i: the matched tokens of the context, and the continuation's
    own up to there. It is 1 for the first token if a longer or a later match goes on with another one.
    """

    proposals: Sequence[Proposal]
    matches: Sequence[int]


class Lookup:
    """One session's continuations, and the rates at which their tokens prove right.

        P(token is right | all before it are) = right tokens / tokens, of the same bin of match lengths

    A bin's rate begins at 1 - 1 / match. The first token after a short match is doubtful; once it was right, the next
    is less so. The first token of a second continuation contradicts the first continuation, and has a rate of its own.
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
        """What may follow `tokens`, which begin with those of the call before; learns from the tokens since."""
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
        """The share of right tokens by the first length of every bin, and of second continuations' first tokens."""
        return {f"rate_{match}": rate.value for match, rate in self._rates.items()} | {
            "rate_others": self._others.value
        }

    def _rate(self, rank: int, length: int, depth: int) -> _Rate:
        """The rate of the token at `depth` of the continuation of that rank, which matched `length` tokens."""
        if rank and not depth:
            return self._others
        return self._rates[self._bins[bisect_right(self._bins, length + depth) - 1]]

    def _learn(self, tokens: Sequence[int]) -> None:
        """Count the last continuations' tokens, sent or not, up to the first wrong one of each."""
        for rank, (length, chain) in enumerate(self._last):
            for depth, (guess, token) in enumerate(zip(chain, tokens, strict=False)):
                self._rate(rank, length, depth).add(guess == token)
                if guess != token:
                    break


class _Rate:
    """The share of right tokens, in (0, 1), `prior_trials` of them before any."""

    def __init__(self, prior: float, control: ControlSettings) -> None:
        self._right = control.prior_trials * prior
        self._tried = control.prior_trials

    @property
    def value(self) -> float:
        return min(max(self._right / self._tried, LEAST_PROB), 1.0 - LEAST_PROB)

    def add(self, right: bool) -> None:
        self._right += right
        self._tried += 1.0
