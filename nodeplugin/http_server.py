"""A small HTTP server that hostile clients cannot hold up: plain HTTP and TLS on one port, one GET for each connection.

Connections are bounded in number, in total and for each peer: a new one ends the oldest one of the peer with the most.
It is refused only while too many requests are being answered whose connections have ended, in total or of its peer. A
connection has one deadline for everything (handshake, request, response), and a request has a size limit. So clients
that send nothing, or byte by byte, keep neither the kubelet's probes nor Prometheus out.
"""

import socket
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog
from msgspec import Struct

MAX_CONNECTIONS, MAX_PER_PEER = 64, 8
# Ended connections still have a thread for as long as an answer is computed. Beyond this, new ones are refused: a peer
# whose requests are slow must not take the threads of all others.
MAX_THREADS, MAX_THREADS_PER_PEER = 2 * MAX_CONNECTIONS, 2 * MAX_PER_PEER
CONNECTION_S = 15.0
# Service account tokens have about 1 KiB.
MAX_REQUEST_BYTES = 16 * 2**10
# The first byte of a TLS handshake; no HTTP request begins with it.
TLS_HANDSHAKE = b"\x16"
METHODS = {"GET", "HEAD"}
REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
TEXT = "text/plain; charset=utf-8"


class Request(Struct, frozen=True):
    """A request without query and body; `headers` have lower-case names. `is_tls` tells how it came."""

    method: str
    path: str
    headers: Mapping[str, str]
    peer: str = ""
    is_tls: bool = False


class Response(Struct, frozen=True):
    status: int
    content_type: str
    body: bytes
    headers: Mapping[str, str] = {}


class Connection(Struct, frozen=True, eq=False):
    """An open connection. `socket` is a duplicate: to shut it down ends the connection, on whatever thread it is."""

    peer: str
    deadline: float
    socket: socket.socket


class BadHttpRequest(Exception):  # noqa: N818 - the client's mistake
    """A request that cannot be read; the response says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.response = Response(status, TEXT, f"{message}\n".encode())


Respond = Callable[[Request], Response]


class HttpServer(socketserver.TCPServer):
    """Serves `respond`. `tls` returns the context for the next TLS connection, None while there is no certificate."""

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: str,
        port: int,
        respond: Respond,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        *,
        connection_s: float = CONNECTION_S,
    ) -> None:
        if ":" in address:
            self.address_family = socket.AF_INET6
        self._respond, self._tls, self._connection_s = respond, tls, connection_s
        # Guards the open connections and the number of threads.
        self._lock = threading.Lock()
        self._open: list[Connection] = []
        self._threads: Counter[str] = Counter()
        self._log = structlog.get_logger()
        super().__init__((address, port), socketserver.BaseRequestHandler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def threads(self) -> int:
        return self._threads.total()

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Serve a connection on a thread of its own, and end another one if there are too many."""
        assert isinstance(request, socket.socket)  # noqa: S101 - it is a tuple for UDP only
        assert isinstance(client_address, tuple)  # noqa: S101
        connection = Connection(str(client_address[0]), time.monotonic() + self._connection_s, request.dup())
        with self._lock:
            excess = connection_to_end(self._open, connection.peer)
            if excess is not None:
                self._end(excess)
            if self.threads >= MAX_THREADS or self._threads[connection.peer] >= MAX_THREADS_PER_PEER:
                connection.socket.close()
                self.shutdown_request(request)
                return
            self._open.append(connection)
            self._threads[connection.peer] += 1
        thread = threading.Thread(target=self._serve, args=(request, connection), name="monitor-request", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads
            self._forget(connection)
            self.shutdown_request(request)

    def service_actions(self) -> None:
        """End the connections that are past their deadline; the accepting thread calls this twice a second."""
        now = time.monotonic()
        with self._lock:
            for each in [each for each in self._open if each.deadline <= now]:
                self._end(each)

    def _end(self, connection: Connection) -> None:
        # A read or write that waits on another thread returns at once.
        with suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        self._open.remove(connection)
        connection.socket.close()

    def _serve(self, request: socket.socket, connection: Connection) -> None:
        stream = request
        try:
            # In case nothing checks the deadline any more, because the server is being stopped.
            request.settimeout(self._connection_s)
            if is_tls := request.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE:
                if (context := self._tls()) is None:
                    return
                stream = context.wrap_socket(request, server_side=True)
            self._answer(stream, connection.peer, is_tls=is_tls)
        except (OSError, ValueError):
            pass  # the client is gone, speaks no TLS, or its time is over
        except Exception:  # the outermost frame of the connection
            self._log.exception("monitor_request_failed")
        finally:
            self._forget(connection)
            self.shutdown_request(stream)

    def _forget(self, connection: Connection) -> None:
        """Note that the thread of a connection has ended."""
        with self._lock:
            self._threads[connection.peer] -= 1
            if not self._threads[connection.peer]:
                del self._threads[connection.peer]
            if connection in self._open:
                self._open.remove(connection)
                connection.socket.close()

    def _answer(self, stream: socket.socket, peer: str, *, is_tls: bool) -> None:
        try:
            request = parse_request(read_head(stream), peer, is_tls=is_tls)
        except BadHttpRequest as error:
            stream.sendall(encode_response(error.response))
            return
        stream.sendall(encode_response(self._respond(request), with_body=request.method != "HEAD"))


def connection_to_end(connections: Sequence[Connection], peer: str) -> Connection | None:
    """Return the connection that has to end before another one of `peer` begins, if any; the oldest come first."""
    counts = Counter(each.peer for each in connections)
    if counts[peer] < MAX_PER_PEER:
        if len(connections) < MAX_CONNECTIONS:
            return None
        peer = max(counts, key=lambda each: counts[each])
    return next(each for each in connections if each.peer == peer)


def read_head(stream: socket.socket) -> bytes:
    """Read a request up to the empty line after its headers; BadHttpRequest if it is too large, or ends before."""
    head = bytearray()
    while True:
        # The end may be divided between two reads.
        searched = max(0, len(head) - len(b"\r\n\r\n"))
        chunk = stream.recv(4096)
        head += chunk
        if (end := head.find(b"\r\n\r\n", searched)) >= 0:
            return bytes(head[:end])
        if not chunk:
            raise BadHttpRequest(400, "the request ended before its headers did")
        if len(head) > MAX_REQUEST_BYTES:
            raise BadHttpRequest(431, f"the request is larger than {MAX_REQUEST_BYTES} bytes")


def parse_request(head: bytes, peer: str = "", *, is_tls: bool = False) -> Request:
    """Parse a request's head; BadHttpRequest says what is wrong with it."""
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != len(("method", "path", "version")) or not parts[2].startswith("HTTP/1."):
        raise BadHttpRequest(400, "not an HTTP/1 request")
    method, target, _ = parts
    if method not in METHODS:
        raise BadHttpRequest(405, f"{method[:16]} is not supported: use GET")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        # Of a repeated header the first counts, so that a proxy's own cannot be replaced by an appended one.
        headers.setdefault(name.strip().lower(), value.strip())
    return Request(method, target.partition("?")[0], headers, peer, is_tls)


def encode_response(response: Response, *, with_body: bool = True) -> bytes:
    headers = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "Cache-Control": "no-store",
        "Connection": "close",
        **response.headers,
    }
    lines = [f"HTTP/1.1 {response.status} {REASONS[response.status]}", *(f"{key}: {headers[key]}" for key in headers)]
    return "\r\n".join([*lines, "", ""]).encode() + (response.body if with_body else b"")
