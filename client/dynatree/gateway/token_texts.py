"""Tokens one by one: their bytes and texts."""

from __future__ import annotations

from collections.abc import Sequence


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
