"""What the services write to standard error: lines of text, or of JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from datetime import UTC, datetime

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


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
        return json.dumps(line, ensure_ascii=False)


class TextLines(logging.Formatter):
    """One line a record; its `fields` follow the message as `name=value`, those that are not empty."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, but for a traceback."""
        fields = {name: value for name, value in getattr(record, "fields", {}).items() if value not in ("", None)}
        return " ".join([super().formatMessage(record), *(f"{name}={_short(value)}" for name, value in fields.items())])


def configure_logging(log_format: str, level: str = "info") -> None:
    """Write to standard error in this format, "text" or "json", what is at least as important as `level`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=max(logging.WARNING, logging.getLevelNamesMapping()[level.upper()]), handlers=[handler])
    logging.getLogger("dynatree").setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_cancellation)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every try to reach the hub


def announce(text: str) -> None:
    """Tell whoever started the process, on standard error, what is no line of the log."""
    print(text, file=sys.stderr, flush=True)


def announce_ready(command: str, what: str) -> None:
    """Tell whoever started the process what it serves, and where, as a line of the log."""
    ready = logging.getLogger(f"dynatree {command}")
    ready.setLevel(logging.getLogger("dynatree").getEffectiveLevel())
    ready.info(what)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a log record is not of a call that a stop has cancelled, which gRPC now and then calls an error."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))
