"""Attention over a tree's rows that skips the blocks of its mask without a visible pair (DySpec appendix C).

    out_i = sum over visible j of softmax(scale q_i k_j) v_j

Queries stand in tiles of `block`, keys in blocks of `block`. A tile reads every block of the committed prefix, and of
the mask's columns the blocks in which one of its queries sees a key. The order of the rows decides how many those are:
a path that stands in one piece, as in depth-first order, shares blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch without a GPU come without it
    HAS_TRITON = False
else:
    HAS_TRITON = True

BLOCKS = (16, 32, 64)  # 16 is the least that a GPU multiplies


def _jit(function: Any) -> Any:
    return triton.jit(function) if HAS_TRITON else function


@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask, and the blocks of it that each tile of queries visits, in CSR form.

    Attributes:
        mask: Bool `[rows, columns]`, contiguous: whom each row sees.
        block: Rows of a tile, and columns of a block; one of `BLOCKS`.
        offsets: Int32 `[tiles + 1]`: tile t visits `blocks[offsets[t]:offsets[t + 1]]`.
        blocks: Int32 `[visits]`: block b holds the columns from `b * block` on. Ascending within a tile.
    """

    mask: Tensor
    block: int
    offsets: Tensor
    blocks: Tensor

    @classmethod
    def of(cls, mask: Tensor, block: int) -> BlockMask:
        """The blocks with a visible pair; all on the mask's device.

        Raises:
            ValueError: Not a mask, or not one of `BLOCKS`.
        """
        visible = _visible(mask, block)
        offsets = pad(visible.sum(1).cumsum(0), (1, 0))
        blocks = visible.nonzero()[:, 1]
        return cls(mask.contiguous(), block, offsets.to(torch.int32), blocks.to(torch.int32))


def visible_blocks(mask: Tensor, block: int) -> Tensor:
    """How many blocks of keys each tile of queries visits: int64 `[tiles]`; the sum is DySpec's block count.

    Args:
        mask: Bool `[rows, columns]`.
        block: One of `BLOCKS`.

    Raises:
        ValueError: Not a mask, or not one of `BLOCKS`.
    """
    return _visible(mask, block).sum(1)


def _visible(mask: Tensor, block: int) -> Tensor:
    """Which blocks have a visible pair: bool `[tiles, blocks]`."""
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(f"a mask is bool of two dimensions, got {mask.dtype} of {mask.ndim}")
    if block not in BLOCKS:
        raise ValueError(f"a block is of {' or '.join(map(str, BLOCKS))} keys, got {block}")
    rows, columns = mask.shape
    whole = pad(mask, (0, -columns % block, 0, -rows % block)).view(torch.uint8)
    # On a CPU the maximum of bytes takes a tenth of what `any` takes.
    return whole.view(-(-rows // block), block, -(-columns // block), block).amax(1).amax(2) != 0


def block_sparse_attention(
    query: Tensor, keys: Tensor, values: Tensor, blocks: BlockMask, scale: float | None = None
) -> Tensor:
    """Attend to the whole prefix, and to what the mask shows behind it: `[rows, heads, head_dim]`, in query's type.

    A row that sees no key at all gives zeros. Sums are in float32. Memory that no tile visits is not read.

    Args:
        query: `[heads, rows, head_dim]`.
        keys: `[kv_heads, prefix + columns, head_dim]`, of a prefix of any length; the mask's columns are its last keys.
            A dimension's values lie side by side, as they must in all three.
        values: As the keys.
        blocks: On query's device. `heads / kv_heads` neighbouring heads share a key head.
        scale: Of the scores; None for `head_dim ** -0.5`.

    Raises:
        RuntimeError: Triton is not installed.
        ValueError: Shapes that do not belong together.
    """
    if not HAS_TRITON:
        raise RuntimeError("block-sparse attention needs Triton, which is not installed")
    heads, rows, head_dim = query.shape
    kv_heads, length = keys.shape[:2]
    prefix = length - blocks.mask.shape[1]
    if keys.shape != values.shape or keys.shape[2] != head_dim or heads % kv_heads:
        raise ValueError(f"query {[*query.shape]}, keys {[*keys.shape]} and values {[*values.shape]} do not match")
    if blocks.mask.shape[0] != rows or prefix < 0:
        raise ValueError(f"a mask {[*blocks.mask.shape]} for {rows} queries and {length} keys")
    if query.stride(2) != 1 or keys.stride(2) != 1 or values.stride(2) != 1:
        raise ValueError("a head's dimensions lie apart in memory")
    output = torch.empty(rows, heads, head_dim, dtype=query.dtype, device=query.device)
    tiles = len(blocks.offsets) - 1
    if not tiles:
        return output
    _attend[tiles, heads](
        *(query, keys, values, output, blocks.mask.view(torch.uint8), blocks.offsets, blocks.blocks),
        *(query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        *(rows, heads, heads // kv_heads, prefix, length - prefix),
        (head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
        HEAD=head_dim,
        PADDED=max(1 << (head_dim - 1).bit_length(), 16),
        BLOCK=blocks.block,
        num_stages=2,  # three of float32 need more shared memory than an A100 has
    )
    return output


@_jit
def _attend(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    output,
    mask,
    offsets,
    blocks,
    query_head,
    query_row,
    key_head,
    key_row,
    value_head,
    value_row,
    rows,
    heads,
    group,
    prefix,
    columns,
    scale,
    HEAD: tl.constexpr,  # noqa: N803
    PADDED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One head of one tile of queries; `scale` is in units of log2."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tile * BLOCK + tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK]
    dim = tl.arange(0, PADDED)  # [PADDED]
    is_row, in_head = row < rows, dim < HEAD
    there = is_row[:, None] & in_head[None, :]
    q = tl.load(query + head * query_head + row[:, None] * query_row + dim[None, :], mask=there, other=0.0)
    keys += (head // group) * key_head
    values += (head // group) * value_head
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, PADDED], tl.float32)

    for first in range(0, prefix, BLOCK):
        at = first + tl.arange(0, BLOCK).to(tl.int64)
        is_key = at < prefix
        seen = is_row[:, None] & is_key[None, :]
        top, total, sums = _fold(
            q, keys, values, key_row, value_row, at, is_key, seen, dim, in_head, top, total, sums, scale
        )

    for visit in range(tl.load(offsets + tile), tl.load(offsets + tile + 1)):
        column = tl.load(blocks + visit) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        is_key = column < columns
        at = row[:, None] * columns + column[None, :]
        seen = tl.load(mask + at, mask=is_row[:, None] & is_key[None, :], other=0) != 0  # [BLOCK, BLOCK]
        at = prefix + column
        top, total, sums = _fold(
            q, keys, values, key_row, value_row, at, is_key, seen, dim, in_head, top, total, sums, scale
        )

    sums = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    at = (row[:, None] * heads + head) * HEAD + dim[None, :]
    tl.store(output + at, sums.to(output.dtype.element_ty), mask=there)


@_jit
def _fold(  # type: ignore[no-untyped-def]
    q, keys, values, key_row, value_row, at, is_key, seen, dim, in_head, top, total, sums, scale
):
    """The running maximum, sum of weights and weighted sum of values, one block further (online softmax)."""
    there = is_key[:, None] & in_head[None, :]
    k = tl.load(keys + at[:, None] * key_row + dim[None, :], mask=there, other=0.0)  # [BLOCK, PADDED]
    v = tl.load(values + at[:, None] * value_row + dim[None, :], mask=there, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing yet
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(top - base)
    sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weights, 1), sums
