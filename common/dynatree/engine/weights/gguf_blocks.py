"""Repacks the blocks of llama.cpp's quantised types as codes and scales, without rounding anything.

A weight of a block is computed as llama.cpp does (ggml-quants.c), and as PyPI's `gguf` does in float32:

    Q8_0, Q4_0, Q5_0   d * (code - offset)                  32 inputs share d
    Q4_1, Q5_1         d * code + m                         32 inputs share d and m
    Q4_K, Q5_K         d * scale * code - dmin * minimum    32 inputs share scale and minimum (6 bits), 256 d and dmin
    Q6_K               d * scale * (code - 32)              16 inputs share scale (8 bits), 256 inputs d
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dynatree.engine.weights.quantized_weight import QuantizedWeight

_HIGH_BITS = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)


def repacked(raw: Tensor, kind: str) -> QuantizedWeight:
    """Return a quantised tensor's codes and scales.

    Args:
        raw: uint8 `[features, blocks, bytes of a block]`.
        kind: Name of the type, such as "Q4_K".

    Raises:
        ValueError: A scale is not finite.
    """
    weight = _READERS[kind](raw)
    for numbers in (weight.scales, weight.minimums, weight.steps, weight.minimum_steps):
        if numbers is not None and numbers.is_floating_point() and not bool(numbers.isfinite().all()):
            raise ValueError("a scale is NaN or infinite")
    return weight


def _half(raw: Tensor, begin: int) -> Tensor:
    """Return the float16 number at a byte of each block, `[features, blocks]`."""
    return raw[..., begin : begin + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(raw: Tensor) -> Tensor:
    """Return the lower halves of bytes, then the upper ones: `[..., bytes]` as `[..., 2 * bytes]`."""
    return torch.cat([raw & 15, raw >> 4], -1)


def _bits(raw: Tensor) -> Tensor:
    """Return the bits of bytes, the lowest first: `[..., bytes]` as `[..., bytes, 8]` of 0 and 1."""
    return (raw[..., None] & _HIGH_BITS).ne(0).to(torch.uint8)


def _q8_0(raw: Tensor) -> QuantizedWeight:
    return QuantizedWeight("Q8_0", (raw[..., 2:] ^ 128).flatten(1), _half(raw, 0), 8, 128)


def _q4_0(raw: Tensor) -> QuantizedWeight:
    return QuantizedWeight("Q4_0", _nibbles(raw[..., 2:]).flatten(1), _half(raw, 0), 4, 8, narrow=True)


def _q4_1(raw: Tensor) -> QuantizedWeight:
    codes = _nibbles(raw[..., 4:]).flatten(1)
    return QuantizedWeight("Q4_1", codes, _half(raw, 0), 4, minimums=_half(raw, 2), narrow=True)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Return the fifth bits of 32 codes, from 4 bytes: `[..., 32]` of 0 and 16."""
    return _bits(raw).flatten(-2) << 4


def _q5_0(raw: Tensor) -> QuantizedWeight:
    codes = (_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])).flatten(1)
    return QuantizedWeight("Q5_0", codes, _half(raw, 0), 8, 16, narrow=True)


def _q5_1(raw: Tensor) -> QuantizedWeight:
    codes = (_nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])).flatten(1)
    return QuantizedWeight("Q5_1", codes, _half(raw, 0), 8, minimums=_half(raw, 2), narrow=True)


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack the 6-bit scales and minimums of 8 groups from 12 bytes; int8 `[features, 8 * blocks]` twice."""
    first, second, third = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scales = torch.cat([first & 63, (third & 15) | (first >> 2 & 48)], -1)
    minimums = torch.cat([second & 63, (third >> 4) | (second >> 2 & 48)], -1)
    return scales.flatten(1).view(torch.int8), minimums.flatten(1).view(torch.int8)


def _k_nibbles(raw: Tensor) -> Tensor:
    """Return 256 codes of 4 bits: each 32 bytes are the lower halves of 32 codes, then the upper ones of 32 more."""
    return _nibbles(raw.reshape(*raw.shape[:-1], 4, 32)).flatten(-2)


def _q4_k(raw: Tensor) -> QuantizedWeight:
    scales, minimums = _k_scales(raw[..., 4:16])
    codes = _k_nibbles(raw[..., 16:]).flatten(1)
    steps, minimum_steps = _half(raw, 0), -_half(raw, 2)
    return QuantizedWeight("Q4_K", codes, scales, 4, 0, minimums, steps, minimum_steps, narrow=True)


def _q5_k(raw: Tensor) -> QuantizedWeight:
    scales, minimums = _k_scales(raw[..., 4:16])
    high = _bits(raw[..., 16:48]).transpose(-1, -2).flatten(-2) << 4  # bit b of byte i is of code 32 b + i
    codes = (_k_nibbles(raw[..., 48:]) | high).flatten(1)
    steps, minimum_steps = _half(raw, 0), -_half(raw, 2)
    return QuantizedWeight("Q5_K", codes, scales, 8, 0, minimums, steps, minimum_steps, narrow=True)


def _q6_k(raw: Tensor) -> QuantizedWeight:
    outer = raw.shape[:-1]
    low = _nibbles(raw[..., :128].reshape(*outer, 2, 64)).flatten(-2)
    parts = raw[..., 128:192].reshape(*outer, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (parts >> shifts & 3).flatten(-3) << 4
    scales = raw[..., 192:208].flatten(1).view(torch.int8)
    return QuantizedWeight("Q6_K", (low | high).flatten(1), scales, 8, 32, steps=_half(raw, 208), narrow=True)


_READERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
