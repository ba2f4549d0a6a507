"""The grammar of a request: the texts that its completions may be."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dynatree.common.errors import GrammarError
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
        GrammarError: The text is longer than `MAX_GRAMMAR_BYTES`, or it is empty. The empty regular expression is
            allowed: it matches the empty text.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        size, least = len(self.text.encode()), 0 if self.kind is GrammarKind.REGEX else 1
        if not least <= size <= MAX_GRAMMAR_BYTES:
            raise GrammarError(f"the grammar has {size} bytes, expected {least} to {MAX_GRAMMAR_BYTES}")
