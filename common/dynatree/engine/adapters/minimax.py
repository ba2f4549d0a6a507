"""The adapter of MiniMax-01, whose lightning attention computes its recurrence itself."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import sigmoid
from transformers import PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from dynatree.engine.adapters.layer_call import LayerCall
from dynatree.engine.cpu import native_recurrence
from dynatree.engine.forward.attention import AttentionCall
from dynatree.engine.recurrent.scan import Scan


class _Lightning(MiniMaxLightningAttention):
    """Replaces lightning attention in forward passes that have an `AttentionCall`."""

    def forward(
        self, hidden_states: Tensor, *args: Any, dynatree_call: AttentionCall | None = None, **options: Any
    ) -> Any:
        """Return the layer's output `[1, n, hidden_size]`, and the state if the model computes it itself."""
        if dynatree_call is None:
            return super().forward(hidden_states, *args, **options)
        qkv = self.act_fn(self.qkv_proj(hidden_states))[0].unflatten(-1, (self.num_attention_heads, -1))
        query, key, value = qkv.double().split(self.head_dim, -1)  # each [n, heads, head_dim]
        decays = -self.slope_rate.double().view(1, -1).expand(len(qkv), -1)
        start = partial(value.new_zeros, (self.num_attention_heads, self.head_dim, self.head_dim))
        none = (key[:0], value[:0], decays[:0])
        scan = Scan("lightning attention", native_recurrence.linear_attention, native_recurrence.fold, start, none)
        output = LayerCall(dynatree_call, self.layer_idx).scan(scan, (query, key, value, decays))
        output = self.norm(output.flatten(1).to(hidden_states.dtype)[None])
        return self.out_proj(sigmoid(self.output_gate(hidden_states)) * output), None


def adapt(model: PreTrainedModel) -> None:
    """Replace each lightning attention of a model."""
    for mixer in mixers(model):
        mixer.__class__ = _Lightning


def mixers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the lightning attentions of a model."""
    return [each for each in model.modules() if isinstance(each, MiniMaxLightningAttention)]
