"""When a certificate has to be replaced: pure functions that return the decision and its reason.

The reasons are shown by `quotient certs` after the certificate's name, and logged with every step of a rotation.
"""

from collections.abc import Sequence
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec

from certs.authority import BACKDATED
from certs.key_pairs import CertificateError, KeyPair, certificates_in, covers, format_time, parse_pair

# The part of its lifetime after which a certificate is renewed. The last third is the time to notice and repair a
# renewal that does not work: ten days for a serving certificate, four months for a CA.
RENEW_AT = 2 / 3


def needs_renewal(
    certificate: bytes,
    key: bytes,
    *,
    now: datetime,
    names: Sequence[str] = (),
    authority: bytes = b"",
) -> tuple[bool, str]:
    """Decide whether to replace a serving certificate: it has to cover all `names` and be signed by `authority`.

    Without `authority` the signature is not checked.
    """
    problem = pair_problem(certificate, key, now=now, names=names)
    if problem:
        return True, problem
    leaf = certificates_in(certificate, "")[0]
    if authority and not is_signed_by(leaf, authority):
        return True, "not signed by the current CA"
    return due_for_renewal(leaf, now)


def authority_needs_renewal(certificate: bytes, key: bytes, *, now: datetime) -> tuple[bool, str]:
    """Decide whether a CA has to be succeeded by a new one."""
    problem = pair_problem(certificate, key, now=now)
    if problem:
        return True, problem
    return due_for_renewal(certificates_in(certificate, "")[0], now)


def pair_problem(certificate: bytes, key: bytes, *, now: datetime, names: Sequence[str] = ()) -> str:
    """Return why a pair cannot be used now, whichever CA signed it; empty if it can."""
    if not certificate or not key:
        return "missing"
    try:
        pair = parse_pair(certificate, key, "secret")
    except CertificateError as error:
        return str(error)
    problem = pair.problem(now, "")
    missing = sorted(name for name in names if not any(covers(held, name) for held in pair.names))
    return problem or (f"not valid for {', '.join(missing)}" if missing else "")


def authority_problem(pair: KeyPair) -> str:
    """Return why an intact pair cannot sign certificates for us; empty if it can."""
    certificate = certificates_in(pair.certificate, "the CA")[0]
    try:
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound:
        return "not a CA certificate"
    if not constraints.ca:
        return "not a CA certificate"
    return "" if isinstance(certificate.public_key(), ec.EllipticCurvePublicKey) else "not an ECDSA key"


def due_for_renewal(certificate: x509.Certificate, now: datetime) -> tuple[bool, str]:
    # Counted from when it was issued: backdating must not shorten a short life.
    issued, expires = certificate.not_valid_before_utc + BACKDATED, certificate.not_valid_after_utc
    renew_at = issued + (expires - issued) * RENEW_AT
    if now >= renew_at:
        return True, f"two thirds of its lifetime have passed, it expires on {format_time(expires)}"
    return False, f"valid, renewal is due on {format_time(renew_at)}"


def is_signed_by(leaf: x509.Certificate, authorities: bytes) -> bool:
    """Return whether one of the CAs of a bundle signed a certificate."""
    for authority in certificates_in(authorities, "the CA"):
        try:
            leaf.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            continue  # another issuer's name, another key, or a kind of key that we do not use
        return True
    return False
