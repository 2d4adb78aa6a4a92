"""How to reach an API server, and with which credentials.

In a pod these are its service account's: a token, which the kubelet renews, and a CA. They are read here directly. The
official client handles every form of kubeconfig but takes 20 MB of memory, too much for a process on every node, so it
is imported only where a kubeconfig is used.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import urllib3
from msgspec import Struct

from vcuda.decision import Unavailable

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_NAMESPACE = "default"
POOL_SIZE = 32
# The kubelet replaces a token when 80 % of its lifetime (an hour by default) are over: a minute is soon enough.
TOKEN_REFRESH_S = 60.0
# In the error of the official client when a kubeconfig does not exist, or has no content.
NO_KUBECONFIG = "No configuration found"

# Returns the headers that authenticate a request. Called for every request, on any thread.
Credentials = Callable[[], dict[str, str]]


class ApiConnection(Struct, frozen=True):
    """The API server's URL, a connection pool for it, and credentials."""

    host: str
    pool: urllib3.PoolManager
    credentials: Credentials


class TokenFile:
    """A bearer token in a file that is replaced from time to time."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        # Guards the token and the time it was read.
        self._lock = threading.Lock()
        self._read_at = -TOKEN_REFRESH_S
        self._token = ""

    def __call__(self) -> dict[str, str]:
        """Return the Authorization header; Unavailable if the token was never readable."""
        with self._lock:
            if self._clock() - self._read_at >= TOKEN_REFRESH_S:
                try:
                    self._token = self._file.read_text().strip()
                    self._read_at = self._clock()
                except OSError as error:
                    # The previous token is still valid for minutes.
                    if not self._token:
                        raise Unavailable(f"{self._file}: cannot be read: {error.strerror}") from None
            return {"Authorization": f"Bearer {self._token}"}


def pod_connection(folder: Path = SERVICE_ACCOUNT) -> ApiConnection | None:
    """Connect as the service account of this pod; None if this process does not run in a pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not (folder / "token").exists() or not (folder / "ca.crt").exists():
        return None
    pool = urllib3.PoolManager(
        num_pools=4,
        maxsize=POOL_SIZE,
        cert_reqs="CERT_REQUIRED",
        ca_certs=str(folder / "ca.crt"),
        socket_options=keepalive_options(),
    )
    return ApiConnection(f"https://{url_host(host)}:{port}", pool, TokenFile(folder / "token"))


def default_namespace(kubeconfig: str = "", context: str = "", folder: Path = SERVICE_ACCOUNT) -> str:
    """Return the namespace of the kubeconfig's context, or of this pod; `default` if none is set."""
    if not kubeconfig and pod_connection(folder) is not None:
        return (folder / "namespace").read_text().strip()
    from kubernetes import config  # noqa: PLC0415 - see above

    try:
        contexts, current = config.list_kube_config_contexts(kubeconfig or None)
    except (config.ConfigException, OSError):
        return DEFAULT_NAMESPACE
    chosen = next((each for each in contexts if each["name"] == context), current)
    return str(chosen["context"].get("namespace") or DEFAULT_NAMESPACE)


def url_host(host: str) -> str:
    """Return an address as URLs write it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def keepalive_options() -> list[tuple[int, int, int]]:
    """Return socket options with which the kernel closes a connection to a vanished peer after 30 s (15 + 3 * 5)."""
    options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return options


def kubeconfig_connection(kubeconfig: str, context: str) -> ApiConnection:
    """Connect with a kubeconfig; an empty name means the user's own ($KUBECONFIG or ~/.kube/config)."""
    from kubernetes.client.rest import RESTClientObject  # noqa: PLC0415 - see above

    settings = kubeconfig_settings(kubeconfig, context)
    settings.connection_pool_maxsize = POOL_SIZE
    settings.keep_alive = True
    # Guards the refresh of credentials, which the client does in place on the shared configuration.
    lock = threading.Lock()

    def credentials() -> dict[str, str]:
        with lock:
            token = settings.get_api_key_with_prefix("BearerToken", alias="authorization")
        return {"Authorization": token} if token else {}

    return ApiConnection(settings.host, RESTClientObject(settings).pool_manager, credentials)


def kubeconfig_settings(kubeconfig: str, context: str) -> Any:  # noqa: ANN401 - the client's Configuration
    """Return the official client's settings of a kubeconfig; Unavailable if it cannot be used."""
    from kubernetes import config  # noqa: PLC0415 - see above
    from kubernetes.client.configuration import Configuration  # noqa: PLC0415

    settings = Configuration()
    try:
        config.load_kube_config(config_file=kubeconfig or None, context=context or None, client_configuration=settings)
    except (config.ConfigException, OSError) as error:
        remedy = "set KUBECONFIG, or --set cluster.kubeconfig=FILE"
        if NO_KUBECONFIG in str(error):
            problem = f"kubeconfig {kubeconfig}: missing or empty" if kubeconfig else "no kubeconfig found"
        else:
            problem = f"kubeconfig {kubeconfig}: {error}" if kubeconfig else f"kubeconfig: {error}"
        raise Unavailable(f"{problem}; {remedy}") from None
    return settings
