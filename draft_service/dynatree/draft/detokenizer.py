"""Token ids to text, as they come: no character is emitted before all of its tokens are there."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 6


class Detokenizer:
    """Decodes a completion piece by piece.

    Each piece is the difference between decoding a short window with and without the new tokens, so that tokenizers
    whose text depends on neighbours (leading spaces, byte fallback) give what decoding everything at once would give.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        if self._decode(self._window).endswith(REPLACEMENT):
            self._window = []  # the prompt ends inside a character, which the completion's own bytes cannot mend
        self._emitted = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is still open."""
        self._window.extend(token_ids)
        text = self._pending()
        return "" if text.endswith(REPLACEMENT) else self._take(text)

    def flush(self) -> str:
        """The rest, with replacement characters where bytes form no character."""
        return self._take(self._pending())

    def _pending(self) -> str:
        before = self._decode(self._window[: self._emitted])
        return self._decode(self._window)[len(before) :]

    def _take(self, text: str) -> str:
        if text:
            self._window = self._window[self._emitted :]
            self._emitted = len(self._window)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
