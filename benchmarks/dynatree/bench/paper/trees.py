"""Figures of recorded trees: acceptance by draft probability, and the blocks of their masks (DySpec)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from dynatree.bench.record import Report, Tree
from dynatree.common.tree import ROOT, TokenTree
from dynatree.verify.layout import depth_first

BINS = 10  # bins of draft probability
BLOCK = 32  # rows and keys of a block
RANDOM_TREES = 10


@dataclass(frozen=True)
class Bin:
    """Nodes with a draft probability in (low, high]: the number that the target reached, and the number accepted."""

    low: float
    high: float
    tried: int
    accepted: int


def trees_of(report: Report) -> list[list[Tree]]:
    """The trees that a record has kept, by run."""
    return [run["trees"] for run in report["runs"] if "trees" in run]


def acceptance(trees: Sequence[Tree]) -> list[Bin]:
    """Count the nodes that the target reached and accepted, by draft probability.

    The target reaches a node if the node's parent is the root or accepted and no earlier sibling is accepted.
    """
    tried, accepted = [0] * BINS, [0] * BINS
    for tree in trees:
        taken = {ROOT, *tree["accepted"]}
        done: set[int] = set()  # parents of which a child was accepted
        for node, parent in enumerate(tree["parents"]):
            if parent in taken and parent not in done:
                place = max(0, math.ceil(BINS * tree["probabilities"][node]) - 1)
                tried[place] += 1
                if node in taken:
                    accepted[place] += 1
                    done.add(parent)
    return [Bin(each / BINS, (each + 1) / BINS, tried[each], accepted[each]) for each in range(BINS)]


def prefix_blocks(rows: int, prefix: int) -> int:
    """Number of blocks of the tokens before the root, which every row sees; the tree's own blocks come on top."""
    return math.ceil(rows / BLOCK) * math.ceil(prefix / BLOCK)


def blocks(parents: Sequence[int], order: Sequence[int]) -> int:
    """Number of blocks of a tree's mask with a visible pair; the root comes first, then the nodes in `order`."""
    place = {ROOT: 0} | {node: number for number, node in enumerate(order, start=1)}
    seen: set[tuple[int, int]] = set()
    for node in (ROOT, *order):
        row, above = place[node] // BLOCK, node
        while above != ROOT:
            seen.add((row, place[above] // BLOCK))
            above = parents[above]
        seen.add((row, 0))
    return len(seen)


def by_value(tree: Tree) -> list[int]:
    """The order in which Algorithm 1's heap yields the nodes: by the value of their slots, highest first.

    v(k-th child of u) = p(u) * (1 - the draft's probability of the children before it), with p(u) the path probability.
    """
    paths, values = {ROOT: 1.0}, {ROOT: 1.0}
    left: dict[int, float] = {}  # remaining probability of each node's draft distribution
    for node, (parent, probability) in enumerate(zip(tree["parents"], tree["probabilities"], strict=True)):
        rest = left.get(parent, 1.0)
        values[node] = min(values[parent], paths[parent] * rest)  # probabilities are rounded
        paths[node], left[parent] = paths[parent] * probability, rest - probability
    return sorted(range(len(tree["parents"])), key=lambda node: -values[node])


def reordered(parents: Sequence[int]) -> list[int]:
    """The verify service's order: depth-first, with siblings in their given order."""
    nodes = tuple(range(len(parents)))
    return list(depth_first(TokenTree(nodes, tuple(parents)), nodes))


def random_blocks(rows: int) -> tuple[float, float]:
    """Mean blocks of random trees with uniform parents among the earlier rows: in order of growth, and reordered."""
    grown, better = [], []
    for parents in _random_trees(rows):
        grown.append(blocks(parents, range(len(parents))))
        better.append(blocks(parents, reordered(parents)))
    return fmean(grown), fmean(better)


def _random_trees(rows: int) -> Iterator[list[int]]:
    for seed in range(RANDOM_TREES):
        chance = random.Random(f"{rows} {seed}")
        yield [chance.randrange(ROOT, node) for node in range(rows - 1)]
