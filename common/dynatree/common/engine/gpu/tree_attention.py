"""Tree attention over rows: each row sees whole blocks that its session shares, and then its own path.

The kernels are Triton's where Triton is installed, and torch's operations elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynatree.common.device import HAS_TRITON

BLOCK = 64  # keys that are summed at a time
SPLIT_BLOCKS = 4  # of one split, where there are few: sums that run beside each other, and are merged in order
MAX_SPLITS = 32
LEAST_TILE = 16  # rows of the smallest tile that a GPU multiplies
_WARPS = 4  # of both launches, so that both multiply in one order


@dataclass(frozen=True)
class RowPlan:
    """Where the rows of a forward find their keys. All are int32, and a captured graph reads them anew.

    Attributes:
        tiles: `[tiles, 4]`: of up to `tile_rows` neighbouring rows of one session the first row, their number (0: no
            tile), the first slot of the session's range, and how many blocks of it all of them see.
        slots: `[rows]`: where each row's own key and value go.
        rows: `[rows, 2]`: the blocks that are shared, and the length of the row's own path behind them.
        paths: `[rows, path]`: the slots of that path, in the order of their positions.
    """

    tiles: Tensor
    slots: Tensor
    rows: Tensor
    paths: Tensor


def tile_rows(heads: int, kv_heads: int) -> int:
    """Rows of a tile: those whose heads, as far as they share a key head, fill the smallest product."""
    return max(LEAST_TILE // _padded(heads // kv_heads), 1)


def _padded(size: int) -> int:
    return 1 << (size - 1).bit_length()


def splits(slots: int) -> tuple[int, int]:
    """Into how many splits the longest session is cut, of so many slots; and the blocks of a split."""
    blocks = -(-slots // BLOCK)
    size = max(SPLIT_BLOCKS, -(-blocks // MAX_SPLITS))
    return -(-blocks // size), size


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, plan: RowPlan, longest: int, scale: float
) -> Tensor:
    """Store the rows' keys and values, then attend.

    Args:
        query: `[heads, rows, head_dim]`.
        key: `[kv_heads, rows, head_dim]`, in the arena's dtype.
        value: The same.
        layer: One layer of the arena, `[2, kv_heads, slots, head_dim]`; the rows' slots of it are written.
        plan: Where the rows find their keys.
        longest: Slots of the longest session.
        scale: Of the scores.

    Returns:
        `[rows, heads, head_dim]`.
    """
    output: Tensor = torch.ops.dynatree.tree_attention(
        query, key, value, layer, plan.tiles, plan.slots, plan.rows, plan.paths, longest, scale
    )
    return output


@torch.library.custom_op("dynatree::tree_attention", mutates_args={"layer"})
def _tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: Tensor,
    tiles: Tensor,
    slots: Tensor,
    rows: Tensor,
    paths: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    plan = RowPlan(tiles, slots, rows, paths)
    if HAS_TRITON and query.is_cuda:
        return by_triton(query, key, value, layer, plan, longest, scale)
    return by_torch(query, key, value, layer, plan, scale)


@_tree_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    heads, count, dim = query.shape
    return query.new_empty(count, heads, dim)


def by_triton(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, plan: RowPlan, longest: int, scale: float
) -> Tensor:
    """By Triton's kernels: on a GPU, or in Triton's interpreter."""
    from dynatree.common.engine.gpu import tree_attention_kernels as kernels

    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    heads, rows, dim = query.shape
    kv_heads = key.shape[0]
    group = _padded(heads // kv_heads)
    split_count, split_blocks = splits(longest)
    part = torch.empty(rows, heads, split_count, dim + 2, dtype=torch.float32, device=query.device).view(-1)
    per_split = rows * heads * split_count
    part_max, part_sum, part_out = part[:per_split], part[per_split : 2 * per_split], part[2 * per_split :]
    output = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    sizes = {
        "heads": heads,
        "group": heads // kv_heads,
        "padded_group": group,
        "dim": dim,
        "padded_dim": max(_padded(dim), LEAST_TILE),
        "tile": max(LEAST_TILE, group),
        "block": BLOCK,
        "splits": split_count,
        "split_blocks": split_blocks,
        "wide": query.dtype == torch.float32 or not query.is_cuda,
    }
    stages = 1 if sizes["wide"] else 2  # blocks on their way to a product; of float32 more fill a small GPU's memory
    in_log2 = scale * math.log2(math.e)
    kernels.shared_blocks[len(plan.tiles), kv_heads, split_count + 1](
        query,
        key,
        value,
        layer,
        plan.tiles,
        plan.slots,
        part_max,
        part_sum,
        part_out,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        layer.stride(0),
        layer.stride(1),
        in_log2,
        **sizes,
        num_warps=_WARPS,
        num_stages=stages,
        enable_fp_fusion=False,  # or a product and a sum may be one in one launch, and two in the other
    )
    kernels.own_paths[rows, kv_heads](
        query,
        layer,
        plan.rows,
        plan.paths,
        part_max,
        part_sum,
        part_out,
        output,
        query.stride(0),
        query.stride(1),
        layer.stride(0),
        layer.stride(1),
        plan.paths.stride(0),
        in_log2,
        **sizes,
        num_warps=_WARPS,
        num_stages=stages,
        enable_fp_fusion=False,  # or a product and a sum may be one in one launch, and two in the other
    )
    return output


def by_torch(query: Tensor, key: Tensor, value: Tensor, layer: Tensor, plan: RowPlan, scale: float) -> Tensor:
    """The same by torch's operations: blocks that are shared, then own paths, merged by their log-sum-exps.

    It reads the plan on the host, so no graph can capture it.
    """
    dtype, kv_heads = layer.dtype, key.shape[0]
    heads, count, dim = query.shape
    tiles, paths = plan.tiles.tolist(), plan.paths.long()
    stored = sum(tile[1] for tile in tiles)  # rows behind the last tile are padding
    for held, new in zip(layer, (key, value), strict=True):
        held.index_copy_(1, plan.slots[:stored].long(), new[:, :stored].to(dtype).nan_to_num(0.0, 0.0, 0.0))
    groups = query.reshape(kv_heads, heads // kv_heads, count, dim).float() * scale  # [kv_heads, group, rows, dim]
    out = groups.new_zeros(groups.shape)
    log_sum = groups.new_full(groups.shape[:-1], -math.inf)  # [kv_heads, group, rows]
    for first, rows, base, blocks in tiles:
        if rows and blocks:
            span, at = slice(base, base + blocks * BLOCK), slice(first, first + rows)
            scores = groups[:, :, at] @ layer[0, :, None, span].float().transpose(-1, -2)
            log_sum[:, :, at] = scores.logsumexp(-1)
            out[:, :, at] = scores.softmax(-1).to(dtype).float() @ layer[1, :, None, span].float()
    lengths = plan.rows[:, 1]
    reached = int(lengths.max())
    unseen = torch.arange(reached, device=query.device) >= lengths[:, None]  # [rows, path]
    # where a path has ended its first slot stands again, which is finite and has no weight
    own = torch.where(unseen, paths[:, :1], paths[:, :reached])
    keys, values = (each[:, own].float() for each in layer)  # [kv_heads, rows, path, dim]
    scores = torch.einsum("kgrd,krpd->kgrp", groups, keys).masked_fill(unseen, -math.inf)
    own_sum = scores.logsumexp(-1)
    own_out = torch.einsum("kgrp,krpd->kgrd", scores.softmax(-1).to(dtype).float(), values)
    share = torch.sigmoid(own_sum - log_sum)[..., None]  # of the row's weight
    merged = own_out * share + out * (1 - share)
    return merged.reshape(heads, count, dim).transpose(0, 1).to(query.dtype)
