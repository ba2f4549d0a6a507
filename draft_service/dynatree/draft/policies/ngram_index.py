"""Index of the earlier places of a sequence's last tokens: prompt lookup (Saxena 2023; LLMA, Yang et al. 2023)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

MAX_PLACES = 64  # latest places of a hash that a look-up tries: in a long loop all give the same continuation
NOWHERE = 0  # no n-gram ends before the first token
LEAST_SLOTS = 64


class NGramIndex:
    """The places of every n-gram of a growing sequence, for each n of `lengths`.

    The place of an n-gram is the position of the token after it. Each place leads to the place before it with the same
    hash, as in LZ77's hash chains. So a token takes 8 to 14 bytes for each n.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        self._lengths = sorted(lengths, reverse=True)
        self._slots = 0
        self._latest: dict[int, array[int]] = {}  # by n: the latest place of each hash
        self._before: dict[int, array[int]] = {}  # by n: the place before each place

    def continuations(self, tokens: Sequence[int], depth: int, count: int) -> list[tuple[int, list[int]]]:
        """The tokens that followed the sequence's last n-gram at its earlier places.

        Args:
            tokens: The whole sequence; it begins with the sequence of the last call.
            depth: The length of a continuation. A continuation that reaches the end of the sequence starts again at its
                own first token, as a loop would.
            count: Maximum number of continuations, each with another first token.

        Returns:
            For each continuation the length n of the match, and its tokens: the longest match first, then the latest.
        """
        self.extend(tokens)
        found: dict[int, tuple[int, list[int]]] = {}
        for length in self._lengths:
            if length >= len(tokens):
                continue
            for end in self.places(tokens, tokens[len(tokens) - length :]):
                if len(found) == count:
                    return list(found.values())
                if tokens[end] not in found:
                    period = len(tokens) - end
                    found[tokens[end]] = (length, [tokens[end + i % period] for i in range(depth)])
        return list(found.values())

    def extend(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that end before the last token, so that each has a token after it."""
        if len(tokens) > self._slots:
            self._slots = max(LEAST_SLOTS, 1 << len(tokens).bit_length())
            for length in self._lengths:
                self._latest[length], self._before[length] = array("i", bytes(4 * self._slots)), array("i")
        for length in self._lengths:
            latest, before, mask = self._latest[length], self._before[length], self._slots - 1
            for place in range(len(before), len(tokens)):
                if place < length:
                    before.append(NOWHERE)
                    continue
                slot = hash(tuple(tokens[place - length : place])) & mask
                before.append(latest[slot])
                latest[slot] = place

    def places(self, tokens: Sequence[int], ngram: Sequence[int]) -> Iterator[int]:
        """Yield the places of an n-gram of the type of `tokens`, the whole sequence; the latest is first."""
        if not self._slots:
            return
        length = len(ngram)
        before = self._before[length]
        place = self._latest[length][hash(tuple(ngram)) & (self._slots - 1)]
        for _ in range(MAX_PLACES):
            if place == NOWHERE:
                return
            if tokens[place - length : place] == ngram:
                yield place
            place = before[place]
