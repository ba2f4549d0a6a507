"""Reads a trace, and checks each line before the page is drawn."""

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

ROOT = -1

# One round: exactly the fields of `_FIELDS`.
Round = dict[str, Any]


def read_rounds(path: Path) -> list[Round]:
    """Read the rounds of a trace in the file's order; within one completion (`index`), the rounds must increase.

    Raises:
        SystemExit: The file cannot be read or has no rounds, or a line is not a round; the message names the line.
    """
    rounds: list[Round] = []
    last: dict[int, int] = {}  # completion index -> its last round
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            round_ = _parse(line)
            _check_order(last, round_["index"], round_["round"])
        except ValueError as error:
            raise SystemExit(f"{path}: line {number}: {error}") from None
        rounds.append(round_)
    if not rounds:
        raise SystemExit(f"{path} is empty: a trace has one JSON object per round (a completion of one token has none)")
    return rounds


def _parse(line: bytes) -> Round:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    for name, (expected, holds) in _FIELDS.items():
        if name not in value:
            raise ValueError(f"{name} is missing")
        if not holds(value[name]):
            raise ValueError(f"{name} is not {expected}")
    round_ = {name: value[name] for name in _FIELDS}
    _check_tree(round_)
    _check_commit(round_)
    return round_


def _check_order(last: dict[int, int], index: int, round_: int) -> None:
    """Check that the rounds of a completion increase; completions may be interleaved."""
    if index in last and round_ <= last[index]:
        raise ValueError(f"round {round_} of index {index} comes after round {last[index]}")
    last[index] = round_


def _check_tree(round_: Round) -> None:
    nodes = len(round_["token_ids"])
    for name in ("parents", "probabilities", "texts"):
        if len(round_[name]) != nodes:
            raise ValueError(f"lengths differ: {nodes} token_ids, {len(round_[name])} {name}")
    for node, parent in enumerate(round_["parents"]):
        if not ROOT <= parent < node:
            raise ValueError(f"parents[{node}] is {parent}, expected -1 (the root) or an earlier node")


def _check_commit(round_: Round) -> None:
    """Check that the accepted nodes are a path from the root, with as many committed tokens or one more."""
    accepted, ids, texts = round_["accepted_nodes"], round_["committed_ids"], round_["committed_texts"]
    for node in accepted:
        if node >= len(round_["token_ids"]):
            raise ValueError(f"accepted_nodes has {node}, out of range in a tree of {len(round_['token_ids'])} nodes")
    for parent, node in pairwise((ROOT, *accepted)):
        if round_["parents"][node] != parent:
            raise ValueError(f"accepted_nodes is not a path from the root: node {node} is not a child of {parent}")
    if len(texts) != len(ids):
        raise ValueError(f"lengths differ: {len(ids)} committed_ids, {len(texts)} committed_texts")
    if len(ids) - len(accepted) not in (0, 1):
        raise ValueError(
            f"lengths differ: {len(accepted)} accepted_nodes, {len(ids)} committed_ids; expected as many, or one more"
        )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= 2**53  # JavaScript's numbers are exact up to here


def _is_node(value: object) -> bool:
    return type(value) is int


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and -sys.float_info.max <= value <= sys.float_info.max  # type: ignore[operator]


def _is_seconds(value: object) -> bool:
    return _is_number(value) and value >= 0  # type: ignore[operator]


def _is_probability(value: object) -> bool:
    return _is_number(value) and 0 <= value <= 1  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_parameters(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


def _list_of(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(holds, value))


# Field -> its expected value in words, and the check.
_FIELDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "index": ("a whole number, 0 or more", _is_count),
    "round": ("a whole number, 0 or more", _is_count),
    "base_length": ("a whole number, 0 or more", _is_count),
    "token_ids": ("a list of whole numbers, 0 or more", _list_of(_is_count)),
    "parents": ("a list of whole numbers", _list_of(_is_node)),
    "probabilities": ("a list of numbers from 0 to 1", _list_of(_is_probability)),
    "texts": ("a list of strings", _list_of(_is_text)),
    "accepted_nodes": ("a list of whole numbers, 0 or more", _list_of(_is_count)),
    "committed_ids": ("a list of whole numbers, 0 or more", _list_of(_is_count)),
    "committed_texts": ("a list of strings", _list_of(_is_text)),
    "parameters": ("an object of numbers", _is_parameters),
    "draft_seconds": ("a number, 0 or more", _is_seconds),
    "verify_seconds": ("a number, 0 or more", _is_seconds),
}
