"""When a certificate has to be made anew: pure functions that say why."""

from collections.abc import Sequence
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from certs.authority import BACKDATED
from certs.key_pairs import CertificateError, KeyPair, certificates_in, covers, format_time, pair_of

# A certificate is renewed when so much of its life is over.
RENEW_AT = 2 / 3


def needs_renewal(
    certificate: bytes,
    key: bytes,
    *,
    now: datetime,
    names: Sequence[str] = (),
    authority: bytes = b"",
) -> tuple[bool, str]:
    """Tell whether a serving certificate has to be made anew, and why: names it must hold, the CA that must be its."""
    unusable = why_unusable(certificate, key, now=now, names=names)
    if unusable:
        return True, unusable
    leaf = certificates_in(certificate, "")[0]
    if authority and not is_signed_by(leaf, authority):
        return True, "it is not signed by the present CA"
    return due_for_renewal(leaf, now)


def authority_needs_renewal(certificate: bytes, key: bytes, *, now: datetime) -> tuple[bool, str]:
    """Tell whether a CA has to be followed by another, and why."""
    unusable = why_unusable(certificate, key, now=now)
    if unusable:
        return True, unusable
    return due_for_renewal(certificates_in(certificate, "")[0], now)


def why_unusable(certificate: bytes, key: bytes, *, now: datetime, names: Sequence[str] = ()) -> str:
    """Say why a certificate cannot be served now, whoever signed it; nothing if it can."""
    if not certificate or not key:
        return "there is none"
    try:
        pair = pair_of(certificate, key, "it")
    except CertificateError as wrong:
        return str(wrong)
    problem = pair.problem(now, "")
    missing = sorted(name for name in names if not any(covers(held, name) for held in pair.names))
    return problem or (f"it is not made for {', '.join(missing)}" if missing else "")


def why_no_authority(pair: KeyPair) -> str:
    """Say why a pair that is whole cannot sign for us; nothing if it can."""
    certificate = certificates_in(pair.certificate, "the CA")[0]
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound:
        return "it is no CA"
    if not constraints.ca:
        return "it is no CA"
    return "" if isinstance(certificate.public_key(), ec.EllipticCurvePublicKey) else "its key is no ECDSA key"


def due_for_renewal(certificate: x509.Certificate, now: datetime) -> tuple[bool, str]:
    """Tell whether enough of a certificate's life is over."""
    began, ends = certificate.not_valid_before_utc + BACKDATED, certificate.not_valid_after_utc
    renew_at = began + (ends - began) * RENEW_AT
    if now >= renew_at:
        return True, f"two thirds of its life are over, it ends on {format_time(ends)}"
    return False, f"it is good, and will be renewed on {format_time(renew_at)}"


def is_signed_by(leaf: x509.Certificate, authorities: bytes) -> bool:
    """Tell whether one of these CAs signed a certificate."""
    for authority in certificates_in(authorities, "the CA"):
        try:
            leaf.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            continue
        return True
    return False
