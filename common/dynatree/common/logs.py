"""What the services write to standard error: lines of text, or of JSON.

Strangers choose some of the words. So a record is one line whatever they are, of printable characters.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
INDENT = "    "  # of a traceback: a line that begins at the margin is a record's first
_OF_PEERS = ("ExecuteBatchError",)  # of a private module of gRPC
_PLAIN = re.compile(r'[^\s"=\\]+')


class JsonLines(logging.Formatter):
    """One JSON object a record: `time`, `level`, `logger`, `message`, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """One line a record; its `fields` follow the message as `name=value`, those that are not empty.

    A value with spaces, quotes, equals signs or backslashes is a JSON string. A traceback follows, indented.
    """

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, but for a traceback."""
        fields = {name: value for name, value in getattr(record, "fields", {}).items() if value not in ("", None)}
        line = escaped(super().formatMessage(record))
        return " ".join([line, *(f"{name}={_short(value)}" for name, value in fields.items())])

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The traceback, whose last lines may be a stranger's."""
        return "\n".join(INDENT + escaped(line) for line in super().formatException(ei).split("\n"))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        """The stack, as a traceback."""
        return "\n".join(INDENT + escaped(line) for line in stack_info.split("\n"))


def configure_logging(log_format: str, level: str = "info") -> None:
    """Write to standard error in this format, "text" or "json", what is at least as important as `level`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]), handlers=[handler])
    logging.getLogger("dynatree").setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every try to reach the hub


def announce(text: str) -> None:
    """Tell whoever started the process, on standard error, what is no line of the log."""
    print(text, file=sys.stderr, flush=True)


def announce_ready(command: str, what: str) -> None:
    """Tell whoever started the process what it serves, and where, as a line of the log."""
    ready = logging.getLogger(f"dynatree {command}")
    ready.setLevel(logging.getLogger("dynatree").getEffectiveLevel())
    ready.info(what)


def escaped(text: str) -> str:
    """Text on one line, whose control characters and the like are shown as Python's literals have them."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isprintable() and _PLAIN.fullmatch(text) else json.dumps(text)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record of gRPC is one of ours to mend.

    The others tell of what peers do, with a traceback each, so that any peer could fill the log: a call that a stop has
    cancelled, a status for a peer that is gone or whose message was refused, metadata that are no text.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (asyncio.CancelledError, UnicodeDecodeError)) and type(error).__name__ not in _OF_PEERS
