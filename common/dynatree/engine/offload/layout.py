"""The tensors of a layer by name, and the binding of a layer's module to such tensors in other memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dynatree.engine.cpu.native_linear import NativeLinear
from dynatree.engine.cpu.quantized_linear import QuantizedLinear

_WEIGHT, _BIAS = "packed weight", "packed bias"


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a layer by name, including native linear layers and excluding buffers."""
    tensors: dict[str, Tensor] = dict(layer.named_parameters())
    for name, module in layer.named_modules():
        if isinstance(module, NativeLinear):
            form = f" {module.format}" if isinstance(module, QuantizedLinear) else ""
            tensors[f"{name}.{_WEIGHT}{form}"] = module.weight
            if module.bias is not None:
                tensors[f"{name}.{_BIAS}"] = module.bias
    return tensors


def bind(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Point a layer of meta tensors at tensors with the names of `tensors_of`."""
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        if last == _BIAS:
            continue
        parent = layer.get_submodule(owner)
        if last.startswith(_WEIGHT):
            above, _, own = owner.rpartition(".")
            bias, form = tensors.get(f"{owner}.{_BIAS}"), last.removeprefix(f"{_WEIGHT} ")
            linear = NativeLinear.bound if form == _WEIGHT else partial(QuantizedLinear.reloaded, form, _dtype(parent))
            setattr(layer.get_submodule(above), own, linear(tensor, bias, *_sizes(parent)))
        else:
            setattr(parent, last, nn.Parameter(tensor, requires_grad=False))
    left = [name for name, parameter in layer.named_parameters() if parameter.device.type == "meta"]
    assert not left, f"{left} are in no file"


def _dtype(linear: nn.Module) -> torch.dtype:
    assert isinstance(linear.weight, Tensor)
    return linear.weight.dtype


def _sizes(linear: nn.Module) -> tuple[int, int]:
    """Return the output and input features of a linear module of the checkpoint."""
    assert isinstance(linear.weight, Tensor)
    out_features, in_features = linear.weight.shape
    return (in_features, out_features) if type(linear) is Conv1D else (out_features, in_features)
