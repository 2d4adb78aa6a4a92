"""Reads an HTTP path of a pod through the API server, with the user's own rights.

By port forwarding, not by the API server's proxy: that removes the Authorization header, and a pod that reviews bearer
tokens would refuse the request. A forwarded connection comes from the pod's own loopback.

The protocol is Kubernetes' v4.channel.k8s.io: each message begins with the number of a channel, 0 for data and 1 for
errors, and the first message of each is the port. The client's own PortForward is not used: it loses what it has not
passed on yet when the server closes, and a server that answers one request closes at once.
"""

import http.client
import io
import re
import threading
from typing import Any

from msgspec import Struct

from cluster.api import object_path
from cluster.connection import kubeconfig_settings, pod_connection
from cluster.errors import api_error
from cluster.objects import PODS
from vcuda.decision import Unavailable

DATA, ERRORS = 0, 1
# More is not read.
MAX_BYTES = 2**24
# Guards the refresh of credentials, which the client does in place on the shared settings.
REFRESHING = threading.Lock()
HANDSHAKE_STATUS = re.compile(r"Handshake status (\d{3})")


class PodAddress(Struct, frozen=True):
    namespace: str
    pod: str
    port: int


def read_from_pod(settings: Any, address: PodAddress, path: str, timeout_s: float) -> bytes:  # noqa: ANN401
    """Return the body of a GET; ApiError if the user may not forward ports, Unavailable for any other failure.

    `settings` are those of `port_forwarding_settings`.
    """
    import websocket  # noqa: PLC0415 - with the client, only where it is used
    from kubernetes.stream.ws_client import create_websocket, get_websocket_url  # noqa: PLC0415

    websocket.setdefaulttimeout(timeout_s)
    with REFRESHING:
        token = settings.get_api_key_with_prefix("BearerToken", alias="authorization")
    where = object_path(PODS, address.namespace, address.pod, "portforward")
    url = get_websocket_url(f"{settings.host}{where}", [("ports", str(address.port))])
    try:
        socket = create_websocket(settings, url, {"authorization": token} if token else {})
        try:
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
            socket.send_binary(bytes([DATA]) + request.encode())
            return body_of(receive_all(socket))
        finally:
            # Not close(), which sends a last message: a server that has closed already makes it fail and leak.
            socket.shutdown()
    except (websocket.WebSocketException, OSError, http.client.HTTPException) as error:
        status = HANDSHAKE_STATUS.search(str(error))
        message = f"pod {address.namespace}/{address.pod} cannot be read: {first_line(error)}"
        raise api_error(int(status[1]), "", message) if status else Unavailable(message) from None


def port_forwarding_settings(kubeconfig: str = "", context: str = "") -> Any:  # noqa: ANN401 - the client's own
    """Return how to reach the API server: as `cluster.api.connect` does, but by the official client."""
    if kubeconfig or pod_connection() is None:
        return kubeconfig_settings(kubeconfig, context)
    from kubernetes import config  # noqa: PLC0415 - see above
    from kubernetes.client.configuration import Configuration  # noqa: PLC0415

    settings = Configuration()
    config.load_incluster_config(client_configuration=settings)
    return settings


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or "no answer"


def receive_all(socket: Any) -> bytes:  # noqa: ANN401 - a WebSocket
    """Return all data that arrives until the other side closes; raises OSError for an error of the node."""
    import websocket  # noqa: PLC0415

    received = {DATA: b"", ERRORS: b""}
    opened: set[int] = set()
    while len(received[DATA]) < MAX_BYTES:
        try:
            opcode, message = socket.recv_data()
        except websocket.WebSocketConnectionClosedException:
            break
        if opcode != websocket.ABNF.OPCODE_BINARY or not message or message[0] not in received:
            break
        channel, data = message[0], message[1:]
        if channel in opened:
            received[channel] += data
        opened.add(channel)
        if received[ERRORS]:
            raise OSError(received[ERRORS].decode(errors="replace"))
        if is_complete(received[DATA]):
            break
    return received[DATA]


def is_complete(answer: bytes) -> bool:
    """Whether an answer has all of the body that its header announces, so that its end needs not be waited for."""
    header, separator, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", header)
    return bool(separator) and length is not None and len(body) >= int(length[1])


class AnsweredSocket:
    """What http.client needs of a socket to parse an answer that was received already."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._answer)


def body_of(answer: bytes) -> bytes:
    """Return the body of an HTTP answer with status 200; raises OSError or HTTPException for anything else."""
    response = http.client.HTTPResponse(AnsweredSocket(answer))  # type: ignore[arg-type]
    response.begin()
    body = response.read()
    if response.status != http.client.OK:
        raise OSError(f"status {response.status}: {body[:200].decode(errors='replace').strip()}")
    return body
