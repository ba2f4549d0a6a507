"""Puts quantised weights into a model: into the kernels' layers, or dequantised where there are no kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.native_experts import NativeExperts, are_experts, fused_experts, is_fused, matrix, weights_in
from dynatree.engine.cpu.packing import weight_of
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.weights.quantized_weight import (
    GROUPS,
    MOST_INPUTS,
    QuantizedWeight,
    format_names,
    group_of,
    rounded,
)

_OUTPUT_BITS = 8  # at least, in the output layer
_SCALE_BITS = 16
# Layers that choose a token's experts keep their precision; they are small, and an error changes the choice.
_ROUTERS = frozenset({"gate", "router"})


def layer_of(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, native: bool) -> nn.Module:
    """Return a linear layer that keeps the quantised weight, or without native kernels the dequantised one."""
    if native:
        return QuantizedLinear(weight, bias, dtype)
    features, inputs = weight.codes.shape
    layer = nn.Linear(inputs, features, bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.dequantized().to(dtype), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(dtype), requires_grad=False)
    return layer


@torch.inference_mode()
def quantize(
    module: nn.Module,
    bits: int,
    dtype: torch.dtype,
    native: bool,
    output: nn.Module | None = None,
    apart: Collection[nn.Module] = (),
) -> None:
    """Round the weights of a module's linear layers to 8 or 4 bits.

    Args:
        module: A model or a part of one, changed in place.
        bits: 8 or 4.
        dtype: Data type of activations.
        native: Whether the project's own kernels compute the layers.
        output: The output layer, which has 8 bits in any case.
        apart: Modules within `module` that stay unchanged.

    Raises:
        StartupError: See `check_groups`.
    """
    left = {id(each) for owner in apart for each in owner.modules()}
    for parent, name, own, group in list(_rounded(module, bits, output)):
        if id(parent) in left:
            continue
        layer = getattr(parent, name)
        bias: Tensor | None = layer.bias
        setattr(parent, name, layer_of(rounded(weight_of(layer), own, group), bias, dtype, native))
    for parent, name, experts in list(fused_experts(module)):
        if id(parent) in left:
            continue
        weights = [rounded(matrix(each), bits, _group(each, bits)) for each in weights_in(experts)]
        if native:
            gate_up, down = (QuantizedLinear(each, None, dtype) for each in weights)
            setattr(parent, name, NativeExperts(gate_up, down, len(experts.down_proj)))
        else:
            for parameter, each in zip(weights_in(experts), weights, strict=True):
                parameter.data = each.dequantized().to(dtype).view_as(parameter)


def check_groups(model: nn.Module, bits: int) -> None:
    """Refuse a model that `quantize` would refuse; the weights may be on the meta device.

    Raises:
        StartupError: A layer's number of inputs is no multiple of the smallest group, or a layer's experts are in a
            form that is not rounded.
    """
    for _ in _rounded(model, bits, None):
        pass


def formats_of(model: nn.Module, bits: int, output: nn.Module | None) -> str:
    """Return the names of the formats of a model's weights after `quantize`; see `format_names`."""
    return format_names(f"int{own}" for _, _, own, _ in _rounded(model, bits, output))


def bytes_of(module: nn.Module, bits: int | None = None, output: nn.Module | None = None) -> int:
    """Return the bytes of a module's parameters; with `bits`, those after `quantize` with the kernels."""
    rounded_bits: dict[int, float] = {}  # bits of a weight, by the id of the layer or of the experts' parameter
    if bits:
        for parent, name, own, group in _rounded(module, bits, output):
            rounded_bits[id(getattr(parent, name))] = own + _SCALE_BITS / group
        for _, _, experts in fused_experts(module):
            for weights in weights_in(experts):
                rounded_bits[id(weights)] = bits + _SCALE_BITS / _group(weights, bits)
    whole: dict[int, int] = {}  # bytes, by the parameter's id; tied parameters count once
    rest = 0.0
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            each = id(owner) if name == "weight" else id(parameter)
            if each in rounded_bits:
                rest += parameter.numel() * rounded_bits[each] / 8
            else:
                whole[id(parameter)] = parameter.nbytes
    return sum(whole.values()) + int(rest)


def _rounded(module: nn.Module, bits: int, output: nn.Module | None) -> Iterator[tuple[nn.Module, str, int, int]]:
    """Yield the linear layers that are rounded: the parent, the name there, the bits and the size of a group.

    Raises:
        StartupError: See `check_groups`.
    """
    for parent in module.modules():
        if are_experts(parent) and not is_fused(parent):
            raise StartupError(
                "--weights: the experts of its layers have a form that is not rounded; leave the option out"
            )
        for name, layer in parent.named_children():
            if type(layer) not in (nn.Linear, Conv1D) or name in _ROUTERS:
                continue
            own, inputs = max(bits, _OUTPUT_BITS) if layer is output else bits, weight_of(layer).shape[1]
            group = group_of(inputs, MOST_INPUTS[own])
            if group is None:
                raise StartupError(f"--weights: {name} has {inputs} inputs, expected multiples of {GROUPS[-1]}")
            yield parent, name, own, group


def _group(weights: Tensor, bits: int) -> int:
    """Return the inputs of a group of experts' weights `[experts, features, inputs]`."""
    group = group_of(weights.shape[-1], MOST_INPUTS[bits])
    assert group is not None, "fused experts have whole panels of features, which are the inputs of the next layer"
    return group
