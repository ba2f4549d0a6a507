"""How far to fill up what 16-bit CPU kernels are given, so that they sum a token alike whatever is beside it.

The order in which products are summed decides a result's last bit, and in 16 bits a last bit can decide a token. The
kernels choose that order by the sizes that they are given: filled up to sizes that are summed alike, one token and many
give the same bits.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention

FEWEST_ROWS = 4  # rows and queries; fewer are summed in another order, and four take no longer than one
# How torch's attention on a CPU cuts its work: into this many keys, and this many queries or a multiple of them.
_KEY_BLOCK = 512
_QUERY_BLOCK = 32
_KEY_TILE = 16  # whole vectors of any processor


def sums_alike(dtype: torch.dtype) -> bool:
    """Whether what is filled up as this module says is summed alike on this CPU: in 16 bits, on x86 before AMX."""
    return dtype in (torch.bfloat16, torch.float16) and is_x86() and not torch.cpu._is_amx_tile_supported()


def is_x86() -> bool:
    """Whether this is an x86 CPU with vectors of 256 bits at least."""
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def filled_queries(count: int) -> int:
    """The least number of queries, not below this one, whose last block is not summed by itself."""
    last = count % _QUERY_BLOCK
    return count + FEWEST_ROWS - last if 0 < last < FEWEST_ROWS else count


def filled_keys(count: int, head_dim: int, dtype: torch.dtype) -> int:
    """The least number of keys, not below this one, over which attention sums as over more."""
    blocks, last = divmod(count, _KEY_BLOCK)
    return blocks * _KEY_BLOCK + (next(each for each in _key_counts(head_dim, dtype) if each >= last) if last else 0)


@cache
@torch.inference_mode()
def _key_counts(head_dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Numbers of keys, up to a whole block, that are summed as in the block; found by trying.

    oneDNN sums up to 192 products at a time but cuts what is between that and twice that in halves. The values of each
    trial come with their opposites: what is left of their sum is rounding, which every order does otherwise.
    """
    generator = torch.Generator().manual_seed(0)
    counts = range(_KEY_TILE, _KEY_BLOCK + 1, _KEY_TILE)

    def alike(count: int) -> bool:
        exponents = torch.randint(-6, 6, (count // 2, head_dim), generator=generator)
        half = torch.randn(count // 2, head_dim, generator=generator) * 2.0**exponents
        values = torch.zeros(1, 2, _KEY_BLOCK, head_dim, dtype=dtype)
        values[:, :, :count] = torch.cat([half, -half])[torch.randperm(count, generator=generator)].to(dtype)
        queries = torch.zeros(1, 2, FEWEST_ROWS, head_dim, dtype=dtype)  # so every key weighs the same
        bias = torch.zeros(FEWEST_ROWS, _KEY_BLOCK, dtype=dtype)
        bias[:, count:] = float("-inf")
        few, many = (
            scaled_dot_product_attention(
                queries, values.new_zeros(1, 2, read, head_dim), values[:, :, :read], attn_mask=bias[:, :read]
            )
            for read in (count, _KEY_BLOCK)
        )
        return torch.equal(few, many)

    return tuple(count for count in counts if alike(count))
