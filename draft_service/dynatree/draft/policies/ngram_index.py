"""Index of the earlier places of a sequence's last tokens: prompt lookup (Saxena 2023; LLMA, Yang et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PLACES = 64  # latest places of an n-gram that a look-up tries: in a long loop all give the same continuation


class NGramIndex:
    """The places of every n-gram of a growing sequence, for n from `shortest` to `longest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._indexed = 0

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
        self._extend(tokens)
        found: dict[int, tuple[int, list[int]]] = {}
        for length in self._lengths:
            if length >= len(tokens):
                continue
            ends = self._ends.get(tuple(tokens[len(tokens) - length :]), [])
            for end in ends[: -MAX_PLACES - 1 : -1]:
                if len(found) == count:
                    return list(found.values())
                if tokens[end] not in found:
                    period = len(tokens) - end
                    found[tokens[end]] = (length, [tokens[end + i % period] for i in range(depth)])
        return list(found.values())

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index the n-grams that end before the last token, so that each has a token after it."""
        for end in range(max(self._indexed, 1), len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._ends.setdefault(tuple(tokens[end - length : end]), []).append(end)
        self._indexed = max(self._indexed, len(tokens))
