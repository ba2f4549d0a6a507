"""Finds out without gRPC whether a server listens at an address, and whether it can be a gRPC server."""

from __future__ import annotations

import socket

SECONDS = 0.5  # timeout of connecting, and of the answer
# The preface of an HTTP/2 connection and an empty SETTINGS frame. An HTTP/2 server answers with SETTINGS too, an HTTP/1
# server with an error response.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_FRAME_TYPE, _SETTINGS = 3, b"\x04"


def failure(addresses: str, *, plain: bool) -> str:
    """Return why none of these comma-separated addresses can be a gRPC service; "" if one may be.

    A DNS name for several addresses, or a host that does not answer in time, may be one. `plain` means a connection
    without TLS, on which an HTTP port can be recognized.
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
            answer = _answer(address) if plain else None
            if answer == b"":
                reasons.append(
                    f"{address}: it closes unencrypted connections; if it has TLS, name its authority with --ca"
                )
            elif other := _described(answer):
                reasons.append(f"{address}: it is {other}, not a gRPC port")
            else:
                return ""
    return "; ".join(reasons)


def another_service(address: str) -> str:
    """Describe the server that answers a plain connection to an address; "" if it may be a gRPC service."""
    return _described(_answer(address))


def _answer(address: str) -> bytes | None:
    """Return how a server answers a plain connection: not at all if it closes it; None if it does not in time."""
    try:
        with _connected(address) as connection:
            connection.sendall(_PREFACE)
            return connection.recv(64)
    except ConnectionResetError:
        return b""
    except OSError:
        return None


def _described(answer: bytes | None) -> str:
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
