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


@dataclass(frozen=True)
class PackedFormat:
    """How a checkpoint stores the weights of its linear layers.

    Attributes:
        name: Name of the method.
        bits: Bits of a code.
        symmetric: Whether one code stands for zero in all groups.
        tensors: Names of a layer's tensors in the checkpoint, the codes first; others than the first may be absent.
        scales: Name of the scales among them.
        unpacked: Makes a weight of a layer's tensors by these names.
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
    bits = _checked_bits(settings.get("bits"))
    first = 0 if settings.get("checkpoint_format") == "gptq_v2" else 1  # the first version stores zero - 1

    def unpacked(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        codes = _unpacked(tensors["qweight"].T, bits)  # [features, inputs]
        zeros = (_unpacked(tensors["qzeros"], bits) + first).T  # [features, groups]
        scales = tensors["scales"].T
        if "g_idx" in tensors:
            in_order = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
            if not torch.equal(tensors["g_idx"].long(), in_order):
                raise ValueError("its groups of inputs are not in order (desc_act)")
        return _weight("gptq", codes, scales, zeros, bits)

    tensors = ("qweight", "qzeros", "scales", "g_idx")
    return PackedFormat("gptq", bits, bool(settings.get("sym")), tensors, "scales", unpacked)


def _awq(settings: Mapping[str, Any]) -> PackedFormat:
    bits = _checked_bits(settings.get("bits"))
    if bits != 4 or settings.get("version", "gemm").lower() != "gemm":
        raise ValueError(f"its awq has {bits} bits and version {settings.get('version')}, expected 4 and gemm")

    def in_order(packed: Tensor) -> Tensor:
        words = _unpacked(packed, bits).view(len(packed), -1, len(_AWQ_ORDER))
        ordered = torch.empty_like(words)
        ordered[..., _AWQ_ORDER] = words
        return ordered.flatten(-2)

    def unpacked(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        codes, zeros = in_order(tensors["qweight"]).T, in_order(tensors["qzeros"]).T
        return _weight("awq", codes, tensors["scales"].T, zeros, bits)

    return PackedFormat("awq", bits, False, ("qweight", "qzeros", "scales"), "scales", unpacked)


def _compressed(settings: Mapping[str, Any]) -> PackedFormat:
    schemes = list((settings.get("config_groups") or {}).values())
    if len(schemes) != 1 or not schemes[0].get("weights"):
        raise ValueError(f"its compressed-tensors have {len(schemes)} groups of layers, expected 1")
    weights, form = schemes[0]["weights"], settings.get("format")
    bits = _checked_bits(weights.get("num_bits"))
    if weights.get("type", "int") != "int" or form not in ("pack-quantized", "int-quantized", "naive-quantized"):
        raise ValueError(f"its compressed-tensors are {weights.get('type')} in the format {form}, expected int")
    if weights.get("strategy") not in ("group", "channel", "tensor"):
        raise ValueError(f"its compressed-tensors have scales by {weights.get('strategy')}, expected group or channel")
    middle = 1 << (bits - 1)

    def unpacked(tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        if "weight_g_idx" in tensors:
            raise ValueError("its groups of inputs are not in order (actorder)")
        if "weight_packed" in tensors:
            inputs = int(tensors["weight_shape"][1])
            codes = _unpacked(tensors["weight_packed"], bits)[:, :inputs]
        else:
            codes = (tensors["weight"].to(torch.int16) + middle).to(torch.uint8)
        scales = tensors["weight_scale"]
        scales = (scales if scales.dim() == 2 else scales.reshape(-1, 1)).expand(len(codes), -1)
        zeros = torch.full_like(scales, middle, dtype=torch.float32)
        if "weight_zero_point" in tensors:
            points = tensors["weight_zero_point"]
            packed = points.dtype == torch.int32
            zeros = _unpacked(points.T, bits).T[: len(codes)].float() if packed else points.float() + middle
        return _weight("compressed-tensors", codes, scales, zeros, bits)

    names = ("weight_packed", "weight", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    symmetric = bool(weights.get("symmetric", True))
    return PackedFormat("compressed-tensors", bits, symmetric, names, "weight_scale", unpacked)


def _checked_bits(bits: object) -> int:
    if bits not in _BITS:
        raise ValueError(f"its weights have {bits} bits, expected 4 or 8")
    assert isinstance(bits, int)
    return bits


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the codes in int32 words `[..., words]`, the lowest bits first, as uint8 `[..., codes]`."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return (packed.contiguous()[..., None] >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _weight(kind: str, codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> QuantizedWeight:
    """Return scale * (code - zero): codes `[features, inputs]`, scales and zeros `[features, groups]`.

    Raises:
        ValueError: A scale is not finite, or shapes do not go together.
    """
    features, inputs = codes.shape
    groups = scales.shape[1]
    group = group_of(inputs // groups, 128) if groups and inputs % groups == 0 else None
    if group is None or scales.shape != (features, groups) or zeros.shape != (features, groups):
        raise ValueError(f"weights {list(codes.shape)} and scales {list(scales.shape)} do not go together")
    if not bool(scales.isfinite().all()):
        raise ValueError("a scale is NaN or infinite")
    repeats = inputs // groups // group
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
