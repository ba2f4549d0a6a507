"""What may name a principal, and how two names become one."""

from __future__ import annotations

from dynatree.common.limits import MAX_PRINCIPAL_LENGTH


def is_principal(name: str) -> bool:
    """Whether a token file, a certificate or a draft service may name a principal so: lines of logs show it."""
    return 0 < len(name) <= MAX_PRINCIPAL_LENGTH and name.isprintable()


def joint(caller: str, principal: str) -> str:
    """A draft service's name before that of its own principal: no two pairs have the same.

    The first slash ends the caller's name, whose own slashes are written as in a URI.
    """
    return f"{caller.replace('%', '%25').replace('/', '%2F')}/{principal}"
