"""Committed tokens to the text and the tokens that a client gets."""

from __future__ import annotations

from dynatree.draft.detokenizer import Detokenizer
from dynatree.draft.stop_strings import StopStrings


class TextStream:
    """Committed tokens to text, up to the first stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self._stops.found

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """The text that these tokens complete, and those of them that belong to the completion.

        The token that completes a stop string is the last that does; the text ends before the stop string.
        """
        if self.stopped:
            return "", ()
        if not self._stops.active:
            return self._detokenizer.push(token_ids), token_ids
        text = ""
        for count, token in enumerate(token_ids, start=1):
            text += self._stops.push(self._detokenizer.push([token]))
            if self._stops.found:
                return text, token_ids[:count]
        return text, token_ids

    def flush(self) -> str:
        """What was held back for a character or a stop string that did not come to be."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
