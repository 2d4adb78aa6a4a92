"""The monitor's server against clients that want to keep others out: too many, too slow, too large."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trustme

from nodeplugin.http_server import (
    MAX_CONNECTIONS,
    MAX_PER_PEER,
    MAX_REQUEST_BYTES,
    MAX_THREADS,
    MAX_THREADS_PER_PEER,
    TEXT,
    BadHttpRequest,
    Connection,
    HttpServer,
    Request,
    Response,
    connection_to_end,
    parse_request,
)
from nodeplugin.monitor_certificate import MonitorCertificate
from tests.waiting import eventually

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
NAME = "gpu-manager-metric.quotient-system.svc"


def respond(request: Request) -> Response:
    text = f"{request.path} from {request.peer} {'by TLS' if request.is_tls else 'in the clear'}"
    return Response(200, TEXT, text.encode())


@pytest.fixture
def serve() -> Iterator[Callable[..., HttpServer]]:
    """Start servers on loopback; they stop with the test."""
    with ExitStack() as stack:

        def start(connection_s: float = 30, tls: Callable[[], ssl.SSLContext | None] = lambda: None) -> HttpServer:
            server = stack.enter_context(HttpServer("127.0.0.1", 0, respond, tls, connection_s=connection_s))
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            stack.callback(thread.join, 20)
            stack.callback(server.shutdown)
            thread.start()
            return server

        yield start


def connect(server: HttpServer, source: str = "127.0.0.1") -> socket.socket:
    """Connect from an address of loopback, of which there are millions."""
    return socket.create_connection(("127.0.0.1", server.port), 20, source_address=(source, 0))


def read_all(connection: socket.socket) -> bytes:
    """Read until the server ends the connection."""
    parts = bytearray()
    try:
        while part := connection.recv(65536):
            parts += part
    except ConnectionError:
        pass
    return bytes(parts)


def ask(server: HttpServer, request: bytes = GET, source: str = "127.0.0.1") -> bytes:
    with connect(server, source) as connection:
        connection.sendall(request)
        return read_all(connection)


def test_a_request_is_answered_and_the_connection_ends(serve: Callable[..., HttpServer]) -> None:
    head, _, body = ask(serve()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert {b"Content-Length: 34", b"Connection: close", b"Cache-Control: no-store"} <= set(head.split(b"\r\n"))
    assert body == b"/livez from 127.0.0.1 in the clear"
    assert ask(serve(), GET.replace(b"GET", b"HEAD")).endswith(b"Connection: close\r\n\r\n")


def test_idle_connections_of_one_client_keep_nobody_out(serve: Callable[..., HttpServer]) -> None:
    """Of more than it may have, the oldest ends; other clients, and its own new requests, are answered."""
    server = serve()
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(3 * MAX_PER_PEER)]
        for each in idle[: 2 * MAX_PER_PEER]:
            assert read_all(each) == b""
        assert b"200 OK" in ask(server, source="127.0.0.2")
        assert b"200 OK" in ask(server)
        newest = idle[-1]
        newest.sendall(GET)
        assert b"200 OK" in read_all(newest)


def test_idle_connections_of_many_clients_keep_nobody_out(serve: Callable[..., HttpServer]) -> None:
    """In total there are as many as allowed, and a new client still gets in."""
    server = serve()
    with ExitStack() as stack:
        for number in range(3 * MAX_CONNECTIONS):
            stack.enter_context(connect(server, f"127.0.1.{number + 1}"))
        assert b"200 OK" in ask(server, source="127.0.0.2")
        eventually(lambda: server.connections <= MAX_CONNECTIONS, "the number of connections to be bounded")
        eventually(lambda: server.threads <= MAX_CONNECTIONS, "the threads of ended connections to end")


def test_slow_requests_of_one_client_keep_no_other_out() -> None:
    """Each holds a thread until it is answered, also when its connection has ended."""
    may_answer = threading.Event()

    def respond_late(request: Request) -> Response:
        assert request.path == "/livez" or may_answer.wait(60)
        return respond(request)

    with ExitStack() as stack:
        server = stack.enter_context(HttpServer("127.0.0.1", 0, respond_late))
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        stack.callback(thread.join, 20)
        stack.callback(server.shutdown)
        stack.callback(may_answer.set)
        thread.start()
        for _ in range(2 * MAX_THREADS):
            slow = stack.enter_context(connect(server))
            with suppress(ConnectionError):
                slow.sendall(GET.replace(b"/livez", b"/metrics"))
        assert b"200 OK" in ask(server, source="127.0.0.2")
        assert server.threads <= MAX_THREADS_PER_PEER + 1


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /livez HTTP/1.1\r\nX: ",
        GET.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n") + b"b",
        b"\x16\x03",
    ],
    ids=["nothing", "half of a header", "half of a body", "half of a TLS handshake"],
)
def test_a_connection_ends_at_its_deadline_or_with_its_answer(serve: Callable[..., HttpServer], sent: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server = serve(0.2, lambda: context)
    with connect(server) as connection:
        connection.sendall(sent)
        assert (b"200 OK" in read_all(connection)) == (b"Content-Length" in sent)
    eventually(lambda: server.threads == 0, "its thread to end")


def test_bytes_now_and_then_do_not_extend_the_deadline(serve: Callable[..., HttpServer]) -> None:
    """Slow loris: each byte is in time, the request never is."""
    server = serve(1.0)
    with connect(server) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\n")

        def is_ended() -> bool:
            try:
                connection.sendall(b"X")
            except ConnectionError:
                return True
            return False

        eventually(is_ended, "the connection to end", 20)


def test_a_request_that_is_too_large_is_refused_before_it_is_read(serve: Callable[..., HttpServer]) -> None:
    with connect(serve()) as connection, pytest.raises(ConnectionError):
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"X" * 10_000 * MAX_REQUEST_BYTES)


@pytest.mark.parametrize(
    ("head", "status"),
    {
        b"GET /": 400,
        b"GET / HTTP/2": 400,
        b"": 400,
        b"\xff\xfe\x00": 400,
        b"POST /usage HTTP/1.1": 405,
        b"G" * 9000 + b" / HTTP/1.1": 405,
    }.items(),
)
def test_what_is_no_get_request_is_refused(head: bytes, status: int) -> None:
    with pytest.raises(BadHttpRequest) as refusal:
        parse_request(head)
    assert refusal.value.response.status == status
    assert len(refusal.value.response.body) < 100


def test_a_request_is_parsed() -> None:
    """Without its query; header names have no case, and of a repeated header the first counts."""
    parsed = parse_request(b"GET /usage?x=1 HTTP/1.1\r\nAuthorization: Bearer a:b\r\nauthorization: Bearer c\r\nodd")
    assert (parsed.method, parsed.path) == ("GET", "/usage")
    assert parsed.headers == {"authorization": "Bearer a:b", "odd": ""}


MANY = tuple(f"p{number}" for number in range(MAX_CONNECTIONS - 3))


@pytest.mark.parametrize(
    ("peers", "peer", "expected"),
    [
        (("a",) * (MAX_PER_PEER - 1), "a", None),
        (("b", *("a",) * MAX_PER_PEER), "a", 1),
        (("b", *("a",) * MAX_PER_PEER, "c"), "b", None),
        (("x", "y", "z", *MANY), "new", 0),
        (("x", "y", "y", *MANY), "new", 1),
    ],
    ids=["few", "its own oldest", "of another client", "all have one", "of the client with the most"],
)
def test_which_connection_ends(peers: tuple[str, ...], peer: str, expected: int | None) -> None:
    """None, or the place of the one that does, of which the first is the oldest."""
    with socket.socket() as unused:
        opened = [Connection(each, 0.0, unused) for each in peers]
        ended = connection_to_end(opened, peer)
    assert (None if ended is None else opened.index(ended)) == expected


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def write_certificate(authority: trustme.CA, folder: Path) -> None:
    """Replace the files as the kubelet does: new ones under the same names."""
    issued = authority.issue_cert(NAME)
    for name, content in (
        ("tls.crt", b"".join(each.bytes() for each in issued.cert_chain_pems)),
        ("tls.key", issued.private_key_pem.bytes()),
    ):
        (folder / f"{name}.new").write_bytes(content)
        (folder / f"{name}.new").replace(folder / name)


def ask_by_tls(server: HttpServer, authority: trustme.CA) -> tuple[bytes, bytes]:
    """The answer, and the certificate that was served."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with connect(server) as connection, context.wrap_socket(connection, server_hostname=NAME) as secured:
        certificate = secured.getpeercert(binary_form=True) or b""
        secured.sendall(GET)
        return read_all(secured), certificate


def test_tls_and_plain_http_are_served_on_one_port(
    serve: Callable[..., HttpServer], authority: trustme.CA, tmp_path: Path
) -> None:
    """TLS as soon as there is a certificate, and with the new one once it is renewed."""
    server = serve(tls=MonitorCertificate(tmp_path).context)
    with pytest.raises((ssl.SSLError, OSError)):
        ask_by_tls(server, authority)
    assert b"in the clear" in ask(server)
    write_certificate(authority, tmp_path)
    answer, first = ask_by_tls(server, authority)
    assert b"/livez from 127.0.0.1 by TLS" in answer
    write_certificate(authority, tmp_path)
    assert ask_by_tls(server, authority)[1] != first
    assert b"in the clear" in ask(server)


@pytest.mark.parametrize("spoil", ["tls.crt", "tls.key", "missing"])
def test_a_certificate_that_cannot_be_loaded_replaces_none(
    serve: Callable[..., HttpServer], authority: trustme.CA, tmp_path: Path, spoil: str
) -> None:
    server = serve(tls=MonitorCertificate(tmp_path).context)
    write_certificate(authority, tmp_path)
    first = ask_by_tls(server, authority)[1]
    if spoil == "missing":
        (tmp_path / "tls.key").unlink()
    else:
        (tmp_path / spoil).write_text("damaged")
    assert ask_by_tls(server, authority)[1] == first
    write_certificate(authority, tmp_path)
    assert ask_by_tls(server, authority)[1] != first
