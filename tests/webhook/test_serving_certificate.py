"""The serving certificate: taken when it is good, kept when the next one is not."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from certs.key_pairs import CertificateError, parse_pair, read_pair
from tests.running import HOST
from tests.webhook.running import Authority
from webhook.serving_certificate import ServingCertificate

NOW = datetime(2026, 11, 16, tzinfo=UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture
def certificates(authority: Authority) -> ServingCertificate:
    """A keeper that has taken a good certificate."""
    keeper = ServingCertificate(authority.folder, HOST)
    assert keeper.refresh().startswith(f"serving a certificate for {HOST} until ")
    return keeper


def test_nothing_is_said_while_nothing_changes(certificates: ServingCertificate) -> None:
    """It is looked at every few seconds."""
    assert certificates.refresh() == ""
    assert certificates.is_good


def test_a_new_certificate_is_taken(authority: Authority, certificates: ServingCertificate) -> None:
    """As soon as it is there."""
    before = certificates.in_use
    authority.issue()
    assert "serving" in certificates.refresh()
    assert certificates.in_use != before


BAD = {
    "half written": lambda cert, key: (cert[: len(cert) // 2], key),
    "empty": lambda _, key: (b"", key),
    "without key": lambda cert, _: (cert, b""),
    "with another's key": lambda cert, _: (cert, trustme.CA().issue_cert(HOST).private_key_pem.bytes()),
    "no PEM": lambda _, key: (b"hello", key),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD.keys())
def test_a_bad_pair_never_replaces_a_good_one(
    authority: Authority, certificates: ServingCertificate, spoil: object
) -> None:
    """It is told once, and counted."""
    before = certificates.in_use
    made = authority.ca.issue_cert(HOST)
    assert callable(spoil)
    authority.put(*spoil(made.cert_chain_pems[0].bytes(), made.private_key_pem.bytes()))
    assert certificates.refresh().startswith("certificate not taken: ")
    assert certificates.refresh() == ""
    assert certificates.in_use == before
    assert certificates.failures == 1
    assert certificates.is_good
    authority.issue()
    assert "serving" in certificates.refresh()


def test_an_expired_one_or_one_for_another_name_does_not_either(
    authority: Authority, certificates: ServingCertificate
) -> None:
    """Callers would refuse it."""
    authority.issue(not_after=datetime.now(UTC) - timedelta(hours=1), not_before=datetime.now(UTC) - timedelta(hours=2))
    assert "expired" in certificates.refresh()
    authority.issue("other.example.org")
    assert "valid for other.example.org, not for 127.0.0.1" in certificates.refresh()
    authority.issue(not_before=datetime.now(UTC) + timedelta(hours=1))
    assert "not valid before" in certificates.refresh()
    assert certificates.is_good


def test_missing_files_leave_the_one_in_use(authority: Authority, certificates: ServingCertificate) -> None:
    """A secret may be deleted."""
    (authority.folder / "..data").unlink()
    assert "cannot be read" in certificates.refresh()
    assert certificates.is_good


def test_something_is_better_than_nothing(tmp_path: Path) -> None:
    """A first pair that is expired is served, and said to be."""
    authority = Authority(tmp_path / "tls")
    authority.issue(not_after=datetime.now(UTC) - timedelta(hours=1), not_before=datetime.now(UTC) - timedelta(hours=2))
    keeper = ServingCertificate(authority.folder, HOST)
    assert "expired" in keeper.refresh()
    assert keeper.in_use is not None
    assert not keeper.is_good
    authority.issue()
    keeper.refresh()
    assert keeper.is_good


def test_validity_is_a_matter_of_the_clock_and_the_name(authority: Authority) -> None:
    """And of nothing else."""
    authority.issue(not_before=NOW, not_after=NOW + timedelta(days=30))
    pair = read_pair(authority.folder)
    assert pair.problem(NOW, HOST) == ""
    assert pair.problem(NOW - timedelta(seconds=1), HOST)
    assert pair.problem(NOW + timedelta(days=30), HOST)
    assert pair.problem(NOW, "elsewhere")
    assert pair.problem(NOW, "") == ""


def test_a_key_with_a_password_is_said_to_be_one() -> None:
    """Nobody is here to type it."""
    made = trustme.CA().issue_cert(HOST)
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    key = serialization.load_pem_private_key(made.private_key_pem.bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    with pytest.raises(CertificateError, match="unencrypted"):
        parse_pair(made.cert_chain_pems[0].bytes(), locked, "x")


def test_clients_are_asked_for_a_certificate_only_if_configured(authority: Authority, tmp_path: Path) -> None:
    """Most API servers have none."""
    assert ServingCertificate(authority.folder, HOST).context.verify_mode is ssl.CERT_NONE
    trusted = tmp_path / "ca.pem"
    authority.ca.cert_pem.write_to_path(str(trusted))
    keeper = ServingCertificate(authority.folder, HOST, trusted)
    assert "serving" in keeper.refresh()
    assert keeper.context.verify_mode is ssl.CERT_REQUIRED
    assert keeper._latest is not None
    assert len(keeper._latest.get_ca_certs()) == 1
    trustme.CA().cert_pem.write_to_path(str(trusted))
    assert "serving" in keeper.refresh()
    assert len(keeper._latest.get_ca_certs()) == 1, "a CA that was taken away is trusted no more"
    missing = ServingCertificate(authority.folder, HOST, tmp_path / "missing")
    assert "missing: cannot be read" in missing.refresh()
