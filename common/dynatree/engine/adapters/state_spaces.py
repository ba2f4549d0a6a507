"""What takes the place of the scans of Mamba-2's and Mamba-1's mixers; `recurrent` calls these functions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from dynatree.engine.adapters.layer_call import LayerCall, check_options
from dynatree.engine.adapters.rounded import rounded, softplus
from dynatree.engine.cpu import native_recurrence
from dynatree.engine.recurrent import selective_scan
from dynatree.engine.recurrent.scan import Scan


def mamba2(
    call: LayerCall,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803 (transformers' name)
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **others: Any,
) -> Tensor:
    """Compute Mamba-2's scan: x `[1, n, H, dv]`, dt `[1, n, H]`, a `[H]`, b and c `[1, n, G, dk]`."""
    check_options(others)
    x, b, c = x[0].double(), b[0].double(), c[0].double()
    step = _step(dt[0], dt_bias, dt_softplus).clamp(*dt_limit).double()
    v, g = x * step[..., None], step * a.double()
    start = partial(v.new_zeros, (v.shape[1], b.shape[2], v.shape[2]))
    none = (b[:0], v[:0], g[:0])
    scan = Scan("a state space", native_recurrence.linear_attention, native_recurrence.fold, start, none)
    output = call.scan(scan, (c, b, v, g))
    return (output if D is None else output + D[:, None] * x).contiguous()[None]  # Falcon-H1 takes a view of it


def mamba(
    call: LayerCall,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor | None = None,  # noqa: N803 (transformers' name)
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **others: Any,
) -> Tensor:
    """Compute Mamba-1's scan: x, dt and z `[1, channels, n]`, a `[channels, states]`, b and c `[1, states, n]`."""
    check_options(others)
    x, dt, b, c = (each[0].T for each in (x, dt, b, c))
    step = _step(dt, delta_bias, delta_softplus).double()
    v, wide = step * x.double(), b.double()
    a = a.double()
    passed: selective_scan.Passed = {}
    compute = partial(selective_scan.selective_scan, a, passed=passed)
    fold = partial(selective_scan.fold, a, passed=passed)
    scan = Scan("a selective scan", compute, fold, partial(torch.zeros_like, a), (step[:0], v[:0], wide[:0]))
    output = call.scan(scan, (step, v, wide, c.double()))
    output = (output if D is None else output + x * D).T[None]
    return output if z is None else output * rounded(silu, z)


def _step(dt: Tensor, bias: Tensor | None, softened: bool) -> Tensor:
    """Compute step sizes in the dtype of `dt`, as transformers does."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus(dt) if softened else dt
