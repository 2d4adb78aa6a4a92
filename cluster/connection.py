"""As whom an API server is called, and over which connections.

In a pod that is its own account: a token, which the kubelet renews, and a CA. It is read here directly, for the
official client, which knows all the ways of a kubeconfig, takes 20 MB that every node would have to spare for it.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import urllib3
from msgspec import Struct

from vcuda.decision import Unavailable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
POOL_SIZE = 32
TOKEN_S = 60.0

Credentials = Callable[[], dict[str, str]]


class ApiConnection(Struct, frozen=True):
    """Where the API server is, how to reach it, and what to say there."""

    host: str
    pool: urllib3.PoolManager
    credentials: Credentials


class TokenFile:
    """A token in a file, read again from time to time."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        # Guards the token and its age.
        self._lock = threading.Lock()
        self._read_at = -TOKEN_S
        self._token = ""

    def __call__(self) -> dict[str, str]:
        """Give the header; if the file is away for a moment, the last token is as good as any."""
        with self._lock:
            if self._clock() - self._read_at >= TOKEN_S:
                try:
                    self._token = self._file.read_text().strip()
                    self._read_at = self._clock()
                except OSError as wrong:
                    if not self._token:
                        raise Unavailable(f"{self._file}: {wrong.strerror}") from None
            return {"Authorization": f"Bearer {self._token}"}


def pod_connection(folder: Path = ACCOUNT) -> ApiConnection | None:
    """Connect as the account of the pod that this process runs in; None if it runs in none."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not (folder / "token").exists() or not (folder / "ca.crt").exists():
        return None
    pool = urllib3.PoolManager(
        num_pools=4,
        maxsize=POOL_SIZE,
        cert_reqs="CERT_REQUIRED",
        ca_certs=str(folder / "ca.crt"),
        socket_options=keep_alive(),
    )
    return ApiConnection(f"https://{bracketed(host)}:{port}", pool, TokenFile(folder / "token"))


def bracketed(host: str) -> str:
    """Write an address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def keep_alive() -> list[tuple[int, int, int]]:
    """Have the kernel notice after 30 s that a peer has vanished."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def kubeconfig_connection(kubeconfig: str, context: str) -> ApiConnection:
    """Connect as a kubeconfig says; none named means the user's own."""
    from kubernetes import config  # noqa: PLC0415 - see above
    from kubernetes.client.configuration import Configuration  # noqa: PLC0415
    from kubernetes.client.rest import RESTClientObject  # noqa: PLC0415

    settings = Configuration()
    try:
        config.load_kube_config(config_file=kubeconfig or None, context=context or None, client_configuration=settings)
    except (config.ConfigException, OSError) as wrong:
        where = f"kubeconfig {kubeconfig!r}" if kubeconfig else "no kubeconfig, and not in a pod"
        raise Unavailable(f"{where}: {wrong}; name one with --set cluster.kubeconfig=FILE or KUBECONFIG") from None
    settings.connection_pool_maxsize = POOL_SIZE
    settings.keep_alive = True
    # Guards the refresh of credentials, which the client does in place on the shared configuration.
    lock = threading.Lock()

    def credentials() -> dict[str, str]:
        with lock:
            token = settings.get_api_key_with_prefix("BearerToken", alias="authorization")
        return {"Authorization": token} if token else {}

    return ApiConnection(settings.host, RESTClientObject(settings).pool_manager, credentials)
