"""Gumbel noise drawn where it is wanted: the numbers of `gumbel`, from parameters that a captured graph reads anew.

The random bits are those of numpy's Philox4x64-10 (Salmon et al. 2011, section 3.3). The logarithms are in float64, in
which those of a GPU and of numpy differ by a last bit here and there; rounding to float32 hides it, but for noise that
is smaller than 1e-8.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynatree.common.gumbel import Stream, gumbel

try:
    import triton
    import triton.language as tl
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

_BLOCKS = 256  # Philox blocks, of four numbers, that one program draws


def fill_noise(out: Tensor, seeds: Tensor, positions: Tensor, stream: int, round_: int = 0) -> None:
    """Write the noise `gumbel(seed, position, vocabulary, stream, round_)` into each row.

    A captured graph reads `seeds` and `positions` at each replay; `stream` and `round_` are part of it.

    Args:
        out: `[rows, vocabulary]`, float32; each row is contiguous.
        seeds: `[rows]`, int64, from `seed_bits`; contiguous.
        positions: `[rows]`, int32 or int64; contiguous.
        stream: A `Stream`, that of all rows.
        round_: That of all rows.

    Raises:
        ValueError: A tensor has another dtype, shape or layout.
    """
    if out.dtype != torch.float32 or out.ndim != 2 or out.stride(1) != 1:
        raise ValueError(f"out is {_described(out)}, expected float32 [rows, vocabulary] with contiguous rows")
    integers = (("seeds", seeds, (torch.int64,)), ("positions", positions, (torch.int32, torch.int64)))
    for name, tensor, dtypes in integers:
        if tensor.dtype not in dtypes or tensor.shape != out.shape[:1] or not tensor.is_contiguous():
            kinds = " or ".join(map(str, dtypes))
            raise ValueError(f"{name} is {_described(tensor)}, expected {kinds} [{out.shape[0]}], contiguous")
    torch.ops.dynatree.fill_noise(out, seeds, positions, stream, round_)


def seed_bits(seed: int) -> int:
    """The int64 that has the bits of a seed in [0, 2^64)."""
    return int(np.uint64(seed).view(np.int64))


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"


@torch.library.custom_op("dynatree::fill_noise", mutates_args={"out"})
def _fill_noise(out: Tensor, seeds: Tensor, positions: Tensor, stream: int, round_: int) -> None:
    if HAS_TRITON and out.is_cuda:
        by_triton(out, seeds, positions, stream, round_)
    else:
        by_numpy(out, seeds, positions, stream, round_)


def by_numpy(out: Tensor, seeds: Tensor, positions: Tensor, stream: int, round_: int) -> None:
    """The same by the CPU; rows that have one seed and position are drawn once."""
    rows: dict[tuple[int, int], Tensor] = {}
    for row, key in zip(out, zip(seeds.tolist(), positions.tolist(), strict=True), strict=True):
        if key not in rows:
            rows[key] = gumbel(key[0] % 2**64, key[1], out.shape[1], Stream(stream), round_)
        row.copy_(rows[key])


def by_triton(out: Tensor, seeds: Tensor, positions: Tensor, stream: int, round_: int) -> None:
    """The same by Triton's kernel: on a GPU, or in Triton's interpreter."""
    rows, vocab_size = out.shape
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        _noise[rows, triton.cdiv(vocab_size, 4 * _BLOCKS)](
            out,
            seeds,
            positions,
            stream,
            round_,
            vocab_size,
            out.stride(0),
            block_count=_BLOCKS,
            enable_fp_fusion=False,  # Triton's default differs between its versions
        )


@_fill_noise.register_fake
def _(out: Tensor, seeds: Tensor, positions: Tensor, stream: int, round_: int) -> None:
    pass


def _jit(function: Any) -> Any:
    """`triton.jit`, where there is Triton; one kernel serves every stream and round."""
    return triton.jit(function, do_not_specialize=["stream", "round_"]) if HAS_TRITON else function


@_jit
def random_words(seed: tl.tensor, position: tl.tensor, stream: tl.tensor, round_: tl.tensor, blocks: tl.tensor) -> Any:
    """The four uint64 of each Philox block, for kernels; `blocks` is int64 and counts from 0.

    The key is (seed, 0), the counter (block + 1, position, stream, round): numpy counts before it draws.
    """
    return tl.philox(seed, blocks + 1, position.to(tl.int64), stream.to(tl.int64), round_.to(tl.int64))


@_jit
def noise_of(words: tl.tensor) -> Any:
    """Standard Gumbel noise, float32, of random uint64, for kernels."""
    uniform = (words >> 11).to(tl.float64) * 2.0**-53
    return (-tl.log(-tl.log(tl.maximum(uniform, 2.0**-60)))).to(tl.float32)


@_jit
def _noise(
    out: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    stream: tl.tensor,
    round_: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    block_count: tl.constexpr,
) -> None:
    """`block_count` Philox blocks of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    blocks = part * block_count + tl.arange(0, block_count)
    first, second, third, fourth = random_words(tl.load(seeds + row), tl.load(positions + row), stream, round_, blocks)
    words = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))  # [4 * block_count], in order
    tokens = part * block_count * 4 + tl.arange(0, block_count * 4)
    tl.store(out + row * stride + tokens, noise_of(words), mask=tokens < vocab_size)
