"""Probes and metrics, on a port and a thread of their own: a busy webhook must not look dead."""

import threading
from collections.abc import Callable, Iterable
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from werkzeug.serving import WSGIRequestHandler, make_server

TEXT = "text/plain; charset=utf-8"
STALLED_CLIENT_S = 10

Check = Callable[[], list[str]]


class QuietHandler(WSGIRequestHandler):
    """Serves without a line of log for every probe, and leaves no thread to a client that says nothing."""

    timeout = STALLED_CLIENT_S

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


class Probes:
    """Serves `/livez`, `/readyz` and `/metrics`. A check gives what is amiss; nothing means all is well."""

    def __init__(self, address: str, port: int, registry: CollectorRegistry, live: Check, ready: Check) -> None:
        self._registry = registry
        self._checks = {"/livez": live, "/healthz": live, "/readyz": ready}
        self._server = make_server(address, port, self._serve, threaded=True, request_handler=QuietHandler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="ops", daemon=True)

    def start(self) -> "Probes":
        """Begin to serve."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            start("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
            return [generate_latest(self._registry)]
        check = self._checks.get(path)
        if check is None:
            start("404 Not Found", [("Content-Type", TEXT)])
            return [b"there are /livez, /readyz and /metrics\n"]
        amiss = check()
        start("503 Service Unavailable" if amiss else "200 OK", [("Content-Type", TEXT)])
        return ["".join(f"{line}\n" for line in amiss or ["ok"]).encode()]
