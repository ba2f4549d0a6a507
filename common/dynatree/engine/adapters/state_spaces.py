"""What takes the place of the scans of Mamba-2's and Mamba-1's mixers; `recurrent` calls these functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.functional import softplus

from dynatree.engine.recurrent import linear_attention
from dynatree.engine.recurrent.scan import Scan

if TYPE_CHECKING:
    from dynatree.engine.adapters.recurrent import LayerCall


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
    z: None = None,
    **_: Any,
) -> Tensor:
    """Compute Mamba-2's scan: x `[1, n, H, dv]`, dt `[1, n, H]`, a `[H]`, b and c `[1, n, G, dk]`."""
    x, b, c = x[0].float(), b[0].float(), c[0].float()
    step = _step(dt[0], dt_bias, dt_softplus).clamp(*dt_limit).float()
    v, g = x * step[..., None], step * a.float()
    state = v.new_zeros(v.shape[1], b.shape[2], v.shape[2])
    scan = Scan("a state space", linear_attention.linear_attention, linear_attention.fold, state, (b[:0], v[:0], g[:0]))
    output = call.scan(scan, (c, b, v, g))
    return (output if D is None else output + D[:, None] * x)[None]


def _step(dt: Tensor, bias: Tensor | None, softened: bool) -> Tensor:
    """Compute step sizes in the dtype of `dt`, as transformers does."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return softplus(dt) if softened else dt
