"""Padding sizes that make 16-bit CPU kernels batch-invariant.

A kernel is batch-invariant if a token's result has the same bits regardless of the other tokens in the batch. The last
bit of a sum depends on the order of its terms, and in 16 bits the last bit can decide a token. CPU kernels choose the
order by the sizes of their operands. Operands padded to the sizes below are always summed in the same order, so a token
that is verified in a tree has the same bits as in plain decoding.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

MIN_ROWS = 4  # rows or queries; kernels use another summation order for fewer, and four take no longer than one
# torch's attention on a CPU works in blocks of this many keys, and of this many queries or a multiple of them.
KEY_BLOCK = 512
_QUERY_BLOCK = 32
_KEY_TILE = 16  # keys; fills a whole number of vector registers on any processor


def is_batch_invariant(dtype: torch.dtype) -> bool:
    """Whether kernels of this dtype are batch-invariant at padded sizes here: 16 bits, on an x86 CPU without AMX."""
    return dtype in (torch.bfloat16, torch.float16) and is_x86() and not torch.cpu._is_amx_tile_supported()


def is_x86() -> bool:
    """Whether this is an x86 CPU with vectors of at least 256 bits."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def padded_queries(count: int) -> int:
    """Return the smallest number of queries, at least `count`, whose last block has at least `MIN_ROWS` queries."""
    last = count % _QUERY_BLOCK
    return count + MIN_ROWS - last if 0 < last < MIN_ROWS else count


def padded_keys(count: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the smallest number of keys, at least `count`, whose last block is summed in a whole block's order."""
    blocks, last = divmod(count, KEY_BLOCK)
    return blocks * KEY_BLOCK + (next(each for each in _key_counts(head_dim, dtype) if each >= last) if last else 0)


@cache
@torch.inference_mode()
def _key_counts(head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Find by trial the numbers of keys, up to a whole block, that are summed in the order of a whole block.

    oneDNN sums up to 192 products at a time, and halves sums of 192 to 384 products. A trial's values include the
    negative of each value, so their exact sum is 0. A kernel's result is then pure rounding error, which depends on the
    order of summation.
    """
    generator = torch.Generator().manual_seed(0)
    counts = range(_KEY_TILE, KEY_BLOCK + 1, _KEY_TILE)

    def in_one_order(count: int) -> bool:
        exponents = torch.randint(-6, 6, (count // 2, head_dim), generator=generator)
        half = torch.randn(count // 2, head_dim, generator=generator) * 2.0**exponents  # [count / 2, head_dim]
        values = torch.zeros(1, 2, KEY_BLOCK, head_dim, dtype=dtype)  # [1, heads, keys, head_dim]
        values[:, :, :count] = torch.cat([half, -half])[torch.randperm(count, generator=generator)].to(dtype)
        queries = torch.zeros(1, 2, MIN_ROWS, head_dim, dtype=dtype)  # zeros, so all keys have equal weight
        bias = torch.zeros(MIN_ROWS, KEY_BLOCK, dtype=dtype)
        bias[:, count:] = float("-inf")
        few, many = (
            scaled_dot_product_attention(
                queries, values.new_zeros(1, 2, read, head_dim), values[:, :, :read], attn_mask=bias[:, :read]
            )
            for read in (count, KEY_BLOCK)
        )
        return torch.equal(few, many)

    return tuple(count for count in counts if in_one_order(count))
