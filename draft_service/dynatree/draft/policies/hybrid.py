"""N-gram and model candidates in one tree, under one budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT
from dynatree.draft.growing_tree import GrowingTree, Proposal
from dynatree.draft.policies.base import Outcome, check_range
from dynatree.draft.policies.dyspec import BestFirst
from dynatree.draft.policies.ngram import Lookup, NGramSettings


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
    """The best nodes of both sources; where both propose a token, the surer counts.

    A continuation's tokens are as likely as such tokens have proved in this session, so long matches in looping text
    fill the budget, and poor ones leave it to the model.
    """

    takes_draws = False

    def __init__(self, settings: HybridSettings) -> None:
        super().__init__(settings.max_nodes, settings.max_depth, settings.breadth)
        self._lookup = Lookup(settings.ngrams())
        self._chains: Sequence[Sequence[Proposal]] = ()

    def start(self, tree: GrowingTree) -> list[int]:
        """Look up what may follow."""
        self._chains = self._lookup.chains(tree.context)
        return super().start(tree)

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """The continuations first, then the best of both."""
        if ROOT in level:
            self.add_chains(tree, tree.proposals(ROOT))
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
        """Called with each node that carries one of the model's proposals."""

    def add_chains(self, tree: GrowingTree, proposals: Sequence[Proposal]) -> None:
        """Add the continuations to an empty tree; `proposals` are the model's for its root, if it was asked."""
        known = {proposal.token: self.judge(proposal) for proposal in proposals}
        for first, *rest in self._chains:
            node = tree.add(ROOT, Proposal(first.token, max(first.log_prob, known.get(first.token, first.log_prob))))
            for proposal in rest[: tree.max_depth - 1]:
                node = tree.add(node, proposal)

    def observe(self, outcome: Outcome) -> None:
        """Learn how far the continuations were right."""
        self._lookup.observe(outcome)

    def parameters(self) -> dict[str, float]:
        """The acceptance of continuations' tokens by the match before them."""
        return self._lookup.rates()
