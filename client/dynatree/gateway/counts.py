"""How many values a JSON text has, counted before it is parsed.

Each value costs time and memory whatever its length, so a text of four megabytes may cost a hundred times as much as
another. What is counted is what bytes tell: commas, brackets and quotes.
"""

from __future__ import annotations

from dynatree.gateway.errors import ApiError

MAX_VALUES = 2**20  # numbers and the like: the prompts' token ids above all
MAX_STRINGS = 2**16  # names of fields among them: a chat of `MAX_MESSAGES` has half as many
MAX_CONTAINERS = 2**14  # objects and lists
VALUE_BYTES = 64  # that one takes in memory, beside the text's own


class Counts:
    """Counts as the text comes, without regard to whether it is JSON."""

    def __init__(self) -> None:
        self.values = self.strings = self.containers = 0
        self._within = False  # a string
        self._rest = b""  # an escape's first half

    def add(self, piece: bytes) -> None:
        """Count what is in a piece of the text.

        Raises:
            ApiError: There is too much of something.
        """
        text = self._rest + piece
        backslashes = len(text) - len(text.rstrip(b"\\"))
        self._rest = b"\\" if backslashes % 2 else b""
        text = text[: len(text) - len(self._rest)].replace(b"\\\\", b"").replace(b'\\"', b"")
        quotes = text.count(b'"')
        self.strings += (quotes + self._within) // 2
        _check(self.strings, MAX_STRINGS, "strings")
        outside = b"".join(text.split(b'"')[self._within :: 2])
        self._within ^= quotes % 2 == 1
        self.containers += outside.count(b"[") + outside.count(b"{")
        self.values += outside.count(b",")
        _check(self.containers, MAX_CONTAINERS, "objects and lists")
        _check(self.values, MAX_VALUES, "values")


def _check(count: int, most: int, what: str) -> None:
    if count > most:
        raise ApiError(400, f"the body has too many {what}; at most {most} are accepted", code="invalid_value")
