"""Probes and metrics over HTTP, on a port and threads of their own: a busy component must still answer the kubelet."""

import threading
from collections.abc import Callable, Iterable, Mapping
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from werkzeug.serving import WSGIRequestHandler, make_server

TEXT = "text/plain; charset=utf-8"
# A client that connects and sends nothing would occupy its thread without end.
STALLED_CLIENT_S = 10

# Answers another path: from the request to status, content type and body.
Route = Callable[[WSGIEnvironment], tuple[str, str, bytes]]
# Returns the problems found, one per line of the answer; none means that the probe succeeds.
Check = Callable[[], list[str]]


class QuietHandler(WSGIRequestHandler):
    """Does not log requests, as probes come every few seconds."""

    timeout = STALLED_CLIENT_S

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class Probes:
    """Serves `/livez` (or `/healthz`), `/readyz` and `/metrics`; a failed probe is a 503 with the problems as text.

    `routes` are further paths of a component.
    """

    def __init__(
        self,
        address: str,
        port: int,
        registry: CollectorRegistry,
        live: Check,
        ready: Check,
        *,
        routes: Mapping[str, Route] | None = None,
    ) -> None:
        self._registry, self._routes = registry, routes or {}
        self._checks = {"/livez": live, "/healthz": live, "/readyz": ready}
        self._server = make_server(address, port, self._serve, threaded=True, request_handler=QuietHandler)
        # With port 0 the system chooses one.
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="ops", daemon=True)

    def start(self) -> "Probes":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            start("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
            return [generate_latest(self._registry)]
        if route := self._routes.get(path):
            status, content_type, body = route(environ)
            start(status, [("Content-Type", content_type)])
            return [body]
        check = self._checks.get(path)
        if check is None:
            start("404 Not Found", [("Content-Type", TEXT)])
            return [b"not found: use /livez, /readyz or /metrics\n"]
        problems = check()
        start("503 Service Unavailable" if problems else "200 OK", [("Content-Type", TEXT)])
        return ["".join(f"{line}\n" for line in problems or ["ok"]).encode()]
