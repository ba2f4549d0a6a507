"""Expected values of a node's children, before the node is expanded."""

from __future__ import annotations

from collections.abc import Sequence

from dynatree.common.tree import ROOT
from dynatree.draft.control.constants import ControlSettings
from dynatree.draft.control.track_record import TrackRecord
from dynatree.draft.policies.growing_tree import GrowingTree


class ChildMass:
    """The fraction of an expanded node's value that its best child has, and that all its children have together.

        mass <- mass + step (sum of the children's values / sum of the level's values - mass),   after each level

    A session begins with the last session's figures.

    Attributes:
        best: The best child's share.
        children: The share of all children together.
    """

    def __init__(self, track_record: TrackRecord, control: ControlSettings) -> None:
        self.best, self.children = track_record.child_mass
        self._track_record = track_record
        self._step = control.child_mass_step

    def observe(self, tree: GrowingTree, level: Sequence[int]) -> None:
        """Take in an expanded level."""
        expanded = sum(_values(tree, level))
        below = _children(tree, level)
        best = sum(max(values, default=0.0) for values in below) / expanded
        children = sum(map(sum, below)) / expanded
        self.best += self._step * (best - self.best)
        self.children += self._step * (children - self.children)
        self._track_record.child_mass = (self.best, self.children)


def open_mass(tree: GrowingTree, nodes: Sequence[int]) -> list[float]:
    """For each node, the probability that the target reaches it and continues with none of its known children."""
    pairs = zip(_values(tree, nodes), _children(tree, nodes), strict=True)
    return [max(value - sum(known), 0.0) for value, known in pairs]


def _values(tree: GrowingTree, nodes: Sequence[int]) -> list[float]:
    return [1.0 if node == ROOT else tree.value(node) for node in nodes]


def _children(tree: GrowingTree, nodes: Sequence[int]) -> list[list[float]]:
    """The values of each node's children."""
    values: dict[int, list[float]] = {node: [] for node in nodes}
    for node in range(len(tree)):
        if tree.parent(node) in values:
            values[tree.parent(node)].append(tree.value(node))
    return list(values.values())
