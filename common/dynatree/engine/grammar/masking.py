"""Logits masked by the states of grammars. A mask has one bit per token until it is on the device of the logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class HasBits(Protocol):
    """Says which tokens may follow; `GrammarState` implements it."""

    @property
    def bits(self) -> bytes:
        """One bit per token, lowest first; tokens after the last bit may not follow."""


def packed(states: Sequence[HasBits | None], vocab_size: int, device: torch.device) -> Tensor:
    """Return the masks of some states on the host, uint8 `[states, ceil(vocab_size / 8)]`, lowest bit first.

    None allows all tokens. The memory is pinned if `device`, where the logits are, is a GPU.
    """
    masks = torch.zeros(len(states), -(-vocab_size // 8), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for row, state in zip(masks.numpy(), states, strict=True):
        bits = np.frombuffer(b"\xff" * len(row) if state is None else state.bits[: len(row)], dtype=np.uint8)
        row[: len(bits)] = bits
    return masks


def allowed(masks: Tensor, vocab_size: int) -> Tensor:
    """Return whether each token may follow, bool `[states, vocab_size]`, from `packed` masks on any device."""
    return _bytes_of_bits(masks.device).take(masks.long()).view(torch.bool)[:, :vocab_size]


def masked(logits: Tensor, masks: Tensor) -> Tensor:
    """Return logits `[rows, vocabulary]` with -inf for the tokens that `packed` masks, one for each row, forbid.

    The masks are copied to the device of the logits; the host waits neither for the copy nor for the logits.
    """
    masks = masks.to(logits.device, non_blocking=True)
    return torch.where(allowed(masks, logits.shape[-1]), logits, -math.inf)


@cache
def _bytes_of_bits(device: torch.device) -> Tensor:
    """The bits of each byte, lowest first, as the eight bytes of a number: int64 `[256]`."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(bits.view(np.int64)[:, 0]).to(device)
