"""What a layer's module holds, as named tensors, and how a module points at such tensors elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dynatree.common.engine.native_linear import NativeLinear

_WEIGHT, _BIAS = "packed weight", "packed bias"


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """The tensors of a layer whose linear layers may be the kernels', by name; buffers are left where they are."""
    tensors: dict[str, Tensor] = dict(layer.named_parameters())
    for name, module in layer.named_modules():
        if isinstance(module, NativeLinear):
            tensors[f"{name}.{_WEIGHT}"] = module.weight
            if module.bias is not None:
                tensors[f"{name}.{_BIAS}"] = module.bias
    return tensors


def bind(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Have a layer of meta tensors point at the tensors that `tensors_of` named."""
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        if last == _BIAS:
            continue
        parent = layer.get_submodule(owner)
        if last == _WEIGHT:
            above, _, own = owner.rpartition(".")
            linear = NativeLinear.bound(tensor, tensors.get(f"{owner}.{_BIAS}"), *_sizes(parent))
            setattr(layer.get_submodule(above), own, linear)
        else:
            setattr(parent, last, nn.Parameter(tensor, requires_grad=False))
    left = [name for name, parameter in layer.named_parameters() if parameter.device.type == "meta"]
    assert not left, f"{left} are in no file"


def _sizes(linear: nn.Module) -> tuple[int, int]:
    """Features out and in of the module that a checkpoint has."""
    assert isinstance(linear.weight, Tensor)
    out_features, in_features = linear.weight.shape
    return (in_features, out_features) if type(linear) is Conv1D else (out_features, in_features)


def fill(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a layer of meta tensors its own, by the names that its state has.

    Raises:
        KeyError: One is missing.
    """
    for name, _ in list(layer.named_parameters()):
        owner, _, last = name.rpartition(".")
        setattr(layer.get_submodule(owner), last, nn.Parameter(tensors[name].clone(), requires_grad=False))


def bytes_of(layer: nn.Module) -> int:
    """Of a layer's parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in layer.parameters())
