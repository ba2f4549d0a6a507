"""Tree attention over rows: each row attends to whole blocks shared by its session, and then to its own path.

On a GPU it runs Triton kernels, and otherwise torch operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dynatree.engine.forward.scores import Scores
from dynatree.engine.kv.kv_cache import KVCache
from dynatree.engine.kv.locality import GLOBAL, Locality

BLOCK = 64  # keys summed at a time
SPLIT_BLOCKS = 4  # least blocks of a split; splits are summed in parallel and merged in order
MAX_SPLITS = 32
LEAST_TILE = 16  # rows of the smallest tile of a GPU's matrix product
_WARPS = 4  # the same for both launches, so that both multiply in the same order


@dataclass(frozen=True)
class RowPlan:
    """The KV slots of a forward pass's rows. All tensors are int32, and a captured graph uses them at each replay.

    Attributes:
        tiles: `[tiles, 4]`: a tile is up to `tile_rows` neighbouring rows of one session. It has its first row, its
            number of rows (0 means an unused tile), the first slot of the session's range, and the number of blocks of
            the range that all its rows share.
        slots: `[rows]`: slot for each row's new key and value.
        rows: `[rows, 2]`: the number of shared blocks, and the length of the row's own path after them. A row without
            a path is padding, whose output is zeros.
        paths: `[rows, path]`: slots of the row's own path, in the order of their positions.
        faulty: `[rows]`: attention sets it to 1 where a row's key or value is not finite in any layer, and stores
            zeros in its place. None records nothing.
    """

    tiles: Tensor
    slots: Tensor
    rows: Tensor
    paths: Tensor
    faulty: Tensor | None = None


class RowAttention:
    """The attention of one forward pass over rows; implements `Attending`."""

    def __init__(self, kv_cache: KVCache, plan: RowPlan, longest: int) -> None:
        self._kv_cache = kv_cache
        self._plan = plan
        self._longest = longest

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Store the new keys and values, then attend; see `Attending.attend`."""
        dtype = self._kv_cache.dtype
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        plan, locality = self._plan, self._kv_cache.shape.locality(layer)
        rules = (scores.scale, scores.cap, scores.sinks, locality.window, locality.chunk)
        numbers = (plan.tiles, plan.slots, plan.rows, plan.paths, plan.faulty, self._longest, *rules)
        output: Tensor = torch.ops.dynatree.tree_attention(query, key, value, self._kv_cache.layer(layer), *numbers)
        return output


def tile_rows(heads: int, kv_heads: int) -> int:
    """Return the rows of a tile; their query heads that share a key head fill the smallest matrix product."""
    return max(LEAST_TILE // padded(heads // kv_heads), 1)


def padded(size: int) -> int:
    """Return the least power of two that is at least `size`, as Triton's blocks need it."""
    return 1 << (size - 1).bit_length()


def splits(slots: int) -> tuple[int, int]:
    """Return the number of splits of the longest session, which has `slots` slots, and the blocks of a split."""
    blocks = -(-slots // BLOCK)
    size = max(SPLIT_BLOCKS, -(-blocks // MAX_SPLITS))
    return -(-blocks // size), size


@torch.library.custom_op("dynatree::tree_attention", mutates_args={"layer", "faulty"})
def _tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: Tensor,
    tiles: Tensor,
    slots: Tensor,
    rows: Tensor,
    paths: Tensor,
    faulty: Tensor | None,
    longest: int,
    scale: float | None,
    cap: float | None,
    sinks: Tensor | None,
    window: int | None,
    chunk: int | None,
) -> Tensor:
    plan = RowPlan(tiles, slots, rows, paths, faulty)
    scores, locality = Scores(scale, cap, sinks), Locality(window, chunk)
    if query.is_cuda:
        return by_triton(query, key, value, layer, plan, longest, scores, locality)
    return by_torch(query, key, value, layer, plan, scores, locality)


@_tree_attention.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    heads, count, dim = query.shape
    return query.new_empty(count, heads, dim)


def by_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: Tensor,
    plan: RowPlan,
    longest: int,
    scores: Scores,
    locality: Locality = GLOBAL,
) -> Tensor:
    """Store the rows' keys and values, then attend, by Triton kernels: on a GPU or in Triton's interpreter.

    Args:
        query: `[heads, rows, head_dim]`.
        key: `[kv_heads, rows, head_dim]`, in the KV cache's dtype.
        value: `[kv_heads, rows, head_dim]`, in the KV cache's dtype.
        layer: One layer of the KV cache, `[2, kv_heads, slots, head_dim]`; the rows' slots are written.
        plan: KV slots that the rows read and write; its `faulty` flags are set.
        longest: KV slots of the longest session.
        scores: How the products of queries and keys become weights.
        locality: What a query sees of its session's earlier tokens.

    Returns:
        `[rows, heads, head_dim]`.
    """
    from dynatree.engine.gpu import tree_attention_kernels as kernels

    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    heads, rows, dim = query.shape
    kv_heads = key.shape[0]
    group = padded(heads // kv_heads)
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
        "padded_dim": max(padded(dim), LEAST_TILE),
        "tile": max(LEAST_TILE, group),
        "block": BLOCK,
        "splits": split_count,
        "split_blocks": split_blocks,
        "window": locality.window or 0,
        "chunk": locality.chunk or 0,
        "cap": (scores.cap or 0.0) * math.log2(math.e),
        "wide": query.dtype == torch.float32 or not query.is_cuda,
    }
    in_log2 = scores.factor(dim) * math.log2(math.e)
    parts = (part_max, part_sum, part_out)
    of_query, of_key, of_value, of_cache = (each.stride()[:2] for each in (query, key, value, layer))
    # Two pipelined blocks of float32 exceed the shared memory of a small GPU. Fusion is off, because one of two
    # launches may fuse a product and a sum, and the other may not.
    options = {"num_warps": _WARPS, "num_stages": 1 if sizes["wide"] else 2, "enable_fp_fusion": False}
    kernels.shared_blocks[len(plan.tiles), kv_heads, split_count + 1](
        *(query, key, value, layer, plan.tiles, plan.rows, plan.slots, plan.faulty),
        *(*parts, *of_query, *of_key, *of_value, *of_cache, in_log2),
        **sizes,
        **options,
    )
    kernels.own_paths[rows, kv_heads](
        *(query, layer, plan.rows, plan.paths, scores.sinks, *parts, output),
        *(*of_query, *of_cache, plan.paths.stride(0), in_log2),
        **sizes,
        **options,
    )
    return output


def by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: Tensor,
    plan: RowPlan,
    scores: Scores,
    locality: Locality = GLOBAL,
) -> Tensor:
    """Compute the same with torch operations: shared blocks, then own paths, merged by their log-sum-exps.

    Sums are in float32, or in float64 if the KV cache is. The plan is read on the host, so no graph can capture this.
    """
    dtype, kv_heads = layer.dtype, key.shape[0]
    wide = torch.promote_types(dtype, torch.float32)
    heads, count, dim = query.shape
    tiles, paths = plan.tiles.tolist(), plan.paths.long()
    stored = sum(tile[1] for tile in tiles)  # rows after the last tile are padding
    for held, each in zip(layer, (key, value), strict=True):
        new = each[:, :stored].to(dtype)
        held.index_copy_(1, plan.slots[:stored].long(), new.nan_to_num(0.0, 0.0, 0.0))
        if plan.faulty is not None:
            plan.faulty[:stored].masked_fill_(~new.isfinite().all(2).all(0), 1)
    groups = query.reshape(kv_heads, heads // kv_heads, count, dim).to(wide)  # [kv_heads, group, rows, dim]
    groups = groups * scores.factor(dim)
    out = groups.new_zeros(groups.shape)
    log_sum = groups.new_full(groups.shape[:-1], -math.inf)  # [kv_heads, group, rows]
    if scores.sinks is not None:
        log_sum[:] = scores.sinks.to(wide).reshape(kv_heads, heads // kv_heads, 1)
    shared, lengths = plan.rows[:, 0] * BLOCK, plan.rows[:, 1]
    lowest = locality.lowest(shared + lengths - 1)  # [rows]
    for first, rows, base, blocks in tiles:
        if rows and blocks:
            span, at = slice(base, base + blocks * BLOCK), slice(first, first + rows)
            products = scores.capped(groups[:, :, at] @ layer[0, :, None, span].to(wide).transpose(-1, -2))
            unseen = torch.arange(blocks * BLOCK, device=query.device) < lowest[at, None]
            products.masked_fill_(unseen, -math.inf)
            before, within = log_sum[:, :, at], products.logsumexp(-1)
            log_sum[:, :, at] = torch.logaddexp(before, within)
            weights = (products - log_sum[:, :, at, None]).exp().nan_to_num(0.0)  # NaN where no key is seen
            out[:, :, at] = weights.to(dtype).to(wide) @ layer[1, :, None, span].to(wide)
    reached = max(int(lengths.max()), 1)
    places = torch.arange(reached, device=query.device)
    unseen = (places >= lengths[:, None]) | (shared[:, None] + places < lowest[:, None])  # [rows, path]
    # past its end, a path repeats its first slot, whose values are finite and get no weight
    own = torch.where(unseen, paths[:, :1], paths[:, :reached])
    keys, values = (each[:, own].to(wide) for each in layer)  # [kv_heads, rows, path, dim]
    products = scores.capped(torch.einsum("kgrd,krpd->kgrp", groups, keys)).masked_fill(unseen, -math.inf)
    own_sum = products.logsumexp(-1)
    own_out = torch.einsum("kgrp,krpd->kgrd", products.softmax(-1).to(dtype).to(wide), values)
    share = torch.sigmoid(own_sum - log_sum)[..., None]  # share of the row's total weight that its own path has
    merged = torch.where(lengths[:, None] > 0, own_out * share + out * (1 - share), 0.0)  # padding has no path
    return merged.reshape(heads, count, dim).transpose(0, 1).to(query.dtype).contiguous()
