"""Token ids to text, as they come: no character is emitted before all of its tokens are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 6
OPEN_TOKENS = 16  # of pending text that are kept back: more than a character has
# Text that `clean_up_tokenization` changes: it has spaces before punctuation and before English contractions.
_UNCLEAN = "a . b , c ? d ! e ' f do n't I 'm it 's we 've you 're"
# The characters that stand before the last one in any of the strings that `clean_up_tokenization` replaces.
_MAY_GO_ON = " 'nvr"


class Detokenizer:
    """Decodes a completion piece by piece.

    Each piece is the difference between decoding a short window with and without the new tokens, so that tokenizers
    whose text depends on neighbours (leading spaces, byte fallback) give what decoding everything at once would give.

    Invariant: the pieces join to what `tokenizer.decode(ids, skip_special_tokens=True)` gives for the completion, with
    the tokenizer's own `clean_up_tokenization_spaces`. Behind a prompt the text is the prompt's continuation: the space
    that some tokenizers drop at the start of a text is kept.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_ids[-CONTEXT_TOKENS:])
        if self._decode(self._window).endswith(REPLACEMENT):
            self._window = []  # the prompt ends inside a character, which the completion's own bytes cannot mend
        self._emitted = len(self._window)
        self._clean = SpaceCleaner(tokenizer.clean_up_tokenization) if cleans_up(tokenizer) else None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is still open."""
        self._window.extend(token_ids)
        text = self._pending()
        text = self._take_certain(text) if text.endswith(REPLACEMENT) else self._take(text)
        return text if self._clean is None else self._clean.push(text)

    def flush(self) -> str:
        """The rest, with replacement characters where bytes form no character."""
        text = self._take(self._pending())
        return text if self._clean is None else self._clean.push(text) + self._clean.flush()

    def _pending(self) -> str:
        before = self._decode(self._window[: self._emitted])
        return self._decode(self._window)[len(before) :]

    def _take(self, text: str) -> str:
        if text:
            self._window = self._window[self._emitted :]
            self._emitted = len(self._window)
        return text

    def _take_certain(self, text: str) -> str:
        """Of text that ends inside a character, what no further token can change; nothing while little is pending.

        A character has at most four bytes, and so at most four tokens. Without this, text whose bytes never form
        characters would be decoded from its beginning with every token.
        """
        certain = len(self._window) - OPEN_TOKENS
        if certain - self._emitted < OPEN_TOKENS:
            return ""
        before = self._decode(self._window[: self._emitted])
        prefix = self._decode(self._window[:certain])[len(before) :]
        if not text.startswith(prefix):
            return ""
        self._window = self._window[self._emitted :]
        self._emitted = certain - self._emitted
        return prefix

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class SpaceCleaner:
    """`clean_up_tokenization` of a stream of text.

    The clean-up only removes spaces, by replacing fixed strings one after the other. A character that is in none of
    them, or only at the end, separates what comes before it from what comes after: the text is cleaned up to and with
    the last such character, and the rest is held back.
    """

    def __init__(self, clean_up: Callable[[str], str]) -> None:
        self._clean_up = clean_up
        self._held = ""

    def push(self, text: str) -> str:
        """The cleaned text that is certain by now."""
        text = self._held + text
        certain = len(text.rstrip(_MAY_GO_ON))
        self._held = text[certain:]
        return self._clean_up(text[:certain])

    def flush(self) -> str:
        """The rest."""
        text, self._held = self._held, ""
        return self._clean_up(text)


def cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `decode` removes spaces before punctuation unless it is told not to; found by trying.

    The tokenizer's setting alone does not tell: transformers ignores it for BPE tokenizers.
    """
    if not tokenizer.clean_up_tokenization_spaces:
        return False
    ids = tokenizer(_UNCLEAN, verbose=False)["input_ids"]
    return bool(tokenizer.decode(ids) != tokenizer.decode(ids, clean_up_tokenization_spaces=False))
