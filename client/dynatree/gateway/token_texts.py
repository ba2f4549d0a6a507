"""The bytes and texts of single tokens."""

from __future__ import annotations

from collections.abc import Sequence


class TokenTexts:
    """The tokens of a vocabulary as bytes and as text.

    Args:
        vocabulary: The bytes of each token, indexed by token id.
    """

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._vocabulary = vocabulary

    def bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; empty if the vocabulary has no such id."""
        return self._vocabulary[token_id] if token_id < len(self._vocabulary) else b""

    def name(self, token_id: int) -> str:
        """Return a token's text, or where its bytes are not whole characters, OpenAI's spelling: `bytes:\\xe2\\x80`."""
        token = self.bytes(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
