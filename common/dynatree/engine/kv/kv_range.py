"""A session's place in the KV arena."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class KVRange:
    """A session's slots: `size` slots of the pool, from slot `start` on.

    Slot numbers within a range count from its start. The first slots hold the session's committed tokens in order, and
    speculative tokens follow them. The arena may move a range to make room for another one, but never during a forward
    pass. A move copies only the first `used` slots, which forward passes have written.

    `broken` means that keys or values of a committed token were NaN or infinite. The arena stores zeros in their place,
    so logits that depend on them look plausible, but no token may be chosen from them.
    """

    start: int
    size: int
    used: int = 0
    broken: bool = False
