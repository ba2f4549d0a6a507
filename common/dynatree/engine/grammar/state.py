"""The state of a grammar after some tokens: which tokens may follow."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cached_property
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher

from dynatree.common.errors import GrammarError
from dynatree.engine.grammar.reasons import reason_of

NO_TOKEN = "no token of the vocabulary continues a text that the grammar allows"


class GrammarState:
    """The state of a grammar after some tokens. It never changes: `after` returns another state. Thread-safe.

    It depends on the grammar and the tokens alone, so that verification of a tree and plain decoding mask alike. Where
    the grammar allows only one text, it allows only the first token that the tokenizer gives for that text. A state
    that cannot be followed further allows no token. It is an `error` only of the completion that has its tokens.

    While the state after a token is in use, `after` returns the same one again, so that its mask is computed once: for
    a tree's node, for the commit of the node, and for other completions that begin with the same tokens.

    Args:
        matcher: The grammar after the tokens.
        missing: Bytes that the vocabulary has no token for.
    """

    def __init__(self, matcher: LLMatcher, missing: frozenset[int] = frozenset()) -> None:
        self._matcher = matcher
        self._missing = missing
        self._lock = threading.Lock()  # a matcher that two threads use at once raises an error
        self._bits: bytes | None = None
        self._reason = ""
        self._following: WeakValueDictionary[int, GrammarState] = WeakValueDictionary()

    def after(self, token: int) -> GrammarState | None:
        """Return the state after one more token; None if this state does not allow the token."""
        if not self.allows(token):
            return None
        with self._lock:
            following = self._following.get(token)
            if following is None:
                matcher = self._matcher.deep_copy()
                matcher.consume_token(token)  # if this fails, the matcher keeps its error
                following = self._following[token] = GrammarState(matcher, self._missing)
            return following

    def after_all(self, token_ids: Iterable[int]) -> GrammarState | None:
        """Return the state after more tokens; None if one of them is not allowed."""
        state: GrammarState | None = self
        for token in token_ids:
            state = state and state.after(token)
        return state

    def allows(self, token: int) -> bool:
        """Whether a token may follow."""
        bits = self.bits
        return token < 8 * len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)

    @property
    def error(self) -> GrammarError | None:
        """Why no token may follow: the grammar has become too complex, or no token continues it; None if one may."""
        return None if self.bits else GrammarError(self._reason)

    @property
    def bits(self) -> bytes:
        """One bit per token, lowest first: whether it may follow; empty if none may."""
        with self._lock:
            if self._bits is None:
                self._bits, self._reason = self._computed()
            return self._bits

    def _computed(self) -> tuple[bytes, str]:
        """Return the bits, or why no token may follow."""
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            no_token = self._matcher.get_error().startswith("NoExtension")
            return b"", NO_TOKEN if no_token else f"the grammar cannot be followed further: {reason_of(self._matcher)}"
        # where a text that must follow has no tokens, the mask would be that of another text
        spelt = not self._missing or self._missing.isdisjoint(self._matcher.compute_ff_bytes())
        return (bits, "") if spelt and any(bits) else (b"", NO_TOKEN)

    @cached_property
    def forced(self) -> int | None:
        """The only token that may follow; None if there are several."""
        bits = np.frombuffer(self.bits, dtype=np.uint8)
        places = np.flatnonzero(bits)
        if len(places) != 1:
            return None
        byte = int(bits[places[0]])
        return None if byte & (byte - 1) else 8 * int(places[0]) + byte.bit_length() - 1
