"""Bearer tokens, and on whose behalf each is shown."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from dynatree.common.errors import StartupError
from dynatree.common.files import Reloaded

AUTHORIZATION = "authorization"
SCHEME = "bearer "
LEAST_LENGTH = 16  # characters of a token


def bearer(token: str) -> tuple[str, str]:
    """The metadata that shows a token."""
    return AUTHORIZATION, f"Bearer {token}"


class TokenFile:
    """Who is known by which token: lines `principal:token` of a file that is read anew when it is replaced.

    A principal may have several tokens, so that one can be replaced without a pause. Empty lines and lines that begin
    with # say nothing.

    Raises:
        StartupError: The file cannot be read, or has no token.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._known = Reloaded([path], lambda: _read(path))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StartupError(f"the token file cannot be used: {reason}") from error

    def principal(self, authorization: str) -> str | None:
        """Whose token the value of `authorization` shows; None where it shows none that is known.

        Every known token is compared, in a time that does not depend on what was shown.
        """
        if authorization[: len(SCHEME)].lower() != SCHEME:
            return None
        shown = _digest(authorization[len(SCHEME) :].strip())
        found = None
        for principal, digest in self._known.value:
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


def _read(path: Path) -> list[tuple[str, bytes]]:
    known = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        principal, colon, token = (part.strip() for part in line.partition(":"))
        if not colon or not principal or len(token) < LEAST_LENGTH:
            raise ValueError(f"line {number} is not principal:token with a token of {LEAST_LENGTH} characters or more")
        known.append((principal, _digest(token)))
    if not known:
        raise ValueError("expected lines principal:token, and found none")
    return known


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
