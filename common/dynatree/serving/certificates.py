"""Checks of certificates and keys in PEM files, made here because gRPC does not report invalid ones."""

from __future__ import annotations

import ssl
from pathlib import Path


def check_certificates(pair: tuple[Path, Path] | None, authorities: Path | None) -> None:
    """Check a certificate chain with its private key, and the certificates of authorities.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file has other contents, or the key does not belong to the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if pair is not None:
        certificate, key = pair
        try:
            context.load_cert_chain(certificate, key, password="")  # else it would prompt at the terminal
        except ssl.SSLError as error:
            raise ValueError(
                f"{certificate.name} and {key.name} are not a certificate and its unencrypted key: {error.reason}"
            ) from error
    if authorities is not None:
        try:
            context.load_verify_locations(authorities)
        except ssl.SSLError as error:
            raise ValueError(f"{authorities.name} has no certificates: {error.reason}") from error
