"""Committed tokens to the text and the tokens that a client gets."""

from __future__ import annotations

from dynatree.draft.detokenizer import Detokenizer
from dynatree.draft.stop_strings import StopStrings


class TextStream:
    """Committed tokens to text, up to the first stop string.

    Attributes:
        offsets: Where each token that the last `push` kept begins in the text, in characters.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self.offsets: tuple[int, ...] = ()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self._stops.found

    def push(self, token_ids: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """The text that these tokens complete, and those of them that belong to the completion.

        The token that completes a stop string is the last that does; the text ends before the stop string.
        """
        text = ""
        offsets: list[int] = []
        for token in token_ids:
            if self.stopped:
                break
            text += self._stops.push(self._detokenizer.push([token]))
            offsets.append(self._detokenizer.offset)
        self.offsets = tuple(offsets)
        return text, token_ids[: len(offsets)]

    def flush(self) -> str:
        """What was held back for a character or a stop string that did not come to be."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
