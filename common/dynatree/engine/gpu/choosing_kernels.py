"""Triton kernels from logits to tokens: the target's choices and accepted rows, and a draft's best continuations.

A row's vocabulary is split into parts of `size` tokens, one program each; another program merges the parts of a row.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from dynatree.engine.sampling.noise_kernels import noise_at


@triton.jit
def _first(values, tokens, value):
    """Return the lowest of the `tokens` that have this value."""
    return tl.min(tl.where(values == value, tokens, 0x7FFFFFFF), 0)


@triton.jit
def best_of_parts(
    logits,
    highest,
    temperatures,
    seeds,
    positions,
    best,
    places,
    vocab_size,
    row_stride,
    stream,
    parts,
    noisy: tl.constexpr,
    size: tl.constexpr,
    padded_parts: tl.constexpr,
):
    """Find the best score of a part of a row and its lowest token; infinity stands for NaN.

    With `noisy`, `highest` has the best logit of each part, and the scores of a sampled row are those of
    `decisions.ranking`, to the bit. A greedy row's best score is then `highest`, and its tokens are there already.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if noisy:
        temperature = tl.load(temperatures + row)
        if temperature == 0.0:
            tl.store(best + row * parts + part, tl.load(highest + row * parts + part))
            return
    tokens = part * size + tl.arange(0, size)
    inside = tokens < vocab_size
    x = tl.load(logits + row * row_stride + tokens, mask=inside, other=0.0).to(tl.float32)
    if noisy:
        each = tl.arange(0, padded_parts)
        top = tl.max(tl.load(highest + row * parts + each, mask=each < parts, other=float("-inf")), 0)
        noise = noise_at(tl.load(seeds + row), tl.load(positions + row) + 1, stream, part * (size // 4), size // 4)
        x = tl.div_rn(x - top, temperature) + noise
    x = tl.where(x == x, x, float("inf"))
    x = tl.where(inside, x, float("-inf"))
    value = tl.max(x, 0)
    tl.store(best + row * parts + part, value)
    tl.store(places + row * parts + part, _first(x, tokens, value))


@triton.jit
def choices_of_rows(
    best, places, faulty, choices, parts, none: tl.constexpr, fault: tl.constexpr, padded_parts: tl.constexpr
):
    """Choose the token of a row from its parts, `none` if the best score is not finite, or `fault` if it is faulty."""
    row = tl.program_id(0)
    each = tl.arange(0, padded_parts)
    values = tl.load(best + row * parts + each, mask=each < parts, other=float("-inf"))
    value = tl.max(values, 0)
    token = _first(values, tl.load(places + row * parts + each, mask=each < parts, other=0x7FFFFFFF), value)
    choice = tl.where(tl.abs(value) < float("inf"), token, none)
    if faulty is not None:
        choice = tl.where(tl.load(faulty + row) > 0, fault, choice)
    tl.store(choices + row, choice.to(tl.int64))


@triton.jit
def accepted_moves(token_ids, parents, choices, slots, homes, moves, rows, block: tl.constexpr):
    """List the moves of the drafted rows that the target accepts, in the order of rows: see `decisions.accepted`.

    Each row walks up its path, as far as the target's choices lead down it. It is a single program.
    """
    count = 0
    for first in range(0, rows, block):
        row = first + tl.arange(0, block)
        real = row < rows
        at = row
        kept = real & (tl.load(parents + row, mask=real, other=0) != row)
        walks = kept
        while tl.max(walks.to(tl.int32), 0) > 0:
            above = tl.load(parents + at, mask=walks, other=0)
            chosen = tl.load(choices + above, mask=walks, other=0)
            right = (above == at) | (tl.load(token_ids + at, mask=walks, other=0) == chosen)
            kept = kept & (right | (walks == 0))
            walks = walks & right & (above != at)
            at = tl.where(walks, above, at)
        place = moves + 1 + 2 * (count + tl.cumsum(kept.to(tl.int32), 0) - 1)
        tl.store(place, tl.load(slots + row, mask=kept, other=0), mask=kept)
        tl.store(place + 1, tl.load(homes + row, mask=kept, other=0), mask=kept)
        count += tl.sum(kept.to(tl.int32), 0)
    tl.store(moves, count)


@triton.jit
def move_slots(data, moves, stride, dim: tl.constexpr, padded_dim: tl.constexpr):
    """Copy the listed slots of one head of one layer, one after the other."""
    numbers = data + tl.program_id(0).to(tl.int64) * stride
    dims = tl.arange(0, padded_dim)
    inside = dims < dim
    for place in range(0, tl.load(moves)):
        source = tl.load(moves + 1 + 2 * place).to(tl.int64)
        destination = tl.load(moves + 2 + 2 * place).to(tl.int64)
        tl.store(numbers + destination * dim + dims, tl.load(numbers + source * dim + dims, mask=inside), mask=inside)


@triton.jit
def _best_first(values, tokens, ids, chances, shift, breadth: tl.constexpr):
    """Store the best `breadth` values less `shift`, and their tokens; among equal values the lowest token is first."""
    for rank in range(breadth):
        value = tl.max(values, 0)
        token = _first(values, tokens, value)
        tl.store(ids + rank, token)
        tl.store(chances + rank, value - shift)
        values = tl.where(tokens == token, float("-inf"), values)


@triton.jit
def ranked_parts(
    logits,
    limits,
    temperatures,
    seeds,
    positions,
    ids,
    values,
    bases,
    sums,
    vocab_size,
    row_stride,
    stream,
    parts,
    breadth: tl.constexpr,
    size: tl.constexpr,
):
    """Find the best tokens of a part of a row, relative to the part's own highest logit, and the sum of their weights.

    Only tokens below the row's limit count. The highest logit is divided by the row's temperature if that is sampled.
    It is -inf if the part has no token. The sum is NaN or infinity if the part has a logit that is not a number.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * size + tl.arange(0, size)
    inside = tokens < tl.minimum(vocab_size, tl.load(limits + row))
    x = tl.load(logits + row * row_stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    x = x - tl.where(tl.abs(top) < float("inf"), top, 0.0)
    base = tl.where(top == float("-inf"), top, tl.where(top < float("inf"), top, 0.0))
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        noise = noise_at(tl.load(seeds + row), tl.load(positions + row) + 1, stream, part * (size // 4), size // 4)
        x = tl.div_rn(x, temperature) + noise
        base = tl.div_rn(base, temperature)
    at = row * parts + part
    tl.store(bases + at, base)
    tl.store(sums + at, tl.sum(tl.exp(x), 0))
    x = tl.where(x == x, x, float("-inf"))
    # a token of the padding is no token: where fewer than `breadth` are left, others come again
    tokens = tl.where(tokens < vocab_size, tokens, part * size)
    _best_first(x, tokens, ids + at * breadth, values + at * breadth, 0.0, breadth)


@triton.jit
def merged_ranks(
    part_ids,
    part_values,
    bases,
    sums,
    ids,
    chances,
    parts,
    breadth: tl.constexpr,
    padded_parts: tl.constexpr,
):
    """Merge the parts of a row to its best tokens and their log-probabilities."""
    row = tl.program_id(0)
    each = tl.arange(0, padded_parts)
    base = tl.load(bases + row * parts + each, mask=each < parts, other=float("-inf"))
    weights = tl.load(sums + row * parts + each, mask=each < parts, other=0.0)
    top = tl.max(base, 0)
    log_sum = tl.log(tl.sum(weights * tl.exp(base - top), 0))
    place = tl.arange(0, padded_parts * breadth)
    inside = place < parts * breadth
    at = row * parts * breadth + place
    shifts = tl.load(bases + row * parts + place // breadth, mask=inside, other=float("-inf")) - top
    values = tl.load(part_values + at, mask=inside, other=float("-inf")) + shifts
    tokens = tl.load(part_ids + at, mask=inside, other=0)
    values = tl.where(values == values, values, float("-inf"))
    _best_first(values, tokens, ids + row * breadth, chances + row * breadth, log_sum, breadth)
