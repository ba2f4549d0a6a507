"""How large a model is."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel


def parameters_of(model: PreTrainedModel) -> int:
    """The number of its parameters."""
    return sum(weight.numel() for weight in model.parameters())


def step_bytes_of(model: PreTrainedModel) -> int:
    """Bytes of the weights that a forward over one token reads; of an embedding table it reads one row."""
    table: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tied = output is not None and output.weight is table
    read = sum(weight.nbytes for weight in model.parameters())
    return int(read if tied else read - table.nbytes)
