"""Requests to the webhook under load, on kept connections, each used until the server closes it, as API servers do."""

import http.client
import socket
import ssl
import threading

from tests.background import Background
from tests.running import HOST
from tests.webhook.running import Authority


class RequestLoad(Background):
    """Clients that send the next request as soon as the last one is answered, and record every failure."""

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
                is_closed = answer.will_close
            except (OSError, http.client.HTTPException) as error:
                self._count(repr(error))
                is_closed = True
            if is_closed:
                connection.close()
                connection = None
        if connection is not None:
            connection.close()

    def _connect(self) -> http.client.HTTPSConnection | None:
        connection = http.client.HTTPSConnection(HOST, self._port, timeout=10, context=self._authority.client_context())
        try:
            connection.connect()
        except OSError as error:
            self._count(f"connecting: {error!r}")
            connection.close()
            return None
        return connection

    def _count(self, failure: str, *, closed: bool = False) -> None:
        with self._lock:
            self.calls += 1
            self.closed += closed
            if failure:
                self.failures.append(failure)


def connect_tls(port: int, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(socket.create_connection((HOST, port), timeout=10), server_hostname=HOST)


def request(body: bytes, path: str = "/mutate?timeout=10s", *headers: str) -> bytes:
    """Encode a plain request, with additional header lines."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: h",
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
        *headers,
    )
    return "\r\n".join((*lines, "", "")).encode() + body


def read_answer(connection: socket.socket) -> tuple[int, bytes, bytes]:
    """Read one answer: status, head and body."""
    data = b""
    while b"\r\n\r\n" not in data:
        received = connection.recv(65536)
        if not received:
            raise ConnectionError(f"closed after {data!r}")
        data += received
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65536)
    return int(head.split(b" ")[1]), head, body
