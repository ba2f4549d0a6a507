"""A model's forward pass over one row of tokens, with its attention replaced."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynatree.engine.forward.attention import Attending, AttentionCall, Requests
from dynatree.engine.kv.kv_cache import KVShape
from dynatree.engine.recurrent.scan import Recurring


class FlatForward:
    """Calls a model that was loaded with `attn_implementation=attention.NAME`.

    Args:
        model: The model.
        shape: Shape of the keys and values in the KV cache; None leaves those of every layer as they are.
        requests: Receives the masks of the layers, which the model then builds; otherwise it builds none.
    """

    def __init__(self, model: PreTrainedModel, shape: KVShape | None, requests: Requests | None = None) -> None:
        self._model = model
        self._shape = shape
        self._requests = requests
        self.vocab_size: int = model.config.get_text_config().vocab_size  # width of the logits
        # given a four-dimensional mask, transformers builds none; the attention function ignores the placeholder
        zeros = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
        self._placeholder = None if requests else zeros

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attending: Attending,
        keep: Tensor | None = None,
        recurring: Recurring | None = None,
    ) -> Tensor:
        """Run a forward pass.

        Args:
            token_ids: `[1, n]`.
            positions: `[1, n]`.
            attending: Computes every layer's attention.
            keep: Indices of the tokens whose logits are returned, `[kept]`; None means all.
            recurring: Computes every recurrent layer; None if the model has none.

        Returns:
            Logits `[kept, vocabulary]`, in the model's dtype.
        """
        logits: Tensor = self._model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=self._placeholder,
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,  # 0 means all
            dynatree_call=AttentionCall(attending, self._shape, self._placeholder, self._requests, recurring),
        ).logits[0]
        return logits
