"""What recorded trees show: acceptance by draft probability, sizes, and the blocks of their masks (DySpec)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from dynatree.bench.record import Report, Tree
from dynatree.common.tree import ROOT, TokenTree
from dynatree.verify.layout import depth_first

BINS = 10  # of draft probability
BLOCK = 32  # rows and keys
RANDOM_TREES = 10


@dataclass(frozen=True)
class Bin:
    """Nodes whose draft probability is in (low, high]: those whose turn came, and those of them that were accepted."""

    low: float
    high: float
    tried: int
    accepted: int


def trees_of(report: Report) -> list[list[Tree]]:
    """The trees that a record has kept, by run."""
    return [run["trees"] for run in report["runs"] if "trees" in run]


def acceptance(trees: Sequence[Tree]) -> list[Bin]:
    """By draft probability, how many of the nodes that the target came to were accepted.

    It comes to a node where the node's parent is accepted, or is the root, and no sibling before the node is.
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
    """Blocks of the tokens before the root, which every row sees; the tree's begin behind them."""
    return math.ceil(rows / BLOCK) * math.ceil(prefix / BLOCK)


def blocks(parents: Sequence[int], order: Sequence[int]) -> int:
    """Blocks of a tree's mask with a visible pair: the root stands first, and then the nodes in an order."""
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
    """The order in which Algorithm 1's heap draws the nodes, each when its slot's value is the highest.

    v(k-th child of u) = p(u) * (1 - the draft's probability of the children before it), p(u) the path probability.
    """
    paths, values = {ROOT: 1.0}, {ROOT: 1.0}
    left: dict[int, float] = {}  # of each node's draft distribution
    for node, (parent, probability) in enumerate(zip(tree["parents"], tree["probabilities"], strict=True)):
        rest = left.get(parent, 1.0)
        values[node] = min(values[parent], paths[parent] * rest)  # probabilities are rounded
        paths[node], left[parent] = paths[parent] * probability, rest - probability
    return sorted(range(len(tree["parents"])), key=lambda node: -values[node])


def reordered(parents: Sequence[int]) -> list[int]:
    """The verify service's order: depth-first, siblings as they stand."""
    return list(depth_first(TokenTree(tuple(range(len(parents))), tuple(parents)))[1])


def random_blocks(rows: int) -> tuple[float, float]:
    """Mean blocks of random trees, each parent uniform among the rows before: as they grew, and reordered."""
    grown, better = [], []
    for parents in _random_trees(rows):
        grown.append(blocks(parents, range(len(parents))))
        better.append(blocks(parents, reordered(parents)))
    return fmean(grown), fmean(better)


def _random_trees(rows: int) -> Iterator[list[int]]:
    for seed in range(RANDOM_TREES):
        chance = random.Random(f"{rows} {seed}")
        yield [chance.randrange(ROOT, node) for node in range(rows - 1)]
