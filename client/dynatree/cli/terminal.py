"""Output of text to a terminal, a file or a pipe."""

from __future__ import annotations

import io
import re
import sys

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Escape all control characters but line feeds and tabs, so that a terminal shows them and does not obey them."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def print_utf8() -> None:
    """Switch standard output to UTF-8 in every locale, since a model may answer with any character."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
