"""The Triton kernel of `device_noise`."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def random_words(seed: tl.tensor, position: tl.tensor, stream: tl.tensor, blocks: tl.tensor) -> Any:
    """Return the four uint64 of each Philox block, for kernels; `blocks` is int64 and counts from 0.

    The key is (seed, 0) and the counter is (block + 1, position, stream, 0), because numpy increments before it draws.
    """
    return tl.philox(seed, blocks + 1, position.to(tl.int64), stream.to(tl.int64), tl.zeros_like(blocks))


@triton.jit
def noise_of(words: tl.tensor) -> Any:
    """Convert random uint64 to standard Gumbel noise, float32, for kernels."""
    uniform = (words >> 11).to(tl.float64) * 2.0**-53
    return (-tl.log(-tl.log(tl.maximum(uniform, 2.0**-60)))).to(tl.float32)


@triton.jit
def noise_at(seed: tl.tensor, position: tl.tensor, stream: tl.tensor, first: tl.tensor, count: tl.constexpr) -> Any:
    """Return the noise of tokens `4 * first` to `4 * (first + count)` of a row, for kernels; float32 `[4 * count]`."""
    blocks = first.to(tl.int64) + tl.arange(0, count)
    one, two, three, four = random_words(seed, position, stream, blocks)
    return noise_of(tl.interleave(tl.interleave(one, three), tl.interleave(two, four)))


@triton.jit(do_not_specialize=["stream"])
def fill(
    out: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    stream: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    block_count: tl.constexpr,
) -> None:
    """Fill `block_count` Philox blocks of one row."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    noise = noise_at(tl.load(seeds + row), tl.load(positions + row), stream, part * block_count, block_count)
    tokens = part * block_count * 4 + tl.arange(0, block_count * 4)
    tl.store(out + row * stride + tokens, noise, mask=tokens < vocab_size)
