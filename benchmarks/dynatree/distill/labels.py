"""The target's predictions for sequences of tokens: computed once, and kept in files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from dynatree.common.seeds import derived_seed
from dynatree.distill.texts import LENGTH, PROMPT, Texts, windows
from dynatree.engine.offload.choice import kv_bytes_of

SEQUENCES = 64  # of a file
HELD_BACK = 16  # sequences of the held-back labels, of each kind, at most
HELD_BACK_PIECE = 4  # of them at a time, so that a slow machine can stop early
TOP = 32  # tokens whose probabilities are kept
_TEMPERATURE = 0.7  # of every second answer; the others are greedy
_ROWS = 1024  # rows whose logits over the whole vocabulary are in memory at once
_KV_BYTES = 1 << 30  # of the answers that are written at once


@dataclass(frozen=True)
class Labels:
    """Sequences, and the target's distribution over the next token at each position.

    Attributes:
        tokens: Token ids, `[sequences, LENGTH]`, int32.
        counted: Whether a position counts, `[sequences, LENGTH]`; those after the end of an answer do not.
        top_ids: The `TOP` likeliest next tokens, the likeliest first, `[sequences, LENGTH, TOP]`, int32.
        top_log_probs: Their log-probabilities, float16.
    """

    tokens: Tensor
    counted: Tensor
    top_ids: Tensor
    top_log_probs: Tensor

    def save(self, path: Path) -> None:
        """Write the labels to a file."""
        save_file({field.name: getattr(self, field.name) for field in fields(self)}, path)

    @classmethod
    def load(cls, path: Path, rows: slice = slice(None)) -> Labels:
        """Read some of the sequences of a file."""
        with safe_open(path, "pt") as file:
            return cls(**{field.name: file.get_slice(field.name)[rows] for field in fields(cls)})

    @classmethod
    def join(cls, parts: list[Labels]) -> Labels:
        """Put several labels into one."""
        return cls(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)})


class Labeller:
    """Makes labels with the target.

    Args:
        target: The target.
        texts: The texts.
        frame: Tokens before and after a user's message in a chat; see `chat_frame`.
        seed: Seed, on which each file's sequences depend with its number only.
    """

    def __init__(self, target: PreTrainedModel, texts: Texts, frame: tuple[list[int], list[int]], seed: int) -> None:
        self._body: Any = target.base_model
        self._head: Any = target.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._texts = texts
        self._frame = frame
        self._seed = seed
        end = target.generation_config.eos_token_id if target.generation_config else None
        self._ends = torch.tensor([] if end is None else end, dtype=torch.int32).flatten()
        token_bytes = max(kv_bytes_of(target.config, target.dtype), 1)
        self._at_once = max(1, min(SEQUENCES, _KV_BYTES // (token_bytes * LENGTH)))

    def text(self, number: int) -> Labels:
        """Label random windows of the texts."""
        return self._label(windows(self._texts.training, SEQUENCES, LENGTH, self._generator(number)))

    def answers(self, number: int, *, chat: bool) -> Labels:
        """Let the target continue random prompts, in the chat template or as they are."""
        return self._answer(self._texts.training, SEQUENCES, number, chat=chat)

    def held_back(self, *, answers: bool, goes_on: Callable[[], bool] = lambda: True) -> Labels:
        """Label windows of the held-back texts, or answers to prompts of them.

        Args:
            answers: Whether the target answers prompts.
            goes_on: Is asked before each `HELD_BACK_PIECE` sequences but the first whether there is time for them.
        """
        generator = self._generator(-1 if answers else -2)
        sequences = windows(self._texts.held_back, HELD_BACK, PROMPT if answers else LENGTH, generator)
        parts: list[Labels] = []
        for rows in torch.split(sequences, min(HELD_BACK_PIECE, self._at_once)):
            if parts and not goes_on():
                break
            parts.append(self._continue(rows, generator) if answers else self._label(rows))
        return Labels.join(parts)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(derived_seed(self._seed, number) >> 1)

    @torch.inference_mode()
    def _label(self, tokens: Tensor) -> Labels:
        parts = []
        for rows in torch.split(tokens, 8):
            hidden = self._body(input_ids=rows.long(), use_cache=False).last_hidden_state
            parts.append(Labels(rows, torch.ones_like(rows, dtype=torch.bool), *self._top(hidden)))
        return Labels.join(parts)

    def _answer(self, texts: Tensor, count: int, number: int, *, chat: bool) -> Labels:
        generator = self._generator(number)
        before, after = (torch.tensor(each, dtype=torch.int32) for each in (self._frame if chat else ([], [])))
        cut = windows(texts, count, PROMPT - len(before) - len(after), generator)
        prompts = torch.cat([before.expand(count, -1), cut, after.expand(count, -1)], dim=1)
        return Labels.join([self._continue(rows, generator) for rows in torch.split(prompts, self._at_once)])

    @torch.inference_mode()
    def _continue(self, prompts: Tensor, generator: torch.Generator) -> Labels:
        """Write answers to prompts of one length, `[rows, PROMPT]`: half of them greedy, the others sampled."""
        tokens = prompts
        cache: dict[str, Any] = {}
        ids: list[Tensor] = []
        log_probs: list[Tensor] = []
        greedy = torch.arange(len(prompts)) % 2 == 0
        read = prompts
        while tokens.shape[1] <= LENGTH:
            out = self._body(input_ids=read.long(), use_cache=True, **cache)
            cache = {name: out[name] for name in ("past_key_values", "cache_params") if name in out}
            for kept, new in zip((ids, log_probs), self._top(out.last_hidden_state), strict=True):
                kept.append(new)
            weights = (log_probs[-1][:, -1].float() / _TEMPERATURE).softmax(-1)
            drawn = torch.multinomial(weights, 1, generator=generator)[:, 0]
            rank = torch.where(greedy, 0, drawn)
            read = ids[-1][:, -1].gather(1, rank[:, None])
            tokens = torch.cat([tokens, read], dim=1)
        tokens = tokens[:, :LENGTH]
        ended = torch.isin(tokens, self._ends)
        ended[:, :PROMPT] = False
        counted = ended.cumsum(1) == 0
        return Labels(tokens, counted, torch.cat(ids, 1), torch.cat(log_probs, 1))

    def _top(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and log-probabilities of the likeliest tokens, both `[sequences, length, TOP]`."""
        flat = hidden.flatten(0, 1)
        ids, log_probs = zip(*map(self._top_of_rows, torch.split(flat, _ROWS)), strict=True)
        shape = (*hidden.shape[:2], -1)
        return torch.cat(ids).view(shape), torch.cat(log_probs).view(shape)

    def _top_of_rows(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._head(hidden.to(self._head.weight.dtype))  # Mamba norms in float32
        values, ids = logits.topk(min(TOP, logits.shape[-1]))
        return ids.int(), (values.float() - logits.float().logsumexp(-1, keepdim=True)).half()
