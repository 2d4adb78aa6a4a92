"""The certificate of the monitor: files of a mounted Secret, which may appear late and change with each renewal."""

import ssl
import threading
from pathlib import Path

import structlog

from vcuda.names import TLS_CERTIFICATE, TLS_KEY


class MonitorCertificate:
    """Returns the TLS context for a connection, with the files as they are now. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / TLS_CERTIFICATE, folder / TLS_KEY
        # Guards the fields below.
        self._lock = threading.Lock()
        self._context: ssl.SSLContext | None = None
        self._identity: tuple[int, ...] = ()
        # Logged once, not for every connection.
        self._last_error = ""
        self._log = structlog.get_logger()

    def context(self) -> ssl.SSLContext | None:
        """Return the latest context; None if there never was a certificate that could be loaded."""
        with self._lock:
            try:
                identity = tuple(number for file in self._files for number in file_identity(file))
                if identity != self._identity:
                    # Noted first: files that cannot be loaded are tried again when they change.
                    self._identity = identity
                    self._context = load_context(*self._files)
                    self._log.info("monitor_certificate_loaded", file=str(self._files[0]))
                self._last_error = ""
            except OSError as error:  # ssl.SSLError is one: the files may not belong together
                if str(error) != self._last_error:
                    self._log.warning("monitor_certificate_not_loaded", error=str(error))
                self._last_error = str(error)
            return self._context


def file_identity(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_ino, status.st_mtime_ns


def load_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context
