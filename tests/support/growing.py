"""Grow a policy's trees on a scripted draft model."""

import math
from dataclasses import dataclass

from dynatree.common.model_info import ForwardCost
from dynatree.common.pass_statistics import ALONE, PassStatistics
from dynatree.common.tree import ROOT, DraftDistribution, TokenTree
from dynatree.draft.policies.growing_tree import GrowingTree, Proposal, TrieNode

LOOP = (5, 6, 7, 8) * 5


def grow(policy, model, *, context=(99,), sampled=False, max_nodes=256, max_depth=64, root=None, unread=0.0):
    """Grow a policy's tree on a scripted draft, where `model(path)` gives probabilities; also return the selection.

    `unread` is the time in which the draft reads what it has not read of the context.
    """
    root = root or TrieNode(context[-1])
    limits = {"max_nodes": max_nodes, "max_depth": max_depth}
    tree = GrowingTree(root, context, **limits, sampled=sampled, catch_up_seconds=unread)
    level, forwards = policy.start(tree), 0
    while level:
        forwards += 1
        for node in level:
            read(tree, node, model, policy.breadth)
        level = [node for node in policy.grow(tree, level) if tree.depth(node) < max_depth]
    return tree, policy.select(tree), forwards


def read(tree, node, model, breadth):
    path = tuple(above.token for above in reversed(tree.path(node)))
    probabilities = model(path)
    ranked = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    tree.node(node).proposals = tuple(Proposal(token, math.log(probabilities[token])) for token in ranked[:breadth])
    if tree.sampled:
        tree.node(node).candidates = DraftDistribution(tuple(ranked), tuple(probabilities[token] for token in ranked))


def frozen(policy, model, **options):
    tree, selected, _ = grow(policy, model, **options)
    return tree.freeze(selected)


def constant(*probabilities):
    return lambda path: probabilities


def edges(tree):
    return {tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(len(tree))}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a round, as a policy observes it."""

    tree: TokenTree
    accepted: tuple[int, ...]
    draft_forwards: int
    draft_seconds: float
    verify_seconds: float
    waited_seconds: float = 0.0
    others_draft_seconds: float = 0.0
    pass_statistics: PassStatistics = ALONE
    next_token: int | None = None


def outcome_of(tree, accepted, *, verify=0.1, draft=0.004, levels=2, bonus=None):
    return Outcome(tree, accepted, levels, draft, verify, next_token=bonus)


def along(tree, tokens):
    """The accepted nodes of a tree if the target continues with these tokens."""
    accepted, node = [], ROOT
    while len(accepted) < len(tokens) and (node := tree.children.get((node, tokens[len(accepted)]))) is not None:
        accepted.append(node)
    return tuple(accepted)


def measured(*points):
    """Return the costs of forward passes that a service reports at start."""
    return [ForwardCost(rows, seconds) for rows, seconds in points]
