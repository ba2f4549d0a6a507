"""N-gram candidates in a tree of the draft model, valued by their match and by the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dynatree.common.limits import MOST_TREE_NODES
from dynatree.draft.control.constants import LEAST_PROB, ControlSettings
from dynatree.draft.policies.base import Outcome, check_range
from dynatree.draft.policies.growing_tree import GrowingTree, Proposal
from dynatree.draft.policies.lookup import Lookup, NGramSettings


@dataclass(frozen=True)
class MergedSettings:
    """The node budget, the depth and breadth of the draft model's part, and the n-gram settings of `ngram`."""

    LEAST_BREADTH: ClassVar[int] = 1

    max_nodes: int
    max_depth: int
    breadth: int
    longest: int
    shortest: int
    ngram_depth: int
    branches: int

    def __post_init__(self) -> None:
        check_range("max_nodes", self.max_nodes, 1, MOST_TREE_NODES)
        check_range("max_depth", self.max_depth, 1, 64)
        check_range("breadth", self.breadth, self.LEAST_BREADTH, 64)
        check_range("ngram_depth", self.ngram_depth, 1, 64)
        self.ngrams()

    def ngrams(self) -> NGramSettings:
        """The settings of the n-grams alone."""
        return NGramSettings(self.longest, self.shortest, self.ngram_depth, self.branches, self.max_nodes)


class MergedNGrams:
    """Adds a session's continuations to each tree, and values them once the draft model has read them.

    The first forward pass expands the root and the beginning of the likeliest continuation. The probability q of a
    continuation's token t, after a match of m tokens, is then

        log-odds(q) = log-odds(rate of m) + w (log-odds(p(t)) - log-odds(usual p))

    with p(t) the model's probability of t, w = `model_weight` and usual p = `usual_prob`.
    """

    def __init__(self, settings: NGramSettings, max_depth: int, control: ControlSettings) -> None:
        self._lookup = Lookup(settings, control)
        self._max_depth = max_depth
        self._control = control
        self._added = 0  # number of the tree's first nodes, which are the guesses

    def add_to(self, tree: GrowingTree) -> list[int]:
        """Add the guesses to an empty tree, and return the nodes to expand with the root."""
        along = self._lookup.add_to(tree, earlier=tree.earlier)
        self._added = len(tree)
        return list(range(min(self._control.expand_along, along, min(tree.max_depth, self._max_depth) - 1)))

    def revalue(self, tree: GrowingTree, level: Sequence[int]) -> None:
        """Value the guesses' nodes below the first expanded level, before any other node is added.

        Proposals of other nodes, known from earlier rounds or from drafting ahead, are not used: the tree must not
        depend on them.
        """
        tree.revalue(
            [
                self._judged(tree, node)
                if tree.parent(node) in level and tree.proposals(tree.parent(node))
                else _unchanged(tree, node)
                for node in range(self._added)
            ]
        )

    def observe(self, outcome: Outcome) -> None:
        """Learn from a round; the next tree would also tell, but a completion's last round has none."""
        tokens = [outcome.tree.token_ids[node] for node in outcome.accepted]
        self._lookup.learn(tokens if outcome.next_token is None else [*tokens, outcome.next_token])

    def rates(self) -> dict[str, float]:
        """The rates at which continuations' tokens are right, by the length of the match before them."""
        return self._lookup.rates()

    def _judged(self, tree: GrowingTree, node: int) -> Proposal:
        token, parent = tree.node(node).token, tree.parent(node)
        proposals = {proposal.token: proposal for proposal in tree.proposals(parent)}
        proposal = proposals.get(token)
        if proposal is not None:
            prob = math.exp(proposal.log_prob)
        else:  # at most the least proposal's probability, and at most the mass that the proposals leave
            rest = 1.0 - sum(math.exp(draft.log_prob) for draft in tree.node(parent).proposals or ())
            prob = min([rest, *(math.exp(each.log_prob) for each in proposals.values())])
        model = self._control.model_weight * (_log_odds(prob) - _log_odds(self._control.usual_prob))
        log_odds = _log_odds(math.exp(tree.log_prob(node))) + model
        return Proposal(token, -math.log1p(math.exp(-log_odds)), proposal.draft_log_prob if proposal else None)


def _log_odds(prob: float) -> float:
    prob = min(max(prob, LEAST_PROB), 1.0 - LEAST_PROB)
    return math.log(prob / (1.0 - prob))


def _unchanged(tree: GrowingTree, node: int) -> Proposal:
    return Proposal(tree.node(node).token, tree.log_prob(node))
