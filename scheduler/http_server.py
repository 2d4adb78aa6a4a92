"""The extender's HTTP endpoint, on loopback: kube-scheduler's container in the same pod is its only client.

Connections are kept alive, and each has a thread. kube-scheduler sends filter and prioritize one after another on one
connection, and bindings, which wait for the API server, concurrently on others. Requests are read and answered with as
few system calls as possible: with 5,000 nodes a request has 100 kB, and the standard library's server takes longer for
its transport than the decision takes.
"""

import socket
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from urllib.parse import parse_qs

import structlog
from msgspec import Struct

from settings.probes import TEXT

JSON = "application/json"
# 20,000 node names of 100 characters are 2 MB; whole Node objects, as in the Policy file's time, some 20 kB each.
MAX_BODY = 256 * 2**20
MAX_HEAD = 64 * 2**10
# The whole body of a request should fit, so that neither side waits for the other.
SOCKET_BUFFER = 2 * 2**20
# For a client that connects and sends nothing, or stops in the middle of a request.
IDLE_TIMEOUT_S = 300
TIMEOUT = struct.pack("ll", IDLE_TIMEOUT_S, 0)
JOIN_TIMEOUT_S = 5.0
BACKLOG = 128
END_OF_HEAD = b"\r\n\r\n"
CLOSE = "Connection: close\r\n"
# The parameter of requests that change nothing, and its values: the one of Kubernetes' API is All.
DRY_RUN, YES = "dryRun", ("true", "All")


class Reply(Struct, frozen=True):
    status: int
    body: bytes
    content_type: str = JSON


class HttpRequest(Struct, frozen=True):
    method: str
    path: str
    body: bytes
    keep_alive: bool


class InvalidRequest(Exception):  # noqa: N818 - the caller's fault
    """Not HTTP, or too large; the connection is closed after the reply."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.reply = Reply(status, f"{message}\n".encode(), TEXT)


# A handler of POST gets the body.
GetHandler = Callable[[], Reply]
PostHandler = Callable[[bytes], Reply]


class ExtenderServer:
    """Serves handlers by method and path."""

    def __init__(
        self,
        address: str,
        port: int,
        gets: Mapping[str, GetHandler],
        posts: Mapping[str, PostHandler],
        dry_runs: Mapping[str, PostHandler] | None = None,
    ) -> None:
        self._gets, self._posts, self._dry_runs = dict(gets), dict(posts), dict(dry_runs or {})
        self._socket = socket.create_server((address, port), backlog=BACKLOG)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            # Inherited by every connection.
            self._socket.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER)
        # With port 0 the system chooses one.
        self.port: int = self._socket.getsockname()[1]
        # Guards the connections, which `stop` closes.
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._stopping = False
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._accept, name="extender", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> "ExtenderServer":
        self._thread.start()
        return self

    def stop(self) -> None:
        """Close the listener and all connections; requests that are being answered lose their answers."""
        self._stopping = True
        with suppress(OSError):
            # Ends the accept of another thread, which closing the socket would not.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._stopping:
                    self._log.warning("accept_failed", error=str(error))
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Timeouts of the kernel's, not of Python's, which polls before every call.
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                connection.setsockopt(socket.SOL_SOCKET, option, TIMEOUT)
            threading.Thread(target=self._serve, args=(connection,), name="extender-connection", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            self._serve_requests(connection)
        except OSError:
            pass  # closed by the client, as kube-scheduler does when its timeout is over, or idle for too long
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _serve_requests(self, connection: socket.socket) -> None:
        rest = b""
        while not self._stopping:
            try:
                received = receive_request(connection, rest)
            except InvalidRequest as error:
                connection.sendall(encode_reply(error.reply, keep_alive=False))
                return
            if received is None:
                return
            request, rest = received
            connection.sendall(encode_reply(self._reply(request), keep_alive=request.keep_alive))
            if not request.keep_alive:
                return

    def _reply(self, request: HttpRequest) -> Reply:
        path, _, query = request.path.partition("?")
        try:
            if request.method == "POST" and path in self._posts:
                return self._post_handler(path, query)(request.body)
            if request.method == "GET" and path in self._gets:
                return self._gets[path]()
        except InvalidRequest as error:
            return error.reply
        except Exception as error:  # the outermost frame of a request
            self._log.exception("request_failed", path=path)
            return Reply(500, f"{type(error).__name__}: {error}\n".encode(), TEXT)
        known = ", ".join([*(f"GET {each}" for each in self._gets), *(f"POST {each}" for each in self._posts)])
        return Reply(404, f"not found: use {known}\n".encode(), TEXT)

    def _post_handler(self, path: str, query: str) -> PostHandler:
        """Return the handler of a path. A parameter that is not known must not turn a dry run into a real one."""
        if not query:
            return self._posts[path]
        parameters = parse_qs(query, keep_blank_values=True)
        if path not in self._dry_runs or parameters.keys() != {DRY_RUN} or parameters[DRY_RUN][-1] not in YES:
            known = " or ".join(f"{each}?{DRY_RUN}=true" for each in self._dry_runs)
            raise InvalidRequest(400, f"{query[:60]}: not known here; use {known}, or no parameters")
        return self._dry_runs[path]


def receive_request(connection: socket.socket, rest: bytes) -> tuple[HttpRequest, bytes] | None:
    """Read one request, which begins with `rest`; returns it and what follows it, None if the client is done."""
    head, rest = receive_head(connection, rest)
    if not head:
        return None
    request_line, *lines = head.decode("latin-1").split("\r\n")
    method, path, version = (*request_line.split(" "), "", "", "")[:3]
    headers = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if not version.startswith("HTTP/1."):
        raise InvalidRequest(400, "HTTP/1.1 expected")
    if "transfer-encoding" in headers:
        raise InvalidRequest(411, "Transfer-Encoding is not supported: send a Content-Length")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > MAX_BODY:
        raise InvalidRequest(413, f"Content-Length: {length[:20]}; 0 to {MAX_BODY} expected")
    if headers.get("expect", "").lower() == "100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body, rest = receive_body(connection, rest, int(length))
    keep_alive = version != "HTTP/1.0" and headers.get("connection", "").lower() != "close"
    return HttpRequest(method, path, body, keep_alive), rest


def receive_head(connection: socket.socket, rest: bytes) -> tuple[bytes, bytes]:
    """Return the head of a request, empty if the client has closed the connection, and what follows it."""
    received = rest
    while (end := received.find(END_OF_HEAD)) < 0:
        if len(received) > MAX_HEAD:
            raise InvalidRequest(431, f"more than {MAX_HEAD} bytes of headers")
        part = connection.recv(SOCKET_BUFFER)
        if not part:
            return b"", b""
        received = received + part if received else part
    return received[:end], received[end + len(END_OF_HEAD) :]


def receive_body(connection: socket.socket, rest: bytes, length: int) -> tuple[bytes, bytes]:
    if len(rest) >= length:
        return rest[:length], rest[length:]
    parts, missing = [rest], length - len(rest)
    while missing:
        # All of it at once: to be woken for each part takes longer than to copy it.
        part = connection.recv(min(missing, SOCKET_BUFFER), socket.MSG_WAITALL)
        if not part:
            raise ConnectionResetError("the request is incomplete")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts), b""


def encode_reply(reply: Reply, *, keep_alive: bool) -> bytes:
    head = (
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\nContent-Type: {reply.content_type}\r\n"
        f"Content-Length: {len(reply.body)}\r\n{'' if keep_alive else CLOSE}\r\n"
    )
    return head.encode() + reply.body
