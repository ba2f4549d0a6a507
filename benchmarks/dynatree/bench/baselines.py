"""The baselines: transformers' own `generate()` in this process, alone and with its two ways to draft."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from dynatree.bench.decoding import Arrival, Baselines, Output, Prompt
from dynatree.bench.methods import ASSISTED, PROMPT_LOOKUP, Method
from dynatree.client import ModelInfo
from dynatree.engine.model.composite import loader_of
from dynatree.engine.model.files import checkpoint_of
from dynatree.engine.model.gguf_config import config_of
from dynatree.engine.model.tokenizer import fingerprint, first_line, load_tokenizer

_LOOKUP_TOKENS = 10
_PADDING = 0  # padding token before the shorter prompts of a batch; attention masks it


@dataclass(frozen=True)
class LocalModel:
    """A model's local path or hub name, and its description by the service that runs it."""

    path: str
    info: ModelInfo


def load_baselines(methods: Sequence[Method], target: LocalModel, draft: LocalModel) -> Baselines:
    """Load the decoders of these methods; there must be at least one method.

    Raises:
        SystemExit: A model cannot be loaded, or assisted decoding lacks a draft with the target's tokenizer.
    """
    model = _load(target)
    assistant = _load(draft) if ASSISTED in methods else None
    if assistant is not None and fingerprint(load_tokenizer(draft.path)) != target.info.tokenizer_fingerprint:
        raise SystemExit(f"{ASSISTED.label} needs a draft with the target's tokenizer; expected another baseline")
    options: dict[str, dict[str, Any]] = {
        ASSISTED.label: {"assistant_model": assistant},
        PROMPT_LOOKUP.label: {"prompt_lookup_num_tokens": _LOOKUP_TOKENS},
    }
    decoders = {method.label: partial(_generate, model, options.get(method.label, {})) for method in methods}
    return Baselines(decoders, partial(_margin, model))


def load_batches(target: LocalModel) -> Callable[[Sequence[Prompt], int], list[Output]]:
    """Load the target; return a function that completes a batch of prompts greedily by a given number of tokens each.

    Raises:
        SystemExit: The model cannot be loaded.
    """
    return partial(_generate_batch, _load(target), {})


def _load(local: LocalModel) -> Any:
    """Load a model with transformers' default attention and no end of sequence, as the services ignore theirs.

    The weights are copied out of the memory-mapped checkpoint. The speed of reading mapped weights varies by a factor
    of two with the file's layout in the page cache; a slow layout would flatter every method compared with this one.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # assisted decoding warns of itself
    try:
        dtype = getattr(torch, local.info.dtype)
        where, config = checkpoint_of(local.path), config_of(local.path)
        model = loader_of(config).from_pretrained(**where, config=config, dtype=dtype).to(local.info.device).eval()
    except Exception as error:  # transformers, the hub client, safetensors and torch each raise their own types here
        raise SystemExit(f"model {local.info.name} could not be loaded for a baseline: {first_line(error)}") from None
    model.generation_config.eos_token_id = None
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@torch.inference_mode()
def _margin(model: Any, token_ids: Prompt) -> float:
    """Gap between the highest and the second-highest logit of the next token."""
    top = model(torch.tensor([list(token_ids)], device=model.device)).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])


def _generate(model: Any, options: dict[str, Any], prompt: Prompt, max_new_tokens: int) -> Output:
    [output] = _generate_batch(model, options, [prompt], max_new_tokens)
    return output


@torch.inference_mode()
def _generate_batch(
    model: Any, options: dict[str, Any], prompts: Sequence[Prompt], max_new_tokens: int
) -> list[Output]:
    """Generate one batch, padded on the left to the longest prompt; all its outputs arrive together."""
    arrivals = _Arrivals(len(prompts))
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    token_ids = torch.tensor(  # (batch, longest)
        [[_PADDING] * pads + list(prompt) for pads, prompt in zip(padding, prompts, strict=True)], device=model.device
    )
    mask = torch.tensor([[0] * pads + [1] * (longest - pads) for pads in padding], device=model.device)
    try:
        output = model.generate(
            token_ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=_PADDING,
            streamer=arrivals,
            **options,
        )
    except ValueError as error:
        raise SystemExit(f"transformers' generate() refuses the request: {first_line(error)}") from None
    seconds = time.perf_counter() - arrivals.started
    return [Output(tuple(row), tuple(arrivals.entries), seconds) for row in output[:, longest:].tolist()]


class _Arrivals(BaseStreamer):
    """Records when tokens arrive at the rows of a batch.

    The first call of `put` passes the prompts; each later call passes one or several new tokens of every row.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.entries: list[Arrival] = []
        self.started = time.perf_counter()
        self._tokens: int | None = None

    def put(self, value: torch.Tensor) -> None:
        """Record the arrival of tokens, in a tensor of any shape."""
        if self._tokens is None:
            self._tokens = 0
            return
        self._tokens += value.numel() // self._rows
        self.entries.append((self._tokens, time.perf_counter() - self.started))

    def end(self) -> None:
        """Record nothing: all tokens have arrived."""
