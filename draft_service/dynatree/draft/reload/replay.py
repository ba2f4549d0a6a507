"""Replay of recent completions: how many of their tokens a draft model would have guessed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dynatree.draft.growth.draft_source import DraftSource
from dynatree.draft.growth.drafter import DRAFT_TOKENS_PER_TOKEN
from dynatree.engine.model_thread import ModelThread

MOST_TEXTS = 16  # recent completions that are kept
MOST_TOKENS = 128  # tokens that are kept of each, its prompt included: one forward pass


@dataclass(frozen=True)
class RecentText:
    """The last tokens of a completion, preceded by those of its prompt that there is room for.

    Attributes:
        token_ids: The tokens.
        start: Index of the first token to guess: at least 1, since a guess needs a context.
    """

    token_ids: tuple[int, ...]
    start: int

    @property
    def guessed(self) -> int:
        """Number of tokens to guess."""
        return len(self.token_ids) - self.start


class RecentTexts:
    """The tokens of the most recent completions, in memory only."""

    def __init__(self) -> None:
        self._texts: deque[RecentText] = deque(maxlen=MOST_TEXTS)

    def add(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Keep the end of a completion."""
        kept = (*prompt_ids[-MOST_TOKENS:], *token_ids)[-MOST_TOKENS:]
        text = RecentText(kept, max(len(kept) - len(token_ids), 1))
        if text.guessed > 0:
            self._texts.append(text)

    def copy(self) -> tuple[RecentText, ...]:
        """The kept completions, oldest first."""
        return tuple(self._texts)


def slots_of(source: DraftSource) -> int:
    """KV slots that a replay takes."""
    tokens = MOST_TOKENS if source.translation is None else DRAFT_TOKENS_PER_TOKEN * MOST_TOKENS
    return min(tokens, source.model.context_length)


async def right_guesses(source: DraftSource, thread: ModelThread, texts: Sequence[RecentText]) -> int:
    """Count the tokens that are a draft model's likeliest continuation of the tokens before them.

    Each text takes one call on the model thread, so that running completions wait for a short forward pass at most. The
    model's KV cache must have `slots_of(source)` free slots.
    """
    assert source.guesses is not None, "only draft models are compared"
    most = slots_of(source)
    kv, _ = await thread.run(source.model.reserve, most, (), "")
    assert kv is not None, "the caller has been admitted with as many slots"
    try:
        right = 0
        for text in texts:
            token_ids = text.token_ids[:most]
            guesses = await thread.run(source.guesses, kv, token_ids)
            right += sum(guesses[place - 1] == token_ids[place] for place in range(text.start, len(token_ids)))
        return right
    finally:
        await thread.run(source.model.release, kv, (), "")
