"""Recurrent layers by the project's own CPU kernels (`native/recurrence.c`, `native/short_conv.c`).

They compute what torch computes in `engine.recurrent`, up to the last bits of float64. torch runs some fifty operations
for a layer, and most of them write tensors that the next one reads. The kernels read states and records once.

A token's numbers have the same bits whatever other tokens are computed with it, and with all builds.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dynatree.engine.cpu.native import DTYPES, address, call, kernels
from dynatree.engine.recurrent import gated_delta as delta_rule
from dynatree.engine.recurrent import linear_attention as attention
from dynatree.engine.recurrent import short_conv as convolution
from dynatree.engine.recurrent.linear_attention import Records

_MOST_TAPS = 16  # MOST_TAPS of `native/kernels.h`


class _Recurrence(ctypes.Structure):
    _fields_ = (
        ("heads", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("keys", ctypes.c_int64),
        ("values", ctypes.c_int64),
        ("kept", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("state", ctypes.c_void_p),
        ("kept_k", ctypes.c_void_p),
        ("kept_v", ctypes.c_void_p),
        ("kept_g", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("g", ctypes.c_void_p),
        ("beta", ctypes.c_void_p),
        ("ancestors", ctypes.c_void_p),
        ("u", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
    )


class _Convolution(ctypes.Structure):
    _fields_ = (
        ("channels", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("kept", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("kept_x", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("ancestors", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
    )


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    kept: Records,
    ancestors: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Records]:
    """Compute the gated delta rule as `recurrent.gated_delta` does, which computes what the kernel does not."""
    if not _recurs(state, g):
        return delta_rule.gated_delta(q, k, v, g, beta, kept, ancestors, state)
    if ancestors is None:
        return attention.in_chunks(gated_delta, (q, k, v, g, beta), kept, state, fold)
    output, u = recur(q, k, v, g, beta, kept, ancestors, state)
    return output, (k, u, g)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, kept: Records, ancestors: Tensor | None, state: Tensor
) -> tuple[Tensor, Records]:
    """Compute linear attention as `recurrent.linear_attention` does, which computes what the kernel does not."""
    if not _recurs(state, g):
        return attention.linear_attention(q, k, v, g, kept, ancestors, state)
    if ancestors is None:
        return attention.in_chunks(linear_attention, (q, k, v, g), kept, state, fold)
    output, _ = recur(q, k, v, g, None, kept, ancestors, state)
    return output, (k, v, g)


def short_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor, ancestors: Tensor | None, state: Tensor
) -> Tensor:
    """Compute a convolution as `recurrent.short_conv` does, which computes what the kernel does not."""
    fits = x.dtype == weight.dtype and x.dtype in DTYPES and weight.shape[1] <= _MOST_TAPS
    if fits and x.device.type == "cpu" and kernels() is not None:
        return convolve(x, weight, bias, kept, ancestors, state)
    return convolution.short_conv(x, weight, bias, kept, ancestors, state)


def _recurs(state: Tensor, g: Tensor) -> bool:
    """Whether the kernel computes layers with such states and log-decays: float64, and a decay for each head."""
    return state.dtype == torch.float64 and state.device.type == "cpu" and g.dim() == 2 and kernels() is not None


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    kept: Records,
    ancestors: Tensor,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule, or linear attention without `beta`, by the kernel.

    Returns:
        Outputs, and the values of the records; both `[n, H, dv]`.

    Raises:
        MemoryError: The kernel cannot allocate its working memory.
        ValueError: The tensors do not belong together.
    """
    to, held = _structure(state, kept)
    n, double = len(q), torch.float64
    q, k, v, g, ancestors = (each.contiguous() for each in (q, k, v, g, ancestors))
    output, u = torch.empty_like(v), v if beta is None else torch.empty_like(v)
    to.tokens = n
    to.q, to.k = (address(each, double, n, to.groups, to.keys) for each in (q, k))
    to.v, to.u, to.output = (address(each, double, n, to.heads, to.values) for each in (v, u, output))
    to.g, to.ancestors = address(g, double, n, to.heads), address(ancestors, torch.bool, n, to.kept + n)
    if beta is not None:
        beta = beta.contiguous()
        to.beta = address(beta, double, n, to.heads)
    if n:
        call("dynatree_recurrence", ctypes.byref(to))
    del held
    return output, u


def fold(state: Tensor, records: Records) -> Tensor:
    """Compute the state after a chain of tokens as `recurrent.linear_attention.fold` does.

    Raises:
        MemoryError: The kernel cannot allocate its working memory.
        ValueError: The tensors do not belong together.
    """
    if not _recurs(state, records[-1]):
        return attention.fold(state, records)
    to, held = _structure(state, records)
    output = torch.empty_like(state)
    to.output = address(output, torch.float64, *state.shape)
    call("dynatree_recurrence", ctypes.byref(to))
    del held
    return output


def _structure(state: Tensor, kept: Records) -> tuple[_Recurrence, list[Tensor]]:
    """Return the kernel's structure of the tokens so far, and the tensors that it points at, which must outlive it."""
    double = torch.float64
    held = [state.contiguous(), *(each.contiguous() for each in kept)]
    state, k, v, g = held
    (heads, keys, values), (m, groups) = state.shape, k.shape[:2]
    if not groups or heads % groups:
        raise ValueError(f"{heads} heads are not a multiple of {groups} heads of keys")
    return _Recurrence(
        heads=heads,
        groups=groups,
        keys=keys,
        values=values,
        kept=m,
        state=address(state, double, heads, keys, values),
        kept_k=address(k, double, m, groups, keys),
        kept_v=address(v, double, m, heads, values),
        kept_g=address(g, double, m, heads),
    ), held


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, kept: Tensor, ancestors: Tensor | None, state: Tensor
) -> Tensor:
    """Compute a convolution of each channel by the kernel, with taps of the dtype of `x`, at most 16.

    Raises:
        MemoryError: The kernel cannot allocate its working memory.
        ValueError: The tensors do not belong together.
    """
    dtype, (n, channels), m, width = x.dtype, x.shape, len(kept), weight.shape[1]
    x, weight, kept, state = (each.to(dtype).contiguous() for each in (x, weight, kept, state))
    output = torch.empty_like(x)
    to = _Convolution(
        channels=channels,
        width=width,
        kept=m,
        tokens=n,
        dtype=DTYPES[dtype],
        weight=address(weight, dtype, channels, width),
        state=address(state, dtype, width - 1, channels),
        kept_x=address(kept, dtype, m, channels),
        x=address(x, dtype, n, channels),
        output=address(output, dtype, n, channels),
    )
    if bias is not None:
        bias = bias.to(dtype).contiguous()
        to.bias = address(bias, dtype, channels)
    if ancestors is not None:
        ancestors = ancestors.contiguous()
        to.ancestors = address(ancestors, torch.bool, n, m + n)
    call("dynatree_convolution", ctypes.byref(to))
    return output
