"""Weights laid out for the CPU: linear layers in the layout of its fastest kernels, other weights copied to memory.

A forward pass over few rows takes the time of reading the weights once. A loaded checkpoint is row-major and mapped
from its file in pages of 4 KiB. The same weights in huge pages (`dynatree.cli.main` requests them from torch) and in
oneDNN's blocked layout are read up to 1.8 times as fast, and each further row costs less. CPUs without 16-bit kernels
gain as much from FBGEMM's packed layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dynatree.engine.cpu.native_experts import fused_experts, native_experts
from dynatree.engine.cpu.native_linear import NativeLinear, fits
from dynatree.engine.forward.batch_invariance import MIN_ROWS, is_batch_invariant, is_x86

_SUPPORTED = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
# Number of rows for which oneDNN chooses a weight's blocks. 16-bit weights blocked for 1 row stay as fast for up to 16
# rows. float32 weights blocked for 16 rows match those blocked for 1 at one row, and are much faster above.
_BLOCKED_FOR = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 16}
# Above _FEW_ROWS rows, oneDNN's AMX kernels are slow if the number of rows is not a multiple of 4. A forward pass of a
# 2.8B shape over 32, 36, 37, 38, 63 and 64 rows took 353, 401, 512, 506, 540 and 465 ms.
_FEW_ROWS = 32
_ROUND_ROWS = 4
_SMALL = 2**18  # elements; up to this size torch's float32 layer is faster, because a oneDNN call costs about 40 us
_HALF_EXPONENT = 16  # the largest float16 is just below 2 to this power
_TILE = 6  # rows of FBGEMM's largest tile
_MAX_TRIED = 20 * _TILE


class PackedLinear(nn.Module):
    """A linear layer whose weight `[out_features, in_features]` is kept only in oneDNN's blocked layout.

    If kernels are batch-invariant at padded sizes (`is_batch_invariant`), fewer than `MIN_ROWS` rows are padded to
    `MIN_ROWS`, which takes no longer. On a CPU with AMX, numbers of rows above `_FEW_ROWS` are padded to multiples of
    `_ROUND_ROWS`, which is up to a quarter faster.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else _parameter(bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _BLOCKED_FOR[weight.dtype])
        self._min_rows = MIN_ROWS if is_batch_invariant(weight.dtype) else 0
        self._rounds = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()

    def forward(self, rows: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        count = rows.shape[:-1].numel()
        wanted = max(count, self._min_rows)
        if self._rounds and wanted > _FEW_ROWS:
            wanted += -wanted % _ROUND_ROWS
        if wanted == count:
            return self._multiply(rows)
        padded = pad(rows.reshape(count, self.in_features), (0, 0, 0, wanted - count))
        return self._multiply(padded)[:count].view(*rows.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output


class HalfLinear(nn.Module):
    """A 16-bit linear layer for CPUs without kernels of its dtype, where torch multiplies one row after another.

    FBGEMM multiplies float32 rows by packed float16 weights and reads the weights once for several rows. The weights
    are scaled by a power of two into float16's range, so bfloat16 weights keep every bit. Only weights below 2^-32 of
    the largest weight lose bits, and their error is less than 2^-40 of the largest. Products are summed in float32 and
    rounded once, as in 16-bit kernels. Rows are padded with zeros to batch-invariant numbers of rows.

    Args:
        weight: `[out_features, in_features]`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        wide = weight.float()  # [out_features, in_features]
        self._scale = 2.0 ** (_HALF_EXPONENT - int(torch.frexp(wide.abs().max()).exponent))
        self._packed = torch.ops.quantized.linear_prepack_fp16(
            wide * self._scale, None if bias is None else bias.float().contiguous()
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., out_features]`."""
        inputs = rows.reshape(-1, self.in_features)
        count = len(inputs)
        padded = torch.zeros(_padded_rows(count), self.in_features)
        padded[:count] = inputs
        output: Tensor = torch.ops.quantized.linear_dynamic_fp16(padded.div_(self._scale), self._packed)
        return output[:count].to(rows.dtype).view(*rows.shape[:-1], self.out_features)


def _padded_rows(rows: int) -> int:
    """Return the smallest number of rows, at least `rows`, that FBGEMM sums entirely in the order of a whole tile."""
    if rows > _MAX_TRIED:
        return -(-rows // _TILE) * _TILE
    return next((each for each in _tile_order_counts() if each >= rows), rows)


@cache
def _tile_order_counts() -> tuple[int, ...]:
    """Find by trial the numbers of rows, up to `_MAX_TRIED`, that FBGEMM sums in the order of whole tiles.

    FBGEMM splits rows into tiles by an internal table. Tiles of three or more rows sum in one order; tiles of one row
    and of two rows sum in other orders.
    """
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(count, 1024, generator=generator) for count in (256, _MAX_TRIED))
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    tiles = (rows[start : start + _TILE] for start in range(0, _MAX_TRIED, _TILE))
    whole = torch.cat([torch.ops.quantized.linear_dynamic_fp16(tile, packed) for tile in tiles])
    return tuple(
        count
        for count in range(1, _MAX_TRIED + 1)
        if torch.equal(torch.ops.quantized.linear_dynamic_fp16(rows[:count], packed), whole[:count])
    )


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU and this build of torch have oneDNN kernels over blocked weights of a dtype.

    oneDNN also accepts bfloat16 on AVX-512 without bfloat16 instructions, and emulates them. A layer of 10,240 by 2,560
    took 20 ms at one row on such a CPU, and 4 ms with FBGEMM.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.float32:
        return is_x86()
    if dtype == torch.bfloat16 and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return False
    supported = _SUPPORTED.get(dtype)
    return supported is not None and bool(getattr(torch.ops.mkldnn, supported)())


def _lacks_kernels(dtype: torch.dtype) -> bool:
    """Whether torch multiplies 16-bit matrices by its slow fallback: on x86 CPUs without 16-bit instructions."""
    return dtype in _SUPPORTED and is_x86() and not can_pack(dtype)


@torch.inference_mode()
def pack_linear(module: nn.Module) -> None:
    """Convert a module's linear layers to the layout of the project's own kernels."""
    _replace_linear(module, NativeLinear, everywhere=True)


@torch.inference_mode()
def pack(model: PreTrainedModel, native: bool, apart: Collection[nn.Module] = ()) -> None:
    """Convert a model's linear layers to the best layout for this CPU, and copy other weights out of the file mapping.

    Args:
        model: Model on the CPU, changed in place.
        native: Whether the project's own kernels are available.
        apart: Modules of the model that stay unchanged.
    """
    left = {id(each) for module in apart for each in module.modules()}
    quantised = any(isinstance(module, NativeLinear) for module in model.modules())
    if native:
        _replace_experts(model, left)
    if native and multiplies_natively(model.dtype, quantised):
        _replace_linear(model, NativeLinear, everywhere=True, left=left)
    elif can_pack(model.dtype):
        _replace_linear(model, PackedLinear, left=left)
    elif _lacks_kernels(model.dtype) and "fbgemm" in torch.backends.quantized.supported_engines:
        # the packing of one layer runs in one thread
        _replace_linear(model, HalfLinear, torch.get_num_threads(), left=left)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(module) not in left:
                parameter.data = parameter.data.clone()


def multiplies_natively(dtype: torch.dtype, quantised: bool) -> bool:
    """Whether linear layers take the project's own kernels where they are available.

    On a CPU with AMX, oneDNN's kernels are faster in 16 bits. A model with quantised layers still takes the project's,
    because its native program can call no others.
    """
    return quantised or not (dtype in _SUPPORTED and torch.cpu._is_amx_tile_supported())


def weights_of(model: PreTrainedModel) -> Iterator[Tensor]:
    """Yield the weights of a packed model, except those in oneDNN's and FBGEMM's layouts, which have no address."""
    yield from model.parameters()
    yield from (layer.weight for layer in model.modules() if isinstance(layer, NativeLinear))


def _replace_experts(model: nn.Module, left: Collection[int]) -> None:
    for parent, name, experts in list(fused_experts(model)):
        if id(parent) not in left:
            setattr(parent, name, native_experts(experts))


def _replace_linear(
    model: nn.Module,
    layout: Callable[[Tensor, Tensor | None], nn.Module],
    threads: int = 1,
    everywhere: bool = False,
    left: Collection[int] = (),
) -> None:
    def replace(place: tuple[nn.Module, str]) -> None:
        layer = getattr(*place)
        with torch.inference_mode():
            setattr(*place, layout(weight_of(layer), layer.bias))

    places = [
        (parent, name)
        for parent in model.modules()
        if id(parent) not in left
        for name, layer in parent.named_children()
        if (type(layer) in (nn.Linear, Conv1D) and fits(weight_of(layer)) if everywhere else _is_slow(layer))
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(replace, places))


def _is_slow(layer: nn.Module) -> bool:
    """Whether `layer` is a linear layer that another layout makes faster."""
    if type(layer) not in (nn.Linear, Conv1D):
        return False
    weight = weight_of(layer)
    return weight.dtype != torch.float32 or weight.numel() > _SMALL


def weight_of(layer: nn.Module) -> Tensor:
    """Return the weight `[out_features, in_features]`; GPT-2's `Conv1D` stores it transposed."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.T if type(layer) is Conv1D else weight


def _parameter(values: Tensor) -> nn.Parameter:
    """Return `values` as a parameter; a parameter is returned unchanged, so that tied weights stay tied."""
    if isinstance(values, nn.Parameter):
        return values
    return nn.Parameter(values.contiguous(), requires_grad=False)
