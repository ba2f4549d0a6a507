"""Gumbel noise drawn on the device, with the same numbers as `gumbel`.

The kernel reads seeds and positions from tensors, so that a captured graph draws new noise at each replay.

The random bits are those of numpy's Philox4x64-10 (Salmon et al. 2011, section 3.3). The logarithms are computed in
float64, where a GPU and numpy sometimes differ in the last bit. Rounding to float32 hides the difference, except for
noise smaller than 1e-8.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from dynatree.engine.sampling.gumbel import NoiseStream, gumbel

_BLOCKS = 256  # Philox blocks of four numbers that a program draws


def fill_noise(out: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> None:
    """Write the noise `gumbel(seed, position, vocabulary, stream)` into each row.

    A captured graph reads `seeds` and `positions` at each replay, but `stream` is fixed at capture. The noise of a tree
    also depends on `round_` and `node`, so it is always drawn on the host.

    Args:
        out: `[rows, vocabulary]`, float32; each row is contiguous.
        seeds: `[rows]`, int64, from `seed_bits`; contiguous.
        positions: `[rows]`, int32 or int64; contiguous.
        stream: A `NoiseStream`, which all rows share.

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
    torch.ops.dynatree.fill_noise(out, seeds, positions, stream)


def seed_bits(seed: int) -> int:
    """Return the int64 with the bits of a seed in [0, 2^64)."""
    return int(np.uint64(seed).view(np.int64))


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"


@torch.library.custom_op("dynatree::fill_noise", mutates_args={"out"})
def _fill_noise(out: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> None:
    if out.is_cuda:
        by_triton(out, seeds, positions, stream)
    else:
        by_numpy(out, seeds, positions, stream)


def by_numpy(out: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> None:
    """Fill `out` on the CPU; rows with equal seed and position are drawn once."""
    rows: dict[tuple[int, int], Tensor] = {}
    for row, key in zip(out, zip(seeds.tolist(), positions.tolist(), strict=True), strict=True):
        if key not in rows:
            rows[key] = gumbel(key[0] % 2**64, key[1], out.shape[1], NoiseStream(stream))
        row.copy_(rows[key])


def by_triton(out: Tensor, seeds: Tensor, positions: Tensor, stream: int) -> None:
    """Fill `out` with the Triton kernel, on a GPU or in Triton's interpreter."""
    from dynatree.engine.sampling.noise_kernels import fill

    rows, vocab_size = out.shape
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        fill[rows, -(-vocab_size // (4 * _BLOCKS))](
            out,
            seeds,
            positions,
            stream,
            vocab_size,
            out.stride(0),
            block_count=_BLOCKS,
            enable_fp_fusion=False,  # Triton's default differs between its versions
        )
