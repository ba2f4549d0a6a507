"""The target model run by transformers alone, as the reference of `dynatree audit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from dynatree.engine.examined import WITHOUT_ATTENTION
from dynatree.engine.model.composite import loader_of
from dynatree.engine.model.gguf_config import config_of
from dynatree.engine.model.tokenizer import load_tokenizer
from dynatree.engine.quantized.dequantized import dequantized_model
from dynatree.engine.settings import ModelSettings
from dynatree.engine.support.small_model import spans


@dataclass(frozen=True)
class Divergence:
    """The first difference of two greedy outputs.

    Attributes:
        position: Index among the new tokens, from 0.
        ours: DynaTree's token there; None if its output has ended.
        theirs: transformers' token there; None if its output has ended.
        margin: Difference of the two largest logits there.
    """

    position: int
    ours: int | None
    theirs: int | None
    margin: float


class Reference:
    """The target model run by transformers alone.

    Attributes:
        context: Tokens of the longest sequence that the service serves.
        spans: Windows of the configuration that are shorter than the context, in tokens.
        dequantised: Whether the services' weights are quantised, and this model has them dequantised, in float32.
    """

    def __init__(self, settings: ModelSettings, dtype: str, device: str) -> None:
        """Load the model.

        Args:
            settings: Settings of the target in the verify service.
            dtype: Data type in which the service runs it; a model with quantised weights runs in float32 here.
            device: Device.
        """
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        loader = loader_of(config_of(settings.model))
        dequantised = dequantized_model(settings, dtype, torch.device(device))
        self.dequantised = dequantised is not None
        self._model: Any = dequantised or loader.from_pretrained(settings.model, dtype=getattr(torch, dtype)).to(device)
        self._tokenizer: Any = load_tokenizer(settings.model)
        named: int | None = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        longest = named or settings.max_context or WITHOUT_ATTENTION
        self.context = min(settings.max_context or longest, longest)
        self.spans = [span for span in spans(self._model.config) if span < self.context]

    def encode(self, prompt: str) -> list[int]:
        """Return the prompt's token ids."""
        ids: list[int] = self._tokenizer(prompt)["input_ids"]
        return ids

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        """Return the new tokens of `generate(do_sample=False)`."""
        prompt = torch.tensor([list(prompt_ids)], device=self._model.device)
        output = self._model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count, pad_token_id=0
        )
        tokens: list[int] = output[0, len(prompt_ids) :].tolist()
        return tokens

    @torch.inference_mode()
    def divergence(self, prompt_ids: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> Divergence | None:
        """Find the first position at which two outputs differ; None if they are equal."""
        length = min(len(ours), len(theirs))
        position = next((i for i in range(length) if ours[i] != theirs[i]), length)
        if position == len(ours) == len(theirs):
            return None
        context = torch.tensor([[*prompt_ids, *theirs[:position]]], device=self._model.device)
        top = self._model(context).logits[0, -1].float().topk(2).values
        token = [output[position] if position < len(output) else None for output in (ours, theirs)]
        return Divergence(position, token[0], token[1], (top[0] - top[1]).item())

    @torch.inference_mode()
    def log_probs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the prompt and the tokens before it."""
        sequence = torch.tensor([[*prompt_ids, *token_ids]], device=self._model.device)
        logits = self._model(sequence).logits[0, len(prompt_ids) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(-1, sequence[0, len(prompt_ids) :, None])
        values: list[float] = chosen[:, 0].tolist()
        return values

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids."""
        text: str = self._tokenizer.decode(token_ids)
        return text

    def describe(self, token: int | None) -> str:
        """Return a token's id and text, or "ended" for None."""
        return "ended" if token is None else f"{token} {self.text([token])!r}"
