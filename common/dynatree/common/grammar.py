"""The grammar of a request: the texts that its completions may be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dynatree.common.errors import InvalidArgumentError
from dynatree.common.limits import MAX_GRAMMAR_BYTES


class GrammarKind(Enum):
    """The language that a grammar is written in; values as in `GrammarKind` of tree.proto."""

    JSON_SCHEMA = 1
    REGEX = 2
    LARK = 3


@dataclass(frozen=True)
class Grammar:
    """The texts that a completion may be: those that a JSON schema, a regular expression or a Lark grammar accepts.

    Raises:
        InvalidArgumentError: The text is empty, or longer than `MAX_GRAMMAR_BYTES`.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        size = len(self.text.encode())
        if not 1 <= size <= MAX_GRAMMAR_BYTES:
            raise InvalidArgumentError(f"the grammar has {size} bytes, expected 1 to {MAX_GRAMMAR_BYTES}")
