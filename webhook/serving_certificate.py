"""The serving certificate: loaded from a mounted Secret and reloaded when it changes.

The files of a Secret may be half written, expired or not belong together, and that must not take the webhook down. So
a pair is read and validated as a whole before it is used, and an invalid pair never replaces a valid one. Connections
that exist keep the certificate they were made with.
"""

import os
import ssl
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from certs.key_pairs import CertificateError, KeyPair, read_pair
from vcuda.names import TLS_CERTIFICATE, TLS_KEY


class CertificateLoaded(Struct, frozen=True):
    """A pair was taken into use; `problem` says why callers reject it, and is empty if they accept it."""

    pair: KeyPair
    problem: str


class CertificateRejected(Struct, frozen=True):
    """The files on disk were not taken into use; the pair before them stays."""

    error: str


def load_pair(context: ssl.SSLContext, pair: KeyPair) -> None:
    # `load_cert_chain` takes file names only. Files in memory hold the bytes that were validated; those on disk may
    # have changed since.
    with ExitStack() as stack:
        paths = []
        for name, content in ((TLS_CERTIFICATE, pair.certificate), (TLS_KEY, pair.key)):
            handle = os.memfd_create(name)
            stack.callback(os.close, handle)
            os.write(handle, content)
            paths.append(f"/proc/self/fd/{handle}")
        context.load_cert_chain(*paths)


class ServingCertificate:
    """The pair in use, and the TLS context to listen with.

    A context must not be changed while handshakes use it. So every pair gets a context of its own, and the one that
    listens switches each new connection to the latest by its SNI callback, which runs for clients without SNI, too.
    """

    def __init__(self, folder: Path, server_name: str, client_ca: Path | None = None) -> None:
        self._folder, self._server_name, self._client_ca = folder, server_name, client_ca
        self.context = self._new_context()
        self.context.sni_callback = self._use_latest_context
        self._latest: ssl.SSLContext | None = None
        self._client_ca_pem = b""
        self.in_use: KeyPair | None = None
        self.rejected_count = 0
        self._last_error = ""

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # The short path knows no HTTP/2. API servers do not offer it to webhooks behind a Service either, because one
        # connection would carry all requests to one replica (kubernetes/kubernetes#75791).
        context.set_alpn_protocols(["http/1.1"])
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _use_latest_context(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        if self._latest is not None:
            connection.context = self._latest

    def refresh(self, now: datetime | None = None) -> CertificateLoaded | CertificateRejected | None:
        """Load what is on disk, unless it is invalid and the pair in use is not; None if nothing changed."""
        now = now or datetime.now(UTC)
        try:
            client_ca_pem = self._read_client_ca()
            pair = read_pair(self._folder)
            if pair == self.in_use and client_ca_pem == self._client_ca_pem:
                self._last_error = ""
                return None
            problem = pair.problem(now, self._server_name)
            # Without a valid pair, an expired one is better than none: the probes answer, and the error is visible.
            if problem and self.in_use is not None and not self.in_use.problem(now, self._server_name):
                raise CertificateError(f"{self._folder}: {problem}")  # noqa: TRY301
            latest = self._new_context()
            load_pair(latest, pair)
            if client_ca_pem:
                latest.load_verify_locations(cadata=client_ca_pem.decode("ascii"))
        except (CertificateError, ssl.SSLError, ValueError) as error:
            return self._reject(str(error))
        self._latest, self.in_use, self._client_ca_pem, self._last_error = latest, pair, client_ca_pem, ""
        return CertificateLoaded(pair, problem)

    def _reject(self, error: str) -> CertificateRejected | None:
        """Count an invalid pair once, although it is read again every second."""
        if error == self._last_error:
            return None
        self._last_error = error
        self.rejected_count += 1
        return CertificateRejected(error)

    def _read_client_ca(self) -> bytes:
        if self._client_ca is None:
            return b""
        try:
            return self._client_ca.read_bytes()
        except OSError as error:
            raise CertificateError(f"{self._client_ca}: cannot be read: {error.strerror}") from None

    @property
    def is_valid(self) -> bool:
        """Whether callers accept the pair in use."""
        return self.in_use is not None and not self.in_use.problem(datetime.now(UTC), self._server_name)
