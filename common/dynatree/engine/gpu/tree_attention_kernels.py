"""Tree attention in Triton: two launches for each layer, over the rows of any number of sessions.

A row's keys are summed in a fixed order, regardless of the other rows in the forward pass. The keys form blocks of
`BLOCK` keys in the order of their positions, and splits of a few blocks at fixed positions. A block gives the same bits
whether its keys are contiguous in the cache or gathered: both launches call `_block` with tiles of the same shape, and
a row of a matrix product depends on no other row.

The first launch stores the new keys and values of the rows, and sums the blocks that all rows of a session share. The
second launch continues over each row's own path, and merges the splits in order. Keys are split as in Flash-Decoding
(Dao et al. 2023). Paths replace the mask of DySpec (appendix C). A program skips the blocks that none of its rows sees,
such as those before a sliding window. In a block that only some rows see, the others add exact zeros.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _lowest(position, window: tl.constexpr, chunk: tl.constexpr):
    """Return the lowest position that the query at `position` sees; a `window` or `chunk` of 0 means none."""
    lowest = position * 0
    if window > 0:
        lowest = tl.maximum(lowest, position - window + 1)
    if chunk > 0:
        lowest = tl.maximum(lowest, position // chunk * chunk)
    return lowest


@triton.jit
def _block(
    q,
    keys,
    values,
    stride,
    slots,
    dims,
    seen,
    positions,
    lowest,
    in_head,
    m,
    total,
    acc,
    scale,
    cap: tl.constexpr,
    local: tl.constexpr,
    wide: tl.constexpr,
):
    """Return the running maximum, sum and output after another block of keys; `scale` is in units of log2.

    `local` selects queries that see the keys from position `lowest` on. `cap` is in units of log2, and 0 means none.
    `wide` selects float32 products, for float32 models and because the interpreter does not multiply bfloat16.
    """
    inside = seen[:, None] & in_head[None, :]
    at = slots[:, None] * stride + dims[None, :]
    k = tl.load(keys + at, mask=inside, other=0.0)  # [block, dim]
    v = tl.load(values + at, mask=inside, other=0.0)
    if wide:
        scores = tl.dot(q.to(tl.float32), tl.trans(k).to(tl.float32), input_precision="ieee") * scale
    else:
        scores = tl.dot(q, tl.trans(k)) * scale
    if cap > 0.0:
        fallen = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E / cap))
        bounded = cap * (1.0 - fallen) / (1.0 + fallen)  # cap * tanh(|scores| / cap)
        scores = tl.where(scores < 0.0, -bounded, bounded)
    if local:
        scores = tl.where(seen[None, :] & (positions[None, :] >= lowest[:, None]), scores, float("-inf"))
    else:
        scores = tl.where(seen[None, :], scores, float("-inf"))
    highest = tl.maximum(m, tl.max(scores, 1))
    base = highest
    if local:  # a query that has seen no key yet has no maximum, and -inf - -inf is NaN
        base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(m - base)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]
    if wide:
        acc = tl.dot(weights.to(v.dtype).to(tl.float32), v.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(v.dtype), v, acc)
    return highest, total, acc


@triton.jit
def _store_finite(to, x, mask):
    """Store rows `x` with 0 in place of NaN and infinity; return 1 for each row that has one, and 0 for the others."""
    finite = tl.abs(x.to(tl.float32)) < float("inf")
    tl.store(to, tl.where(finite, x, 0.0), mask=mask)
    return tl.max(tl.where(finite, 0, 1), 1)


@triton.jit
def shared_blocks(
    query,
    key,
    value,
    cache,
    tiles,
    rows_of,
    slots,
    faulty,
    part_max,
    part_sum,
    part_out,
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    cache_value,
    cache_head,
    scale,
    heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    splits: tl.constexpr,
    split_blocks: tl.constexpr,
    window: tl.constexpr,
    chunk: tl.constexpr,
    cap: tl.constexpr,
    wide: tl.constexpr,
):
    """Sum one split for one tile of rows and one key head; program `splits` instead stores the new keys and values."""
    number, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(tiles + number * 4)
    rows = tl.load(tiles + number * 4 + 1)
    base = tl.load(tiles + number * 4 + 2)
    blocks = tl.load(tiles + number * 4 + 3)
    dims = tl.arange(0, padded_dim)
    in_head = dims < dim
    keys = cache + kv_head.to(tl.int64) * cache_head
    values = keys + cache_value
    if split == splits:
        members = tl.arange(0, tile // padded_group)
        stored = (members < rows)[:, None] & in_head[None, :]
        row = first + members
        to = tl.load(slots + row, mask=members < rows, other=0).to(tl.int64)[:, None] * dim + dims[None, :]
        new = tl.load(key + kv_head * k_head + row[:, None] * k_row + dims[None, :], mask=stored, other=0.0)
        marks = _store_finite(keys + to, new, stored)
        new = tl.load(value + kv_head * v_head + row[:, None] * v_row + dims[None, :], mask=stored, other=0.0)
        marks = marks | _store_finite(values + to, new, stored)
        if faulty is not None:
            tl.store(faulty + row, marks, mask=marks > 0)  # the programs of other key heads store nothing else
    else:
        begin = split * split_blocks
        end = tl.minimum(begin + split_blocks, blocks)
        if begin < end:
            places = tl.arange(0, tile)
            row = first + places // padded_group
            head = kv_head * group + places % padded_group
            real = (places // padded_group < rows) & (places % padded_group < group)
            inside = real[:, None] & in_head[None, :]
            q = tl.load(query + head[:, None] * q_head + row[:, None] * q_row + dims[None, :], mask=inside, other=0.0)
            m = tl.full([tile], float("-inf"), tl.float32)
            total = tl.zeros([tile], tl.float32)
            acc = tl.zeros([tile, padded_dim], tl.float32)
            offsets = tl.arange(0, block)
            local: tl.constexpr = window > 0 or chunk > 0
            lowest = places
            if local:
                shared = tl.load(rows_of + row * 2, mask=real, other=0)
                length = tl.load(rows_of + row * 2 + 1, mask=real, other=1)
                lowest = _lowest(shared * block + length - 1, window, chunk)
                begin = tl.maximum(begin, tl.min(tl.where(real, lowest, end * block)) // block)
            for place in range(begin, end):
                at = (base + place * block + offsets).to(tl.int64)
                positions = place * block + offsets
                m, total, acc = _block(
                    q,
                    keys,
                    values,
                    dim,
                    at,
                    dims,
                    offsets >= 0,
                    positions,
                    lowest,
                    in_head,
                    m,
                    total,
                    acc,
                    scale,
                    cap,
                    local,
                    wide,
                )
            part = (row * heads + head) * splits + split
            tl.store(part_max + part, m, mask=real)
            tl.store(part_sum + part, total, mask=real)
            tl.store(part_out + part[:, None] * dim + dims[None, :], acc, mask=inside)


@triton.jit
def own_paths(
    query,
    cache,
    rows,
    paths,
    sinks,
    part_max,
    part_sum,
    part_out,
    output,
    q_head,
    q_row,
    cache_value,
    cache_head,
    path_size,
    scale,
    heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
    splits: tl.constexpr,
    split_blocks: tl.constexpr,
    window: tl.constexpr,
    chunk: tl.constexpr,
    cap: tl.constexpr,
    wide: tl.constexpr,
):
    """Finish one row and one key head: continue each split from the shared blocks' sums, then merge the splits.

    Padding, which has no path, costs a store of zeros.
    """
    row, kv_head = tl.program_id(0), tl.program_id(1)
    blocks = tl.load(rows + row * 2)
    length = tl.load(rows + row * 2 + 1)
    all_blocks = blocks + tl.cdiv(length, block)
    dims = tl.arange(0, padded_dim)
    in_head = dims < dim
    keys = cache + kv_head.to(tl.int64) * cache_head
    values = keys + cache_value
    places = tl.arange(0, tile)
    head = kv_head * group + places % padded_group
    real = (places < padded_group) & (places % padded_group < group)
    inside = real[:, None] & in_head[None, :]
    to = output + (row * heads + head[:, None]) * dim + dims[None, :]
    if length == 0:
        tl.store(to, tl.zeros([tile, padded_dim], output.dtype.element_ty), mask=inside)
        return
    q = tl.load(query + head[:, None] * q_head + row * q_row + dims[None, :], mask=inside, other=0.0)
    offsets = tl.arange(0, block)
    local: tl.constexpr = window > 0 or chunk > 0
    lowest = places * 0 + _lowest(blocks * block + length - 1, window, chunk)
    highest = tl.full([tile], float("-inf"), tl.float32)
    sums = tl.zeros([tile], tl.float32)
    if sinks is not None:  # a sink adds its weight to the sum, but no value to the output
        highest = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
        sums += 1.0
    out = tl.zeros([tile, padded_dim], tl.float32)
    for split in range(0, tl.cdiv(all_blocks, split_blocks)):
        begin = split * split_blocks
        part = (row * heads + head) * splits + split
        left = real & (places * 0 + begin < blocks)  # the zero vector turns the scalar condition into a mask
        m = tl.load(part_max + part, mask=left, other=float("-inf"))
        total = tl.load(part_sum + part, mask=left, other=0.0)
        acc = tl.load(part_out + part[:, None] * dim + dims[None, :], mask=left[:, None] & in_head[None, :], other=0.0)
        first = tl.maximum(begin, blocks)
        if local:
            first = tl.maximum(first, tl.max(lowest) // block)
        for number in range(first, tl.minimum(begin + split_blocks, all_blocks)):
            place = (number - blocks) * block + offsets
            seen = place < length
            at = tl.load(paths + row * path_size + place, mask=seen, other=0).to(tl.int64)
            m, total, acc = _block(
                q,
                keys,
                values,
                dim,
                at,
                dims,
                seen,
                number * block + offsets,
                lowest,
                in_head,
                m,
                total,
                acc,
                scale,
                cap,
                local,
                wide,
            )
        m = tl.where(real, m, 0.0)  # the maximum of a padding row is -inf, and -inf - -inf is NaN
        new = tl.maximum(highest, m)
        base = new
        if local:  # where no key of the splits so far is seen, the maximum is -inf
            base = tl.where(new == float("-inf"), 0.0, new)
        fade, weight = tl.exp2(highest - base), tl.exp2(m - base)
        sums = sums * fade + total * weight
        out = out * fade[:, None] + acc * weight[:, None]
        highest = new
    result = out / sums[:, None]
    tl.store(to, result.to(output.dtype.element_ty), mask=inside)
