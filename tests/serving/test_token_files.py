"""Tests that exactly the principals in valid lines of the token file are admitted, whatever happens to it."""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynatree.serving import files
from dynatree.serving.metrics import new_registry
from dynatree.serving.tokens import TokenFile

PRINCIPALS = ("alice", "bob", "spiffe://example.org/ns/x", "team a", "équipe")
TOKENS = (
    "0123456789abcdef",
    "//token-of-16-or-more",
    "with:colons:0123456789",
    "fedcba9876543210",
    "sixteen-characters",
)
SILENT = (b"", b"   ", b"# alice:0123456789abcdef", b"#")
BAD = (
    b"alice",
    b"alice:",
    b":0123456789abcdef",
    b"alice:too-short",
    b"spiffe://example.org/ns/without/a/token",
    b"al\x1b[2Jice:0123456789abcdef",
    b"\xff\xfe:0123456789abcdef",
    b"alice:\xff0123456789abcdef",
    "alice\u2028bob:0123456789abcdef".encode(),
    b"x" * 257 + b":0123456789abcdef",
)


class Line(NamedTuple):
    """A line of a token file; without a principal it is invalid."""

    text: bytes
    principal: str = ""
    token: str = ""


good = st.builds(
    lambda principal, token: Line(f"{principal}:{token}".encode(), principal, token),
    st.sampled_from(PRINCIPALS),
    st.sampled_from(TOKENS),
)
lines = st.lists(st.one_of(good, st.sampled_from([Line(text) for text in (*SILENT, *BAD)])), max_size=8)
states = st.lists(st.none() | lines, min_size=1, max_size=6)  # None: the file does not exist


@pytest.fixture(name="always", scope="module", autouse=True)
def always_fixture() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "LOOK_SECONDS", 0.0)
        yield


def admitted(state: list[Line] | None) -> dict[str, str]:
    """Return the owner of each token, the first principal with a line for it."""
    owners: dict[str, str] = {}
    for line in state or ():
        if line.principal:
            owners.setdefault(line.token, line.principal)
    return owners


@settings(max_examples=60, deadline=None)
@given(states, st.sampled_from([b"\n", b"\r\n"]))
def test_after_every_edit_those_are_admitted_who_stand_in_the_file(edits: list[list[Line] | None], end: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, times = Path(folder) / "tokens", count(1)
        file.write_bytes(b"start:start-0123456789abcdef\n")
        tokens = TokenFile(file)
        for state in edits:
            if state is None:
                file.unlink(missing_ok=True)
            else:
                replacement = file.with_suffix(".new")
                replacement.write_bytes(end.join(line.text for line in state))
                os.utime(replacement, ns=(0, next(times)))  # the clock of file times ticks every few milliseconds
                os.replace(replacement, file)
            shown = {token: tokens.principal(f"Bearer {token}") for token in (*TOKENS, "start-0123456789abcdef")}
            assert {token: owner for token, owner in shown.items() if owner is not None} == admitted(state)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "tokens admits nobody: No such file"),
        (b"", "tokens admits nobody: it has no lines principal:token"),
        (b"alice\nbob:0123456789abcdef\n", "tokens has lines that are ignored: line 1 is not principal:token"),
        (b"a:0123456789abcdef\nb:0123456789abcdef\n", "ignored: line 2 has the token of another principal"),
        (
            b"alice\n" * 1000 + b"bob:0123456789abcdef\n",
            "line 5 is not principal:token with a token of at least 16 characters; ...",
        ),
    ],
    ids=["gone", "empty", "a bad line", "one token twice", "many"],
)
def test_what_is_wrong_with_a_token_file_is_logged_once_and_counted_until_it_is_mended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes | None, said: str
) -> None:
    file, registry = tmp_path / "tokens", new_registry()
    file.write_bytes(b"start:start-0123456789abcdef\n")
    tokens = TokenFile(file)
    gc.collect()  # files of other tests may be counted

    def failed() -> float | None:
        return registry.get_sample_value("dynatree_reload_failed")

    before = failed()
    assert before is not None
    if text is None:
        file.unlink()
    else:
        file.write_bytes(text)
    assert failed() == before + 1
    assert [tokens.principal("Bearer start-0123456789abcdef") for _ in range(3)] == [None] * 3
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert said in record.getMessage()
    assert len(record.getMessage()) < 1000
    assert "0123456789abcdef" not in record.getMessage()
    file.write_bytes(b"start:start-0123456789abcdef\n\n")
    assert failed() == before
    assert tokens.principal("Bearer start-0123456789abcdef") == "start"


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_secret_that_every_user_may_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(b"start:start-0123456789abcdef\n")
    file.chmod(mode)
    TokenFile(file)
    assert ("every user of this machine can read it" in caplog.text) is warned


def test_a_file_that_is_being_written_locks_nobody_out_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without valid lines is read again at once, and not after `LOOK_SECONDS`."""
    file = tmp_path / "tokens"
    file.write_bytes(b"start:start-0123456789abcdef\n")
    tokens = TokenFile(file)
    file.write_bytes(b"")
    assert tokens.principal("Bearer start-0123456789abcdef") is None
    monkeypatch.setattr(files, "LOOK_SECONDS", 1e9)
    file.write_bytes(b"start:start-0123456789abcdef\n")
    assert tokens.principal("Bearer start-0123456789abcdef") == "start"
