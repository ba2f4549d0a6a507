"""A session's place in the KV arena."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class KVRange:
    """A session's slots: `size` slots of the pool, from slot `start` on.

    Its slots are counted from its own start. Its first slots hold the session's committed tokens in order; speculative
    tokens sit behind them. The arena moves ranges when it makes room for another one, never during a forward. A move
    copies the first `used` slots: those that forwards have written.

    `broken`: a committed token's keys or values were NaN or infinite. The arena holds zeros in their place, so logits
    that depend on them look plausible, and no token may be chosen by them.
    """

    start: int
    size: int
    used: int = 0
    broken: bool = False
