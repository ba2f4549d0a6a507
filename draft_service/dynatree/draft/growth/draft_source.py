"""The source of a draft service's candidates, as its completions need it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dynatree.common.model_info import ModelInfo
from dynatree.draft.growth.drafter import DraftModel
from dynatree.draft.text.translation import Translation


@dataclass(frozen=True, eq=False)
class DraftSource:
    """A draft model, or its absence: then all candidates are n-grams of the sessions.

    Attributes:
        model: Reads tokens and proposes continuations.
        info: Description of the model, for clients and verify services.
        tokenizer: The target's tokenizer.
        slots: Slots of the model's KV cache; infinite without a model.
        sharing: Context of a completion whose target computes on the model's device.
        has_model: Whether there is a draft model.
        translation: The tokens that the draft model shares with the target, if its own tokenizer differs.
    """

    model: DraftModel
    info: ModelInfo
    tokenizer: PreTrainedTokenizerBase
    slots: float
    sharing: Callable[[], AbstractContextManager[None]] = nullcontext
    has_model: bool = True
    translation: Translation | None = None

    def __str__(self) -> str:
        """The source in words, for the log."""
        return f"{self.info.name} ({self.info.dtype}, {self.info.device})" if self.has_model else "n-grams alone"
