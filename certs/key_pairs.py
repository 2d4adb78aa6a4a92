"""A certificate and its private key, read from a folder or a secret and checked before use.

`tls.crt` may be a chain; the leaf comes first, as TLS requires.
"""

from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from msgspec import Struct

from vcuda.names import TLS_CERTIFICATE, TLS_KEY


class CertificateError(Exception):
    """A certificate or key is missing or invalid; the message names the file and the reason."""


class KeyPair(Struct, frozen=True):
    """A PEM chain and its matching PEM key; names and validity are those of the first certificate."""

    certificate: bytes
    key: bytes
    names: tuple[str, ...]
    not_before: datetime
    not_after: datetime

    def problem(self, now: datetime, server_name: str) -> str:
        """Return why clients would reject the certificate, empty if they accept it.

        With an empty `server_name` the names are not checked.
        """
        if now < self.not_before:
            return f"not valid before {format_time(self.not_before)}"
        if now >= self.not_after:
            return f"expired on {format_time(self.not_after)}"
        if server_name and not any(covers(name, server_name) for name in self.names):
            return f"valid for {', '.join(self.names) or 'no name'}, not for {server_name}"
        return ""


def covers(name: str, server_name: str) -> bool:
    """Return whether a certificate's name matches a server; a wildcard matches exactly one label (RFC 6125)."""
    return name == server_name or (name.startswith("*.") and name[1:] == server_name[server_name.find(".") :])


def format_time(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def read_pair(folder: Path) -> KeyPair:
    """Read and check `tls.crt` and `tls.key`; CertificateError names the invalid file."""
    contents: list[bytes] = []
    for name in (TLS_CERTIFICATE, TLS_KEY):
        try:
            contents.append((folder / name).read_bytes())
        except OSError as error:
            raise CertificateError(f"{folder / name}: cannot be read: {error.strerror}") from None
    return parse_pair(contents[0], contents[1], str(folder))


def parse_pair(certificate: bytes, key: bytes, where: str) -> KeyPair:
    """Parse a chain and a key and check that they match; `where` begins the message of a CertificateError."""
    leaf = certificates_in(certificate, f"{where}: {TLS_CERTIFICATE}")[0]
    try:
        public = load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The library's own message is about OpenSSL's error codes.
        raise CertificateError(f"{where}: {TLS_KEY} is not an unencrypted private key in PEM format") from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if public.public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise CertificateError(f"{where}: {TLS_KEY} does not match {TLS_CERTIFICATE}")
    return KeyPair(certificate, key, names_of(leaf), leaf.not_valid_before_utc, leaf.not_valid_after_utc)


def certificates_in(pem: bytes, where: str) -> list[x509.Certificate]:
    """Parse a chain or a bundle of at least one certificate; `where` begins the message of a CertificateError."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise CertificateError(f"{where} is not a certificate in PEM format") from None


def names_of(leaf: x509.Certificate) -> tuple[str, ...]:
    """Return the DNS names, then the IP addresses, of a certificate's subject alternative names."""
    try:
        alternatives = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    dns_names = alternatives.get_values_for_type(x509.DNSName)
    return (*dns_names, *map(str, alternatives.get_values_for_type(x509.IPAddress)))
