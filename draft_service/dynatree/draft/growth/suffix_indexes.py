"""The suffix indexes of all principals, within one limit of memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from dynatree.draft.policies.suffix_index import SuffixIndex

LEAST_TOKENS = 4  # an n-gram and the token after it
MAX_PRINCIPALS = 1024
SEGMENTS = 16  # parts of the limit that are forgotten at once; a look-up asks each


class SuffixIndexes:
    """A suffix index for each principal; no principal gets candidates from another's completions.

    Beyond the limit, the principal that holds the most forgets its oldest segment. So no principal can make those
    forget that hold less. Thread-safe, since a draft model and its replacement draft on two threads.

    Args:
        most_tokens: Maximum number of tokens that are held; 0 holds none.

    Attributes:
        tokens: Number of tokens held.
    """

    def __init__(self, most_tokens: int = 0) -> None:
        self._most = most_tokens
        self._indexes: dict[str, SuffixIndex] = {}  # the principal whose last completion is oldest is first
        self._forgotten_hits = 0
        self._lock = threading.Lock()
        self.tokens = 0

    @property
    def hits(self) -> int:
        """Number of committed tokens that the indexes foretold."""
        return self._forgotten_hits + sum(index.hits for index in list(self._indexes.values()))

    def __iter__(self) -> Iterator[tuple[str, SuffixIndex]]:
        """Iterate over the principals with their indexes, which must not change meanwhile."""
        return iter(self._indexes.items())

    def of(self, principal: str) -> SuffixIndex | None:
        """Return a principal's index, or None if it has no completions."""
        return self._indexes.get(principal)

    def add(self, principal: str, token_ids: Sequence[int]) -> None:
        """Add a completion with its prompt; of one beyond half of the limit, the end."""
        if self._most < 2 * LEAST_TOKENS:
            return
        with self._lock:
            index = self._indexes.get(principal) or SuffixIndex()
            index.add(token_ids[-(self._most // 2 - 1) :], self._most // SEGMENTS)
            self._indexes.pop(principal, None)
            self._indexes[principal] = index
            if len(self._indexes) > MAX_PRINCIPALS:
                self._forget(next(iter(self._indexes)))
            while sum(each.tokens for each in self._indexes.values()) > self._most:
                largest = max(self._indexes, key=lambda each: self._indexes[each].tokens)
                self._indexes[largest].drop_oldest()
                if not self._indexes[largest].tokens:
                    self._forget(largest)
            self.tokens = sum(each.tokens for each in self._indexes.values())

    def _forget(self, principal: str) -> None:
        self._forgotten_hits += self._indexes.pop(principal).hits
