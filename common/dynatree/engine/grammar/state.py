"""The state of a grammar after some tokens: which tokens may follow."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cached_property

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from dynatree.common.errors import InvalidArgumentError

LONGEST_REASON = 500  # characters
NO_TOKEN = "no token of the vocabulary continues a text that the grammar allows"


class GrammarState:
    """The state of a grammar after some tokens. It never changes: `after` returns another state. Thread-safe.

    It depends on the grammar and the tokens alone, so that verification of a tree and plain decoding mask alike. Where
    the grammar allows only one text, it allows only the first token that the tokenizer gives for that text.

    Args:
        matcher: The grammar after the tokens.
        missing: Bytes that the vocabulary has no token for.
    """

    def __init__(self, matcher: LLMatcher, missing: frozenset[int] = frozenset()) -> None:
        self._matcher = matcher
        self._missing = missing
        self._lock = threading.Lock()  # a matcher that two threads use at once raises an error
        self._bits: bytes | None = None

    def after(self, token: int) -> GrammarState | None:
        """Return the state after one more token; None if the grammar forbids the token.

        Raises:
            InvalidArgumentError: The grammar has become too complex, or no token continues it.
        """
        if not self.allows(token):
            return None
        with self._lock:
            following = self._matcher.deep_copy()
        if not following.consume_token(token):
            raise _error(following)
        return GrammarState(following, self._missing)

    def after_all(self, token_ids: Iterable[int]) -> GrammarState | None:
        """Return the state after more tokens; None if the grammar forbids one of them; errors as in `after`."""
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
        with self._lock:
            if self._bits is None:
                bits = self._matcher.compute_bitmask()
                if self._matcher.is_error():
                    raise _error(self._matcher)
                # where a text that must follow has no tokens, the mask would be that of another text
                spelt = not self._missing or self._missing.isdisjoint(self._matcher.compute_ff_bytes())
                if not (spelt and any(bits)):
                    raise InvalidArgumentError(NO_TOKEN)
                self._bits = bits
            return self._bits

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Whether each token may follow, `[vocab_size]`; tokens behind the tokenizer's may not."""
        bits = np.frombuffer(self.bits, dtype=np.uint8)
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)

    @cached_property
    def forced(self) -> int | None:
        """The only token that may follow; None if there are several."""
        bits = np.frombuffer(self.bits, dtype=np.uint8)
        places = np.flatnonzero(bits)
        if len(places) != 1:
            return None
        byte = int(bits[places[0]])
        return None if byte & (byte - 1) else 8 * int(places[0]) + byte.bit_length() - 1


def reason_of(matcher: LLMatcher) -> str:
    """Why a matcher has failed, in at most `LONGEST_REASON` characters."""
    return matcher.get_error().split("\n<state>")[0].strip()[:LONGEST_REASON]


def _error(matcher: LLMatcher) -> InvalidArgumentError:
    if matcher.get_error().startswith("NoExtension"):
        return InvalidArgumentError(NO_TOKEN)
    return InvalidArgumentError(f"the grammar cannot be followed further: {reason_of(matcher)}")
