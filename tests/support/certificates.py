"""Certificates for tests: an authority, and the certificates that it signs."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


@dataclass
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """An authority that signs certificates; `file` is its own certificate."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = _builder(self._name, self._name, self._key, DAY).add_extension(
            x509.BasicConstraints(True, None), True
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def pair(
        self,
        name: str,
        *,
        expired: bool = False,
        common_name: str | None = None,
        others: list[x509.GeneralName] | None = None,
    ) -> Pair:
        """Sign a certificate of `name` for localhost or for `others`; an `expired` one was valid until yesterday.

        `common_name` replaces `name` as the certificate's common name; "" leaves it out.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName("localhost"), x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        subject = _name(name) if common_name is None else _name(common_name) if common_name else x509.Name([])
        builder = _builder(subject, self._name, key, -DAY if expired else DAY)
        if others is None or others:
            builder = builder.add_extension(x509.SubjectAlternativeName(names if others is None else others), False)
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        certificate = builder.sign(self._key, hashes.SHA256())
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lasts: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * DAY)
        .not_valid_after(now + lasts)
    )
