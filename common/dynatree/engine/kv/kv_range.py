"""A session's place in the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Memory(Protocol):
    """What recurrent layers keep of a session; `recurrent.memory` implements it, with torch."""

    @property
    def position(self) -> int:
        """Number of the session's first tokens that are in the states."""
        ...

    @property
    def stop(self) -> int:
        """One past the last slot with a record."""
        ...

    @property
    def layers(self) -> Mapping[Any, Any]:
        """State and records of each scan of each layer."""
        ...

    def moved(self, sources: Sequence[int], start: int) -> Memory:
        """Return the memory with the records before `start`, and those of the slots `sources` from `start` on."""
        ...

    def cut(self, stop: int) -> Memory:
        """Return the memory of the slots before `stop`, which is not before `position`."""
        ...


@dataclass(eq=False)
class KVRange:
    """A session's slots: `size` slots of the KV cache, from slot `start` on.

    Slot numbers within a range count from its start. The first slots hold the session's committed tokens in order, and
    speculative tokens follow them. A range may move to make room for another one, but never during a forward
    pass. A move copies only the first `used` slots, which forward passes have written.

    `broken` means that keys or values of a committed token were NaN or infinite. Zeros are stored in their place,
    so logits that depend on them look plausible, but no token may be chosen from them.

    In layers whose queries do not see every earlier token, the slots before `forgotten` hold nothing.

    `memory` is what recurrent layers keep of the tokens, and `checkpoint` what they kept at the prompt's end; both are
    None in models without such layers.
    """

    start: int
    size: int
    used: int = 0
    broken: bool = False
    forgotten: int = 0
    memory: Memory | None = None
    checkpoint: Memory | None = None

    def covers(self, other: KVRange, stop: int) -> bool:
        """Whether tokens can go on wherever another range of the same first `stop` tokens lets them go on.

        A memory lets them go on at each position from its own to its end.
        """
        mine, theirs = (
            [
                (each.position, min(each.stop, stop))
                for each in (kv.memory, kv.checkpoint)
                if each is not None and each.position <= stop
            ]
            for kv in (self, other)
        )
        return all(any(first <= start and end <= last for first, last in mine) for start, end in theirs)

    def memory_of(self, stop: int) -> Memory | None:
        """Return the memory that holds most of the first `stop` slots, and perhaps more; None if none holds any."""
        found = [each for each in (self.memory, self.checkpoint) if each is not None and each.position <= stop]
        return max(found, key=lambda each: min(each.stop, stop), default=None)
