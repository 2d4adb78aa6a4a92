"""A certificate and its key, as they come from a file or a secret: checked before anybody relies on them."""

from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from msgspec import Struct

CERTIFICATE, KEY = "tls.crt", "tls.key"


class CertificateError(Exception):
    """No usable pair; the message names the file and says why."""


class KeyPair(Struct, frozen=True):
    """A certificate chain and its key, which belong together, with what callers will check."""

    certificate: bytes
    key: bytes
    names: tuple[str, ...]
    not_before: datetime
    not_after: datetime

    def problem(self, now: datetime, server_name: str) -> str:
        """Say why callers would not accept it; empty if they would."""
        if now < self.not_before:
            return f"valid only from {format_time(self.not_before)} on"
        if now >= self.not_after:
            return f"expired on {format_time(self.not_after)}"
        if server_name and not any(covers(name, server_name) for name in self.names):
            return f"made for {', '.join(self.names) or 'no name'}, not for {server_name}"
        return ""


def covers(name: str, server_name: str) -> bool:
    """Tell whether a name in a certificate is good for a server; a wildcard stands for one first word."""
    return name == server_name or (name.startswith("*.") and name[1:] == server_name[server_name.find(".") :])


def format_time(time: datetime) -> str:
    """Write a time as people read it."""
    return f"{time:%Y-%m-%d %H:%M} UTC"


def read_pair(folder: Path) -> KeyPair:
    """Read the files of a folder, and check that they belong together."""
    found: list[bytes] = []
    for name in (CERTIFICATE, KEY):
        try:
            found.append((folder / name).read_bytes())
        except OSError as wrong:
            raise CertificateError(f"{folder / name}: cannot be read: {wrong.strerror}") from None
    return pair_of(found[0], found[1], str(folder))


def pair_of(certificate: bytes, key: bytes, where: str) -> KeyPair:
    """Check that a chain and a key are whole and belong together."""
    leaf = certificates_in(certificate, f"{where}: {CERTIFICATE}")[0]
    try:
        public = load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as wrong:
        raise CertificateError(f"{where}: {KEY} is not a PEM key without password: {wrong}") from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if public.public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise CertificateError(f"{where}: {CERTIFICATE} and {KEY} do not belong together")
    return KeyPair(certificate, key, names_of(leaf), leaf.not_valid_before_utc, leaf.not_valid_after_utc)


def certificates_in(pem: bytes, where: str) -> list[x509.Certificate]:
    """Read a chain or a bundle, which has at least one certificate."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as wrong:
        raise CertificateError(f"{where} is not a PEM certificate: {wrong}") from None


def names_of(leaf: x509.Certificate) -> tuple[str, ...]:
    """Give the names and addresses a certificate is made for."""
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress)))
