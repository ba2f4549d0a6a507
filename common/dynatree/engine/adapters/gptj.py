"""The adapter of GPT-J, whose attention has an inner function that gets the rotated queries and keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.gptj.modeling_gptj import GPTJ_ATTENTION_CLASSES, GPTJAttention

from dynatree.engine.forward.attention import NAME, AttentionCall, attention


class _Attention(GPTJAttention):
    """Replaces the inner function in forward passes that have an `AttentionCall`."""

    _call: AttentionCall | None = None

    def forward(self, *args: Any, dynatree_call: AttentionCall | None = None, **options: Any) -> Any:
        """Return the layer's attention `[1, n, hidden_size]`, and the weights if the model computes them itself."""
        self._call = dynatree_call
        return super().forward(*args, **options)

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None) -> Any:
        """Return the heads' outputs `[1, heads, n, head_dim]`."""
        if self._call is None:
            return super()._attn(query, key, value, attention_mask)  # type: ignore[no-untyped-call]
        scaling = 1.0 / self.scale_attn
        output, _ = attention(self, query, key, value, attention_mask, scaling=scaling, dynatree_call=self._call)
        return output.transpose(1, 2), None


def adapt(model: PreTrainedModel) -> None:
    """Replace each attention of a model."""
    for module in model.modules():
        if type(module) is GPTJAttention:
            module.__class__ = _Attention


GPTJ_ATTENTION_CLASSES[NAME] = GPTJAttention  # which `adapt` replaces
