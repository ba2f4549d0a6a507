"""Access to a server: TLS, client certificates, and bearer tokens.

Every caller is a principal: the owner of its token, or else the name in its client certificate. Without either, anyone
may call, and the server believes the principal that a request names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dynatree.common.errors import StartupError, UnauthenticatedError
from dynatree.common.limits import MAX_PRINCIPAL_LENGTH
from dynatree.serving.certificates import check_certificates
from dynatree.serving.files import Reloaded
from dynatree.serving.principals import is_principal
from dynatree.serving.tokens import AUTHORIZATION, TokenFile


@dataclass(frozen=True)
class SecuritySettings:
    """Security settings of a server, from the command line.

    Attributes:
        certificate: Server's certificate chain, PEM.
        key: Private key of the certificate, PEM.
        client_ca: Certificate authorities of the client certificates that are required, PEM.
        tokens: Token file that names the permitted callers.
        insecure: Whether plain connections from other machines are permitted.
        reflection: Whether the server offers gRPC reflection.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    tokens: Path | None = None
    insecure: bool = False
    reflection: bool = True

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise StartupError("a certificate requires its key; expected both --tls-cert and --tls-key")
        if self.client_ca is not None and self.certificate is None:
            raise StartupError("--client-ca requires TLS; expected --tls-cert and --tls-key")

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.certificate is not None

    def check_plain(self, address: str) -> None:
        """Refuse to listen without encryption on an address open to other machines, unless `insecure` permits it.

        Raises:
            StartupError: The address is not a loopback address.
        """
        if not (self.tls or self.insecure or is_local(address)):
            raise StartupError(
                f"{address} is open to other machines, and connections would not be encrypted; expected --tls-cert and "
                "--tls-key, or --insecure where the network is private"
            )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials for the server's port, None for plain connections; new connections use replaced files.

        Raises:
            StartupError: A file cannot be read or is invalid.
        """
        if self.certificate is None or self.key is None:
            return None
        pair = self.certificate, self.key
        paths = [self.key, self.certificate, *([self.client_ca] if self.client_ca is not None else [])]

        def read() -> list[bytes]:
            check_certificates(pair, self.client_ca)
            return [path.read_bytes() for path in paths]

        try:
            reloaded = Reloaded(paths, read, secrets=[self.key])
        except (OSError, ValueError) as error:
            raise StartupError(f"TLS cannot be used: {_reason(error)}") from error
        served = reloaded.value

        def replaced() -> grpc.ServerCertificateConfiguration | None:
            """The new configuration; None if unchanged, since gRPC frees each one and must not get it twice."""
            nonlocal served
            if (value := reloaded.value) is served:
                return None
            served = value
            return configuration(value)

        def configuration(contents: list[bytes]) -> grpc.ServerCertificateConfiguration:
            key, certificate, *client_ca = contents
            return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca[0] if client_ca else None)

        return grpc.dynamic_ssl_server_credentials(
            configuration(served),
            replaced,  # type: ignore[arg-type]  # may return None (grpc.dynamic_ssl_server_credentials)
            require_client_authentication=self.client_ca is not None,
        )


LOCAL = SecuritySettings()
CERTIFICATE_NAMES = ("x509_common_name", "peer_uri", "peer_dns")  # gRPC's names; the first one present counts


class Authentication:
    """Determines the principal of each call."""

    def __init__(self, settings: SecuritySettings) -> None:
        self._tokens = TokenFile(settings.tokens) if settings.tokens is not None else None
        self._certificates = settings.client_ca is not None

    def principal(self, context: Any) -> str | None:
        """The principal of a call; None if the server does not authenticate calls.

        Raises:
            UnauthenticatedError: The call has no known token, or its certificate contains no usable name.
        """
        if self._tokens is not None:
            shown = dict(context.invocation_metadata() or ()).get(AUTHORIZATION, "")
            principal = self._tokens.principal(shown) if isinstance(shown, str) else None
            if principal is None:
                raise UnauthenticatedError(
                    "the call has no known token; expected the metadata `authorization: Bearer TOKEN`"
                )
            return principal
        if self._certificates:
            return _certificate_name(context.auth_context())
        return None


def _certificate_name(shown: Mapping[str, Sequence[bytes]]) -> str:
    """The name in a client's certificate: its common name, else its first URI, else its first DNS name.

    Raises:
        UnauthenticatedError: The certificate contains no name, or the name cannot be logged.
    """
    names = [name for kind in CERTIFICATE_NAMES for name in shown.get(kind, ()) if name]
    with suppress(UnicodeDecodeError):
        if names and is_principal(name := names[0].decode()):
            return name
    raise UnauthenticatedError(
        f"the certificate has no usable name; expected a common name, a URI or a DNS name of at most "
        f"{MAX_PRINCIPAL_LENGTH} printable characters"
    )


def is_local(address: str) -> bool:
    """Whether an address is reachable only from this machine: `unix:PATH`, or a loopback `host:port`."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(error: OSError | ValueError) -> str:
    return f"{Path(error.filename or '').name}: {error.strerror}" if isinstance(error, OSError) else str(error)
