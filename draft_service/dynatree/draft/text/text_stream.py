"""Conversion of committed tokens to the text and the tokens that a client gets."""

from __future__ import annotations

from dynatree.draft.text.detokenizer import Detokenizer
from dynatree.draft.text.stop_strings import StopStrings


class TextStream:
    """Decodes committed tokens to text, up to the first stop string.

    Attributes:
        offsets: Offset of each token that the last `push` kept, in characters.
    """

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self.offsets: tuple[int, ...] = ()

    @property
    def stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self._stops.found

    def push(self, token_ids: tuple[int, ...], *, ended: bool = False) -> tuple[str, tuple[int, ...]]:
        """Add tokens; return the text that they complete, and the tokens that belong to the completion.

        The last such token is the one that completes a stop string; the text ends before the stop string. If the
        completion has `ended` at the last of `token_ids`, an end token, that token has no text.
        """
        text = ""
        offsets: list[int] = []
        for place, token in enumerate(token_ids, start=1):
            if self.stopped:
                break
            if ended and place == len(token_ids):
                self._detokenizer.pass_over()
            else:
                text += self._stops.push(self._detokenizer.push([token]))
            offsets.append(self._detokenizer.offset)
        self.offsets = tuple(offsets)
        return text, token_ids[: len(offsets)]

    def flush(self) -> str:
        """Return the text that was held back for an incomplete character or stop string."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
