"""Who may call a server, and over what: TLS, client certificates, tokens.

Whoever calls is a principal: the owner of the token, or else whom the client's certificate names. Without both anybody
may call, and is whoever he says he is.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from dynatree.common.certificates import check_certificates
from dynatree.common.errors import StartupError, UnauthenticatedError
from dynatree.common.files import Reloaded
from dynatree.common.limits import MAX_PRINCIPAL_LENGTH
from dynatree.common.principals import is_principal
from dynatree.common.tokens import AUTHORIZATION, TokenFile


@dataclass(frozen=True)
class SecuritySettings:
    """What the command line says of a server's security.

    Attributes:
        certificate: The server's certificate chain, PEM.
        key: Its private key, PEM.
        client_ca: Authorities whose client certificates are demanded, PEM.
        tokens: Who may call, by token.
        insecure: Whether plain connections from other machines are welcome.
        reflection: Whether the server describes its services to whoever asks.
    """

    certificate: Path | None = None
    key: Path | None = None
    client_ca: Path | None = None
    tokens: Path | None = None
    insecure: bool = False
    reflection: bool = True

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise StartupError("a certificate and its key go together: expected both --tls-cert and --tls-key")
        if self.client_ca is not None and self.certificate is None:
            raise StartupError("--client-ca needs TLS: expected --tls-cert and --tls-key")

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.certificate is not None

    def check_plain(self, address: str) -> None:
        """Refuse a plain connection with another machine, unless it is asked for.

        Raises:
            StartupError: The address is no loopback address.
        """
        if not (self.tls or self.insecure or is_local(address)):
            raise StartupError(
                f"{address} is open to other machines, and connections would not be encrypted; expected --tls-cert and "
                "--tls-key, or --insecure where the network is private"
            )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For the server's port; files that are replaced count from the next connection on. None for plain connections.

        Raises:
            StartupError: A file cannot be read, or makes no sense.
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
            """None where nothing changed: gRPC frees what it is given, so nothing may be given to it twice."""
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
            replaced,  # type: ignore[arg-type]  # None is as good (grpc.dynamic_ssl_server_credentials)
            require_client_authentication=self.client_ca is not None,
        )


LOCAL = SecuritySettings()
CERTIFICATE_NAMES = ("x509_common_name", "peer_uri", "peer_dns")  # as gRPC calls them; the first that there is counts


class Authentication:
    """Finds out on whose behalf a call is made."""

    def __init__(self, settings: SecuritySettings) -> None:
        self._tokens = TokenFile(settings.tokens) if settings.tokens is not None else None
        self._certificates = settings.client_ca is not None

    def principal(self, context: Any) -> str | None:
        """The principal of a call; None where the server asks nobody who he is.

        Raises:
            UnauthenticatedError: The call shows no token that is known, or a certificate that names nobody.
        """
        if self._tokens is not None:
            shown = dict(context.invocation_metadata() or ()).get(AUTHORIZATION, "")
            principal = self._tokens.principal(shown) if isinstance(shown, str) else None
            if principal is None:
                raise UnauthenticatedError("no known token; expected the metadata `authorization: Bearer TOKEN`")
            return principal
        if self._certificates:
            return _certificate_name(context.auth_context())
        return None


def _certificate_name(shown: Mapping[str, Sequence[bytes]]) -> str:
    """Whom a client's certificate names: its common name, or else its first URI, or else its first DNS name.

    Raises:
        UnauthenticatedError: It names nobody, or so that a line of a log cannot hold it.
    """
    names = [name for kind in CERTIFICATE_NAMES for name in shown.get(kind, ()) if name]
    with suppress(UnicodeDecodeError):
        if names and is_principal(name := names[0].decode()):
            return name
    raise UnauthenticatedError(
        f"the certificate names nobody; expected a common name, a URI or a DNS name of at most {MAX_PRINCIPAL_LENGTH} "
        "printable characters"
    )


def is_local(address: str) -> bool:
    """Whether only this machine reaches an address: `unix:PATH`, or `host:port` of the loopback interface."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(error: OSError | ValueError) -> str:
    return f"{Path(error.filename or '').name}: {error.strerror}" if isinstance(error, OSError) else str(error)
