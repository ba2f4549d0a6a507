"""The adapter of Llama 4, whose layers without rotary embeddings scale queries by the token's position.

transformers counts positions from the length of its KV cache, not by `position_ids`. In passes without such a cache,
the adapter says where each token is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextDecoderLayer


class _Positions:
    """Stands for a KV cache that holds nothing, at a length of its own for each token.

    Args:
        positions: `[1, n]`.
    """

    def __init__(self, positions: Tensor) -> None:
        self._lengths = positions[0] - torch.arange(positions.shape[1], device=positions.device)

    def get_seq_length(self, _: int) -> Tensor:
        """Return what a token's position is above its index in the pass, `[n]`."""
        return self._lengths

    def update(self, keys: Tensor, values: Tensor, _: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the pass."""
        return keys, values


class _Layer(Llama4TextDecoderLayer):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        """Return the layer's output, `[1, n, hidden_size]`."""
        if past_key_values is None and position_ids is not None:
            past_key_values = _Positions(position_ids)
        return super().forward(hidden_states, attention_mask, position_ids, past_key_values, **options)


def adapt(model: PreTrainedModel) -> None:
    """Replace each layer of a model."""
    for module in model.modules():
        if type(module) is Llama4TextDecoderLayer:
            module.__class__ = _Layer
