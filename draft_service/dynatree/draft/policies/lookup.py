"""N-gram candidates: what followed earlier matches, and the rates at which it is right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MOST_TREE_NODES
from dynatree.common.tree import ROOT
from dynatree.draft.control.constants import DEFAULT_CONTROL, LEAST_PROB, ControlSettings
from dynatree.draft.policies.base import check_range
from dynatree.draft.policies.growing_tree import GrowingTree, Proposal
from dynatree.draft.policies.match_rates import MatchRates, Rate
from dynatree.draft.policies.ngram_index import NGramIndex
from dynatree.draft.policies.suffix_index import SuffixIndex


@dataclass(frozen=True)
class NGramSettings:
    """Limits of n-grams: the lengths of a match and of a continuation, the continuations of a round, and the nodes."""

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


@dataclass
class _Guess:
    """A token that may follow.

    Attributes:
        parent: The guess before it, as an index into the list of guesses; ROOT for the first.
        token: The token.
        prob: The probability that it is right if all guesses before it are.
        rates: The rates that it is judged by, each with the token's expected share of it.
        recalled: Whether the suffix index has it.
    """

    parent: int
    token: int
    prob: float
    rates: list[tuple[Rate, float]]
    recalled: bool = False


class Lookup:
    """One session's guesses from its own text and from the principal's earlier completions.

        P(token is right | all before it are right) = right tokens / expected tokens, in the same bin of match lengths

    A bin's rate begins at 1 - 1 / match. The first token after a short match is doubtful; if it is right, the next
    token is less so. The first token of a second continuation in the session's own text contradicts the first
    continuation, so it has a separate rate.

    Guesses from earlier completions have separate rates, which the principal's sessions share, and are expected in the
    share of the matches that continue with them. If both sources guess a token, it has the higher probability. If they
    contradict each other, the less likely token has at most the probability that the others leave.
    """

    def __init__(self, settings: NGramSettings, control: ControlSettings = DEFAULT_CONTROL) -> None:
        self._settings = settings
        self._control = control
        self._index = NGramIndex(range(settings.shortest, settings.longest + 1))
        self._rates = MatchRates(control)
        self._others = Rate(control.prior_others_rate, control)
        self._earlier: SuffixIndex | None = None
        self._recalled_rates: MatchRates | None = None
        self._guesses: list[_Guess] = []
        self._children: dict[int, list[int]] = {}  # by guess: those after it
        self._right: int | None = ROOT  # the last right guess; None after a token that was not guessed
        self._known = 0

    def add_to(self, tree: GrowingTree, *, budget: int = MOST_TREE_NODES, earlier: SuffixIndex | None = None) -> int:
        """Add guesses to an empty tree; return the length of the likeliest guess's path, whose nodes come first.

        The tree's context must extend the last call's. The index first learns the tokens added since then. Siblings
        have different tokens.

        Args:
            tree: The tree; its depth limit holds.
            budget: Maximum number of nodes.
            earlier: The principal's earlier completions; None leaves them out.
        """
        self.learn(tree.context[self._known :])
        self._guesses = self._merged(self._own(tree.context), self._recalled(tree, earlier))
        self._children, self._right = {}, ROOT
        for index, guess in enumerate(self._guesses):
            self._children.setdefault(guess.parent, []).append(index)
        nodes = {ROOT: ROOT}
        along = 0
        for index, guess in enumerate(self._guesses):
            parent = nodes.get(guess.parent)
            if parent is None or tree.depth(parent) >= tree.max_depth or len(tree) >= budget:
                continue
            if not tree.allows(parent, guess.token):
                continue
            nodes[index] = tree.add(parent, Proposal(guess.token, math.log(guess.prob)))
            along += nodes[index] == along == parent + 1
        _add_forced(tree, budget)
        return along

    def learn(self, tokens: Sequence[int]) -> None:
        """Count the last guesses along the next committed tokens, sent or not, up to the first one without a guess."""
        self._known += len(tokens)
        for token in tokens:
            if self._right is None:
                return
            guessed, self._right = self._children.get(self._right, ()), None
            for index in guessed:
                guess = self._guesses[index]
                right = guess.token == token
                for rate, share in guess.rates:
                    rate.add(right, share)
                if right:
                    self._right = index
                    if guess.recalled and self._earlier is not None:
                        self._earlier.hits += 1

    def rates(self) -> dict[str, float]:
        """The rate of each bin, by its shortest match, and of the first tokens of second continuations."""
        recalled = {} if self._recalled_rates is None else self._recalled_rates.values("history_rate")
        return self._rates.values("rate") | {"rate_others": self._others.value} | recalled

    def _own(self, tokens: Sequence[int]) -> list[_Guess]:
        """Guess what followed the last tokens at their earlier places in the session."""
        guesses: list[_Guess] = []
        settings = self._settings
        for rank, (length, chain) in enumerate(self._index.continuations(tokens, settings.depth, settings.branches)):
            for depth, token in enumerate(chain):
                rate = self._others if rank and not depth else self._rates.of(length + depth)
                guesses.append(_Guess(len(guesses) - 1 if depth else ROOT, token, rate.value, [(rate, 1.0)]))
        return guesses

    def _recalled(self, tree: GrowingTree, earlier: SuffixIndex | None) -> list[_Guess]:
        """Guess what followed the last tokens in the principal's earlier completions."""
        if earlier is None:
            return []
        if self._recalled_rates is None or earlier is not self._earlier:
            self._earlier, self._recalled_rates = earlier, MatchRates(self._control, shared=earlier.rates)
        rates = self._recalled_rates
        depth, count = min(self._settings.depth, tree.max_depth), min(self._settings.max_nodes, tree.max_nodes)
        found = earlier.recall(tree.context, depth, count, tree.vocab_size, lambda match: rates.of(match).value)
        guesses = []
        for parent, token, share, match in found:
            rate = rates.of(match)
            prob = max(rate.value * share, LEAST_PROB)
            guesses.append(_Guess(parent, token, prob, [(rate, share)], recalled=True))
        return guesses

    @staticmethod
    def _merged(one: list[_Guess], other: list[_Guess]) -> list[_Guess]:
        """Merge two sources; the source of the likeliest first token comes first."""
        if not one or not other:
            return one or other
        if other[0].prob > one[0].prob:
            one, other = other, one
        guesses = list(one)
        known = {(guess.parent, guess.token): index for index, guess in enumerate(guesses)}
        moved = {ROOT: ROOT}
        for index, guess in enumerate(other):
            guess.parent = moved[guess.parent]
            place = moved[index] = known.setdefault((guess.parent, guess.token), len(guesses))
            if place == len(guesses):
                guesses.append(guess)
                continue
            same = guesses[place]
            same.prob = max(same.prob, guess.prob)
            same.rates += guess.rates
            same.recalled |= guess.recalled
        left = dict.fromkeys((guess.parent for guess in guesses), 1.0)
        for guess in sorted(guesses, key=lambda guess: -guess.prob):
            guess.prob = max(min(guess.prob, left[guess.parent]), LEAST_PROB)
            left[guess.parent] -= guess.prob
        return guesses


def _add_forced(tree: GrowingTree, budget: int) -> None:
    """Add each token that the grammar alone allows after the root or after a node, and those that follow it."""
    node = ROOT
    while node < len(tree) < min(budget, tree.max_nodes):
        token = tree.forced(node)
        if token is not None and tree.depth(node) < tree.max_depth and not tree.has_child(node, token):
            tree.add(node, Proposal(token, 0.0))
        node += 1
