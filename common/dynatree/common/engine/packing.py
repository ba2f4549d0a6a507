"""Weights laid out for the CPU: linear layers as its kernels read them best, everything else in memory of its own.

At few rows a forward takes the time of reading the weights once. A checkpoint is mapped from its file in pages of 4 KiB
and row-major; copied into huge pages (`dynatree.cli.main` asks torch for them), in oneDNN's blocked format, the same
weights stream up to 1.8 times as fast, and further rows cost less.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
# The rows that a weight is blocked for. 16-bit weights, blocked for 1, cost up to 16 rows no more; float32 weights,
# blocked for 16, are as fast as blocked for 1 at one row and much faster above.
_BLOCKED_FOR = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 16}
_SMALL = 2**18  # elements; a blocked float32 layer of no more is slower than torch's own: a call costs some 40 us
_FEWEST_WIDENED = 3  # rows; fewer are faster one by one
_TILE = 16  # rows; float32 kernels on AVX2 take up to three times as long for counts between multiples of it
_SMALL_TILE = 4
_WORKSPACE = 2**21  # elements, 8 MiB: what is widened at a time stays in the cache


class PackedLinear(nn.Module):
    """A linear layer whose weight `[out_features, in_features]` is kept in oneDNN's blocked format alone."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else _parameter(bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _BLOCKED_FOR[weight.dtype])

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output


class WidenedLinear(nn.Module):
    """A 16-bit linear layer on a CPU without kernels for the dtype, where torch multiplies one row after the other.

    From a few rows on it is faster to widen the weight to float32, a part at a time, and to multiply all rows by it.
    As in 16-bit kernels products are summed in float32 and rounded once. Rows of zeros fill up the last tile.

    Args:
        weight: `[out_features, in_features]`.
        workspace: float32 `[at least in_features]`, shared by layers that never run at the same time.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, workspace: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = _parameter(weight)
        self.bias = None if bias is None else _parameter(bias)
        at_a_time = len(workspace) // self.in_features
        self._part = workspace[: at_a_time * self.in_features].view(at_a_time, self.in_features)

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        inputs = rows.reshape(-1, self.in_features)
        if len(inputs) < _FEWEST_WIDENED:
            return linear(rows, self.weight, self.bias)
        count = len(inputs)
        filled = torch.zeros(_tiled(count), self.in_features)
        filled[:count] = inputs
        sums = torch.empty(self.out_features, len(filled))
        for first in range(0, self.out_features, len(self._part)):
            narrow = self.weight[first : first + len(self._part)]
            wide = self._part[: len(narrow)].copy_(narrow)
            torch.mm(wide, filled.T, out=sums[first : first + len(narrow)])
        sums = sums[:, :count]
        if self.bias is not None:
            sums += self.bias[:, None]
        return sums.T.to(rows.dtype, memory_format=torch.contiguous_format).view(*rows.shape[:-1], -1)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU and this build of torch have blocked kernels for a dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.float32:
        return _is_x86()
    supported = _SUPPORTED.get(dtype)
    return supported is not None and bool(getattr(torch.ops.mkldnn, supported)())


def lacks_kernels(dtype: torch.dtype) -> bool:
    """Whether 16-bit products run in torch's own fallbacks here: an x86 CPU before AVX-512."""
    return dtype in _SUPPORTED and _is_x86() and not can_pack(dtype)


@torch.inference_mode()
def pack(model: PreTrainedModel) -> None:
    """Take a CPU model's weights out of the checkpoint's mapping, and its linear layers into the format of its CPU."""
    if can_pack(model.dtype):
        _replace_linear(model, PackedLinear)
    elif lacks_kernels(model.dtype):
        _replace_linear(model, partial(WidenedLinear, workspace=torch.empty(_WORKSPACE)))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _replace_linear(model: PreTrainedModel, layout: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                weight: Tensor = layer.weight
            elif type(layer) is Conv1D:  # GPT-2's name for a linear layer with a transposed weight
                weight = layer.weight.T
            else:
                continue
            if weight.dtype != torch.float32 or weight.numel() > _SMALL:
                setattr(parent, name, layout(weight, layer.bias))


def _tiled(rows: int) -> int:
    return _SMALL_TILE if rows <= _SMALL_TILE else -(-rows // _TILE) * _TILE


def _parameter(values: Tensor) -> nn.Parameter:
    """Itself where it is one already: tied weights stay one."""
    if isinstance(values, nn.Parameter):
        return values
    return nn.Parameter(values.contiguous(), requires_grad=False)


def _is_x86() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
