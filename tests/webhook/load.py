"""Calls under load, as an API server makes them: over kept connections, each used until the server closes it."""

import http.client
import socket
import ssl
import threading

from tests.background import Background
from tests.running import HOST
from tests.webhook.running import Authority


class Load(Background):
    """Clients that call as fast as they are answered, and remember every call that failed."""

    def __init__(self, port: int, authority: Authority, body: bytes, *, clients: int = 4) -> None:
        super().__init__()
        self._port, self._authority, self._body = port, authority, body
        self.calls, self.failures, self.closed = 0, list[str](), 0
        # Guards the counts above.
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, name=f"load-{i}") for i in range(clients)]

    def _run(self) -> None:
        connection: http.client.HTTPSConnection | None = None
        while not self._ending.is_set():
            connection = connection or self._connect()
            if connection is None:
                continue
            try:
                connection.request("POST", "/mutate?timeout=10s", self._body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                text = answer.read()
                self._count("" if answer.status == 200 else f"{answer.status} {text!r}", closed=answer.will_close)
                is_over = answer.will_close
            except (OSError, http.client.HTTPException) as broken:
                self._count(repr(broken))
                is_over = True
            if is_over:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _connect(self) -> http.client.HTTPSConnection | None:
        made = http.client.HTTPSConnection(HOST, self._port, timeout=10, context=self._authority.client_context())
        try:
            made.connect()
        except OSError as broken:
            self._count(f"connecting: {broken!r}")
            made.close()
            return None
        return made

    def _count(self, failure: str, *, closed: bool = False) -> None:
        with self._lock:
            self.calls += 1
            self.closed += closed
            if failure:
                self.failures.append(failure)


def tls(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    """Open one connection."""
    return context.wrap_socket(socket.create_connection((HOST, port), timeout=10), server_hostname=HOST)


def request(body: bytes, path: str = "/mutate?timeout=10s", *more: str) -> bytes:
    """Write a plain request, with further header lines."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: h",
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
        *more,
    )
    return "\r\n".join((*lines, "", "")).encode() + body


def answer_on(connection: ssl.SSLSocket) -> tuple[int, bytes, bytes]:
    """Read one answer: status, head and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        got = connection.recv(65536)
        if not got:
            raise ConnectionError(f"closed after {data!r}")
        data += got
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65536)
    return int(head.split(b" ")[1]), head, body
