"""Bearer tokens, and the principal to whom each belongs."""

from __future__ import annotations

import hashlib
import hmac
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path

from dynatree.common.errors import StartupError
from dynatree.serving.files import Reloaded
from dynatree.serving.principals import is_principal

AUTHORIZATION = "authorization"
SCHEME = "bearer "
LEAST_LENGTH = 16  # minimum length of a token in characters
NAMED_LINES = 5  # most rejected lines that one log message lists
SPIFFE = "spiffe://"


def bearer(token: str) -> tuple[str, str]:
    """The metadata entry that carries a token."""
    return AUTHORIZATION, f"Bearer {token}"


class TokenFile:
    """The known tokens and their principals: lines `principal:token` of a file, reloaded when the file is replaced.

    A principal may have several tokens, so that a token can be replaced without an interruption. The principal's name
    ends at the first colon of the line; a SPIFFE name ends at the first colon after `spiffe://`. Empty lines and lines
    that begin with # are ignored. An invalid line is skipped and logged, and so is a line whose token already belongs
    to another principal. If the file becomes empty or is removed, all callers are refused.

    Raises:
        StartupError: The file cannot be read, or contains no valid token.
    """

    def __init__(self, path: Path) -> None:
        if not (lines := _read(path)).known:
            raise StartupError(f"the token file cannot be used: it {lines.wrong}")
        self._lines = Reloaded([path], lambda: _read(path), lambda lines: lines.wrong, secrets=[path])

    def principal(self, authorization: str) -> str | None:
        """The principal whose token the `authorization` value contains; None if it contains no known token.

        The token is compared with every known one, in a time that does not depend on its value.
        """
        if authorization[: len(SCHEME)].lower() != SCHEME:
            return None
        shown = _digest(authorization[len(SCHEME) :].strip())
        found = None
        # a file without tokens may be in the middle of a rewrite, so look again
        for principal, digest in self._lines.value.known or self._lines.look().known:
            if hmac.compare_digest(digest, shown):
                found = principal
        return found


def read_token(path: Path) -> str:
    """The only token in a client's token file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file does not contain exactly one valid token.
    """
    token = path.read_text(encoding="utf-8").strip()
    if not token or not token.isprintable() or not token.isascii() or " " in token:
        raise ValueError("the file must contain one token of printable ASCII characters and nothing else")
    return token


@dataclass(frozen=True)
class _Lines:
    """The parsed contents of a token file.

    Attributes:
        known: Pairs of a principal and the digest of one of its tokens.
        wrong: Description of the file's faults, without its subject; "" if there are none.
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
            left_out.append(f"line {number} is not principal:token with a token of at least {LEAST_LENGTH} characters")
            continue
        digest = _digest(token)
        if owners.setdefault(digest, principal) != principal:
            left_out.append(f"line {number} has the token of another principal")
            continue
        known.append((principal, digest))
    reasons = "; ".join(left_out[:NAMED_LINES]) + "; ..." * (len(left_out) > NAMED_LINES)
    if not known:
        return _Lines((), f"admits nobody: {reasons or 'it has no lines principal:token'}")
    return _Lines(tuple(known), f"has lines that are ignored: {reasons}" if left_out else "")


def _split(line: str) -> tuple[str, str]:
    """The principal and the token of a line.

    Raises:
        ValueError: The line lacks a valid principal or a token of sufficient length.
    """
    scheme, rest = (SPIFFE, line.removeprefix(SPIFFE)) if line.startswith(SPIFFE) else ("", line)
    principal, _, token = (part.strip() for part in rest.partition(":"))
    if not principal or not is_principal(scheme + principal) or len(token) < LEAST_LENGTH:
        raise ValueError("no principal with a token")
    return scheme + principal, token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
