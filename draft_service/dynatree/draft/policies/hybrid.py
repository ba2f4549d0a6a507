"""N-gram and model candidates in one tree, under one budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT
from dynatree.draft.growing_tree import GrowingTree, Proposal
from dynatree.draft.policies.base import check_range
from dynatree.draft.policies.dyspec import BestFirst
from dynatree.draft.policies.ngram import Lookup, NGramSettings

READ_ALONG = 4  # tokens: with the root, and an accepted token not read before it, a forward of six rows as a rule
# how a continuation's token fared by its match and the model's probability, fitted by hand to text of the shipped pair
USUAL_PROB = 0.4
MODELS_WORD = 1.9
LEAST_PROB = 1e-4


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


class Hybrid(BestFirst):
    """The best nodes of both sources.

    A continuation's tokens are as likely as such tokens have proved in this session, so long matches in looping text
    fill the budget, and poor ones leave it to the model. The first forward reads the likeliest continuation's beginning
    with the root; what it says there of the continuation counts, too.
    """

    takes_draws = False

    def __init__(self, settings: HybridSettings) -> None:
        super().__init__(settings.max_nodes, settings.max_depth, settings.breadth)
        self._lookup = Lookup(settings.ngrams())
        self._matches: list[int] = []  # of the tree's first nodes, which are the continuations'

    def start(self, tree: GrowingTree) -> list[int]:
        """Add what may follow; the likeliest of it is read with the root."""
        self._matches.clear()
        along = 0
        for continuation in self._lookup.continuations(tree.context):
            node = ROOT
            for proposal in continuation.proposals[: tree.max_depth]:
                node = tree.add(node, proposal)
            self._matches += continuation.matches[: tree.max_depth]
            along = along or min(READ_ALONG, len(tree), min(tree.max_depth, self._max_depth) - 1)
        return [*super().start(tree), *range(along)]

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Judge the continuations by what the model makes of them, then add the best of both."""
        if ROOT in level:
            # by what is read now, and not by what happens to be known from earlier rounds or from reading ahead
            tree.revalue(
                [
                    self._judge_both(tree, node, match) if tree.parent(node) in level else tree.log_prob(node)
                    for node, match in enumerate(self._matches)
                ]
            )
        return super().grow(tree, level)

    def add_children(self, tree: GrowingTree, node: int, bar: float) -> None:
        """Add the model's proposals that the tree lacks."""
        for proposal in tree.proposals(node):
            log_prob = self.judge(proposal)
            if not tree.has_child(node, proposal.token) and tree.next_value(node, log_prob) > bar:
                self.added(tree.add(node, Proposal(proposal.token, log_prob)), proposal)

    def judge(self, proposal: Proposal) -> float:
        """The log-probability to go by: the draft's own."""
        return proposal.log_prob

    def added(self, node: int, proposal: Proposal) -> None:
        """Called with each node that carries one of the model's proposals, once in a round."""

    def parameters(self) -> dict[str, float]:
        """How often continuations' tokens are right, by the match before them."""
        return self._lookup.rates()

    def _judge_both(self, tree: GrowingTree, node: int, match: int) -> float:
        """The log-probability of a continuation's token, by its match and by what the model gives it after its parent.

        The odds after the match, times the model's odds over those that it gives such tokens as a rule; the longer the
        match, the less the model knows better.
        """
        proposals = {proposal.token: proposal for proposal in tree.proposals(tree.parent(node))}
        proposal = proposals.get(tree.node(node).token)
        if proposal is not None:
            self.added(node, proposal)
            prob = math.exp(self.judge(proposal))
        else:  # less than any of these, and than what they leave
            rest = 1.0 - sum(math.exp(each.log_prob) for each in proposals.values())
            prob = min(rest, *(math.exp(self.judge(each)) for each in proposals.values())) / 2
        models_word = MODELS_WORD * match**-0.5 * (_log_odds(prob) - USUAL_LOG_ODDS)
        log_odds = _log_odds(math.exp(tree.log_prob(node))) + models_word
        return -math.log1p(math.exp(-log_odds))


def _log_odds(prob: float) -> float:
    prob = min(max(prob, LEAST_PROB), 1.0 - LEAST_PROB)
    return math.log(prob / (1.0 - prob))


USUAL_LOG_ODDS = _log_odds(USUAL_PROB)
