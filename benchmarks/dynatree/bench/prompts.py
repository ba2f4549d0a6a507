"""Prompts as token ids of the target: windows of a text, or texts and chats of JSON Lines or of a data set."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynatree.bench.data_sets import DataSet, load_data_set

Chat = list[dict[str, str]]  # messages, each with `role` and `content`
Encode = Callable[[str | Chat], Sequence[int]]

# The first field that the first entry has is used.
FIELDS = ("prompt", "prefix", "text", "turns", "question", "messages")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
_FILE_SUFFIXES = (*JSONL_SUFFIXES, ".txt", ".md", ".json", ".csv")
_BLANK_LINES = re.compile(r"(?:\A|\n)(?:[ \t\r]*\n)+")
_MARGIN = 16  # tokens at the end of a truncated text that the cut may change


@dataclass(frozen=True)
class Selection:
    """The prompts to take: `count` prompts of `length` tokens (entries may be shorter, and chats are taken whole).

    `format` is "text" or "jsonl" (entries); "auto" decides by a file's name, and takes a data set as entries. `field`
    names the prompt's field in an entry; None detects it. `split` is the data set's split.
    """

    count: int
    length: int
    format: str = "auto"
    field: str | None = None
    split: str = "test"


@dataclass(frozen=True)
class Prompts:
    """Prompts and their origin: the file's or data set's name, its SHA-256, and the field of its entries."""

    file: str
    sha256: str
    field: str | None
    token_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, and its fingerprint as a service reports it.

    It encodes a chat by the chat template, without the assistant's messages at the end, and raises ValueError if it
    cannot.
    """

    encode: Encode
    fingerprint: str


def load_tokenizer(model: str) -> Tokenizer:
    """Load the tokenizer of "embedded", a local path or a hub name.

    Raises:
        SystemExit: The tokenizer cannot be loaded.
    """
    # These import transformers, which `dynatree bench show` does not need.
    from dynatree import embedded
    from dynatree.common.errors import InvalidArgumentError, StartupError
    from dynatree.draft.text.prompts import Message, PromptEncoder
    from dynatree.engine.model import tokenizer

    try:
        loaded: Any = tokenizer.load_tokenizer(str(embedded.target_path()) if model == embedded.NAME else model)
    except StartupError as error:
        raise SystemExit(str(error)) from None

    encoder = PromptEncoder(loaded)

    def encode_chat(chat: Chat) -> Sequence[int]:
        messages = [Message(each["role"], each["content"]) for each in chat]
        while messages and messages[-1].role == "assistant":
            messages.pop()
        try:
            return encoder.chat(messages, special_tokens=False)
        except InvalidArgumentError as error:
            raise ValueError(str(error)) from None

    def encode(text: str | Chat) -> Sequence[int]:
        if not isinstance(text, str):
            return encode_chat(text)
        token_ids: list[int] = loaded(text, verbose=False)["input_ids"]
        return token_ids

    return Tokenizer(encode, tokenizer.fingerprint(loaded))


def read_prompts(source: Path, selection: Selection, encode: Encode) -> Prompts:
    """Read the prompts of a file, or, if it does not exist, of the data set of that name.

    Raises:
        SystemExit: The source cannot be read, has the wrong format, or has too few prompts.
    """
    try:
        if source.exists() and not source.is_dir():
            return _of_file(source, selection, encode)
        if not source.exists() and _can_only_be_a_file(source):
            raise SystemExit(f"there is no file {source}")
        return _of_data_set(load_data_set(str(source), selection.split), selection, encode)
    except ValueError as error:
        raise SystemExit(f"{source}: {error}") from None


def _can_only_be_a_file(source: Path) -> bool:
    """Whether no data set (`NAME` or `OWNER/NAME`) can have this name; without a network, asking the hub is slow."""
    return source.suffix in _FILE_SUFFIXES or source.is_absolute() or len(source.parts) > 2 or source.parts[0] == ".."


def _of_file(path: Path, selection: Selection, encode: Encode) -> Prompts:
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SystemExit(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    sha256 = hashlib.sha256(content).hexdigest()
    if selection.format == "jsonl" or (selection.format == "auto" and path.suffix in JSONL_SUFFIXES):
        return Prompts(path.name, sha256, *_choose(read_entries(text), selection, encode))
    if selection.field is not None:
        raise SystemExit(f"--field is for JSON Lines, and {path} is read as text; --prompts-format jsonl changes that")
    return Prompts(path.name, sha256, None, cut_text(text, selection.count, selection.length, encode))


def _of_data_set(data: DataSet, selection: Selection, encode: Encode) -> Prompts:
    entries = Entries("row", range(len(data.rows)), data.rows.__getitem__)
    field = selection.field or entries.field()
    prompts = [entries.prompt(row, field) for row in entries.places]
    column = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in prompts)
    sha256 = hashlib.sha256(column.encode()).hexdigest()
    if selection.format == "text":
        return Prompts(data.name, sha256, field, cut_text(column, selection.count, selection.length, encode))
    return Prompts(data.name, sha256, *_choose(entries, selection, encode))


def cut_text(text: str, count: int, length: int, encode: Encode) -> tuple[tuple[int, ...], ...]:
    """`count` windows of `length` tokens, one from each of `count` equal parts of the text, none overlapping.

    A window starts at its part's first paragraph (after a blank line), or, if that leaves too few tokens, at its first
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
    return tuple(windows)


def _next_word(text: str, start: int) -> int:
    """The next place at or after `start` that cuts no word; the space before a word belongs to the word."""
    if start == 0:
        return 0
    while start < len(text) and not text[start].isspace():
        start += 1
    return start


def _first_tokens(text: str, length: int, encode: Encode) -> tuple[int, ...]:
    """The first `length` tokens of a text, or all if there are fewer, without encoding much more of the text."""
    size = 8 * length
    while True:
        tokens = encode(text[:size])
        if size >= len(text) or len(tokens) >= length + _MARGIN:
            return tuple(tokens[:length])
        size *= 2


@dataclass(frozen=True)
class Entries:
    """Objects that each hold a prompt: the word for an entry, the entries' places, and a function that reads one.

    All methods raise ValueError if an entry is malformed.
    """

    unit: str
    places: Sequence[int]
    read: Callable[[int], Mapping[str, Any]]

    def field(self) -> str:
        """The name of the prompts' field, detected in the first entry."""
        if not self.places:
            raise ValueError("it has no prompts")
        first = self.read(self.places[0])
        for name in FIELDS:
            if name in first:
                return name
        raise ValueError(
            f"{self.unit} {self.places[0]} has none of {', '.join(FIELDS)}; "
            "expected --field with the name of its prompt"
        )

    def prompt(self, place: int, field: str) -> str | Chat:
        """An entry's text or chat; if it is a list of texts, such as the user's turns in a conversation, the first."""
        entry = self.read(place)
        if field not in entry:
            raise ValueError(f"{self.unit} {place} has no {field}")
        value = entry[field]
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            reason = f"{field} is not valid Unicode: it has half of a surrogate pair"
            raise ValueError(f"{self.unit} {place}: {reason}") from None
        if isinstance(value, list) and value:
            if all(map(_is_message, value)):
                return value
            value = value[0]
        if not isinstance(value, str):
            raise ValueError(
                f"{self.unit} {place}: {field} is neither a text nor a list that starts with one, nor a chat, "
                "whose messages have a role and a content of text"
            )
        return value


def read_entries(text: str) -> Entries:
    """The entries of JSON Lines."""
    lines = {number: line for number, line in enumerate(text.split("\n"), start=1) if line.strip()}
    return Entries("line", list(lines), lambda number: _object(number, lines[number]))


def _choose(entries: Entries, selection: Selection, encode: Encode) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The name of the field, and the prompts of evenly spaced entries."""
    total = len(entries.places)
    if total < selection.count:
        raise ValueError(f"it has {total} prompts, expected at least {selection.count} (--count)")
    field = selection.field or entries.field()
    prompts = []
    for number in range(selection.count):
        place = entries.places[number * total // selection.count]
        prompt = entries.prompt(place, field)
        tokens = _first_tokens(prompt, selection.length, encode) if isinstance(prompt, str) else tuple(encode(prompt))
        if not tokens:
            raise ValueError(f"{entries.unit} {place}: {field} is empty")
        prompts.append(tokens)
    return field, tuple(prompts)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _object(number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"line {number} is not a JSON object")
    return entry
