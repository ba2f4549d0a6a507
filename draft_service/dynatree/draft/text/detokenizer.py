"""Incremental decoding of token ids to text: a character is emitted once all of its tokens are there."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from dynatree.engine.model.vocabulary import cleans_up, vocabulary_of

# All characters, except the last, of the strings that `clean_up_tokenization` replaces.
_MAY_GO_ON = " 'nvr"


class Detokenizer:
    """Decodes a text token by token.

    Every token adds bytes (`Vocabulary`), and an incremental UTF-8 decoder turns them into characters. So the text
    depends only on the prompt and the ids, not on how the ids are split into calls.

    Invariants:
        - If `tokenizer.decode(ids, skip_special_tokens=True)` has no replacement character, the joined pieces are equal
          to it, with the tokenizer's own `clean_up_tokenization_spaces`. After a prompt the text is the prompt's
          continuation: the space that some tokenizers drop at the start of a text is kept.
        - Bytes that form no character become U+FFFD as Unicode recommends (chapter 3.9, as Python's "replace" does):
          one U+FFFD for each longest beginning of a character. Every complete character is kept. A byte-level tokenizer
          decodes in the same way. A tokenizer with byte fallback would replace each byte of a run that has an invalid
          byte, complete characters included.

    Args:
        tokenizer: The tokenizer.
        prompt_ids: The prompt that the text continues; a character that is incomplete at its end is not repaired.
        special_tokens: Whether the text includes the names of special tokens.

    Attributes:
        offset: Offset of the last pushed token in the text, in characters. A token that continues a character has the
            offset of that character.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], *, special_tokens: bool = False
    ) -> None:
        self._vocabulary = vocabulary_of(tokenizer, special_tokens=special_tokens)
        self._context = self._vocabulary.behind(prompt_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._clean = SpaceCleaner(tokenizer.clean_up_tokenization) if cleans_up(tokenizer) else None
        self._characters = 0  # characters emitted so far
        self.offset = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that they complete; empty while a character is incomplete."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def pass_over(self) -> None:
        """Set `offset` for a token that adds no text."""
        self.offset = self._characters + (0 if self._clean is None else len(self._clean.held))

    def flush(self) -> str:
        """Return the rest of the text, with a replacement character for bytes that form no character."""
        text = self._utf8.decode(b"", final=True)
        return text if self._clean is None else self._clean.push(text) + self._clean.flush()

    def _push(self, token_id: int) -> str:
        data, self._context = self._vocabulary.added(self._context, token_id)
        text = self._broken_by(data[:1])
        self.pass_over()
        self.offset += len(text)
        text += self._utf8.decode(data)
        if self._clean is not None:
            text = self._clean.push(text)
        self._characters += len(text)
        return text

    def _broken_by(self, byte: bytes) -> str:
        """Return the replacement of an incomplete character that the next byte does not continue; "" if it does."""
        try:
            codecs.utf_8_decode(self._utf8.getstate()[0] + byte, "strict", False)
        except UnicodeDecodeError:
            return self._utf8.decode(b"", final=True)
        return ""


class SpaceCleaner:
    """Applies `clean_up_tokenization` to a stream of text.

    The clean-up only removes spaces, by replacing fixed strings one after the other. A character that is in none of
    these strings, or only at their end, separates the text before it from the text after it. So the text up to and
    including the last such character is cleaned up, and the rest is held back.

    Attributes:
        held: The text that is held back.
    """

    def __init__(self, clean_up: Callable[[str], str]) -> None:
        self._clean_up = clean_up
        self.held = ""

    def push(self, text: str) -> str:
        """Add text, and return the cleaned text that no later text can change."""
        text = self.held + text
        certain = len(text.rstrip(_MAY_GO_ON))
        self.held = text[certain:]
        return self._clean_up(text[:certain])

    def flush(self) -> str:
        """Return the rest of the text, cleaned."""
        text, self.held = self.held, ""
        return self._clean_up(text)
