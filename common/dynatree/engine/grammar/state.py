"""The state of a grammar after some tokens: which tokens may follow."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from dynatree.common.errors import InvalidArgumentError

LONGEST_REASON = 500  # characters


class GrammarState:
    """The state of a grammar after some tokens. It never changes: `after` returns another state.

    It depends on the grammar and the tokens alone, so that verification of a tree and plain decoding mask alike. Where
    the grammar allows only one text, it allows only the first token that the tokenizer gives for that text.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._bits: bytes | None = None

    def after(self, token: int) -> GrammarState | None:
        """Return the state after one more token; None if the grammar forbids the token."""
        if not self.allows(token):
            return None
        following = self._matcher.deep_copy()
        return GrammarState(following) if following.consume_token(token) else None

    def after_all(self, token_ids: Iterable[int]) -> GrammarState | None:
        """Return the state after more tokens; None if the grammar forbids one of them."""
        state: GrammarState | None = self
        for token in token_ids:
            state = state and state.after(token)
        return state

    def allows(self, token: int) -> bool:
        """Whether a token may follow."""
        bits = self.bits
        return token < 8 * len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)

    @property
    def bits(self) -> bytes:
        """One bit per token, lowest first: whether it may follow.

        Raises:
            InvalidArgumentError: The grammar has become too complex, or no token continues it.
        """
        if self._bits is None:
            bits = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                reason = self._matcher.get_error().split("\n<state>")[0].strip()
                raise InvalidArgumentError(f"the grammar cannot be followed further: {reason[:LONGEST_REASON]}")
            if not any(bits):
                raise InvalidArgumentError("no token of the vocabulary continues a text that the grammar allows")
            self._bits = bits
        return self._bits

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Whether each token may follow, `[vocab_size]`; tokens behind the tokenizer's may not."""
        bits = np.frombuffer(self.bits, dtype=np.uint8)
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)

    @property
    def forced(self) -> int | None:
        """The only token that may follow; None if there are several."""
        bits = np.frombuffer(self.bits, dtype=np.uint8)
        places = np.flatnonzero(bits)
        if len(places) != 1:
            return None
        byte = int(bits[places[0]])
        return None if byte & (byte - 1) else 8 * int(places[0]) + byte.bit_length() - 1
