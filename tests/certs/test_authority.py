"""Certificates are what callers expect of them."""

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
from certs.renewal import authority_needs_renewal, needs_renewal, why_no_authority

NOW = datetime(2026, 11, 16, 12, 0, tzinfo=UTC)
NAMES = ("quotient-webhook.quotient-system.svc", "quotient-webhook.quotient-system.svc.cluster.local", "10.0.0.7")
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> KeyPair:
    return new_authority(NOW)


def loaded(pair: KeyPair) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pair.certificate)


def test_a_leaf_is_accepted_by_a_strict_verifier(authority: KeyPair) -> None:
    """By one that follows the rules of the web, and for each of its names."""
    leaf = issue(authority, NAMES, NOW)
    for name in NAMES[:2]:
        verifier = PolicyBuilder().store(Store([loaded(authority)])).time(NOW).build_server_verifier(x509.DNSName(name))
        assert len(verifier.verify(loaded(leaf), [])) == 2
    other = PolicyBuilder().store(Store([loaded(new_authority(NOW))])).time(NOW)
    with pytest.raises(VerificationError):
        other.build_server_verifier(x509.DNSName(NAMES[0])).verify(loaded(leaf), [])


def test_what_stands_in_them(authority: KeyPair) -> None:
    """Lives, usages, serial numbers, and the names."""
    leaf, again = issue(authority, NAMES, NOW), issue(authority, NAMES, NOW)
    assert leaf.names == NAMES
    assert leaf.not_after == NOW + 30 * DAY
    assert authority.not_after == NOW + 365 * DAY
    assert leaf.not_before == authority.not_before == NOW - timedelta(hours=1)
    assert loaded(leaf).serial_number != loaded(again).serial_number
    assert loaded(leaf).serial_number.bit_length() > 64
    usages = loaded(leaf).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usages) == [ExtendedKeyUsageOID.SERVER_AUTH]
    key = loaded(leaf).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"
    constraints = loaded(authority).extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    assert loaded(new_authority(NOW)).subject != loaded(authority).subject


def test_a_leaf_never_outlives_its_authority(authority: KeyPair) -> None:
    """However late it is made."""
    late = issue(authority, NAMES, NOW + 360 * DAY)
    assert late.not_after == authority.not_after


def test_it_can_be_served(authority: KeyPair, tmp_path: Path) -> None:
    """By Python's own TLS, in a handshake in memory, with the checks a client makes."""
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
    shake_hands(server, trusting)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, distrusting)


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Let both talk over memory until they are done."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(back, there, server_hostname="webhook.example")
    called = server.wrap_bio(there, back, server_side=True)
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
        (0, False, "it is good, and will be renewed on 2026-12-06 12:00 UTC"),
        (19.99, False, "it is good"),
        (20, True, "two thirds of its life are over, it ends on 2026-12-16 12:00 UTC"),
        (31, True, "expired on 2026-12-16 12:00 UTC"),
        (-1, True, "valid only from 2026-11-16 11:00 UTC on"),
    ],
)
def test_when_a_leaf_is_renewed(authority: KeyPair, days: float, *, renewed: bool, why: str) -> None:
    """At two thirds of its life; and at once if it is no good."""
    leaf = issue(authority, NAMES, NOW)
    found = needs_renewal(
        leaf.certificate, leaf.key, now=NOW + days * DAY, names=NAMES, authority=authority.certificate
    )
    assert found[0] is renewed
    assert found[1].startswith(why)


def test_what_else_makes_a_leaf_unfit(authority: KeyPair) -> None:
    """Everything that callers, or the web server, would refuse."""
    leaf, other = issue(authority, NAMES, NOW), issue(new_authority(NOW), NAMES, NOW)

    def why(certificate: bytes, key: bytes, names: tuple[str, ...] = NAMES) -> str:
        found = needs_renewal(certificate, key, now=NOW, names=names, authority=authority.certificate)
        return found[1] if found[0] else ""

    assert why(b"", b"") == "there is none"
    assert why(leaf.certificate[: len(leaf.certificate) // 2], leaf.key).startswith("it: tls.crt is not a PEM")
    assert why(leaf.certificate, leaf.key[:40]).startswith("it: tls.key is not a PEM key")
    assert why(leaf.certificate, other.key) == "it: tls.crt and tls.key do not belong together"
    assert why(other.certificate, other.key) == "it is not signed by the present CA"
    assert why(leaf.certificate, leaf.key, (*NAMES, "new")) == "it is not made for new"
    assert why(leaf.certificate, leaf.key) == ""


def test_when_an_authority_is_followed(authority: KeyPair) -> None:
    """At two thirds of a year; and a leaf is none."""
    assert not authority_needs_renewal(authority.certificate, authority.key, now=NOW + 243 * DAY)[0]
    assert authority_needs_renewal(authority.certificate, authority.key, now=NOW + 244 * DAY)[0]
    assert why_no_authority(issue(authority, NAMES, NOW)) == "it is no CA"
    assert why_no_authority(authority) == ""


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    """With its path."""
    with pytest.raises(CertificateError, match=r"tls\.crt: cannot be read: No such file"):
        read_pair(tmp_path)


def test_a_wildcard_is_good_for_one_word() -> None:
    """As callers have it."""
    pair = issue(new_authority(NOW), ("*.quotient-system.svc",), NOW)
    assert pair.problem(NOW, "quotient-webhook.quotient-system.svc") == ""
    assert "not for" in pair.problem(NOW, "a.b.quotient-system.svc")
    assert "not for" in pair.problem(NOW, "quotient-system.svc")
