"""Fused Triton kernels between the linear layers of a transformer: one launch instead of many in torch.

Kernels compute in float32 and round once. They mix no rows, so a row's bits do not depend on other rows.
"""

# mypy: disable-error-code="no-untyped-def,misc,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(x, inside, width, epsilon, centered: tl.constexpr):
    """Divide a row, less its mean if `centered`, by its root mean square."""
    if centered:
        x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
    return x / tl.sqrt(tl.sum(x * x, 0) / width + epsilon)


@triton.jit
def _scaled(x, scale, shift, columns, inside, shifted: tl.constexpr):
    x = x * tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
    if shifted:
        x += tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def add_and_norm(
    x,
    first,
    second,
    summed,
    scale,
    shift,
    normed,
    other_scale,
    other_shift,
    other_normed,
    width,
    epsilon,
    other_epsilon,
    addends: tl.constexpr,
    norms: tl.constexpr,
    centered: tl.constexpr,
    shifted: tl.constexpr,
    columns_block: tl.constexpr,
):
    """Compute `summed = x + first + second` and one or two norms of it, for one row."""
    columns = tl.arange(0, columns_block)
    inside = columns < width
    at = tl.program_id(0) * width + columns
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if addends > 0:
        total += tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
        if addends > 1:
            total += tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(summed.dtype.element_ty)
        tl.store(summed + at, rounded, mask=inside)
        total = rounded.to(tl.float32)
    result = _scaled(_normed(total, inside, width, epsilon, centered), scale, shift, columns, inside, shifted)
    tl.store(normed + at, result.to(normed.dtype.element_ty), mask=inside)
    if norms > 1:
        result = _normed(total, inside, width, other_epsilon, centered)
        result = _scaled(result, other_scale, other_shift, columns, inside, shifted)
        tl.store(other_normed + at, result.to(other_normed.dtype.element_ty), mask=inside)


@triton.jit
def rotate(
    query,
    key,
    cosines,
    sines,
    positions,
    q_head,
    q_row,
    k_head,
    k_row,
    heads,
    half: tl.constexpr,
    padded_half: tl.constexpr,
):
    """Rotate the first `2 * half` numbers of a row's head by its position, in place; key heads follow query heads."""
    row, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, padded_half)
    inside = columns < half
    if head < heads:  # noqa: SIM108 - pointers, which Triton selects no other way
        numbers = query + head * q_head + row * q_row
    else:
        numbers = key + (head - heads) * k_head + row * k_row
    angle = tl.load(positions + row).to(tl.int64) * (2 * half) + columns
    first = tl.load(numbers + columns, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(numbers + half + columns, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=inside, other=0.0).to(tl.float32)
    turned = first * cosine - second * sine
    tl.store(numbers + columns, turned.to(query.dtype.element_ty), mask=inside)
    cosine = tl.load(cosines + angle + half, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle + half, mask=inside, other=0.0).to(tl.float32)
    turned = second * cosine + first * sine
    tl.store(numbers + half + columns, turned.to(query.dtype.element_ty), mask=inside)


@triton.jit
def activate(gate, other, output, size, kind: tl.constexpr, times: tl.constexpr, block: tl.constexpr):
    """Compute `activation(gate)`, times `other` if `times`; kind 0 is GELU, 1 is GELU by tanh, 2 is SiLU, 3 is ReLU."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    if kind == 0:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif kind == 1:
        # 1 + tanh(y) is 2 sigmoid(2 y)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif kind == 2:
        x = x * tl.sigmoid(x)
    else:
        x = tl.maximum(x, 0.0)
    if times:
        x = x * tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + at, x.to(output.dtype.element_ty), mask=inside)
