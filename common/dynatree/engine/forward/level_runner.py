"""The interface between a draft and a device that computes several levels of its trees at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dynatree.engine.forward.runner import Choosing
from dynatree.engine.forward.segment import Segment
from dynatree.engine.kv.kv_range import KVRange


@dataclass(frozen=True)
class LevelsWanted:
    """A session's request for levels.

    Attributes:
        segment: First level, preceded by the tokens before the root that are not prefilled yet. The levels below use
            the KV slots after it.
        root: The root's place in the segment.
        choosing: How the session's target chooses tokens.
        vocab_size: Number of tokens that may be proposed.
    """

    segment: Segment
    root: int
    choosing: Choosing
    vocab_size: int


@dataclass(frozen=True)
class KVMove:
    """A copy of the slots `sources` of a range, in that order, to slots `start` onwards."""

    kv: KVRange
    sources: Sequence[int]
    start: int


@dataclass(frozen=True)
class NodesRead:
    """Computed nodes and their best continuations.

    Attributes:
        ids: Best continuations of each node, `[nodes, breadth]`.
        log_probs: Log probabilities of the continuations, `[nodes, breadth]`, float32.
    """

    ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]


@dataclass(frozen=True)
class LevelRead(NodesRead):
    """A computed level, in the order of its KV slots.

    Attributes:
        token_ids: `[nodes]`.
        parents: `[nodes]`: each parent's place in the level above; 0 for the root's children.
    """

    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]


@dataclass(frozen=True)
class SegmentRead:
    """The result for one session: the tokens of its segment, and the levels below its root."""

    given: NodesRead
    levels: Sequence[LevelRead]


class LevelRunner(Protocol):
    """Computes several levels below the roots of trees.

    Attributes:
        breadth: Number of continuations returned for each node.
    """

    breadth: int

    def most(self, levels: int) -> int:
        """Return the number of levels that one call computes if `levels` are wanted."""
        ...

    def slots(self, levels: int) -> int:
        """Return the KV slots that a session then needs after its segment."""
        ...

    def read(self, wanted: Sequence[LevelsWanted], levels: int, moves: Sequence[KVMove]) -> list[SegmentRead] | None:
        """Move slots, then compute segments and about `levels` levels below them.

        Returns:
            One result for each request; None, with nothing moved, if they are too many for one call.
        """
        ...
