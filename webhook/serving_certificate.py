"""The serving certificate: loaded from a mounted secret, followed as it changes, and never replaced by a worse one.

A secret's files change one after another, and a half-written or mismatched pair must not take the webhook down. So
both are read, checked against each other, and only then served. Connections that exist keep what they were made with.
"""

import os
import ssl
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from certs.key_pairs import CertificateError, KeyPair, format_time, read_pair
from vcuda.names import TLS_CERTIFICATE, TLS_KEY


def put_into(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Give a pair to a TLS context. It wants files, and must get the very bytes that were checked."""
    with ExitStack() as stack:
        paths = []
        for name, content in ((TLS_CERTIFICATE, pair.certificate), (TLS_KEY, pair.key)):
            handle = os.memfd_create(name)
            stack.callback(os.close, handle)
            os.write(handle, content)
            paths.append(f"/proc/self/fd/{handle}")
        context.load_cert_chain(*paths)


class ServingCertificate:
    """The pair in use, and the TLS context that serves it.

    A context that is in use must not be changed: a handshake in the middle of it would see half of each. So a new one
    is made for each pair, with the CAs of callers that are trusted now, and every new connection is given the latest.
    """

    def __init__(self, folder: Path, server_name: str, client_ca: Path | None = None) -> None:
        self._folder, self._server_name, self._client_ca = folder, server_name, client_ca
        self.context = self._empty()
        self.context.sni_callback = self._give_latest
        self._latest: ssl.SSLContext | None = None
        self._clients = b""
        self.in_use: KeyPair | None = None
        self.failures = 0
        self._refused: object = None

    def _empty(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        if self._client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def _give_latest(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """Begin a handshake, whether or not the caller names a server, with what is served now."""
        if self._latest is not None:
            connection.context = self._latest

    def refresh(self, now: datetime | None = None) -> str:
        """Take what is in the folder now, unless it is worse; says what happened, or nothing if nothing did."""
        now = now or datetime.now(UTC)
        try:
            trusted = self._read_clients()
            pair = read_pair(self._folder)
            if pair == self.in_use and trusted == self._clients:
                self._refused = None
                return ""
            problem = pair.problem(now, self._server_name)
            if problem and self.in_use is not None and not self.in_use.problem(now, self._server_name):
                raise CertificateError(f"{self._folder}: {problem}; the one in use stays")  # noqa: TRY301
            latest = self._empty()
            put_into(latest, pair)
            if trusted:
                latest.load_verify_locations(cadata=trusted.decode("ascii"))
        except (CertificateError, ssl.SSLError, ValueError) as wrong:
            return self._refuse(str(wrong))
        self._latest, self.in_use, self._clients, self._refused = latest, pair, trusted, None
        until = format_time(pair.not_after)
        return f"serving a certificate for {', '.join(pair.names)} until {until}" + (f": {problem}" if problem else "")

    def _refuse(self, why: str) -> str:
        """Count a pair that was not taken; the same one is told of once."""
        if why == self._refused:
            return ""
        self._refused = why
        self.failures += 1
        return f"certificate not taken: {why}"

    def _read_clients(self) -> bytes:
        if self._client_ca is None:
            return b""
        try:
            return self._client_ca.read_bytes()
        except OSError as wrong:
            raise CertificateError(f"{self._client_ca}: cannot be read: {wrong.strerror}") from None

    @property
    def is_good(self) -> bool:
        """Whether there is a pair that callers accept."""
        return self.in_use is not None and not self.in_use.problem(datetime.now(UTC), self._server_name)
