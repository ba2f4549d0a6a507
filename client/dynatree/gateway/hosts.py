"""The host names under which a gateway may be called.

A web page whose host name resolves to this machine has the same origin as the gateway in a browser (DNS rebinding). So
a gateway that only this machine can reach answers only to this machine's names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from dynatree.gateway.errors import ApiError
from dynatree.serving.security import is_local

_LONGEST = 100  # characters of a name that an error quotes


class Hosts:
    """The names of a gateway.

    Args:
        address: Listening address. Any name is allowed on a Unix socket, which no page can reach. Beyond loopback, any
            name is allowed unless `allowed` has some. Any IP address is allowed there: it cannot be rebound.
        allowed: Further names; "*" allows any.
    """

    def __init__(self, address: str, allowed: Collection[str] = ()) -> None:
        host = _name(address)
        self._beyond = not is_local(address)
        self._any = "*" in allowed or address.startswith("unix:") or (self._beyond and not allowed)
        self._names = {"localhost", host, *(name.lower() for name in allowed)}

    def check(self, shown: bytes | None) -> None:
        """Refuse a request for another host; a request without a Host header (HTTP/1.0) comes from no browser.

        Raises:
            ApiError: The host is not one of the gateway's names.
        """
        if self._any or not shown:
            return
        name = _name(shown.decode("latin-1"))
        if name not in self._names and not self._is_address(name):
            message = f"{name[:_LONGEST]} is not a name of this gateway; --allow-host adds names"
            raise ApiError(421, message, code="unknown_host")

    def _is_address(self, name: str) -> bool:
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._beyond or address.is_loopback


def _name(address: str) -> str:
    """Return the host of `host:port` or `host`, in lower case and without the brackets of an IPv6 address."""
    host = address.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host
