"""Logging of the services to standard error, as lines of text or of JSON.

Parts of a record come from untrusted callers. So every record is one line of printable characters.
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
INDENT = "    "  # before traceback lines, so that only the first line of a record begins at the margin
_OF_PEERS = ("ExecuteBatchError",)  # defined in a private module of gRPC, hence matched by name
_PLAIN = re.compile(r'[^\s"=\\]+')


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object: `time`, `level`, `logger`, `message`, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
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
    """Formats each record as one line; its non-empty `fields` follow the message as `name=value`.

    A value with spaces, quotes, equals signs or backslashes is written as a JSON string. A traceback follows, indented.
    """

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The record's line, without its traceback."""
        fields = {name: value for name, value in getattr(record, "fields", {}).items() if value not in ("", None)}
        line = escaped(super().formatMessage(record))
        return " ".join([line, *(f"{name}={_short(value)}" for name, value in fields.items())])

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The traceback, indented and escaped: an error message may quote untrusted input."""
        return "\n".join(INDENT + escaped(line) for line in super().formatException(ei).split("\n"))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        """The stack, indented and escaped like a traceback."""
        return "\n".join(INDENT + escaped(line) for line in stack_info.split("\n"))


def configure_logging(log_format: str, level: str = "info") -> None:
    """Log records of at least `level` to standard error, in the format "text" or "json"."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]), handlers=[handler])
    logging.getLogger("dynatree").setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it warns at every attempt to reach the hub


def announce(text: str) -> None:
    """Print a message for the operator to standard error, outside the log."""
    print(text, file=sys.stderr, flush=True)


def announce_ready(command: str, what: str) -> None:
    """Log that a command is ready, with the model and the address that it serves."""
    ready = logging.getLogger(f"dynatree {command}")
    ready.setLevel(logging.getLogger("dynatree").getEffectiveLevel())
    ready.info(what)


def escaped(text: str) -> str:
    """The text on one line, with unprintable characters escaped as in Python's string literals."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if text.isprintable() and _PLAIN.fullmatch(text) else json.dumps(text)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record of gRPC reports a fault of this process.

    The other records report the behaviour of peers, each with a traceback, so any peer could fill the log. They concern
    calls that a stop has cancelled, statuses for peers that are gone or whose message was refused, and metadata that is
    not text.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (asyncio.CancelledError, UnicodeDecodeError)) and type(error).__name__ not in _OF_PEERS
