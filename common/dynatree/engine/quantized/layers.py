"""Puts quantised weights into a model: into the kernels' layers, or dequantised where there are no kernels."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dynatree.common.errors import StartupError
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


def check_groups(model: nn.Module, bits: int) -> None:
    """Refuse a model that `quantize` would refuse; the weights may be on the meta device.

    Raises:
        StartupError: A layer's number of inputs is no multiple of the smallest group.
    """
    for _ in _rounded(model, bits, None):
        pass


def formats_of(model: nn.Module, bits: int, output: nn.Module | None) -> str:
    """Return the names of the formats of a model's weights after `quantize`; see `format_names`."""
    return format_names(f"int{own}" for _, _, own, _ in _rounded(model, bits, output))


def bytes_of(module: nn.Module, bits: int | None = None, output: nn.Module | None = None) -> int:
    """Return the bytes of a module's parameters; with `bits`, those after `quantize` with the kernels."""
    linear: dict[int, float] = {}  # bits of a weight, by the layer's id
    for parent, name, own, group in _rounded(module, bits, output) if bits else ():
        linear[id(getattr(parent, name))] = own + _SCALE_BITS / group
    whole: dict[int, int] = {}  # bytes, by the parameter's id; tied parameters count once
    rest = 0.0
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if name == "weight" and id(owner) in linear:
                rest += parameter.numel() * linear[id(owner)] / 8
            else:
                whole[id(parameter)] = parameter.nbytes
    return sum(whole.values()) + int(rest)


def _rounded(module: nn.Module, bits: int, output: nn.Module | None) -> Iterator[tuple[nn.Module, str, int, int]]:
    """Yield the linear layers that are rounded: the parent, the name there, the bits and the size of a group.

    Raises:
        StartupError: See `check_groups`.
    """
    for parent in module.modules():
        for name, layer in parent.named_children():
            if type(layer) not in (nn.Linear, Conv1D) or name in _ROUTERS:
                continue
            own, inputs = max(bits, _OUTPUT_BITS) if layer is output else bits, weight_of(layer).shape[1]
            group = group_of(inputs, MOST_INPUTS[own])
            if group is None:
                raise StartupError(f"--weights: {name} has {inputs} inputs, expected multiples of {GROUPS[-1]}")
            yield parent, name, own, group
