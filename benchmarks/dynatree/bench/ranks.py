"""Acceptance by rank: how often the target chooses the draft's first, second ... guess (Sequoia, section 4.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from typing_extensions import TypedDict

from dynatree.client import RoundTrace

_ROOT = -1


class RankCounts(TypedDict):
    """Number of trials, and for each rank, best first, how often its guess was the target's choice."""

    trials: int
    hits: list[int]


def count_ranks(rounds: Iterable[RoundTrace], ranks: int) -> RankCounts:
    """Count trials and hits among the children of the root and of every accepted node.

    A node's rank is its place among its siblings, which the draft orders best first. A trial is a set of siblings that
    the target chose from; a node without children is no trial.
    """
    counts = RankCounts(trials=0, hits=[0] * ranks)
    for each in rounds:
        accepted = set(each.accepted_nodes)
        for parent in (_ROOT, *each.accepted_nodes):
            children = [node for node, above in enumerate(each.parents) if above == parent]
            counts["trials"] += bool(children)
            for rank, node in enumerate(children[:ranks]):
                counts["hits"][rank] += node in accepted
    return counts


def add_ranks(counts: Sequence[RankCounts]) -> RankCounts:
    """The sum of several runs' counts."""
    hits = [sum(column) for column in zip(*(each["hits"] for each in counts), strict=True)]
    return RankCounts(trials=sum(each["trials"] for each in counts), hits=hits)


def sequoia_rates(counts: RankCounts) -> list[float]:
    """The setting `rates` of policy `sequoia`: hits / trials for each rank.

    The rates are rounded down to four decimals, so that their sum never exceeds 1.
    """
    return [math.floor(1e4 * hits / counts["trials"]) / 1e4 for hits in counts["hits"]]
