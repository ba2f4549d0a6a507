"""Tests that a log record is one line of printable characters, whatever its fields contain."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dynatree.common.logs import INDENT, JsonLines, TextLines

FORGED = "a\n2026-11-26 00:00:00,000 ERROR dynatree.draft.service: forged\x1b[2J\u2028\u202e\x85\x9b\ud800"
words = st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(
    [FORGED, "", " ", 'a="b', "\\", "a b=c", "\r", "\0", "\x7f", "code=OK", "é"]
)
FIELD = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^\s"]+)')


def record(message: str, *args: object, fields: dict[str, Any] | None = None, error: Any = None) -> Any:
    made: Any = logging.LogRecord("dynatree.x", logging.INFO, "x.py", 1, message, args, error)
    made.fields = fields or {}
    return made


@settings(deadline=None)
@given(words, words, words, st.integers())
@example(FORGED, FORGED, FORGED, 0)
def test_a_record_is_one_line_from_which_its_fields_can_be_read(
    message: str, one: str, other: str, number: int
) -> None:
    fields = {"principal": one, "error": other, "number": number}
    made = record("request %s", message)
    before = TextLines().format(made)
    made.fields = fields
    line = TextLines().format(made)
    assert line.isprintable()
    told = line.removeprefix(before)
    read = {name: json.loads(value) if value.startswith('"') else value for name, value in FIELD.findall(told)}
    assert read == {name: str(value) for name, value in fields.items() if value != ""}
    line = JsonLines().format(made)
    assert line.isprintable()
    assert line.isascii()
    assert json.loads(line) == {**json.loads(line), **fields, "message": f"request {message}"}


@settings(deadline=None)
@given(words)
@example(FORGED)
def test_no_line_of_a_traceback_looks_like_a_record(text: str) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        made = record("failed", error=sys.exc_info())
    first, *others = TextLines().format(made).split("\n")
    assert first.endswith("failed")
    assert others
    assert all(line.startswith(INDENT) and line.isprintable() for line in others)
    assert JsonLines().format(made).isprintable()


@pytest.mark.parametrize("kind", [TextLines, JsonLines])
def test_a_field_of_any_type_is_told(kind: type[logging.Formatter]) -> None:
    assert "some/file" in kind().format(record("x", fields={"file": Path("some/file")}))
