"""Detection of stop strings in streamed text, also if a stop string spans several pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through, but holds back text that may be the beginning of a stop string.

    Attributes:
        found: Whether a stop string has appeared; no text is passed after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Add text, and return the text before the first stop string, or before the possible beginning of one."""
        if self.found:
            return ""
        text = self._held + text
        at = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if at >= 0:
            self.found = True
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the held text, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
