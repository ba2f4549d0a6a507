"""Records of a session's tokens, which grow in place: a forward pass reads thousands of them and adds few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dynatree.engine.recurrent.linear_attention import Records, append

_SPARE = 32  # rows of a room for tokens to come


@dataclass
class _Room:
    """Tensors with more rows than records so far; rows that have been written never change."""

    tensors: Records = ()
    written: int = 0


@dataclass(frozen=True)
class Recorded:
    """Records in the order of their slots; they never change, so sessions may share them.

    Attributes:
        new: Records of the last tokens.
        count: Number of tokens before them.
        room: Holds the records of these. Whoever ends where its written rows end adds its new ones there; others copy.
    """

    new: Records
    count: int = 0
    room: _Room = field(default_factory=_Room)

    def settled(self) -> Recorded:
        """Return the same records, all of them in a room."""
        count, stop, room = self.count, self.count + len(self.new[0]), self.room
        if stop == count:
            return self
        if room.written != count or not room.tensors or stop > len(room.tensors[0]):
            room = _Room(tuple(each.new_empty(stop + _SPARE, *each.shape[1:]) for each in self.new))
            for to, each in zip(room.tensors, self.room.tensors, strict=False):
                to[:count] = each[:count]
        for to, each in zip(room.tensors, self.new, strict=True):
            to[count:stop] = each
        room.written = stop
        # a view of no rows would hold the memory of all
        return Recorded(tuple(each.new_empty(0, *each.shape[1:]) for each in self.new), stop, room)

    def joined(self) -> Records:
        """Return all records; without a copy if they are settled."""
        front = tuple(each[: self.count] for each in self.room.tensors)
        return self.new if not self.count else append(front, self.new) if len(self.new[0]) else front

    def followed_by(self, new: Records) -> Recorded:
        """Return settled records with those of more tokens."""
        # a view would hold the memory of other sessions' tokens
        own = (each if each.untyped_storage().nbytes() == each.nbytes else each.clone() for each in new)
        return Recorded(tuple(own), self.count, self.room)

    def taken(self, places: Sequence[int]) -> Recorded:
        """Return the records at some places, in this order."""
        if places == range(self.count + len(self.new[0])):
            return self
        kept = 0
        while kept < min(self.count, len(places)) and places[kept] == kept:
            kept += 1
        rest = torch.tensor(places[kept:], dtype=torch.long)
        if len(rest) and rest.min() < self.count:
            source = self.joined()
        else:
            source, rest = self.new, rest - self.count
        return Recorded(tuple(each.index_select(0, rest.to(each.device)) for each in source), kept, self.room)
