"""A Service on loopback: one address in front of the webhooks that are ready, as kube-proxy provides it."""

import contextlib
import select
import socket
import threading
from typing import Self

from tests.running import HOST
from tests.webhook.running import RunningWebhook

PROBE_EVERY_S = 0.1


class Service:
    """Passes each new connection to a backend that is ready; existing connections stay with their backend."""

    def __init__(self, *backends: RunningWebhook) -> None:
        self.backends = list(backends)
        self.ready: list[RunningWebhook] = []
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._stopping = threading.Event()
        self._accepted = 0
        self._threads = [
            threading.Thread(target=self._accept, name="service-accept", daemon=True),
            threading.Thread(target=self._probe, name="service-probe", daemon=True),
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._listener.close()

    def _probe(self) -> None:
        while not self._stopping.is_set():
            self.ready = [each for each in list(self.backends) if each.ops("/readyz")[0] == 200]
            self._stopping.wait(PROBE_EVERY_S)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed by __exit__
                return
            ready = self.ready
            if not ready:
                client.close()
                continue
            self._accepted += 1
            try:
                server = socket.create_connection((HOST, ready[self._accepted % len(ready)].port), timeout=10)
            except OSError:
                client.close()
                continue
            threading.Thread(target=relay, args=(client, server), name="service-relay", daemon=True).start()


def relay(client: socket.socket, server: socket.socket) -> None:
    """Copy bytes in both directions until one side closes."""
    with client, server, contextlib.suppress(OSError):
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            readable, _, _ = select.select([client, server], [], [])
            for source in readable:
                data = source.recv(65536)
                if not data:
                    return
                (server if source is client else client).sendall(data)
