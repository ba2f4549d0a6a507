"""Channels to services of one kind: plain or TLS, with an optional bearer token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from dynatree.common.errors import StartupError
from dynatree.serving.address import DNS
from dynatree.serving.certificates import check_certificates
from dynatree.serving.files import Reloaded
from dynatree.serving.grpc_options import CHANNEL_OPTIONS
from dynatree.serving.security import is_local
from dynatree.serving.tokens import bearer, read_token

Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ChannelSettings:
    """Security settings of connections to other services.

    Attributes:
        ca: Certificate authorities of the services' certificates, PEM; None means plain connections.
        certificate: Client's certificate chain, PEM.
        key: Private key of the certificate, PEM.
        token: File with the client's bearer token.
        insecure: Whether plain connections to other machines are permitted.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise StartupError("a certificate requires its key; expected both --verify-cert and --verify-key")
        if self.certificate is not None and self.ca is None:
            raise StartupError("a client's certificate requires TLS; expected --verify-ca")


PLAIN = ChannelSettings()


class Connector:
    """Opens channels.

    Raises:
        StartupError: A file cannot be read or is invalid.
    """

    def __init__(self, settings: ChannelSettings = PLAIN) -> None:
        self._settings = settings
        paths = [path for path in (settings.ca, settings.certificate, settings.key) if path is not None]
        pair = (settings.certificate, settings.key) if settings.certificate and settings.key else None

        def read() -> list[bytes]:
            check_certificates(pair, settings.ca)
            return [path.read_bytes() for path in paths]

        try:
            self._files = Reloaded(paths, read, secrets=[settings.key] if settings.key is not None else [])
            token = settings.token
            self._token = Reloaded([token], partial(read_token, token), secrets=[token]) if token is not None else None
        except (OSError, ValueError) as error:
            raise StartupError(f"the connection to the verify services cannot be secured: {error}") from error

    @property
    def generation(self) -> object:
        """A value that changes when certificates are replaced, after which channels must be reopened."""
        return tuple(self._files.value)

    def check(self, addresses: Sequence[str]) -> None:
        """Refuse plain connections to other machines, unless `insecure` permits them.

        Raises:
            StartupError: An address is not a loopback address.
        """
        for address in addresses:
            plain = self._settings.ca is None and not self._settings.insecure
            if plain and not is_local(address.removeprefix(DNS)):
                raise StartupError(
                    f"{address} is on another machine, and the connection would not be encrypted; "
                    "expected --verify-ca, or --insecure where the network is private"
                )

    def channel(self, address: str, server_name: str | None = None) -> Any:
        """A channel to `host:port` or `unix:PATH`, which connects at first use.

        `server_name` is the name that the service's certificate must have if the address comes from a DNS lookup.
        """
        if self._settings.ca is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        ca, *pair = self._files.value
        certificate, key = pair or (None, None)
        options = [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", server_name)] if server_name else [])]
        credentials = grpc.ssl_channel_credentials(ca, private_key=key, certificate_chain=certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def metadata(self) -> Metadata:
        """Metadata of every call."""
        return (bearer(self._token.value),) if self._token is not None else ()
