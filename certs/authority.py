"""Making certificates: a CA, and serving certificates that it signs. The clock is the caller's."""

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
# Clocks of machines differ: what was made just now must be good on one that is behind.
BACKDATED = timedelta(hours=1)
ORGANISATION = "Quotient"
SIGNING = {"key_cert_sign": True, "crl_sign": True}
SERVING = {"digital_signature": True}
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
    """Make a CA, under a name that no other has: old and new stand side by side in a bundle."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    subject = subject_name(f"Quotient CA {now:%Y-%m-%d} {serial % 2**32:08x}")
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = (
        certificate_builder(subject, subject, key.public_key(), serial, now, now + life)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_usage(**SIGNING), critical=True)
        .add_extension(own, critical=False)
        .sign(key, hashes.SHA256())
    )
    return encode_pair(made, key)


def issue(authority: KeyPair, names: Sequence[str], now: datetime, life: timedelta = LEAF_LIFE) -> KeyPair:
    """Make a serving certificate for these names and addresses; it never outlives its CA."""
    parent = certificates_in(authority.certificate, "the CA")[0]
    signer = load_pem_private_key(authority.key, None)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise TypeError("the CA's key is not one of ours")
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(now + life, parent.not_valid_after_utc)
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = (
        certificate_builder(
            subject_name(names[0]), parent.subject, key.public_key(), x509.random_serial_number(), now, until
        )
        .add_extension(x509.SubjectAlternativeName([general_name(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(key_usage(**SERVING), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(own, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return encode_pair(made, key)


def certificate_builder(  # noqa: PLR0917 - the fields of a certificate, in their order
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, serial: int, now: datetime, until: datetime
) -> x509.CertificateBuilder:
    """Begin a certificate with what each has."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(now - BACKDATED)
        .not_valid_after(until)
    )


def subject_name(common: str) -> x509.Name:
    """Write a subject; a common name longer than 64 characters is not allowed, and the names stand elsewhere anyway."""
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, ORGANISATION),
            x509.NameAttribute(NameOID.COMMON_NAME, common[:64]),
        ]
    )


def key_usage(**allowed: bool) -> x509.KeyUsage:
    """Write what a key may be used for."""
    return x509.KeyUsage(**{each: allowed.get(each, False) for each in USAGES})


def general_name(name: str) -> x509.GeneralName:
    """Write a name or an address as a certificate holds it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def encode_pair(made: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    """Write both as PEM."""
    return KeyPair(
        made.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        names_of(made),
        made.not_valid_before_utc,
        made.not_valid_after_utc,
    )
