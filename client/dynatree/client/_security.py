"""The client's TLS credentials and tokens."""

import ipaddress
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Literal

import grpc

File = str | PathLike[str]


def tls_credentials(
    ca: File | Literal[True] | None, cert: File | None, key: File | None
) -> grpc.ChannelCredentials | None:
    """Return the credentials of a TLS connection; None for a plain connection.

    Raises:
        ValueError: `cert` or `key` is given without the other, or both without `ca`.
        OSError: a file cannot be read.
    """
    if (cert is None) != (key is None):
        raise ValueError("cert and key must be given together, or not at all")
    if ca is None:
        if cert is not None:
            raise ValueError("cert requires TLS; expected ca, the authorities of the server's certificate")
        return None
    roots = None if ca is True else Path(ca).read_bytes()
    pair = [Path(file).read_bytes() for file in (key, cert) if file is not None]
    return grpc.ssl_channel_credentials(roots, *pair)


def token_metadata(token: str) -> tuple[str, str]:
    """Return the metadata that sends a token.

    Raises:
        TypeError: the token is not a string.
        ValueError: the token has characters that cannot be sent.
    """
    if not isinstance(token, str):
        raise TypeError(f"token must be a str, not {type(token).__name__}")
    if not token or not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError("token must be printable ASCII characters without spaces")
    return "authorization", f"Bearer {token}"


def check_local(addresses: Iterable[str]) -> None:
    """Refuse to send a token over a plain connection to another machine.

    Raises:
        ValueError: an address is neither a loopback address nor a Unix socket.
    """
    for address in addresses:
        if not _is_local(address):
            raise ValueError(
                f"the token would cross the network to {address} in plain text; expected ca for TLS, or insecure=True"
            )


def _is_local(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
