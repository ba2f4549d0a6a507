"""The size of a model, in parameters and in bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dynatree.engine.cpu.native_experts import NativeExperts, fused_experts
from dynatree.engine.cpu.native_linear import PANEL, NativeLinear
from dynatree.engine.cpu.quantized_linear import QuantizedLinear


def parameters_of(model: PreTrainedModel) -> int:
    """Return the number of a model's parameters."""
    output: Any = model.get_output_embeddings() if model.all_tied_weights_keys else None  # type: ignore[no-untyped-call]
    count = sum(weight.numel() for weight in model.parameters())
    for each in model.modules():
        if isinstance(each, QuantizedLinear) and each is not output:
            count += each.out_features * (each.in_features + (each.bias is not None))
    return count


def step_bytes_of(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that a forward pass over one token reads, without the embedding table.

    The pass reads only those experts of a mixture that one token wakes.
    """
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = output is not None and output.weight is table  # a quantised output layer keeps its own weight
    read = sum(weight.nbytes for weight in model.parameters())
    read += sum(_bytes(each) for each in model.modules() if isinstance(each, NativeLinear))
    return int(read - _asleep(model) if tied else read - _asleep(model) - table.nbytes)


def _asleep(model: PreTrainedModel) -> int:
    """Return the bytes of the experts that a token does not wake."""
    woken = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if woken is None:
        return 0
    sizes = [
        (each.num_experts, _bytes(each.gate_up) + _bytes(each.down))
        for each in model.modules()
        if isinstance(each, NativeExperts)
    ]
    sizes += [
        (len(each.down_proj), sum(part.nbytes for part in each.parameters())) for _, _, each in fused_experts(model)
    ]
    return sum(size * (count - woken) // count for count, size in sizes)


def _bytes(linear: NativeLinear) -> int:
    """Return the bytes of a layer in the kernels' layout, without those that fill up its last panel."""
    bias = 0 if linear.bias is None else linear.bias.itemsize
    return linear.out_features * (linear.weight.nbytes // -(-linear.out_features // PANEL) // PANEL + bias)
