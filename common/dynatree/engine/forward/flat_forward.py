"""A model's forward pass over one row of tokens, with its attention replaced."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynatree.engine.forward.attention import Attending, AttentionCall


class FlatForward:
    """Calls a model that was loaded with `attn_implementation=attention.NAME`.

    Args:
        model: The model.
        context_length: Length of the longest served sequence, in tokens.
        asks: Whether the model builds its own masks, so that the attention function can check them. Otherwise the model
            builds none.
    """

    def __init__(self, model: PreTrainedModel, context_length: int, *, asks: bool = False) -> None:
        self._model = model
        self._context_length = context_length
        self.vocab_size: int = model.config.get_text_config().vocab_size  # width of the logits
        # given a four-dimensional mask, transformers builds none; the attention function ignores the placeholder
        self._placeholder = None if asks else torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attending: Attending, keep: Tensor | None = None
    ) -> Tensor:
        """Run a forward pass.

        Args:
            token_ids: `[1, n]`.
            positions: `[1, n]`.
            attending: Computes every layer's attention.
            keep: Indices of the tokens whose logits are returned, `[kept]`; None means all.

        Returns:
            Logits `[kept, vocabulary]`, in the model's dtype.
        """
        logits: Tensor = self._model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=self._placeholder,
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,  # 0 means all
            dynatree_call=AttentionCall(attending, self._placeholder, self._context_length),
        ).logits[0]
        return logits
