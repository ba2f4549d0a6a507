"""A session's place in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from dynatree.engine.recurrent.memory import Memory


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

    def memory_of(self, stop: int) -> Memory | None:
        """Return the memory that holds most of the first `stop` slots, and perhaps more; None if none holds any."""
        found = [each for each in (self.memory, self.checkpoint) if each is not None and each.position <= stop]
        return max(found, key=lambda each: min(each.stop, stop), default=None)
