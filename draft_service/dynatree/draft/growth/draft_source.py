"""The source of a draft service's candidates, as its completions need it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dynatree.common.model_info import ModelInfo
from dynatree.draft.growth.drafter import DraftModel
from dynatree.draft.target.target import Target
from dynatree.draft.text.translation import Translation
from dynatree.engine.kv.kv_range import KVRange


@dataclass(frozen=True, eq=False)
class DraftSource:
    """A draft model, or its absence: then all candidates are n-grams of the sessions.

    Attributes:
        model: Reads tokens and proposes continuations.
        info: Description of the model, for clients and verify services.
        tokenizer: The target's tokenizer.
        build_target: Builds the `Target` of a verify service for the model, with the model's measured costs.
        slots: Slots of the model's KV cache; infinite without a model.
        sharing: Context of a completion whose target computes on the model's device.
        has_model: Whether there is a draft model.
        translation: The tokens that the draft model shares with the target, if its own tokenizer differs.
        guesses: Reads a text of the target's tokens into an empty KV range of the model, and returns the likeliest
            token after each of its tokens, a negative number where there is no guess; None without a model.
    """

    model: DraftModel
    info: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    build_target: Callable[[ModelInfo], Target]
    slots: float
    sharing: Callable[[], AbstractContextManager[None]] = nullcontext
    has_model: bool = True
    translation: Translation | None = None
    guesses: Callable[[KVRange, Sequence[int]], Sequence[int]] | None = None

    def __str__(self) -> str:
        """The source in words, for the log."""
        return f"{self.info.name} ({self.info.dtype}, {self.info.device})" if self.has_model else "n-grams alone"
