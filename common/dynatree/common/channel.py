"""Channels to services of one kind: plain or TLS, and the token that is shown to them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from dynatree.common.address import DNS
from dynatree.common.certificates import check_certificates
from dynatree.common.errors import StartupError
from dynatree.common.files import Reloaded
from dynatree.common.grpc_options import CHANNEL_OPTIONS
from dynatree.common.security import is_local
from dynatree.common.tokens import bearer, read_token

Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class ChannelSettings:
    """What the command line says of the way to other services.

    Attributes:
        ca: Authorities of the services' certificates, PEM; None: plain connections.
        certificate: The client's certificate chain, PEM.
        key: Its private key, PEM.
        token: The file with the token that is shown.
        insecure: Whether plain connections to other machines are welcome.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise StartupError("a certificate and its key go together: expected both --verify-cert and --verify-key")
        if self.certificate is not None and self.ca is None:
            raise StartupError("a client's certificate needs TLS: expected --verify-ca")


PLAIN = ChannelSettings()


def channel_settings(options: argparse.Namespace) -> ChannelSettings:
    """Settings from parsed options.

    Raises:
        StartupError: They contradict each other.
    """
    return ChannelSettings(
        ca=options.verify_ca,
        certificate=options.verify_cert,
        key=options.verify_key,
        token=options.verify_token_file,
        insecure=options.insecure,
    )


class Connector:
    """Opens channels.

    Raises:
        StartupError: A file cannot be read, or makes no sense.
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
            raise StartupError(f"the way to the verify services cannot be secured: {error}") from error

    @property
    def generation(self) -> object:
        """Another one when certificates were replaced: channels are then opened anew."""
        return tuple(self._files.value)

    def check(self, addresses: Sequence[str]) -> None:
        """Refuse plain connections to other machines, unless they are asked for.

        Raises:
            StartupError: An address is no loopback address.
        """
        for address in addresses:
            plain = self._settings.ca is None and not self._settings.insecure
            if plain and not is_local(address.removeprefix(DNS)):
                raise StartupError(
                    f"{address} is another machine, and the connection would not be encrypted; "
                    "expected --verify-ca, or --insecure where the network is private"
                )

    def channel(self, address: str, server_name: str | None = None) -> Any:
        """A channel to `host:port` or `unix:PATH`, which connects when it is used.

        `server_name`: the name that the service's certificate must have, where the address was looked up.
        """
        if self._settings.ca is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        ca, *pair = self._files.value
        certificate, key = pair or (None, None)
        options = [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", server_name)] if server_name else [])]
        credentials = grpc.ssl_channel_credentials(ca, private_key=key, certificate_chain=certificate)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def metadata(self) -> Metadata:
        """What every call carries."""
        return (bearer(self._token.value),) if self._token is not None else ()
