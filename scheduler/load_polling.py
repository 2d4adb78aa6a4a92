"""Reads from the node plugins how much each GPU is used, so that busy ones are ranked last. Off by default.

What cannot be read counts as not busy: a node without a monitor must not get fewer pods than others.
"""

import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec import Struct

from cluster.connection import SERVICE_ACCOUNT
from scheduler.cluster_state import ClusterState
from vcuda.decode_errors import DECODE_ERRORS
from vcuda.decoding import decoder_for

CLIENTS, TIMEOUT_S = 16, 1.0
# A report of a node; more is not read.
MAX_BYTES = 2**20
JOIN_TIMEOUT_S = 5.0
TOKEN = SERVICE_ACCOUNT / "token"


class CardUsage(Struct, frozen=True):
    uuid: str
    utilization: float | None = None


class NodeUsage(Struct, frozen=True):
    """What a node plugin answers to /usage, as far as it is needed."""

    cards: list[CardUsage] = []


class LoadPoller:
    """A thread that reads /usage of all nodes again and again while `is_active` returns true."""

    def __init__(
        self,
        state: ClusterState,
        *,
        port: int,
        server_name: str = "",
        ca_file: Path | None = None,
        busy_percent: int,
        interval_s: float,
        is_active: Callable[[], bool],
        token_file: Path = TOKEN,
    ) -> None:
        """`ca_file` has the CAs of the monitors' certificates, for `server_name`; without it, they speak plain HTTP."""
        self._state, self._port, self._busy_percent, self._interval_s = state, port, busy_percent, interval_s
        self._is_active, self._token_file = is_active, token_file
        self._server_name, self._ca_file = server_name, ca_file
        # Reads that have begun: a node that answers byte by byte never times out by itself.
        self._reading: set[socket.socket] = set()
        self._stopping = threading.Event()
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._abort()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        with ThreadPoolExecutor(CLIENTS, thread_name_prefix="load") as pool:
            while not self._stopping.wait(self._interval_s):
                try:
                    if self._is_active():
                        self.poll(pool)
                except Exception:  # the outermost frame of the thread: it has to continue
                    self._log.exception("load_not_read")

    def poll(self, pool: ThreadPoolExecutor) -> None:
        """Read all nodes once."""
        token = self._token_file.read_text().strip() if self._token_file.exists() else ""
        try:
            # With the CAs as they are now: the kubelet replaces the file when they change.
            tls = ssl.create_default_context(cafile=self._ca_file) if self._ca_file else None
        except OSError as error:
            self._log.warning("load_not_read", error=f"{self._ca_file}: {error.strerror or error}")
            return
        addresses = self._state.addresses()
        reads = {name: pool.submit(self._busy_gpus, address, token, tls) for name, address in addresses.items()}
        # As long as all of them may take one after another.
        wait(reads.values(), timeout=TIMEOUT_S * (1 + len(reads) // CLIENTS))
        self._abort()
        unread = 0
        for name, read in reads.items():
            uuids = None if read.cancel() or not read.done() else read.result()
            unread += uuids is None
            self._state.set_busy(name, uuids or frozenset())
        if unread:
            self._log.info("load_unknown", nodes=unread, of=len(addresses))

    def _abort(self) -> None:
        """End the reads that still run: the next ones need their threads."""
        for each in self._reading.copy():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _busy_gpus(self, address: str, token: str, tls: ssl.SSLContext | None) -> frozenset[str] | None:
        """Return the GPUs of a node that are busy; None if the node does not say."""
        if self._stopping.is_set():
            return None
        connection = http.client.HTTPConnection(address, self._port, timeout=TIMEOUT_S)
        reading: socket.socket | None = None
        try:
            connection.connect()
            # A duplicate: the connection forgets its own if the node closes it after its answer, and TLS replaces it.
            reading = connection.sock.dup()
            self._reading.add(reading)
            if tls is not None:
                connection.sock = tls.wrap_socket(connection.sock, server_hostname=self._server_name)
            connection.request("GET", "/usage", headers={"Authorization": f"Bearer {token}"} if token else {})
            response = connection.getresponse()
            body = response.read(MAX_BYTES)
            if response.status != http.client.OK:
                return None
            usage = decoder_for(NodeUsage).decode(body)
        except (OSError, http.client.HTTPException, *DECODE_ERRORS):
            return None
        finally:
            if reading is not None:
                self._reading.discard(reading)
                reading.close()
            connection.close()
        return frozenset(
            card.uuid for card in usage.cards if card.utilization is not None and card.utilization >= self._busy_percent
        )
