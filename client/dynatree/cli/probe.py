"""Who answers at an address, asked without gRPC: nobody, an HTTP server, or somebody else."""

from __future__ import annotations

import socket

SECONDS = 0.5  # to connect, and again to answer
# How an HTTP/2 connection begins. The server answers with SETTINGS too; one that knows HTTP/1 only, in its own words.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_FRAME_TYPE, _SETTINGS = 3, b"\x04"


def failure(addresses: str, *, plain: bool) -> str:
    """Why no gRPC service can be at any of these addresses, comma-separated; "" where one may be.

    Names that stand for several addresses, and hosts that do not answer, may have one. `plain`: without TLS, so that
    an HTTP port can be told.
    """
    reasons = []
    for address in (each.strip() for each in addresses.split(",")):
        if address.startswith("dns:///"):
            return ""
        try:
            _connected(address).close()
        except TimeoutError:
            return ""
        except OSError as error:
            reasons.append(f"{address}: {error.strerror or error}")
        else:
            other = another_service(address) if plain else ""
            if not other:
                return ""
            reasons.append(f"{address}: this is {other}, and gRPC has one of its own")
    return "; ".join(reasons)


def another_service(address: str) -> str:
    """What answers at an address over a plain connection, where it is no gRPC service; "" where it may be one."""
    try:
        with _connected(address) as connection:
            connection.sendall(_PREFACE)
            answer = connection.recv(64)
    except OSError:
        return ""
    if not answer or answer[_FRAME_TYPE : _FRAME_TYPE + 1] == _SETTINGS:
        return ""
    return "an HTTP port" if answer.startswith((b"HTTP/", b"<")) else "another service's port"


def _connected(address: str) -> socket.socket:
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(SECONDS)
        try:
            connection.connect(address.removeprefix("unix:"))
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), SECONDS)
