"""Counts the values of a JSON text before it is parsed.

Each value costs time and memory whatever its length, so one text of four megabytes may cost a hundred times as much as
another. The count is of bytes that mark values: commas, brackets and quotes.
"""

from __future__ import annotations

from dynatree.gateway.errors import ApiError

MAX_VALUES = 2**20  # commas outside strings; most of them separate the token ids of prompts
MAX_STRINGS = 2**16  # including field names; a chat of `MAX_MESSAGES` has half as many
MAX_CONTAINERS = 2**14  # objects and lists
VALUE_BYTES = 64  # memory of a parsed value, besides the bytes of its text


class Counts:
    """Counts the values of a text piece by piece; the text need not be valid JSON."""

    def __init__(self) -> None:
        self.values = self.strings = self.containers = 0
        self._within = False  # whether the last piece ended inside a string
        self._rest = b""  # the backslash of an escape that the last piece cut in two

    def add(self, piece: bytes) -> None:
        """Count the values in the next piece of the text.

        Raises:
            ApiError: A count exceeds its limit.
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
