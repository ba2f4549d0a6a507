"""The part of a forward pass that belongs to one session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dynatree.engine.kv.kv_range import KVRange


@dataclass(frozen=True)
class Segment:
    """The tokens of one session in a forward pass.

    Attributes:
        kv: The session's range of the KV cache.
        start: The slot of the first token; token `i` is stored in slot `start + i`.
        token_ids: `[n]`.
        positions: `[n]`; token `i` is embedded at position `positions[i]`.
        mask: Bool `[n, m]` over the last `m` of the slots 0 to `start + n`, true where a token sees a slot. Every token
            sees all earlier slots. None means causal.
        keep: Indices of the tokens whose logits are returned; None means all.
    """

    kv: KVRange
    start: int
    token_ids: Sequence[int]
    positions: Sequence[int]
    mask: Tensor | None = None
    keep: Sequence[int] | None = None

    @property
    def stop(self) -> int:
        """One past the last slot written."""
        return self.start + len(self.token_ids)
