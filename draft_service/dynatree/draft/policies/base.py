"""What a policy is, and the level-by-level growth that several share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dynatree.common.errors import InvalidArgumentError
from dynatree.draft.growing_tree import GrowingTree


class Policy(ABC):
    """Decides the shape of one session's trees. It may carry state from round to round, and no two sessions share one.

    Attributes:
        breadth: The most children that it ever gives a node: how many proposals the draft model is asked for.
    """

    breadth: int

    @abstractmethod
    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Add children below the nodes `level`, all of which have proposals, and name the nodes to expand next.

        Called first with the root alone, then with what it returned, until it returns nothing.
        """

    def observe(self, drafted: int, accepted: int) -> None:  # noqa: B027 - most policies have nothing to learn
        """Learn what became of the last tree: nodes drafted, and nodes on the accepted path."""


class LevelPolicy(Policy):
    """Breadth-first growth under a node budget: each expanded node gets its likeliest children.

    Nodes are taken in breadth-first order until the budget is spent, as in DynaTree's Algorithm 1.
    """

    max_nodes: int

    def grow(self, tree: GrowingTree, level: Sequence[int]) -> list[int]:
        """Give each node of the level its children; those that may be expanded form the next level."""
        added = []
        for node in level:
            for proposal in tree.proposals(node)[: self.children_of(tree, node)]:
                if len(tree) == self.max_nodes:
                    break
                if self.keeps(tree.path_log_prob(node) + proposal.log_prob):
                    added.append(tree.add(node, proposal))
        return [node for node in added if self.expands(tree, node)] if len(tree) < self.max_nodes else []

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
