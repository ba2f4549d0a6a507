"""Weights laid out for the CPU: linear layers as its kernels read them best, everything else in memory of its own.

At few rows a forward takes the time of reading the weights once. A checkpoint is mapped from its file in pages of 4 KiB
and row-major; copied into huge pages (`dynatree.cli.main` asks torch for them), in oneDNN's blocked format, the same
weights stream up to 1.8 times as fast, and further rows cost less. On CPUs without 16-bit kernels FBGEMM's do as much.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dynatree.common.engine.alike import FEWEST_ROWS, is_x86, sums_alike

_SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
# The rows that a weight is blocked for. 16-bit weights, blocked for 1, cost up to 16 rows no more; float32 weights,
# blocked for 16, are as fast as blocked for 1 at one row and much faster above.
_BLOCKED_FOR = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 16}
_SMALL = 2**18  # elements; a blocked float32 layer of no more is slower than torch's own: a call costs some 40 us
_HALF_EXPONENT = 16  # the largest float16 is just below 2 to this power
_TILE = 6  # rows of FBGEMM's largest tile
_MOST_TRIED = 20 * _TILE


class PackedLinear(nn.Module):
    """A linear layer whose weight `[out_features, in_features]` is kept in oneDNN's blocked format alone.

    In 16 bits fewer than four rows are filled up to four where that makes a row's output independent of the rows
    beside it; it takes no longer.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else _parameter(bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _BLOCKED_FOR[weight.dtype])
        self._fewest = FEWEST_ROWS if sums_alike(weight.dtype) else 0

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        count = rows.shape[:-1].numel()
        if count >= self._fewest:
            return self._multiply(rows)
        filled = pad(rows.reshape(count, self.in_features), (0, 0, 0, self._fewest - count))
        return self._multiply(filled)[:count].view(*rows.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output


class HalfLinear(nn.Module):
    """A 16-bit linear layer on a CPU without kernels for the dtype, where torch multiplies one row after the other.

    FBGEMM multiplies float32 rows by float16 weights, which it packs: one reading of the weights serves several rows.
    A power of two brings the weights into float16's range, so bfloat16 weights keep every bit but those of weights
    below 2^-32 of the largest, which lose less than 2^-40 of it. As in 16-bit kernels products are summed in float32
    and rounded once. Rows of zeros fill up a tile of one or two rows, so a row's output does not depend on the rows
    beside it.

    Args:
        weight: `[out_features, in_features]`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        wide = weight.float()
        self._scale = 2.0 ** (_HALF_EXPONENT - int(torch.frexp(wide.abs().max()).exponent))
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            wide * self._scale, None if bias is None else bias.float().contiguous()
        )

    def forward(self, rows: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        inputs = rows.reshape(-1, self.in_features)
        count = len(inputs)
        filled = torch.zeros(_filled_up(count), self.in_features)
        filled[:count] = inputs
        output: Tensor = torch.ops.quantized.linear_dynamic_fp16(filled.div_(self._scale), self._packed)
        return output[:count].to(rows.dtype).view(*rows.shape[:-1], self.out_features)


def _filled_up(rows: int) -> int:
    """The least number of rows, not below this one, that FBGEMM sums as it sums whole tiles."""
    if rows > _MOST_TRIED:
        return -(-rows // _TILE) * _TILE
    return next((each for each in _summed_alike() if each >= rows), rows)


@cache
def _summed_alike() -> tuple[int, ...]:
    """Numbers of rows, up to `_MOST_TRIED`, found by trying; FBGEMM cuts them into tiles by a table of its own.

    Tiles of three rows and more sum in one order, those of one and two in others.
    """
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(count, 1024, generator=generator) for count in (256, _MOST_TRIED))
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    tiles = (rows[start : start + _TILE] for start in range(0, _MOST_TRIED, _TILE))
    whole = torch.cat([torch.ops.quantized.linear_dynamic_fp16(tile, packed) for tile in tiles])
    return tuple(
        count
        for count in range(1, _MOST_TRIED + 1)
        if torch.equal(torch.ops.quantized.linear_dynamic_fp16(rows[:count], packed), whole[:count])
    )


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU and this build of torch have blocked kernels for a dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.float32:
        return is_x86()
    supported = _SUPPORTED.get(dtype)
    return supported is not None and bool(getattr(torch.ops.mkldnn, supported)())


def _lacks_kernels(dtype: torch.dtype) -> bool:
    """Whether 16-bit products run in torch's own fallbacks here: an x86 CPU before AVX-512."""
    return dtype in _SUPPORTED and is_x86() and not can_pack(dtype)


@torch.inference_mode()
def pack(model: PreTrainedModel) -> None:
    """Take a CPU model's weights out of the checkpoint's mapping, and its linear layers into the format of its CPU."""
    if can_pack(model.dtype):
        _replace_linear(model, PackedLinear)
    elif _lacks_kernels(model.dtype) and "fbgemm" in torch.backends.quantized.supported_engines:
        _replace_linear(model, HalfLinear, torch.get_num_threads())  # the packing of one layer runs in one thread
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def _replace_linear(
    model: PreTrainedModel, layout: Callable[[Tensor, Tensor | None], nn.Module], threads: int = 1
) -> None:
    def replace(place: tuple[nn.Module, str]) -> None:
        layer = getattr(*place)
        with torch.inference_mode():
            setattr(*place, layout(_weight(layer), layer.bias))

    places = [
        (parent, name) for parent in model.modules() for name, layer in parent.named_children() if _is_slow(layer)
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(replace, places))


def _is_slow(layer: nn.Module) -> bool:
    """Whether it is a linear layer that another layout makes faster."""
    if type(layer) not in (nn.Linear, Conv1D):
        return False
    weight = _weight(layer)
    return weight.dtype != torch.float32 or weight.numel() > _SMALL


def _weight(layer: nn.Module) -> Tensor:
    """`[out_features, in_features]`; GPT-2's `Conv1D` has it transposed."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.T if type(layer) is Conv1D else weight


def _parameter(values: Tensor) -> nn.Parameter:
    """Itself where it is one already: tied weights stay one."""
    if isinstance(values, nn.Parameter):
        return values
    return nn.Parameter(values.contiguous(), requires_grad=False)
