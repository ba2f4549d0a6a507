"""Text for a terminal, a file or a pipe."""

from __future__ import annotations

import io
import re
import sys

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """Text whose control characters a terminal shows instead of obeying them, but for line feeds and tabs."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def print_utf8() -> None:
    """Print UTF-8 whatever the locale is: a model may answer with any character."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
