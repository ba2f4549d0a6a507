"""Selection of a pass's nodes: the roots of all sessions first, then the nodes worth their rows at a common price.

A pass over R rows takes c(R) seconds, during which no other tokens are produced. So a second costs lambda tokens, the
rate of the whole service. Of the nodes offered by all sessions, a pass verifies the n nodes that maximise

    G(n) = sum of the n highest values - lambda c(roots + n)

This is the objective of the `throughput` policy, over the trees of all sessions at once. A node's value is its path
probability times the proven worth of its session's probabilities (`track_record.py`), so that an overconfident draft
does not outbid an accurate one. Values never rise from a node to its children, so the admitted nodes of a tree form a
tree. Admission decides how many tokens a pass commits, never which tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.common.tree import ROOT, TokenTree
from dynatree.verify.pass_costs import PassCosts


@dataclass(frozen=True)
class Admitted:
    """The nodes to verify of each tree, as ascending indices, and the price of one more row, in tokens."""

    nodes: tuple[tuple[int, ...], ...]
    price: float


def admit(
    trees: Sequence[TokenTree], worths: Sequence[float], rate: float, costs: PassCosts, max_rows: int
) -> Admitted:
    """Choose the nodes of a pass over the given trees, whose roots are always in the pass.

    A tree of random draws is admitted whole: its shape affects its tokens (DySpec Algorithm 3), and these must not
    depend on other sessions. A tree without probabilities is admitted whole too.

    Args:
        trees: Trees of the sessions in the pass.
        worths: For each session, the accepted tokens per token promised by its path probabilities.
        rate: Lambda, tokens per second of all sessions together.
        costs: Cost model c(rows).
        max_rows: Maximum rows of the pass, including roots.
    """
    kept: list[list[int]] = [[] for _ in trees]
    rows = len(trees)
    offered: list[tuple[float, int, int]] = []  # (-value, tree, node): at equal values, a parent sorts before its child
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
    if size < len(offered) and rows >= max_rows:  # the row limit binds, not the price
        price = max(price, -offered[size][0])
    return Admitted(tuple(tuple(sorted(nodes)) for nodes in kept), price)


def is_whole(tree: TokenTree) -> bool:
    """Whether a tree is verified whole or not at all."""
    return bool(tree.candidates) or not tree.log_probs


def _best_size(values: Sequence[float], rows: int, rate: float, costs: PassCosts, max_rows: int) -> int:
    """The n that maximises G(n), for descending values and `rows` rows that are always in the pass."""
    total, best, size = 0.0, -rate * costs.seconds(rows), 0
    for nodes, value in enumerate(values[: max(max_rows - rows, 0)], start=1):
        total += value
        gain = total - rate * costs.seconds(rows + nodes)
        if gain > best:
            best, size = gain, nodes
    return size


def path_probs(tree: TokenTree) -> list[float]:
    """The draft's probability of each node's path from the root; it never exceeds the parent's."""
    logs: list[float] = []
    for parent, log_prob in zip(tree.parents, tree.log_probs, strict=True):
        logs.append(log_prob if parent == ROOT else logs[parent] + log_prob)
    return [math.exp(log) for log in logs]
