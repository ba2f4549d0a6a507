"""The interface between a draft and whatever reads several levels of its trees at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dynatree.common.engine.runner import Choosing
from dynatree.common.engine.segment import Segment
from dynatree.common.kv_range import KVRange


@dataclass(frozen=True)
class LevelsWanted:
    """What one session wants read.

    Attributes:
        segment: Its first level, with what comes before the root and is not read yet. The slots behind it are taken by
            the levels below.
        root: The root's place in the segment.
        choosing: How its target chooses.
        vocab_size: Tokens that may be proposed.
    """

    segment: Segment
    root: int
    choosing: Choosing
    vocab_size: int


@dataclass(frozen=True)
class KVMove:
    """Slots of a range that are to be copied, in that order, to slots `start` onwards."""

    kv: KVRange
    sources: Sequence[int]
    start: int


@dataclass(frozen=True)
class NodesRead:
    """Nodes that were read.

    Attributes:
        ids: Their best continuations, `[nodes, breadth]`.
        log_probs: Of those, float32.
    """

    ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]


@dataclass(frozen=True)
class LevelRead(NodesRead):
    """A level that was read, in the order of its slots.

    Attributes:
        token_ids: `[nodes]`.
        parents: `[nodes]`: places in the level before; of the root's children 0.
    """

    token_ids: NDArray[np.int32]
    parents: NDArray[np.int32]


@dataclass(frozen=True)
class Read:
    """What was read of one session: its segment's tokens, and the levels below its root."""

    given: NodesRead
    levels: Sequence[LevelRead]


class Reader(Protocol):
    """Reads several levels below roots.

    Attributes:
        breadth: Continuations of each node that it tells.
    """

    breadth: int

    def most(self, levels: int) -> int:
        """The levels that it reads where so many are wanted."""
        ...

    def slots(self, levels: int) -> int:
        """Slots that it takes of a session then, behind its segment."""
        ...

    def read(self, wanted: Sequence[LevelsWanted], levels: int, moves: Sequence[KVMove]) -> list[Read] | None:
        """Move slots, then read segments and about `levels` levels below them.

        None, and nothing is moved, where they are too many for one call.
        """
        ...
