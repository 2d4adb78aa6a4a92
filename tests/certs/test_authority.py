"""Certificates that clients and servers accept, and the rules for renewing them."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from certs.authority import issue, new_authority
from certs.key_pairs import CertificateError, KeyPair, read_pair
from certs.renewal import authority_needs_renewal, authority_problem, needs_renewal

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
NAMES = ("quotient-webhook.quotient-system.svc", "quotient-webhook.quotient-system.svc.cluster.local", "10.0.0.7")
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return new_authority(NOW)


def parsed(pair: KeyPair) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pair.certificate)


def test_a_strict_verifier_accepts_a_leaf_for_each_of_its_names(authority: KeyPair) -> None:
    """By the rules of the web (CA/Browser Forum); and not with another CA."""
    leaf = issue(authority, NAMES, NOW)
    for name in NAMES[:2]:
        verifier = PolicyBuilder().store(Store([parsed(authority)])).time(NOW).build_server_verifier(x509.DNSName(name))
        assert len(verifier.verify(parsed(leaf), [])) == 2
    other = PolicyBuilder().store(Store([parsed(new_authority(NOW))])).time(NOW)
    with pytest.raises(VerificationError):
        other.build_server_verifier(x509.DNSName(NAMES[0])).verify(parsed(leaf), [])


def test_certificates_have_the_expected_lifetimes_usages_and_names(authority: KeyPair) -> None:
    leaf, again = issue(authority, NAMES, NOW), issue(authority, NAMES, NOW)
    assert leaf.names == NAMES
    assert leaf.not_after == NOW + 30 * DAY
    assert authority.not_after == NOW + 365 * DAY
    assert leaf.not_before == authority.not_before == NOW - timedelta(hours=1)
    assert parsed(leaf).serial_number != parsed(again).serial_number
    assert parsed(leaf).serial_number.bit_length() > 64
    usages = parsed(leaf).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.SERVER_AUTH]
    key = parsed(leaf).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    constraints = parsed(authority).extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    assert parsed(new_authority(NOW)).subject != parsed(authority).subject


def test_a_leaf_never_outlives_its_ca(authority: KeyPair) -> None:
    late = issue(authority, NAMES, NOW + 360 * DAY)
    assert late.not_after == authority.not_after


def test_a_leaf_can_be_served_over_tls(authority: KeyPair, tmp_path: Path) -> None:
    """With Python's own TLS, in a handshake in memory, with the checks a client makes."""
    now = datetime.now(UTC)
    pair = issue(fresh := new_authority(now), ("webhook.example",), now)
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)
    assert read_pair(tmp_path).names == ("webhook.example",)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    trusting, distrusting = ssl.create_default_context(), ssl.create_default_context()
    trusting.load_verify_locations(cadata=fresh.certificate.decode())
    distrusting.load_verify_locations(cadata=authority.certificate.decode())
    handshake(server, trusting)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(server, distrusting)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Exchange messages in memory until both sides have finished."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server, server_hostname="webhook.example")
    called = server.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    while len(done) < 2:
        for side in (caller, called):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue


@pytest.mark.parametrize(
    ("days", "renewed", "why"),
    [
        (0, False, "valid, renewal is due on 2026-12-06 12:00 UTC"),
        (19.99, False, "valid, renewal is due"),
        (20, True, "two thirds of its lifetime have passed, it expires on 2026-12-16 12:00 UTC"),
        (31, True, "expired on 2026-12-16 12:00 UTC"),
        (-1, True, "not valid before 2026-11-16 11:00 UTC"),
    ],
)
def test_a_leaf_is_renewed_after_two_thirds_of_its_life(
    authority: KeyPair, days: float, *, renewed: bool, why: str
) -> None:
    leaf = issue(authority, NAMES, NOW)
    decision = needs_renewal(
        leaf.certificate, leaf.key, now=NOW + days * DAY, names=NAMES, authority=authority.certificate
    )
    assert decision[0] is renewed
    assert decision[1].startswith(why)


def test_a_leaf_that_clients_or_the_server_would_reject_is_renewed_at_once(authority: KeyPair) -> None:
    leaf, other = issue(authority, NAMES, NOW), issue(new_authority(NOW), NAMES, NOW)

    def why(certificate: bytes, key: bytes, names: tuple[str, ...] = NAMES) -> str:
        renewing, reason = needs_renewal(certificate, key, now=NOW, names=names, authority=authority.certificate)
        return reason if renewing else ""

    assert why(b"", b"") == "missing"
    half = leaf.certificate[: len(leaf.certificate) // 2]
    assert why(half, leaf.key) == "secret: tls.crt is not a certificate in PEM format"
    assert why(leaf.certificate, leaf.key[:40]) == "secret: tls.key is not an unencrypted private key in PEM format"
    assert why(leaf.certificate, other.key) == "secret: tls.key does not match tls.crt"
    assert why(other.certificate, other.key) == "not signed by the current CA"
    assert why(leaf.certificate, leaf.key, (*NAMES, "new")) == "not valid for new"
    assert why(leaf.certificate, leaf.key) == ""


def test_a_ca_is_renewed_after_two_thirds_of_a_year(authority: KeyPair) -> None:
    assert not authority_needs_renewal(authority.certificate, authority.key, now=NOW + 243 * DAY)[0]
    assert authority_needs_renewal(authority.certificate, authority.key, now=NOW + 244 * DAY)[0]


def test_a_leaf_is_not_a_ca(authority: KeyPair) -> None:
    assert authority_problem(issue(authority, NAMES, NOW)) == "not a CA certificate"
    assert authority_problem(authority) == ""


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"tls\.crt: cannot be read: No such file"):
        read_pair(tmp_path)


def test_a_wildcard_matches_exactly_one_label() -> None:
    pair = issue(new_authority(NOW), ("*.quotient-system.svc",), NOW)
    assert pair.problem(NOW, "quotient-webhook.quotient-system.svc") == ""
    assert "not for" in pair.problem(NOW, "a.b.quotient-system.svc")
    assert "not for" in pair.problem(NOW, "quotient-system.svc")
