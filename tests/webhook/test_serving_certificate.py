"""The serving certificate: a valid pair is loaded, an invalid one never replaces it."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from certs.key_pairs import CertificateError, parse_pair, read_pair
from tests.running import HOST
from tests.webhook.running import Authority
from webhook.serving_certificate import CertificateLoaded, CertificateRejected, ServingCertificate

NOW = datetime(2026, 11, 16, tzinfo=UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "tls")


@pytest.fixture
def certificates(authority: Authority) -> ServingCertificate:
    """One that has loaded a valid pair."""
    certificates = ServingCertificate(authority.folder, HOST)
    loaded = certificates.refresh()
    assert isinstance(loaded, CertificateLoaded)
    assert (loaded.pair.names, loaded.problem) == ((HOST,), "")
    return certificates


def rejection(certificates: ServingCertificate) -> str:
    """Refresh, and return why the pair on disk was rejected."""
    change = certificates.refresh()
    assert isinstance(change, CertificateRejected)
    return change.error


def test_a_refresh_without_a_change_reports_nothing(certificates: ServingCertificate) -> None:
    assert certificates.refresh() is None
    assert certificates.is_valid


def test_a_new_certificate_is_loaded(authority: Authority, certificates: ServingCertificate) -> None:
    before = certificates.in_use
    authority.issue()
    assert isinstance(certificates.refresh(), CertificateLoaded)
    assert certificates.in_use != before


INVALID = {
    "half written": lambda cert, key: (cert[: len(cert) // 2], key),
    "empty": lambda _, key: (b"", key),
    "without key": lambda cert, _: (cert, b""),
    "with the key of another certificate": lambda cert, _: (
        cert,
        trustme.CA().issue_cert(HOST).private_key_pem.bytes(),
    ),
    "not PEM": lambda _, key: (b"hello", key),
}


@pytest.mark.parametrize("spoil", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_pair_never_replaces_a_valid_one(
    authority: Authority, certificates: ServingCertificate, spoil: object
) -> None:
    """It is reported and counted once, although it is read again with every refresh."""
    before = certificates.in_use
    issued = authority.ca.issue_cert(HOST)
    assert callable(spoil)
    authority.put(*spoil(issued.cert_chain_pems[0].bytes(), issued.private_key_pem.bytes()))
    assert rejection(certificates).startswith(str(authority.folder))
    assert certificates.refresh() is None
    assert certificates.in_use == before
    assert certificates.rejected_count == 1
    assert certificates.is_valid
    authority.issue()
    assert isinstance(certificates.refresh(), CertificateLoaded)


def test_a_pair_that_callers_would_reject_never_replaces_a_valid_one(
    authority: Authority, certificates: ServingCertificate
) -> None:
    authority.issue(not_after=datetime.now(UTC) - timedelta(hours=1), not_before=datetime.now(UTC) - timedelta(hours=2))
    assert "expired" in rejection(certificates)
    authority.issue("other.example.org")
    assert "valid for other.example.org, not for 127.0.0.1" in rejection(certificates)
    authority.issue(not_before=datetime.now(UTC) + timedelta(hours=1))
    assert "not valid before" in rejection(certificates)
    assert certificates.is_valid


def test_the_pair_in_use_stays_when_its_files_disappear(authority: Authority, certificates: ServingCertificate) -> None:
    """As when the Secret is deleted."""
    (authority.folder / "..data").unlink()
    assert "cannot be read" in rejection(certificates)
    assert certificates.is_valid


def test_an_expired_pair_is_loaded_if_there_is_no_other(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    authority.issue(not_after=datetime.now(UTC) - timedelta(hours=1), not_before=datetime.now(UTC) - timedelta(hours=2))
    certificates = ServingCertificate(authority.folder, HOST)
    loaded = certificates.refresh()
    assert isinstance(loaded, CertificateLoaded)
    assert "expired" in loaded.problem
    assert certificates.in_use is not None
    assert not certificates.is_valid
    authority.issue()
    certificates.refresh()
    assert certificates.is_valid


def test_a_pair_is_valid_for_its_names_between_its_dates(authority: Authority) -> None:
    authority.issue(not_before=NOW, not_after=NOW + timedelta(days=30))
    pair = read_pair(authority.folder)
    assert pair.problem(NOW, HOST) == ""
    assert pair.problem(NOW - timedelta(seconds=1), HOST)
    assert pair.problem(NOW + timedelta(days=30), HOST)
    assert pair.problem(NOW, "elsewhere")
    assert pair.problem(NOW, "") == ""


def test_a_key_with_a_password_is_rejected() -> None:
    issued = trustme.CA().issue_cert(HOST)
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    with pytest.raises(CertificateError, match="not an unencrypted private key"):
        parse_pair(issued.cert_chain_pems[0].bytes(), encrypted, "x")


def test_client_certificates_are_required_only_with_a_client_ca(authority: Authority, tmp_path: Path) -> None:
    assert ServingCertificate(authority.folder, HOST).context.verify_mode is ssl.CERT_NONE
    client_ca = tmp_path / "ca.pem"
    authority.ca.cert_pem.write_to_path(str(client_ca))
    certificates = ServingCertificate(authority.folder, HOST, client_ca)
    assert isinstance(certificates.refresh(), CertificateLoaded)
    assert certificates.context.verify_mode is ssl.CERT_REQUIRED
    assert certificates._latest is not None
    assert len(certificates._latest.get_ca_certs()) == 1
    trustme.CA().cert_pem.write_to_path(str(client_ca))
    assert isinstance(certificates.refresh(), CertificateLoaded)
    assert len(certificates._latest.get_ca_certs()) == 1, "a removed CA is still trusted"
    missing = ServingCertificate(authority.folder, HOST, tmp_path / "missing")
    assert "missing: cannot be read" in rejection(missing)
