"""The adapter of Falcon with rotary positions (7B, 11B, 40B and 180B); Falcon RW has ALiBi instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import (
    FALCON_ATTENTION_CLASSES,
    FalconAttention,
    FalconLinear,
    apply_rotary_pos_emb,
)

from dynatree.common.errors import StartupError
from dynatree.engine.forward.attention import NAME, AttentionCall, attention


class _Attention(FalconAttention):
    """Replaces the attention in forward passes that have an `AttentionCall`."""

    def forward(
        self, hidden_states: Tensor, *args: Any, dynatree_call: AttentionCall | None = None, **options: Any
    ) -> Any:
        """Return the layer's attention `[1, n, hidden_size]`, and the weights if the model computes them itself."""
        if dynatree_call is None:
            return super().forward(hidden_states, *args, **options)
        if options["alibi"] is not None:
            raise StartupError("its attention uses a position bias (ALiBi), which DynaTree does not compute")
        split = self._split_heads(self.query_key_value(hidden_states))  # each [1, n, heads, head_dim]
        query, key, value = (each.transpose(1, 2) for each in split)
        rotated: Any = apply_rotary_pos_emb
        query, key = rotated(query, key, *options["position_embeddings"])
        if self.new_decoder_architecture:  # keys and values are repeated for the query heads that share them
            each = key.shape[1] // (self.num_kv_heads or 1)
            key, value = key[:, ::each], value[:, ::each]
        mask, scaling = options["attention_mask"], self.inv_norm_factor
        output, _ = attention(self, query, key, value, mask, scaling=scaling, dynatree_call=dynatree_call)
        return self.dense(output.flatten(2)), None


def adapt(model: PreTrainedModel) -> None:
    """Replace each attention of a model, and linear layers of a class of the family's own that computes the same."""
    for module in model.modules():
        if type(module) is FalconAttention:
            module.__class__ = _Attention
        elif type(module) is FalconLinear and module.bias is None:
            module.__class__ = nn.Linear


FALCON_ATTENTION_CLASSES[NAME] = FalconAttention  # which `adapt` replaces
