"""Bearer tokens, and on whose behalf each is shown."""

from __future__ import annotations

import hashlib
import hmac
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path

from dynatree.common.errors import StartupError
from dynatree.common.files import Reloaded
from dynatree.common.principals import is_principal

AUTHORIZATION = "authorization"
SCHEME = "bearer "
LEAST_LENGTH = 16  # characters of a token
NAMED_LINES = 5  # that the log names, of those that are left out
SPIFFE = "spiffe://"


def bearer(token: str) -> tuple[str, str]:
    """The metadata that shows a token."""
    return AUTHORIZATION, f"Bearer {token}"


class TokenFile:
    """Who is known by which token: lines `principal:token` of a file that is read anew when it is replaced.

    A principal may have several tokens, so that one can be replaced without a pause. It ends at the first colon of its
    line, a SPIFFE name at the first one behind `spiffe://`. Empty lines and lines that begin with # say nothing. A line
    that makes no sense is left out and logged, and so is one with a token that an earlier line gives to another
    principal. A file that is empty, or gone, admits nobody.

    Raises:
        StartupError: The file cannot be read, or has no token.
    """

    def __init__(self, path: Path) -> None:
        if not (lines := _read(path)).known:
            raise StartupError(f"the token file cannot be used: it {lines.wrong}")
        self._lines = Reloaded([path], lambda: _read(path), lambda lines: lines.wrong, secrets=[path])

    def principal(self, authorization: str) -> str | None:
        """Whose token the value of `authorization` shows; None where it shows none that is known.

        Every known token is compared, in a time that does not depend on what was shown.
        """
        if authorization[: len(SCHEME)].lower() != SCHEME:
            return None
        shown = _digest(authorization[len(SCHEME) :].strip())
        found = None
        # one that admits nobody may be about to be written
        for principal, digest in self._lines.value.known or self._lines.look().known:
            if hmac.compare_digest(digest, shown):
                found = principal
        return found


def read_token(path: Path) -> str:
    """The one token in a file, which a client shows.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has no token.
    """
    token = path.read_text(encoding="utf-8").strip()
    if not token or not token.isprintable() or not token.isascii() or " " in token:
        raise ValueError("expected one token of printable ASCII characters, and nothing else")
    return token


@dataclass(frozen=True)
class _Lines:
    """A token file.

    Attributes:
        known: Principals, each with the digest of one of its tokens.
        wrong: What is wrong with the file, without its subject; "" for nothing.
    """

    known: tuple[tuple[str, bytes], ...]
    wrong: str


def _read(path: Path) -> _Lines:
    try:
        text = path.read_bytes()
    except OSError as error:
        return _Lines((), f"admits nobody: {error.strerror}")
    known: list[tuple[str, bytes]] = []
    owners: dict[bytes, str] = {}
    left_out: list[str] = []
    for number, line in enumerate(text.removeprefix(BOM_UTF8).splitlines(), start=1):
        if not line.strip() or line.startswith(b"#"):
            continue
        try:
            principal, token = _split(line.decode())
        except ValueError:
            left_out.append(f"line {number} is not principal:token with a token of {LEAST_LENGTH} characters or more")
            continue
        digest = _digest(token)
        if owners.setdefault(digest, principal) != principal:
            left_out.append(f"line {number} has the token of another principal")
            continue
        known.append((principal, digest))
    reasons = "; ".join(left_out[:NAMED_LINES]) + "; ..." * (len(left_out) > NAMED_LINES)
    if not known:
        return _Lines((), f"admits nobody: {reasons or 'expected lines principal:token, and found none'}")
    return _Lines(tuple(known), f"has lines that are left out: {reasons}" if left_out else "")


def _split(line: str) -> tuple[str, str]:
    """The principal and the token of a line.

    Raises:
        ValueError: It has not both.
    """
    scheme, rest = (SPIFFE, line.removeprefix(SPIFFE)) if line.startswith(SPIFFE) else ("", line)
    principal, _, token = (part.strip() for part in rest.partition(":"))
    if not principal or not is_principal(scheme + principal) or len(token) < LEAST_LENGTH:
        raise ValueError("no principal with a token")
    return scheme + principal, token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
