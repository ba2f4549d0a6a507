"""A model's forward over one row of tokens, with another attention in place of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynatree.common.engine.attention import Attending, AttentionCall


class FlatForward:
    """Calls a model that was loaded with `attn_implementation=attention.NAME`.

    Args:
        model: The model.
        context_length: Tokens of the longest sequence that is served.
        asks: Whether the model asks for its masks, so that the attention function sees which they are. Otherwise it
            builds none.
    """

    def __init__(self, model: PreTrainedModel, context_length: int, *, asks: bool = False) -> None:
        self._model = model
        self._context_length = context_length
        self.vocab_size: int = model.config.get_text_config().vocab_size  # of the logits
        # transformers takes a four-dimensional mask as it is and builds none; the attention function ignores it
        self._placeholder = None if asks else torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, attending: Attending, keep: Tensor | None = None
    ) -> Tensor:
        """Put tokens through the model.

        Args:
            token_ids: `[1, n]`.
            positions: `[1, n]`.
            attending: What every layer attends with.
            keep: Indices of the tokens whose logits are wanted, `[kept]`; None means all.

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
