"""A check that this process can listen on its addresses, made before any expensive startup work."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from dynatree.common.errors import StartupError
from dynatree.serving.unix_socket import prepare_socket

_REASONS = {
    errno.EADDRINUSE: "the address is in use; another program listens there",
    errno.EADDRNOTAVAIL: "this machine has no such address",
    errno.EACCES: "this user may not listen on that port",
}


def check_free(*addresses: str) -> None:
    """Bind the addresses, `host:port` or `unix:PATH`, and release them again.

    Raises:
        StartupError: An address is in use, is named by two options, or does not belong to this machine.
    """
    asked: set[object] = set()
    for address in addresses:
        places = _check_socket(address) if address.startswith("unix:") else _bind(address)
        if asked & places:
            raise StartupError(f"cannot listen on {address}: two options name this address")
        asked |= places


def cannot_listen(address: str, error: OSError) -> StartupError:
    """The error for an address that cannot be bound."""
    return StartupError(f"cannot listen on {address}: {_REASONS.get(error.errno or 0) or error.strerror or error}")


def _check_socket(address: str) -> set[object]:
    path = Path(address.removeprefix("unix:"))
    prepare_socket(path)
    if path.exists() and not path.is_socket():
        raise StartupError(f"cannot listen on {address}: a file that is not a socket is in its place")
    return {path.absolute()}


def _bind(address: str) -> set[object]:
    """Bind every address of a host name; an address that this machine lacks is an error only if all fail."""
    host, _, port = address.rpartition(":")
    failures = []
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise cannot_listen(address, error) from None
    for family, kind, protocol, _, place in found:
        try:
            with socket.socket(family, kind, protocol) as tried:
                if family == socket.AF_INET6:
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # permit a recently closed port
                tried.bind(place)
        except OSError as error:
            failures.append(error)
    taken = [error for error in failures if error.errno == errno.EADDRINUSE]
    if taken or len(failures) == len(found):
        raise cannot_listen(address, (taken or failures)[0])
    return {place for *_, place in found} if int(port) else set()  # port 0 binds a new port each time
