"""Texts as one stream of token ids, of which a part is held back, and prompts cut from it."""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dynatree.bench.prompts import JSONL_SUFFIXES, Chat, read_entries
from dynatree.common.errors import StartupError
from dynatree.engine.model.tokenizer import first_line

log = logging.getLogger(__name__)

LENGTH = 256  # tokens of a training sequence
PROMPT = 64  # tokens of a prompt that the target answers, its chat template included
_PIECE = 4 * LENGTH
_MANIFEST = "manifest.json"  # of a folder that `--record` wrote
_HELD_BACK = 16  # every 16th piece is held back


@dataclass(frozen=True)
class Texts:
    """The tokens to train on and those held back, both `[tokens]`, and the SHA-256 of both."""

    training: Tensor
    held_back: Tensor
    sha256: str

    def save(self, path: Path) -> None:
        """Write the tokens to a file."""
        save_file({"training": self.training, "held_back": self.held_back}, path, {"sha256": self.sha256})

    @classmethod
    def load(cls, path: Path) -> Texts:
        """Read a file that `save` wrote.

        Raises:
            StartupError: It cannot be read.
        """
        try:
            with safe_open(path, "pt") as file:
                return cls(file.get_tensor("training"), file.get_tensor("held_back"), file.metadata()["sha256"])
        except Exception:  # safetensors raises types that are no OSError or ValueError
            raise StartupError(f"--resume: {path} cannot be read") from None


def read_texts(sources: Sequence[Path], tokenizer: Any) -> Texts:
    """Read files and folders, and hold back every sixteenth piece of 1,024 tokens.

    A file is UTF-8 text, or JSON Lines whose entries have a field that `read_entries` finds. Documents are separated by
    the tokenizer's end-of-sequence token. Files of a folder that are not UTF-8 are passed over.

    Raises:
        StartupError: A source cannot be read, the chat template refuses a chat, or there are too few tokens.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = array("i")  # a list would take nine times the memory
    for document in (document for source in sources for document in _documents(source)):
        ids.extend([*_encoded(document, tokenizer), *end])
    if len(ids) < 2 * _PIECE:
        names = ", ".join(map(str, sources))
        raise StartupError(f"--texts {names} has {len(ids)} tokens; expected at least {2 * _PIECE}, better a million")
    pieces = torch.split(torch.frombuffer(ids, dtype=torch.int32), _PIECE)
    every = min(_HELD_BACK, len(ids) // _PIECE)
    training = [piece for number, piece in enumerate(pieces) if number % every != every - 1]
    return Texts(torch.cat(training), torch.cat(pieces[every - 1 :: every]), hashlib.sha256(ids).hexdigest())


def windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Cut random windows `[count, length]` from a stream of tokens."""
    starts = torch.randint(len(tokens) - length + 1, (count,), generator=generator).tolist()
    return torch.stack([tokens[start : start + length] for start in starts])


def chat_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens before and after a user's message in a chat; both empty if there is no short chat template."""
    mark = "<message>"
    try:
        chat = [{"role": "user", "content": mark}]
        before, found, after = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        ).partition(mark)
    except Exception:  # there is none, or it fails: a template is a program of the model's author
        return [], []
    frame = tuple(tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    return frame if found and sum(map(len, frame)) <= PROMPT * 3 // 4 else ([], [])


def _encoded(document: str | Chat, tokenizer: Any) -> Sequence[int]:
    """Return the tokens of a text, or of a whole chat by the chat template."""
    chat = not isinstance(document, str)
    try:
        text = tokenizer.apply_chat_template(document, tokenize=False) if chat else document
    except Exception as error:  # as in `chat_frame`
        raise StartupError(f"--texts has a chat that the chat template refuses: {first_line(error)}") from None
    token_ids: list[int] = tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"]
    return token_ids


def _documents(source: Path) -> Iterator[str | Chat]:
    """Yield the texts and chats of a file, or of all files in a folder.

    Raises:
        StartupError: There is no text.
    """
    if not source.exists():
        raise StartupError(f"--texts: there is no {source}")
    if not source.is_dir():
        yield from _of_file(source)
        return
    texts = others = 0
    for file in sorted(each for each in source.rglob("*") if each.is_file() and each.name != _MANIFEST):
        try:
            yield from _of_file(file)
            texts += 1
        except StartupError as error:
            log.warning("passed over: %s", error)
            others += 1
    if not texts:
        raise StartupError(f"--texts {source} has no text: " + (f"{others} other files" if others else "it is empty"))


def _of_file(file: Path) -> Iterator[str | Chat]:
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise StartupError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise StartupError(f"{file} is not UTF-8 text")
    if file.suffix not in JSONL_SUFFIXES:
        yield text
        return
    try:
        entries = read_entries(_without_incomplete_line(text))
        field = entries.field()
        yield from [entries.prompt(place, field) for place in entries.places]
    except ValueError as error:
        raise StartupError(f"{file}: {error}") from None


def _without_incomplete_line(text: str) -> str:
    """Return JSON Lines without the line at the end that a service is just recording."""
    whole, _, last = text.rpartition("\n")
    try:
        json.loads(last or "0")
    except (ValueError, RecursionError):
        return whole
    return text
