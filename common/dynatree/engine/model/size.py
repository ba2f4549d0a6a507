"""The size of a model, in parameters and in bytes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


def parameters_of(model: PreTrainedModel) -> int:
    """Return the number of a model's parameters."""
    return sum(weight.numel() for weight in model.parameters())


def step_bytes_of(model: PreTrainedModel) -> int:
    """Return the bytes of the weights that a forward pass over one token reads, without the embedding table."""
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = output is not None and output.weight is table
    read = sum(weight.nbytes for weight in model.parameters())
    return int(read if tied else read - table.nbytes)
