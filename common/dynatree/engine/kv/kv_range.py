"""A session's place in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class KVRange:
    """A session's slots: `size` slots of the KV cache, from slot `start` on.

    Slot numbers within a range count from its start. The first slots hold the session's committed tokens in order, and
    speculative tokens follow them. A range may move to make room for another one, but never during a forward
    pass. A move copies only the first `used` slots, which forward passes have written.

    `broken` means that keys or values of a committed token were NaN or infinite. Zeros are stored in their place,
    so logits that depend on them look plausible, but no token may be chosen from them.

    In layers whose queries do not see every earlier token, the slots before `forgotten` hold nothing.
    """

    start: int
    size: int
    used: int = 0
    broken: bool = False
    forgotten: int = 0
