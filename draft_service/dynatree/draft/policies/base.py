"""What a policy is, and the level-by-level growth that several share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.tree import ROOT, TokenTree
from dynatree.draft.growing_tree import GrowingTree


@dataclass(frozen=True)
class Outcome:
    """What became of one tree.

    Attributes:
        tree: What was sent.
        accepted: Its nodes on the accepted path, from the root down.
        levels: Draft forwards that growing it took.
        draft_seconds: Growing and committing, on the draft side.
        verify_seconds: The verify service's own work on it, and the wire.
        waited_seconds: What else lay between sending it and having its commit: waiting while other sessions' trees were
            verified, above all.
    """

    tree: TokenTree
    accepted: Sequence[int]
    levels: int
    draft_seconds: float
    verify_seconds: float
    waited_seconds: float = 0.0


class Policy(ABC):
    """Decides the shape of one session's trees. It may carry state from round to round, and no two sessions share one.

    Attributes:
        breadth: The most children that it ever gives a node: how many proposals the draft model is asked for. 0: the
            draft model is not asked.
        takes_draws: Whether it can grow a tree of random draws (residual sampling): it never keeps a node, or leaves
            one out, for the token that the node carries.
    """

    breadth: int
    takes_draws: bool = False

    def start(self, tree: GrowingTree) -> list[int]:
        """Called with the empty tree: the nodes to expand first, the root or nothing. May add what needs no model."""
        return [ROOT]

    @abstractmethod
    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add nodes below the nodes `level`, all of which have proposals, and name the nodes to expand next.

        Called first with what `start` returned, then with what it returned itself, until that is nothing.
        """

    def select(self, tree: GrowingTree) -> Sequence[int]:
        """The nodes to send of those that were added: parents before children, and no node without its parent."""
        return range(len(tree))

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 - most policies have nothing to learn
        """Learn from a round."""

    def parameters(self) -> dict[str, float]:
        """Whatever it has learnt that steers its next tree, by name."""
        return {}


class LevelPolicy(Policy):
    """Breadth-first growth under a node budget: each expanded node gets its likeliest children.

    Nodes are taken in breadth-first order until the budget is spent, as in DynaTree's Algorithm 1. Where children are
    drawn, what would be left out for its low probability is kept and not expanded.
    """

    max_nodes: int
    takes_draws = True

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Give each node of the level its children; those that may be expanded form the next level."""
        budget = min(self.max_nodes, tree.max_nodes)
        added = []
        for node in level:
            for proposal in tree.proposals(node)[: self.children_of(tree, node)]:
                if len(tree) == budget:
                    break
                if tree.drawn or self.keeps(tree.path_log_prob(node) + proposal.log_prob):
                    added.append(tree.add(node, proposal))
        if len(tree) == budget:
            return []
        return [node for node in added if self.keeps(tree.path_log_prob(node)) and self.expands(tree, node)]

    @abstractmethod
    def children_of(self, tree: GrowingTree, node: int) -> int:
        """How many children an expanded node gets, B(u)."""

    @abstractmethod
    def expands(self, tree: GrowingTree, node: int) -> bool:
        """Whether a node below the root may have children."""

    @abstractmethod
    def keeps(self, path_log_prob: float) -> bool:
        """Whether a node of that cumulative log-probability belongs in the tree at all."""


def check_range(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Refuse a setting out of its range.

    Raises:
        InvalidArgumentError: The message names the setting, the value and the range.
    """
    if not (low < value if open_low else low <= value) or not value <= high:
        raise InvalidArgumentError(
            f"{name} is {value:g}, expected a number in {'(' if open_low else '['}{low:g}, {high:g}]"
        )
