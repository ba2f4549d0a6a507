"""Breadth-first growth under a node budget, by three rules of the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynatree.draft.growing_tree import GrowingTree


def grow_level(
    tree: GrowingTree,
    level: Sequence[int],
    *,
    max_nodes: int,
    children_of: Callable[[int], int],
    keeps: Callable[[float], bool],
    expands: Callable[[int], bool],
) -> list[int]:
    """Give each node of a level its likeliest children; returns the nodes to expand next (DynaTree, Algorithm 1).

    Nodes are added in breadth-first order until the tree has `max_nodes` nodes. Where children are drawn, one that
    would be pruned for its low probability is kept and not expanded.

    Args:
        tree: The tree that grows.
        level: Expanded nodes.
        max_nodes: The node budget, N_max.
        children_of: B(u), the number of children of an expanded node.
        keeps: Whether a node of that cumulative log-probability belongs in the tree.
        expands: Whether a node that was kept may have children.
    """
    budget = min(max_nodes, tree.max_nodes)
    added = []
    for node in level:
        for proposal in tree.proposals(node)[: children_of(node)]:
            if len(tree) == budget:
                break
            if tree.sampled or keeps(tree.path_log_prob(node) + proposal.log_prob):
                added.append(tree.add(node, proposal))
    if len(tree) == budget:
        return []
    return [node for node in added if keeps(tree.path_log_prob(node)) and expands(node)]
