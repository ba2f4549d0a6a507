"""Valid names of principals, and the joint name of a draft service and its principal."""

from __future__ import annotations

from dynatree.common.limits import MAX_PRINCIPAL_LENGTH


def is_principal(name: str) -> bool:
    """Whether a name is valid for a principal: short and printable, since log lines contain it."""
    return 0 < len(name) <= MAX_PRINCIPAL_LENGTH and name.isprintable()


def joint(caller: str, principal: str) -> str:
    """The name of a draft service followed by that of its principal, unique for each pair.

    The first slash ends the draft service's name, in which slashes are percent-encoded.
    """
    return f"{caller.replace('%', '%25').replace('/', '%2F')}/{principal}"
