"""Tests that parsers of external input answer, or raise the errors that their callers expect, in time."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.parsers import PARSERS, Parser

pytestmark = pytest.mark.long
EXAMPLES = 200  # inputs for each parser
SECONDS = 1.0  # CPU seconds for all of them

_PIECES = st.one_of(st.binary(max_size=4), st.sampled_from([b"\0" * 9, b"\xff" * 9, b"{", b'"', b"[" * 99, b"1e999"]))
_KINDS = st.sampled_from(["insert", "cut", "change", "repeat"])
_EDITS = st.lists(st.tuples(st.floats(0, 1), _KINDS, _PIECES), max_size=6)


def _edited(seed: bytes, edits: list[tuple[float, str, bytes]]) -> bytes:
    for share, how, piece in edits:
        place = int(share * len(seed))
        match how:
            case "insert":
                seed = seed[:place] + piece + seed[place:]
            case "cut":
                seed = seed[:place]
            case "change":
                seed = seed[:place] + piece + seed[place + len(piece) :]
            case _:
                seed += seed[place:]
    return seed


def _json(words: tuple[str, ...]) -> st.SearchStrategy[bytes]:
    """JSON with a parser's own words at any place."""
    names = st.sampled_from(words) | st.text(max_size=4)
    plain = st.none() | st.booleans() | st.integers() | st.floats() | names
    values = st.recursive(
        plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
    )
    return st.dictionaries(names, values, max_size=5).map(lambda value: json.dumps(value).encode())


def _inputs(parser: Parser) -> st.SearchStrategy[bytes]:
    edited = st.builds(_edited, st.sampled_from(parser.seeds), _EDITS)
    return st.one_of(edited, st.binary(max_size=200), *([_json(parser.words)] if parser.words else []))


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_answers_or_raises_what_is_expected(name: str) -> None:
    parser = PARSERS[name]

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(_inputs(parser))
    def fuzz(data: bytes) -> Any:
        began = time.process_time()
        parser(data)
        assert time.process_time() - began < SECONDS

    fuzz()


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_its_seeds(name: str) -> None:
    """Otherwise fuzzing would test only the first check."""
    for seed in PARSERS[name].seeds:
        if name != "certificates":
            PARSERS[name].read(seed)
