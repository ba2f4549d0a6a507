"""Tokens one by one: their bytes and texts, and where each begins in the text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class TokenTexts:
    """What each token of a vocabulary is as bytes, and as text.

    Args:
        vocabulary: The bytes of each token, by its id.
    """

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._vocabulary = vocabulary

    def bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none where the vocabulary has no such id."""
        return self._vocabulary[token_id] if token_id < len(self._vocabulary) else b""

    def name(self, token_id: int) -> str:
        """Its text; of a token that is no whole characters its bytes, in OpenAI's spelling: `bytes:\\xe2\\x80`."""
        token = self.bytes(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)

    def text(self, token_ids: Iterable[int]) -> str:
        """The text of several tokens."""
        return b"".join(map(self.bytes, token_ids)).decode(errors="replace")


class Offsets:
    """Where each token begins in the text of all tokens, in characters."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def push(self, token_ids: Iterable[int]) -> list[int]:
        """Of the next tokens; one that goes on with a character begins where that does."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._characters)
            self._characters += len(self._decoder.decode(self._texts.bytes(token_id)))
        return offsets
