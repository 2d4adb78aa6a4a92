"""The extender's HTTP endpoint: kept-alive connections, bounded input, errors that say what is wrong."""

import socket
import time
from collections.abc import Iterator

import pytest

from scheduler.http_server import MAX_HEAD, ExtenderServer, Reply


def fail() -> Reply:
    raise ValueError("broken")


@pytest.fixture
def server() -> Iterator[ExtenderServer]:
    made = ExtenderServer(
        "127.0.0.1",
        0,
        {"/healthz": lambda: Reply(200, b"ok\n", "text/plain"), "/broken": fail},
        {"/echo": lambda body: Reply(200, body)},
    ).start()
    yield made
    made.stop()


def connect(server: ExtenderServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def receive(connection: socket.socket) -> tuple[int, bytes]:
    """Read one response."""
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(65536)
        assert part, received
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536)
    return int(head.split(b" ")[1]), body


def post(body: bytes, path: str = "/echo") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_many_requests_share_a_connection(server: ExtenderServer) -> None:
    with connect(server) as connection:
        for size in (0, 1, 100_000, 3_000_000):
            connection.sendall(post(b"x" * size))
            assert receive(connection) == (200, b"x" * size)
        connection.sendall(b"GET /healthz?verbose HTTP/1.1\r\nHost: x\r\n\r\n")
        assert receive(connection) == (200, b"ok\n")


def test_a_request_may_arrive_in_pieces_or_with_the_next_one(server: ExtenderServer) -> None:
    with connect(server) as connection:
        both = post(b"first") + post(b"second")
        for at in range(0, len(both), 7):
            connection.sendall(both[at : at + 7])
            time.sleep(0.001)
        assert receive_two(connection) == [b"first", b"second"]


def receive_two(connection: socket.socket) -> list[bytes]:
    received = b""
    while received.count(b"second") < 1:
        received += connection.recv(65536)
    return [b"first"] * (b"first" in received) + [b"second"] * (b"second" in received)


REFUSED = {
    "an unknown path": (b"GET /other HTTP/1.1\r\n\r\n", 404, b"POST /echo"),
    "a get of a post": (b"GET /echo HTTP/1.1\r\n\r\n", 404, b"not found"),
    "not http": (b"hello\r\n\r\n", 400, b"HTTP/1.1 expected"),
    "a negative length": (b"POST /echo HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 413, b"Content-Length: -1"),
    "a huge length": (b"POST /echo HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n", 413, b"expected"),
    "chunks": (b"POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411, b"send a Content-Length"),
    "endless headers": (b"GET / HTTP/1.1\r\nX: " + b"y" * (MAX_HEAD + 10), 431, b"bytes of headers"),
    "a broken handler": (b"GET /broken HTTP/1.1\r\n\r\n", 500, b"ValueError: broken"),
}


@pytest.mark.parametrize(("request_", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_a_request_that_cannot_be_answered_is_refused(
    server: ExtenderServer, request_: bytes, status: int, message: bytes
) -> None:
    with connect(server) as connection:
        connection.sendall(request_)
        answered, body = receive(connection)
    assert answered == status
    assert message in body


def test_an_old_client_gets_its_connection_closed(server: ExtenderServer) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert receive(connection)[0] == 200
        assert connection.recv(1) == b""


def test_a_client_that_sends_half_a_request_holds_up_nobody(server: ExtenderServer) -> None:
    with connect(server) as stalled, connect(server) as other:
        stalled.sendall(post(b"x" * 1000)[:100])
        other.sendall(post(b"y"))
        assert receive(other) == (200, b"y")


def test_stopping_closes_idle_connections(server: ExtenderServer) -> None:
    with connect(server) as connection:
        connection.sendall(post(b"x"))
        receive(connection)
        server.stop()
        assert connection.recv(1) == b""
        assert not server.alive
