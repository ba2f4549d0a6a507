"""The file that keeps finished completions from a clean stop of a draft service to its next start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from dynatree.draft.growth.suffix_indexes import SuffixIndexes
from dynatree.serving.principals import is_principal

log = logging.getLogger(__name__)

FORMAT = "dynatree history 1"
TOKEN_IDS = range(2**31)  # a tree takes the ids that its target has


class HistoryFile:
    """A file of all principals' sequences as JSON, which only this user may read.

    A file that is not such a file, or has the tokens of another tokenizer, is neither used nor replaced.

    Args:
        path: The file, which need not exist yet.
        tokenizer: Fingerprint of the tokenizer, which gives the token ids their meaning.
    """

    def __init__(self, path: Path, tokenizer: str) -> None:
        self._path = path
        self._tokenizer = tokenizer
        self._replaceable = True

    def load(self, histories: SuffixIndexes) -> None:
        """Add the file's sequences; warn if it cannot be used."""
        try:
            sequences = self._read()
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            self._replaceable = False
            log.warning("the history %s is neither used nor replaced: %s", self._path, error)
            return
        for principal, token_ids in sequences:
            histories.add(principal, token_ids)
        log.info("%d tokens of earlier completions from %s", histories.tokens, self._path)

    def save(self, histories: SuffixIndexes) -> None:
        """Replace the file in one step; warn if it cannot be written."""
        if not self._replaceable:
            return
        written = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            with suppress(FileNotFoundError):
                written.unlink()
            with os.fdopen(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                self._write(file, histories)
                file.flush()
                os.fsync(file.fileno())
            written.replace(self._path)
        except OSError as error:
            log.warning("the history %s cannot be saved: %s", self._path, error)
            with suppress(OSError):
                written.unlink()

    def _write(self, file: TextIO, histories: SuffixIndexes) -> None:
        """Write the contents one sequence at a time, since there may be gigabytes."""
        head = json.dumps({"format": FORMAT, "tokenizer": self._tokenizer})
        file.write(f'{head[:-1]}, "principals": ')
        digest = hashlib.sha256()
        for part in _dumped(histories):
            file.write(part)
            digest.update(part.encode())
        file.write(f', "sha256": "{digest.hexdigest()}"}}')

    def _read(self) -> list[tuple[str, list[int]]]:
        """Return the principal and the tokens of each sequence.

        Raises:
            OSError: The file cannot be read.
            ValueError: Its contents are wrong.
        """
        try:
            content = json.loads(self._path.read_bytes())
        except ValueError:
            content = None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError("it is no history, or it is damaged")
        if content.get("sha256") != _sum(content.get("principals")):
            raise ValueError("it is damaged")
        if content.get("tokenizer") != self._tokenizer:
            raise ValueError("its tokens are another tokenizer's")
        return [each for entry in _list(content.get("principals")) for each in self._sequences(entry)]

    @staticmethod
    def _sequences(entry: Any) -> list[tuple[str, list[int]]]:
        principal = entry.get("principal") if isinstance(entry, dict) else None
        if not isinstance(principal, str) or not (principal == "" or is_principal(principal)):
            raise ValueError("an entry has no principal")
        sequences = _list(entry.get("sequences"))
        for token_ids in sequences:
            if not all(type(token) is int and token in TOKEN_IDS for token in _list(token_ids)):
                raise ValueError("a token is not a token id")
        return [(principal, token_ids) for token_ids in sequences]


def _dumped(principals: Iterable[tuple[str, Iterable[list[int]]]]) -> Iterator[str]:
    """Yield the parts of the text that `_sum` takes the sum of."""
    yield "["
    for number, (name, sequences) in enumerate(principals):
        yield f'{", " if number else ""}{{"principal": {json.dumps(name)}, "sequences": ['
        for place, token_ids in enumerate(sequences):
            yield f"{', ' if place else ''}{json.dumps(token_ids)}"
        yield "]}"
    yield "]"


def _sum(principals: Any) -> str:
    return hashlib.sha256(json.dumps(principals).encode()).hexdigest()


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("a list is missing")
    return value
