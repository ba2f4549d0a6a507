"""Repacks the weights of GPTQ, AWQ and compressed-tensors checkpoints as codes and scales, without rounding anything.

All three store codes of 4 or 8 bits in int32 words, and for each group of inputs a scale and often the code that stands
for zero. GPTQ (Frantar et al. 2022) packs along the inputs, AWQ (Lin et al. 2023) along the features in an order of its
own, and compressed-tensors along the inputs of a transposed weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynatree.engine.weights.quantized_weight import QuantizedWeight, group_of

_WORD = 32  # bits
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # features of a word's 4 bits, the lowest first
_BITS = (4, 8)
_ALL_INPUTS = -1  # a group_size by which a scale is that of all inputs


@dataclass(frozen=True)
class PackedFormat:
    """How a checkpoint stores the weights of its linear layers.

    Attributes:
        name: Name of the method.
        bits: Bits of a code.
        symmetric: Whether one code stands for zero in all groups.
        tensors: Names of a layer's tensors in the checkpoint, the codes first; others than the first may be absent.
        scales: Name of the scales among them.
        unpacked: Makes a weight of a layer's tensors by these names; raises ValueError if they do not go together.
    """

    name: str
    bits: int
    symmetric: bool
    tensors: tuple[str, ...]
    scales: str
    unpacked: Callable[[Mapping[str, Tensor]], QuantizedWeight]

    @property
    def scale_bytes(self) -> int:
        """Bytes of a group's scale in memory, with its minimum if there is one, where scales are float16."""
        return 2 if self.symmetric else 8


def format_of(settings: Mapping[str, Any]) -> PackedFormat:
    """Return the format that a `quantization_config` names.

    Raises:
        ValueError: The format is not served; the message names it.
    """
    method = settings.get("quant_method")
    if method not in METHODS:
        raise ValueError(f"its weights are quantised by {method}, expected {', '.join(METHODS)}")
    return METHODS[method](settings)


def _gptq(settings: Mapping[str, Any]) -> PackedFormat:
    bits, size = _checked_bits(settings.get("bits")), _checked_group(settings.get("group_size"))
    version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq").lower()
    first = 0 if version == "gptq_v2" else 1  # the first version stores zero - 1

    def unpacked(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        codes = _unpacked(_matrix(tensors, "qweight", torch.int32).T, bits)  # [features, inputs]
        zeros = (_unpacked(_matrix(tensors, "qzeros", torch.int32), bits) + first).T  # [features, groups]
        weight = _weight("gptq", codes, _matrix(tensors, "scales").T, zeros, bits, size)
        if settings.get("desc_act") or "g_idx" in tensors:
            inputs, groups = codes.shape[1], zeros.shape[1]
            order = _tensor(tensors, "g_idx").long()
            if not torch.equal(order, torch.arange(inputs) // (inputs // groups)):
                raise ValueError("its groups of inputs are not in order (desc_act)")
        return weight

    tensors = ("qweight", "qzeros", "scales", "g_idx")
    return PackedFormat("gptq", bits, bool(settings.get("sym")), tensors, "scales", unpacked)


def _awq(settings: Mapping[str, Any]) -> PackedFormat:
    bits, size = _checked_bits(settings.get("bits")), _checked_group(settings.get("group_size"))
    version = settings.get("version", "gemm")
    if bits != 4 or str(version).lower() != "gemm":
        raise ValueError(f"its awq has {bits} bits and version {version}, expected 4 and gemm")

    def in_order(packed: Tensor) -> Tensor:
        words = _unpacked(packed, bits).view(len(packed), -1, len(_AWQ_ORDER))
        ordered = torch.empty_like(words)
        ordered[..., _AWQ_ORDER] = words
        return ordered.flatten(-2)

    def unpacked(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        codes, zeros = (in_order(_matrix(tensors, name, torch.int32)).T for name in ("qweight", "qzeros"))
        return _weight("awq", codes, _matrix(tensors, "scales").T, zeros, bits, size)

    return PackedFormat("awq", bits, False, ("qweight", "qzeros", "scales"), "scales", unpacked)


def _compressed(settings: Mapping[str, Any]) -> PackedFormat:
    if settings.get("transform_config"):
        raise ValueError("its compressed-tensors expect rotated activations (transform_config)")
    schemes, form = settings.get("config_groups"), settings.get("format")
    schemes = list(schemes.values()) if isinstance(schemes, Mapping) else []
    weights = schemes[0].get("weights") if len(schemes) == 1 and isinstance(schemes[0], Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError(f"its compressed-tensors have {len(schemes)} groups of layers, expected 1")
    bits, strategy = _checked_bits(weights.get("num_bits")), weights.get("strategy")
    if weights.get("type", "int") != "int" or form not in ("pack-quantized", "int-quantized", "naive-quantized"):
        raise ValueError(f"its compressed-tensors are {weights.get('type')} in the format {form}, expected int")
    if strategy not in ("group", "channel", "tensor"):
        raise ValueError(f"its compressed-tensors have scales by {strategy}, expected group or channel")
    size = _checked_group(weights.get("group_size")) if strategy == "group" else _ALL_INPUTS
    middle = 1 << (bits - 1)

    def by_feature(numbers: Tensor, features: int) -> Tensor:
        """Return the numbers of a tensor, of channels or of groups as `[features, groups]`."""
        if strategy == "tensor" and numbers.numel() == 1:
            return numbers.reshape(1, 1).expand(features, 1)
        return numbers if numbers.dim() > 1 else numbers.reshape(-1, 1)

    def unpacked(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        if "weight_g_idx" in tensors or weights.get("actorder") in ("group", "dynamic"):
            raise ValueError("its groups of inputs are not in order (actorder)")
        if form == "pack-quantized":
            packed, shape = _matrix(tensors, "weight_packed", torch.int32), _tensor(tensors, "weight_shape")
            features, inputs = shape.long().tolist() if shape.shape == (2,) else (0, 0)
            if packed.shape != (features, -(-inputs * bits // _WORD)):
                shapes = f"weight_packed {list(packed.shape)} and weight_shape {shape.tolist()}"
                raise ValueError(f"{shapes} do not go together as {bits} bits")
            codes = _unpacked(packed, bits)[:, :inputs]
        else:
            shifted = _matrix(tensors, "weight", torch.int8).to(torch.int16) + middle
            codes = shifted.to(torch.uint8)
            if bool((shifted >> bits).any()):
                raise ValueError(f"weight has codes beyond {bits} bits")
        scales = by_feature(_tensor(tensors, "weight_scale"), len(codes))
        zeros = torch.full_like(scales, middle, dtype=torch.float32)
        if "weight_zero_point" in tensors:
            points = tensors["weight_zero_point"]
            is_packed = points.dtype == torch.int32 and points.dim() == 2
            points = _unpacked(points.T, bits).T[: len(codes)].float() if is_packed else points.float() + middle
            zeros = by_feature(points, len(codes))
        return _weight("compressed-tensors", codes, scales, zeros, bits, size)

    names = ("weight_packed", "weight", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    symmetric = bool(weights.get("symmetric", True))
    return PackedFormat("compressed-tensors", bits, symmetric, names, "weight_scale", unpacked)


def _checked_bits(bits: object) -> int:
    if type(bits) is not int or bits not in _BITS:
        raise ValueError(f"its weights have {bits} bits, expected 4 or 8")
    return bits


def _checked_group(size: object) -> int | None:
    if size is None or (type(size) is int and (size > 0 or size == _ALL_INPUTS)):
        return size
    raise ValueError(f"its group_size is {size}, expected a number of inputs or {_ALL_INPUTS}")


def _tensor(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"its checkpoint lacks {name}")
    return tensors[name]


def _matrix(tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Return a layer's matrix, which has the data type if one is named."""
    found = _tensor(tensors, name)
    if found.dim() != 2 or (dtype and found.dtype != dtype):
        raise ValueError(f"{name} is {found.dtype} {list(found.shape)}, expected a matrix of {dtype or 'numbers'}")
    return found


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes in int32 words `[..., words]`, the lowest bits first, as uint8 `[..., codes]`."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return (packed.contiguous()[..., None] >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _weight(kind: str, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, size: int | None) -> QuantizedWeight:
    """Return scale * (code - zero).

    Args:
        kind: Name of the format.
        codes: uint8 `[features, inputs]`.
        scales: `[features, groups]`.
        zeros: Codes that stand for zero, `[features, groups]`.
        bits: 8 or 4.
        size: Inputs of a group by the `quantization_config`; None if it names none.

    Raises:
        ValueError: A scale is not finite, or shapes do not go together.
    """
    features, inputs = codes.shape
    size = inputs if size == _ALL_INPUTS else size or max(inputs // max(scales.shape[-1], 1), 1)
    expected = (features, inputs // size)
    if inputs % size or 0 in expected or scales.shape != expected or zeros.shape != expected:
        shapes = f"codes {list(codes.shape)}, scales {list(scales.shape)} and zeros {list(zeros.shape)}"
        raise ValueError(f"{shapes} do not go together as {bits} bits in groups of {size}")
    group = group_of(size, 128)
    if group is None:
        raise ValueError(f"its groups have {size} inputs, expected a multiple of 16")
    if not scales.is_floating_point() or not bool(scales.isfinite().all()):
        raise ValueError("a scale is NaN or infinite, or no floating-point number")
    repeats = size // group
    scales = scales.repeat_interleave(repeats, 1)
    half = scales.half()
    stored = half if torch.equal(half.double(), scales.double()) else scales.float()
    codes = codes.contiguous()
    first = float(zeros.flatten()[0])
    if bool((zeros == first).all()):
        return QuantizedWeight(kind, codes, stored, bits, int(first), narrow=bits == 4)
    minimums = -(scales.float() * zeros.float().repeat_interleave(repeats, 1))  # exact: 11 bits by 9
    return QuantizedWeight(kind, codes, scales.float(), bits, minimums=minimums, narrow=bits == 4)


METHODS: dict[str, Callable[[Mapping[str, Any]], PackedFormat]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}
