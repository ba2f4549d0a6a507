"""By which names a gateway may be called.

A page of a foreign name that resolves to this machine has the gateway's origin to a browser (DNS rebinding), so a
gateway that only this machine reaches answers to this machine's names alone.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from dynatree.common.security import is_local
from dynatree.gateway.errors import ApiError

_LONGEST = 100  # characters of a name that an error quotes


class Hosts:
    """The names of a gateway.

    Args:
        address: Where it listens. Beyond loopback, and on a Unix socket, which no page reaches, it has any name.
        allowed: Further names; "*" is any.
    """

    def __init__(self, address: str, allowed: Collection[str] = ()) -> None:
        host = _name(address)
        self._any = "*" in allowed or address.startswith("unix:") or not is_local(address)
        self._names = {"localhost", host, *(name.lower() for name in allowed)}

    def check(self, shown: bytes | None) -> None:
        """Refuse a request for another host; one that names none, as HTTP/1.0 has it, comes from no browser.

        Raises:
            ApiError: The host is another.
        """
        if self._any or not shown:
            return
        name = _name(shown.decode("latin-1"))
        if name not in self._names and not _is_loopback(name):
            message = f"{name[:_LONGEST]} is not a name of this gateway; --allow-host makes it one"
            raise ApiError(421, message, code="unknown_host")


def _name(address: str) -> str:
    """The host of `host:port` or `host`, in lower case and without the brackets of an IPv6 address."""
    host = address.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
