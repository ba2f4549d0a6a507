"""The adapter of Llama 4, whose layers without rotary embeddings scale queries by the token's position.

transformers counts positions from the length of its KV cache, not by `position_ids`. In passes without such a cache,
the adapter says where each token is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextDecoderLayer


class _Positions:
    """A KV cache that holds nothing. Its length differs by token, so that index plus length is the position.

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


def adapt(model: PreTrainedModel) -> None:
    """Tell each layer of a model where its tokens are."""
    for module in model.modules():
        if type(module) is Llama4TextDecoderLayer:
            module.register_forward_pre_hook(_tell, with_kwargs=True)


def _tell(_: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    positions = options.get("position_ids")
    if options.get("past_key_values") is None and positions is not None:
        options = {**options, "past_key_values": _Positions(positions)}
    return args, options
