"""Hides names of special tokens in messages while a template is rendered, and encodes chats that have such names."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

_DIGITS = 9  # of a mark's number
_CONTROL = re.compile(r"[<\[{|].+[>\]}|]", re.DOTALL)  # names that no text has as a word


class HiddenNames:
    """The names of special tokens in a chat's messages, each replaced by an unguessable mark.

    A mark consists of digits, which no filter of a template escapes.

    Args:
        special: Matches the names.
    """

    def __init__(self, special: re.Pattern[str]) -> None:
        self._special = special
        self._prefix = f"{secrets.randbits(128):039}"
        self._names: list[str] = []
        self._mark = re.compile(rf"{self._prefix}(\d{{{_DIGITS}}})")

    def __bool__(self) -> bool:
        return bool(self._names)

    def hide(self, content: str) -> str:
        """Replace the names in a text by marks."""
        return self._special.sub(self._marked, content)

    def shown(self, text: str) -> str:
        """Put the names back."""
        return self._mark.sub(lambda mark: self._names[int(mark[1])], text)

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """Cut a text at the marks; return each piece, names put back, and whether it is a name."""
        parts = self._mark.split(text)  # texts and the numbers of marks by turns
        pieces = [(self._names[int(part)] if at % 2 else part, bool(at % 2)) for at, part in enumerate(parts)]
        return [piece for piece in pieces if piece[0]]

    def _marked(self, match: re.Match[str]) -> str:
        self._names.append(match[0])
        return f"{self._prefix}{len(self._names) - 1:0{_DIGITS}}"


def renamed(
    tokenizer: PreTrainedTokenizerBase, special: re.Pattern[str], ids: Mapping[str, int]
) -> Callable[[str, HiddenNames], Sequence[int]] | None:
    """Return a function that encodes a rendered chat whole, or None if the tokenizer allows none.

    Its copy of the tokenizer has unguessable names of special tokens. So those that the template wrote are special
    tokens, and the names in messages are text that goes on before and behind them.

    Args:
        tokenizer: The tokenizer.
        special: Matches the names of its special tokens.
        ids: Their ids by name.
    """
    if not tokenizer.is_fast:
        return None
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if any(token["normalized"] or token["single_word"] for token in content["added_tokens"] if token["special"]):
        return None  # the tokenizer does not match their names wherever the pattern does
    # a word that is a special token too, as some tokenizers pad with "!", keeps its name
    words = {name for name, id_ in ids.items() if not _CONTROL.fullmatch(name) and id_ in _as_text(tokenizer, name)}
    names = {name: f"{secrets.randbits(128):039}" for name in ids.keys() - words}
    model = content["model"]
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    if model.get("merges"):
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    content["post_processor"] = None  # names special tokens
    copy: Any = Tokenizer.from_str(json.dumps(content))

    def encode(text: str, hidden: HiddenNames) -> Sequence[int]:
        own = special.sub(lambda match: names.get(match[0], match[0]), text)
        found: list[int] = copy.encode(hidden.shown(own), add_special_tokens=False).ids
        return found

    return encode


def _as_text(tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    found: list[int] = tokenizer(name, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return found
