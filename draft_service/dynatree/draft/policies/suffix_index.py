"""Suffix index over a principal's earlier completions (suffix decoding, Oliaro et al. 2024)."""

from __future__ import annotations

import itertools
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from dynatree.common.tree import ROOT
from dynatree.draft.control.constants import DEFAULT_CONTROL
from dynatree.draft.policies.match_rates import MatchRates
from dynatree.draft.policies.ngram_index import MAX_PLACES, NGramIndex

LENGTHS = (8, 3)  # tokens of the indexed n-grams: a match is at least as long as the shortest
MATCH_TOKENS = 32  # longest match that is told apart from longer ones
BLOCK = 32  # tokens; sequences are compared by whole blocks
END = -1  # after each sequence
LEAST_VALUE = 0.01  # path probability below which a token is not worth the time to add it

Place = tuple["array[int]", int]  # tokens, and the position of the next one


class Recalled(NamedTuple):
    """A token that followed the longest match, or others that did.

    Attributes:
        parent: The token before it, as an index into the list of these; ROOT for the first.
        token: The token.
        share: The share of the places that continue with it, among those that continue with the tokens before it.
        match: Number of tokens before it that match, its ancestors included.
    """

    parent: int
    token: int
    share: float
    match: int


class SuffixIndex:
    """The sequences of one principal's finished completions, and where their n-grams continue.

    The prompt of a chat's next turn repeats the turns before it. So a sequence that begins like an earlier one is kept
    without that beginning, except for its last block; the beginning is counted in whole blocks. A sequence that is held
    already is not kept again.

    One thread at a time may change an index, and any thread may recall from it.

    Attributes:
        rates: The rates at which the tokens are right, over all sessions of the principal.
        hits: Number of committed tokens that the index foretold.
        tokens: Number of tokens held, with one for each end of a sequence.
    """

    def __init__(self) -> None:
        self.rates = MatchRates(fade=DEFAULT_CONTROL.calibration_fade)
        self.hits = 0
        self.tokens = 0
        self._segments: deque[_Segment] = deque()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[list[int]]:
        """Iterate over the kept parts of the sequences, the oldest first; the index must not change meanwhile."""
        for segment in self._segments:
            start = 0
            while start < len(segment.tokens):
                end = segment.tokens.index(END, start)
                yield segment.tokens[start:end].tolist()
                start = end + 1

    def add(self, token_ids: Sequence[int], segment_tokens: int) -> None:
        """Add a sequence; a segment that holds more than one sequence has at most `segment_tokens` tokens."""
        keys = _keys(token_ids)
        known = 0
        while known < len(keys) and any(keys[known] in segment.beginnings for segment in self._segments):
            known += 1
        if known == len(keys):
            return
        part = token_ids[max(known - 1, 0) * BLOCK :]
        with self._lock:
            if not self._segments or len(self._segments[-1].tokens) + len(part) >= segment_tokens:
                self._segments.append(_Segment())
            self._segments[-1].add(part, keys[known:])
            self.tokens += len(part) + 1

    def drop_oldest(self) -> None:
        """Forget the oldest segment."""
        with self._lock:
            self.tokens -= len(self._segments.popleft().tokens)

    def recall(
        self, context: Sequence[int], depth: int, count: int, vocab_size: int, rate: Callable[[int], float]
    ) -> list[Recalled]:
        """Find the likeliest tokens after the longest match of the end of `context`.

            P(token | all before it are right) = rate(match) x share

        Args:
            context: The committed tokens of a session.
            depth: Maximum length of a continuation.
            count: Maximum number of tokens.
            vocab_size: Number of token ids that may follow.
            rate: The rate at which a token is right after a match of some length, if all places continue with it.

        Returns:
            The tokens in descending order of their path probability, so parents come first; none below `LEAST_VALUE`.
        """
        found: list[Recalled] = []
        heap: list[tuple[float, int, Recalled, list[Place]]] = []
        order = itertools.count()  # among equals, the first that was found is first

        def follow(parent: int, match: int, value: float, places: Sequence[Place]) -> None:
            for token, following in _by_token(places).items():
                if not 0 <= token < vocab_size:  # the end of a sequence, or another target's token
                    continue
                share = len(following) / len(places)
                reached = value * share * rate(match)
                if reached >= LEAST_VALUE:
                    each = Recalled(parent, token, share, match)
                    heappush(heap, (-reached, next(order), each, following))

        with self._lock:  # the rest reads tokens, which never change once they are there
            longest, places = self._longest(context)
        follow(ROOT, longest, 1.0, places)
        while heap and len(found) < count:
            negative, _, each, following = heappop(heap)
            found.append(each)
            if each.match + 1 < longest + depth:
                follow(len(found) - 1, each.match + 1, -negative, following)
        return found

    def _longest(self, context: Sequence[int]) -> tuple[int, list[Place]]:
        """Return the length of the longest match that goes on, at most `MATCH_TOKENS`, and its latest places."""
        end = array("i", context[-MATCH_TOKENS:])
        for length in LENGTHS:
            ngram = end[-length:]
            if len(ngram) < length:
                continue
            longest, tried = length, 0
            found: list[Place] = []
            for segment in reversed(self._segments):
                for place in segment.index.places(segment.tokens, ngram):
                    tried += 1
                    match = _match(segment.tokens, place, end, length) if segment.tokens[place] != END else 0
                    if match > longest:
                        longest, found = match, []
                    if match == longest:
                        found.append((segment.tokens, place))
                if tried >= MAX_PLACES:
                    break
            if found:
                return longest, found
        return 0, []


class _Segment:
    """Some sequences in a row, which are forgotten together.

    Attributes:
        tokens: The sequences, each followed by `END`.
        index: The index of the tokens.
        beginnings: Keys of the beginnings of the whole sequences.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.index = NGramIndex(LENGTHS)
        self.beginnings: set[int] = set()

    def add(self, token_ids: Sequence[int], keys: Sequence[int]) -> None:
        self.tokens.extend((*token_ids, END))
        self.index.extend(self.tokens)
        self.beginnings.update(keys)


def _keys(token_ids: Sequence[int]) -> list[int]:
    """Return a key for each beginning of the sequence that has whole blocks, and for the whole sequence."""
    keys, key = [], 0
    for start in range(0, len(token_ids), BLOCK):
        key = hash((key, *token_ids[start : start + BLOCK]))
        keys.append(key)
    return keys


def _match(tokens: array[int], place: int, end: array[int], match: int) -> int:
    """Return the number of equal tokens before `place` and at the end of `end`, of which `match` are known."""
    if tokens[max(place - len(end), 0) : place] == end:
        return len(end)
    while match < min(place, len(end)) and tokens[place - match - 1] == end[-match - 1]:
        match += 1
    return match


def _by_token(places: Sequence[Place]) -> dict[int, list[Place]]:
    """Group places by their next token, each moved behind it."""
    found: dict[int, list[Place]] = {}
    for tokens, place in places:
        found.setdefault(tokens[place], []).append((tokens, place + 1))
    return found
