"""What goes into a pass: every session's root first, then the nodes that are worth their rows, under one price.

A pass over R rows takes c(R) seconds, and while it runs nobody else's tokens come: a second is worth lambda tokens, the
rate of the whole service. So of all nodes offered, whoever offered them, those n are verified that maximise

    G(n) = sum of the n highest values - lambda c(roots + n)

which is `throughput`'s own objective, over the trees of all sessions at once. A node's value is its path probability
times what the probabilities of its session have proved to be worth (`track_record.py`), so that a draft that is sure
and wrong does not outbid one that is right. Values never rise from a node to its children, so what is admitted of a
tree is a tree. Admission decides how many tokens a pass commits, never which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT, TokenTree
from dynatree.verify.pass_costs import PassCosts


@dataclass(frozen=True)
class Admitted:
    """What is verified of each tree: its nodes' indices, rising; and the price of the next row, in tokens."""

    nodes: tuple[tuple[int, ...], ...]
    price: float


def admit(
    trees: Sequence[TokenTree], worths: Sequence[float], rate: float, costs: PassCosts, max_rows: int
) -> Admitted:
    """Choose the nodes of a pass over these trees, whose roots are in it already.

    A tree of random draws is taken whole: its shape has a say in its tokens (DySpec Algorithm 3), and those must not
    depend on who else is served. So is a tree without probabilities.

    Args:
        trees: Of the sessions of the pass.
        worths: Of each session, the tokens that a token promised by its path probabilities has proved to be worth.
        rate: Lambda, tokens a second of all sessions together.
        costs: c(rows).
        max_rows: Of the pass, roots included.
    """
    kept: list[list[int]] = [[] for _ in trees]
    rows = len(trees)
    offered: list[tuple[float, int, int]] = []  # (minus the value, tree, node): of equals a parent is before its child
    for place, (tree, worth) in enumerate(zip(trees, worths, strict=True)):
        if is_whole(tree):
            kept[place] = list(range(len(tree)))
            rows += len(tree)
        else:
            offered += [(-min(worth * prob, 1.0), place, node) for node, prob in enumerate(path_probs(tree))]
    offered.sort()
    size = _best_size([-negative for negative, _, _ in offered], rows, rate, costs, max_rows)
    for _, place, node in offered[:size]:
        kept[place].append(node)
    rows += size
    price = rate * (costs.seconds(rows + 1) - costs.seconds(rows))
    if size < len(offered) and rows >= max_rows:  # nobody may have more, whatever the price
        price = max(price, -offered[size][0])
    return Admitted(tuple(tuple(sorted(nodes)) for nodes in kept), price)


def is_whole(tree: TokenTree) -> bool:
    """Whether a tree is verified whole or not at all."""
    return bool(tree.candidates) or not tree.log_probs


def _best_size(values: Sequence[float], rows: int, rate: float, costs: PassCosts, max_rows: int) -> int:
    """The n of the highest G(n), for descending values; `rows` are in the pass in any case."""
    total, best, size = 0.0, -rate * costs.seconds(rows), 0
    for nodes, value in enumerate(values[: max(max_rows - rows, 0)], start=1):
        total += value
        gain = total - rate * costs.seconds(rows + nodes)
        if gain > best:
            best, size = gain, nodes
    return size


def path_probs(tree: TokenTree) -> list[float]:
    """The probability of every node's path from the root, as the draft has it; never above the parent's."""
    logs: list[float] = []
    for parent, log_prob in zip(tree.parents, tree.log_probs, strict=True):
        logs.append(log_prob if parent == ROOT else logs[parent] + log_prob)
    return [math.exp(log) for log in logs]


def subtree(tree: TokenTree, nodes: Sequence[int]) -> TokenTree:
    """The tree of some nodes of a tree, rising and each with its parent."""
    if len(nodes) == len(tree):
        return tree
    place = {ROOT: ROOT} | {node: place for place, node in enumerate(nodes)}
    return TokenTree(
        token_ids=tuple(tree.token_ids[node] for node in nodes),
        parents=tuple(place[tree.parents[node]] for node in nodes),
        log_probs=tuple(tree.log_probs[node] for node in nodes) if tree.log_probs else (),
        candidates=(),
    )
