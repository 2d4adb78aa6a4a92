"""Creates a CA and issues serving certificates with it.

ECDSA P-256 throughout: small, fast to verify, and accepted by every API server. The current time is passed in.
"""

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from certs.key_pairs import KeyPair, certificates_in, names_of

AUTHORITY_LIFE = timedelta(days=365)
LEAF_LIFE = timedelta(days=30)
# Clocks of machines differ: a certificate that was issued just now must be valid on a machine whose clock is behind.
BACKDATED = timedelta(hours=1)
ORGANIZATION = "Quotient"
# X.509's upper bound for a common name (RFC 5280, ub-common-name).
MAX_COMMON_NAME = 64
SIGNING = {"key_cert_sign": True, "crl_sign": True}
SERVING = {"digital_signature": True}
# x509.KeyUsage wants every usage named, true or false.
USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def new_authority(now: datetime, life: timedelta = AUTHORITY_LIFE) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    # Unique per CA: during a rotation two of them are in one bundle, and verifiers select an issuer by its subject.
    subject = subject_name(f"Quotient CA {now:%Y-%m-%d} {serial % 2**32:08x}")
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        certificate_builder(subject, subject, key.public_key(), serial, now, now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(**SIGNING), critical=True)
        .add_extension(key_id, critical=False)
        .sign(key, hashes.SHA256())
    )
    return encode_pair(certificate, key)


def issue(authority: KeyPair, names: Sequence[str], now: datetime, life: timedelta = LEAF_LIFE) -> KeyPair:
    """Issue a serving certificate for DNS names and IP addresses; it never outlives its CA.

    ValueError if a name cannot be part of a certificate.
    """
    parent = certificates_in(authority.certificate, "the CA")[0]
    signer = load_pem_private_key(authority.key, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise TypeError("the CA's key is not an ECDSA key")
    key = ec.generate_private_key(ec.SECP256R1())
    # A leaf that outlived its CA would look valid in every listing and still be rejected by clients.
    until = min(now + life, parent.not_valid_after_utc)
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        certificate_builder(
            subject_name(names[0]), parent.subject, key.public_key(), x509.random_serial_number(), now, until
        )
        .add_extension(x509.SubjectAlternativeName([general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(**SERVING), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(key_id, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return encode_pair(certificate, key)


def certificate_builder(  # noqa: PLR0917 - the fields of a certificate, in their order
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, serial: int, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
    )


def subject_name(common_name: str) -> x509.Name:
    """Return a subject. A long common name is cut: clients check the subject alternative names only."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, ORGANIZATION),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name[:MAX_COMMON_NAME]),
        ]
    )


def key_usage(**allowed: bool) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: allowed.get(usage, False) for usage in USAGES})


def general_name(name: str) -> x509.GeneralName:
    """Return an IP address as an IP entry, anything else as a DNS entry: clients do not mix the two."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def encode_pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    return KeyPair(
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        names_of(certificate),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
    )
