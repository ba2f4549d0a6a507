"""Breadth-first growth under a node budget, by three rules that a policy supplies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum

from dynatree.common.tree import ROOT
from dynatree.draft.policies.growing_tree import GrowingTree


class Root(StrEnum):
    """The token at depth 0: the last committed token, or its single likeliest continuation (Algorithm 1, line 10).

    With a single root all drafted tokens are below one guess: if that guess is wrong, the whole tree is lost.
    """

    COMMITTED = "committed"
    SINGLE = "single"


class Prune(StrEnum):
    """The effect of pruning: the node is removed, or only not expanded (Algorithm 1, lines 14 to 16)."""

    REMOVE = "remove"
    EXPAND = "expand"


def grow_level(
    tree: GrowingTree,
    level: Sequence[int],
    *,
    max_nodes: int,
    children_of: Callable[[int], int],
    keeps: Callable[[float], bool],
    expands: Callable[[int, int], bool],
    root: Root = Root.COMMITTED,
    prune: Prune = Prune.REMOVE,
) -> list[int]:
    """Give each node of a level its likeliest children, and return the nodes to expand next (DynaTree, Algorithm 1).

    Nodes are added in breadth-first order until the tree has `max_nodes` nodes. Draws are never removed for their low
    probability, whatever `prune` says, because residual sampling would not be exact.

    Args:
        tree: The tree that grows.
        level: Expanded nodes.
        max_nodes: The node budget, N_max.
        children_of: B(u), the number of children of an expanded node.
        keeps: Whether a node with this cumulative log-probability survives pruning.
        expands: Whether a surviving node may have children, given the node and its depth d(u) below the `root`.
        root: The token at depth 0. With a single root the committed token has one child.
        prune: The effect of pruning on the other nodes.
    """
    budget = min(max_nodes, tree.max_nodes)
    single = root is Root.SINGLE
    added: dict[int, None] = {}  # an ordered set, since a draw may repeat a child
    for node in level:
        for proposal in tree.proposals(node)[: 1 if single and node == ROOT else children_of(node)]:
            if len(tree) == budget:
                break
            if prune is Prune.EXPAND or tree.sampled or keeps(tree.path_log_prob(node) + proposal.log_prob):
                added[tree.add(node, proposal)] = None
    if len(tree) == budget:
        return []
    return [node for node in added if keeps(tree.path_log_prob(node)) and expands(node, tree.depth(node) - single)]
