"""Puts quantised weights into a model: into the kernels' layers, or dequantised where there are no kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dynatree.common.errors import StartupError
from dynatree.engine.cpu.packing import weight_of
from dynatree.engine.cpu.quantized_linear import QuantizedLinear
from dynatree.engine.weights.quantized_weight import MOST_INPUTS, QuantizedWeight, group_of, rounded

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
        StartupError: A layer's number of inputs is no multiple of the smallest group.
    """
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) not in (nn.Linear, Conv1D) or name in _ROUTERS:
                continue
            weight, own = weight_of(layer), max(bits, _OUTPUT_BITS) if layer is output else bits
            group = group_of(weight.shape[1], MOST_INPUTS[own])
            if group is None:
                raise StartupError(
                    f"--weights int{bits}: {name} has {weight.shape[1]} inputs, expected multiples of 16"
                )
            bias: Tensor | None = layer.bias  # type: ignore[assignment]
            setattr(parent, name, layer_of(rounded(weight, own, group), bias, dtype, native))
