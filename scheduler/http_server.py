"""The extender's HTTP endpoint, on loopback: kube-scheduler's container in the same pod is its only client.

Connections are kept alive, and each has a thread. kube-scheduler sends filter and prioritize one after another on one
connection, and bindings, which wait for the API server, concurrently on others.
"""

import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog
from msgspec import Struct

JSON, TEXT = "application/json", "text/plain; charset=utf-8"
# 20,000 node names of 100 characters are 2 MB; whole Node objects, as in the Policy file's time, some 20 kB each.
MAX_BODY = 256 * 2**20
# For a client that connects and sends nothing, or stops in the middle of a request.
IDLE_TIMEOUT_S = 300.0
JOIN_TIMEOUT_S = 5.0


class Reply(Struct, frozen=True):
    status: int
    body: bytes
    content_type: str = JSON


# By path; a handler of POST gets the body.
GetHandler = Callable[[], Reply]
PostHandler = Callable[[bytes], Reply]


class ExtenderServer:
    """Serves handlers by method and path."""

    def __init__(
        self, address: str, port: int, gets: Mapping[str, GetHandler], posts: Mapping[str, PostHandler]
    ) -> None:
        handler = type("Handler", (RequestHandler,), {"gets": dict(gets), "posts": dict(posts)})
        self._server = Server((address, port), handler)
        # With port 0 the system chooses one.
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="extender", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> "ExtenderServer":
        self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join(JOIN_TIMEOUT_S)
        self._server.server_close()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    # Do not wait for idle connections when the server stops.
    block_on_close = False
    request_queue_size = 128

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, client = super().get_request()
        # The response is two writes, headers and body: without this, the second waits for an acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, client

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Log nothing for a client that closed its connection: kube-scheduler does when its timeout is over."""


class RequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = IDLE_TIMEOUT_S
    gets: Mapping[str, GetHandler] = {}
    posts: Mapping[str, PostHandler] = {}

    def do_GET(self) -> None:
        handler = self.gets.get(self.path.partition("?")[0])
        self._send(handler() if handler else self._not_found())

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY:
            # The body cannot be skipped, so the connection cannot be used again.
            self.close_connection = True
            self._send(Reply(411 if not length else 413, f"Content-Length: 0 to {MAX_BODY} expected\n".encode(), TEXT))
            return
        body = self.rfile.read(int(length))
        handler = self.posts.get(self.path.partition("?")[0])
        if handler is None:
            self._send(self._not_found())
            return
        try:
            reply = handler(body)
        except Exception as error:  # the outermost frame of a request
            structlog.get_logger().exception("request_failed", path=self.path)
            reply = Reply(500, f"{type(error).__name__}: {error}\n".encode(), TEXT)
        self._send(reply)

    def _not_found(self) -> Reply:
        known = ", ".join(sorted({*self.gets, *self.posts}))
        return Reply(404, f"not found: use {known}\n".encode(), TEXT)

    def _send(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401
        """Log nothing: there are hundreds of requests a second, and metrics count them."""
