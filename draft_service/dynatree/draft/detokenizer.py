"""Token ids to text, as they come: no character is emitted before all of its tokens are there."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from dynatree.draft.vocabulary import cleans_up, vocabulary_of

# The characters that stand before the last one in any of the strings that `clean_up_tokenization` replaces.
_MAY_GO_ON = " 'nvr"


class Detokenizer:
    """Decodes a text token by token.

    Every token adds bytes (`Vocabulary`), and an incremental UTF-8 decoder makes characters of them. So the text is a
    function of the prompt and the ids, however they come.

    Invariants:
        - Where `tokenizer.decode(ids, skip_special_tokens=True)` has no replacement character, the pieces join to it,
          with the tokenizer's own `clean_up_tokenization_spaces`. Behind a prompt the text is the prompt's
          continuation: the space that some tokenizers drop at the start of a text is kept.
        - Bytes that form no character become U+FFFD as Unicode recommends (chapter 3.9, as Python's "replace" does):
          one for each longest beginning of a character. Every complete character is right. A byte-level tokenizer
          decodes in this way too; byte fallback would turn a run of bytes with an invalid one in it into one U+FFFD for
          each byte, its complete characters included.

    Args:
        tokenizer: The tokenizer.
        prompt_ids: What the text goes on from; a character that is open at its end is not mended.
        special_tokens: Whether the text has the names of special tokens.

    Attributes:
        offset: Where the last token that was pushed begins in the text, in characters. One that goes on with a
            character begins where that does.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], *, special_tokens: bool = False
    ) -> None:
        self._vocabulary = vocabulary_of(tokenizer, special_tokens=special_tokens)
        self._context = self._vocabulary.behind(prompt_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._clean = SpaceCleaner(tokenizer.clean_up_tokenization) if cleans_up(tokenizer) else None
        self._characters = 0  # emitted
        self.offset = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is still open."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """The rest, with a replacement character for bytes that form none."""
        text = self._utf8.decode(b"", final=True)
        return text if self._clean is None else self._clean.push(text) + self._clean.flush()

    def _push(self, token_id: int) -> str:
        data, self._context = self._vocabulary.added(self._context, token_id)
        text = self._broken_by(data[:1])
        self.offset = self._characters + len(text) + (0 if self._clean is None else len(self._clean.held))
        text += self._utf8.decode(data)
        if self._clean is not None:
            text = self._clean.push(text)
        self._characters += len(text)
        return text

    def _broken_by(self, byte: bytes) -> str:
        """What becomes of a character that is open where the next byte does not go on with it."""
        try:
            codecs.utf_8_decode(self._utf8.getstate()[0] + byte, "strict", False)
        except UnicodeDecodeError:
            return self._utf8.decode(b"", final=True)
        return ""


class SpaceCleaner:
    """`clean_up_tokenization` of a stream of text.

    The clean-up only removes spaces, by replacing fixed strings one after the other. A character that is in none of
    them, or only at the end, separates what comes before it from what comes after: the text is cleaned up to and with
    the last such character, and the rest is held back.

    Attributes:
        held: What is held back.
    """

    def __init__(self, clean_up: Callable[[str], str]) -> None:
        self._clean_up = clean_up
        self.held = ""

    def push(self, text: str) -> str:
        """The cleaned text that is certain by now."""
        text = self.held + text
        certain = len(text.rstrip(_MAY_GO_ON))
        self.held = text[certain:]
        return self._clean_up(text[:certain])

    def flush(self) -> str:
        """The rest."""
        text, self.held = self.held, ""
        return self._clean_up(text)
