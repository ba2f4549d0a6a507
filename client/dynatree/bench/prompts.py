"""Prompts from files: evenly spaced windows of a text, or entries of a JSON Lines file, as token ids of the target."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Encode = Callable[[str], Sequence[int]]

FIELDS = ("prompt", "prefix", "text", "turns", "question")  # of a JSON Lines file, the first that its first line has
_JSONL_SUFFIXES = (".jsonl", ".ndjson")
_BLANK_LINES = re.compile(r"(?:\A|\n)(?:[ \t\r]*\n)+")
_MARGIN = 16  # tokens that the end of a cut text may spoil


@dataclass(frozen=True)
class Selection:
    """Which prompts to take: `count` of them, of `length` tokens (entries of JSON Lines may be shorter).

    `format` is "auto" (by the file's name), "text" or "jsonl"; `field` names the prompt in a line, None to find out.
    """

    count: int
    length: int
    format: str = "auto"
    field: str | None = None


@dataclass(frozen=True)
class Prompts:
    """Prompts and where they come from: the file's name and SHA-256, and the field of a JSON Lines file."""

    file: str
    sha256: str
    field: str | None
    token_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, and the fingerprint by which a service names its own."""

    encode: Encode
    fingerprint: str


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of "embedded", a local path or a hub name.

    Raises:
        SystemExit: There is none.
    """
    # These import transformers; `dynatree bench show` does without.
    from dynatree.common import embedded, tokenizer
    from dynatree.common.errors import StartupError

    try:
        loaded: Any = tokenizer.load_tokenizer(str(embedded.target_path()) if model == embedded.NAME else model)
    except StartupError as error:
        raise SystemExit(str(error)) from None
    return Tokenizer(lambda text: loaded(text, verbose=False)["input_ids"], tokenizer.fingerprint(loaded))


def read_prompts(path: Path, selection: Selection, encode: Encode) -> Prompts:
    """The prompts of a file.

    Raises:
        SystemExit: The file cannot be read, is not what it should be, or has too few prompts.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SystemExit(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    lines = selection.format == "jsonl" or (selection.format == "auto" and path.suffix in _JSONL_SUFFIXES)
    if selection.field is not None and not lines:
        raise SystemExit(f"--field is for JSON Lines, and {path} is read as text; --prompts-format jsonl changes that")
    field = None
    try:
        if lines:
            field, token_ids = _entries(text, selection, encode)
        else:
            token_ids = cut_text(text, selection.count, selection.length, encode)
    except ValueError as error:
        raise SystemExit(f"{path}: {error}") from None
    return Prompts(path.name, hashlib.sha256(content).hexdigest(), field, tuple(token_ids))


def cut_text(text: str, count: int, length: int, encode: Encode) -> list[tuple[int, ...]]:
    """`count` windows of `length` tokens, one from each of `count` equal parts of the text, none overlapping.

    A window starts at its part's first paragraph (after a blank line), or where that leaves too little, at its first
    whole word.

    Raises:
        ValueError: The text is too short.
    """
    paragraphs = [match.end() for match in _BLANK_LINES.finditer(text)]
    if not _BLANK_LINES.match(text):
        paragraphs.insert(0, 0)
    windows = []
    for part in range(count):
        start, stop = part * len(text) // count, (part + 1) * len(text) // count
        starts = [place for place in paragraphs if start <= place < stop][:1]
        starts.append(_next_word(text, start))
        found = (_first_tokens(text[place:stop], length, encode) for place in starts)
        window = next((tokens for tokens in found if len(tokens) == length), None)
        if window is None:
            raise ValueError(
                f"too short for {count} prompts of {length} tokens each; "
                "expected fewer (--count) or shorter ones (--prompt-tokens)"
            )
        windows.append(window)
    return windows


def _next_word(text: str, start: int) -> int:
    """The next place at or after `start` where no word is cut; the space before a word belongs to it."""
    if start == 0:
        return 0
    while start < len(text) and not text[start].isspace():
        start += 1
    return start


def _first_tokens(text: str, length: int, encode: Encode) -> tuple[int, ...]:
    """The first `length` tokens of a text, or all that there are, without encoding much more than that."""
    size = 8 * length
    while True:
        tokens = encode(text[:size])
        if size >= len(text) or len(tokens) >= length + _MARGIN:
            return tuple(tokens[:length])
        size *= 2


def _entries(text: str, selection: Selection, encode: Encode) -> tuple[str, list[tuple[int, ...]]]:
    """The name of the field, and evenly spaced lines' prompts."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if len(lines) < selection.count:
        raise ValueError(f"it has {len(lines)} prompts, expected at least {selection.count} (--count)")
    field = selection.field or _detect(*lines[0])
    chosen = [lines[place * len(lines) // selection.count] for place in range(selection.count)]
    prompts = []
    for number, line in chosen:
        tokens = _first_tokens(_prompt(number, line, field), selection.length, encode)
        if not tokens:
            raise ValueError(f"line {number}: {field} is empty")
        prompts.append(tokens)
    return field, prompts


def _detect(number: int, line: str) -> str:
    entry = _object(number, line)
    for name in FIELDS:
        if name in entry:
            return name
    raise ValueError(f"line {number} has none of {', '.join(FIELDS)}; expected --field with the name of its prompt")


def _prompt(number: int, line: str, field: str) -> str:
    """A line's prompt; of a list, such as the turns of a conversation, the first."""
    entry = _object(number, line)
    if field not in entry:
        raise ValueError(f"line {number} has no {field}")
    value = entry[field]
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str):
        raise ValueError(f"line {number}: {field} is no text, and no list that starts with one")
    return value


def _object(number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"line {number} is not a JSON object")
    return entry
