"""A path of a pod is read by port forwarding, as an API server forwards: over a WebSocket, one channel for data."""

import base64
import hashlib
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes.client.configuration import Configuration

from cluster.errors import Rejected
from cluster.port_forwarding import PodAddress, read_from_pod
from vcuda.decision import Unavailable

ADDRESS = PodAddress("quotient-system", "plugin-1", 5678)
TIMEOUT_S = 5.0
# RFC 6455.
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
BINARY, CLOSE = 2, 8
PORT = struct.pack("<H", ADDRESS.port)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nConnection: close\r\n\r\nhello there"


def frame(payload: bytes, opcode: int = BINARY) -> bytes:
    size = bytes([len(payload)]) if len(payload) < 126 else b"\x7e" + struct.pack(">H", len(payload))
    return bytes([0x80 | opcode]) + size + payload


def unmask(received: bytes) -> bytes:
    """The payload of a client's short frame, which is masked."""
    size = received[1] & 0x7F
    start = 4 if size == 126 else 2
    mask, payload = received[start : start + 4], received[start + 4 :]
    return bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))


class ApiServer:
    """Accepts one forwarding; sends these messages at once, and closes."""

    def __init__(self, *messages: bytes, refusal: bytes = b"") -> None:
        self._messages, self._refusal = messages, refusal
        self.handshake = self.request = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, name="api-server", daemon=True)
        self._thread.start()

    @property
    def settings(self) -> Any:
        made = Configuration()
        made.host = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        made.api_key = {"authorization": "Bearer secret"}
        return made

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            self.handshake = connection.recv(65536)
            if self._refusal:
                connection.sendall(self._refusal)
                return
            lines = dict(line.lower().split(b": ", 1) for line in self.handshake.split(b"\r\n")[1:] if b": " in line)
            key = self.handshake.lower().index(b"sec-websocket-key: ") + len("sec-websocket-key: ")
            nonce = self.handshake[key : self.handshake.index(b"\r\n", key)]
            accept = base64.b64encode(hashlib.sha1(nonce + GUID.encode()).digest())  # noqa: S324 - RFC 6455
            assert b"v4.channel.k8s.io" in lines[b"sec-websocket-protocol"]
            connection.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Protocol: v4.channel.k8s.io\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n"
            )
            self.request = unmask(connection.recv(65536))
            # In one write, as when it answers and closes faster than the client reads.
            connection.sendall(b"".join(map(frame, self._messages)) + frame(b"\x03\xe8", CLOSE))

    def stop(self) -> None:
        self._listener.close()
        self._thread.join(TIMEOUT_S)


@pytest.fixture
def servers() -> Iterator[list[ApiServer]]:
    made: list[ApiServer] = []
    yield made
    for each in made:
        each.stop()


def read(servers: list[ApiServer], *messages: bytes, **changes: Any) -> bytes:
    servers.append(ApiServer(*messages, **changes))
    return read_from_pod(servers[0].settings, ADDRESS, "/usage", TIMEOUT_S)


def test_the_answer_arrives_although_the_pod_closes_at_once(servers: list[ApiServer]) -> None:
    """In several messages, after the port on each channel; with the user's token, and none for the pod."""
    body = read(servers, b"\0" + PORT, b"\1" + PORT, b"\0" + OK[:50], b"\0" + OK[50:])
    assert body == b"hello there"
    path = b"GET /api/v1/namespaces/quotient-system/pods/plugin-1/portforward?ports=5678 "
    assert servers[0].handshake.startswith(path)
    assert b"authorization: bearer secret" in servers[0].handshake.lower()
    assert servers[0].request.startswith(b"\0GET /usage HTTP/1.1\r\n")
    assert b"authorization" not in servers[0].request.lower()


FAILURES = {
    "a pod that refuses": ((b"\0" + PORT, b"\0HTTP/1.1 403 F\r\nContent-Length: 3\r\n\r\nno\n"), "status 403: no"),
    "a port on which nothing listens": ((b"\0" + PORT, b"\1" + PORT, b"\1connection refused"), "connection refused"),
    "an answer that is cut off": ((b"\0" + PORT, b"\0" + OK[:-5]), "IncompleteRead"),
    "no answer": ((b"\0" + PORT, b"\1" + PORT), "cannot be read"),
}


@pytest.mark.parametrize(("messages", "problem"), FAILURES.values(), ids=FAILURES)
def test_a_failure_names_the_pod_and_the_reason(
    servers: list[ApiServer], messages: tuple[bytes, ...], problem: str
) -> None:
    with pytest.raises(Unavailable, match="pod quotient-system/plugin-1 cannot be read") as failed:
        read(servers, *messages)
    assert problem in str(failed.value)


def test_a_missing_permission_is_told_from_other_failures(servers: list[ApiServer]) -> None:
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
    with pytest.raises(Rejected, match="Handshake status 403"):
        read(servers, refusal=refusal)


def test_an_api_server_that_is_gone_is_unavailable() -> None:
    settings = Configuration()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        settings.host = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(Unavailable, match="refused"):
        read_from_pod(settings, ADDRESS, "/usage", TIMEOUT_S)
