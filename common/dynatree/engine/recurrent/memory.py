"""What the recurrent layers of a session keep between forward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from dynatree.engine.recurrent.recorded import Recorded

# Tokens whose records are kept, so that the states need not be folded in every forward pass, and so that the prefix
# cache can go back by some tokens.
KEPT = 64
Key: TypeAlias = tuple[int, str]  # a layer's index, and the name of one of its scans


@dataclass(frozen=True)
class RecurrentSize:
    """Bytes that a model's recurrent layers keep.

    Attributes:
        state_bytes: Bytes of the states of one session.
        record_bytes: Bytes of the records of one token.
    """

    state_bytes: int
    record_bytes: int

    def session_bytes(self, prefixes: bool) -> int:
        """Return the bytes of one session, apart from the records of a pass's own tokens.

        These are its memory and, in a forward pass, the next one. With `prefixes` they are also the memory at its
        prompt's end, and the two memories of an entry of the prefix cache.
        """
        memory = self.state_bytes + 2 * KEPT * self.record_bytes
        return (5 if prefixes else 2) * memory

    def pass_bytes(self, rows: int) -> int:
        """Return the bytes of the records of a forward pass over the trees of all sessions, of `rows` tokens."""
        return rows * self.record_bytes


@dataclass(frozen=True)
class Memory:
    """States of the recurrent layers of a session, and records of the tokens behind them.

    Memories and their tensors never change. So sessions and entries of the prefix cache may share them, and a forward
    pass that fails leaves them as they were.

    Attributes:
        position: Number of the session's first tokens that are in the states.
        count: Number of tokens after them that have records, in the order of their slots from `position` on.
        layers: State and records of each scan of each layer; empty if both numbers are 0.
    """

    position: int = 0
    count: int = 0
    layers: Mapping[Key, tuple[Tensor, Recorded]] = field(default_factory=dict)

    @property
    def stop(self) -> int:
        """One past the last slot with a record."""
        return self.position + self.count

    def moved(self, sources: Sequence[int], start: int) -> Memory:
        """Return the memory with the records before `start`, and those of the slots `sources` from `start` on."""
        return self._taken([*range(self.position, start), *sources])

    def cut(self, stop: int) -> Memory:
        """Return the memory of the slots before `stop`, which is not before `position`."""
        return self if self.stop <= stop else self._taken(range(self.position, stop))

    def _taken(self, slots: Sequence[int]) -> Memory:
        if list(slots) == list(range(self.position, self.stop)):
            return self
        places = [slot - self.position for slot in slots]
        layers = {key: (state, records.taken(places)) for key, (state, records) in self.layers.items()}
        return Memory(self.position, len(slots), layers)
