"""Puts quantised weights into a model: into the kernels' layers, or dequantised where there are no kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.packing import weight_of
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.weights.quantized_weight import GROUPS, MOST_INPUTS, QuantizedWeight, group_of, rounded

_OUTPUT_BITS = 8  # at least, in the output layer
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
def quantize(module: nn.Module, bits: int, dtype: torch.dtype, native: bool, output: nn.Module | None = None) -> None:
    """Round the weights of a module's linear layers to 8 or 4 bits.

    Args:
        module: A model or a part of one, changed in place.
        bits: 8 or 4.
        dtype: Data type of activations.
        native: Whether the project's own kernels compute the layers.
        output: The output layer, which has 8 bits in any case.

    Raises:
        StartupError: See `check_groups`.
    """
    for parent, name, layer in _linear_layers(module):
        own = max(bits, _OUTPUT_BITS) if layer is output else bits
        bias: Tensor | None = layer.bias  # type: ignore[assignment]
        weight = rounded(weight_of(layer), own, _group(name, layer, own))
        setattr(parent, name, layer_of(weight, bias, dtype, native))


def check_groups(model: nn.Module, bits: int) -> None:
    """Refuse a model that `quantize` would refuse; the weights may be on the meta device.

    Raises:
        StartupError: A layer's number of inputs is no multiple of the smallest group.
    """
    for _, name, layer in _linear_layers(model):
        _group(name, layer, bits)


def _linear_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield each layer that `quantize` replaces, behind the module that has it and its name there."""
    parents = [each for each in module.modules() if next(each.children(), None) is not None]  # keeps no layer in memory
    for parent in parents:
        for name, layer in list(parent.named_children()):
            if type(layer) in (nn.Linear, Conv1D) and name not in _ROUTERS:
                yield parent, name, layer


def _group(name: str, layer: nn.Module, bits: int) -> int:
    inputs = weight_of(layer).shape[1]
    group = group_of(inputs, MOST_INPUTS[bits])
    if group is None:
        raise StartupError(f"--weights: {name} has {inputs} inputs, expected multiples of {GROUPS[-1]}")
    return group
