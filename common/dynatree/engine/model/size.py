"""The size of a model, in parameters and in bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dynatree.engine.cpu.quantized_linear import QuantizedLinear


def parameters_of(model: PreTrainedModel) -> int:
    """Return the number of a model's parameters."""
    quantised = (each.in_features * each.out_features for each in model.modules() if isinstance(each, QuantizedLinear))
    return sum(weight.numel() for weight in model.parameters()) + sum(quantised)


def step_bytes_of(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that a forward pass over one token reads, without the embedding table."""
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = output is not None and output.weight is table  # a quantised output layer keeps its own weight
    quantised = (each.weight.nbytes for each in model.modules() if isinstance(each, QuantizedLinear))
    read = sum(weight.nbytes for weight in model.parameters()) + sum(quantised)
    return int(read if tied else read - table.nbytes)
