"""Routers of mixtures whose weights have the same bits however many rows are computed at once.

In models of 16 bits, transformers computes many routers in float32. There, the last bits of torch's products and of its
elementwise functions depend on the number of rows. float64 rounds to one float32 number, as the module `rounded` says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from dynatree.engine.cpu.native_experts import are_experts

_FUNCTIONS = (functional.linear, torch.sigmoid, Tensor.sigmoid)


class _Rounded(TorchFunctionMode):
    """Computes these functions of float32 numbers on a CPU in float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function in _FUNCTIONS:
            first: Tensor = args[0] if args else named["input"]
            if first.is_cpu and first.dtype == torch.float32:
                named = {name: _double(each) for name, each in named.items()}
                return function(*map(_double, args), **named).float()
        return function(*args, **named)


def _double(given: Tensor | None) -> Tensor | None:
    return None if given is None else given.double()


_ROUNDED = _Rounded()


def adapt(model: PreTrainedModel) -> None:
    """Let each router of a model round once, from float64, where transformers computes in float32."""
    for block in model.modules():
        experts: Any = next(filter(are_experts, block.children()), None)
        for child in block.children() if experts else ():
            weights = (each for each in child.parameters() if each.dim() == 2)
            if child is not experts and any(len(each) == experts.num_experts for each in weights):
                child.register_forward_pre_hook(_enter)
                child.register_forward_hook(_leave, always_call=True)


def _enter(*_: Any) -> None:
    _ROUNDED.__enter__()  # type: ignore[no-untyped-call]


def _leave(*_: Any) -> None:
    _ROUNDED.__exit__(None, None, None)  # type: ignore[no-untyped-call]
