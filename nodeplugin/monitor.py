"""The page of a node, on port 5678: `/metrics` (and `/metric`, as gpu-manager had it), `/usage`, and the probes.

Whoever asks from this machine gets an answer; whoever asks from elsewhere needs a token whose owner may `get` the path
(RBAC on `nonResourceURLs`), unless `monitor.open` says that anybody may.
"""

import html
import threading
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from typing import Any
from wsgiref.types import StartResponse, WSGIEnvironment

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from werkzeug.serving import make_server

from cluster.authorization import CachedAuthorizer
from nodeplugin.metrics import isolation_of
from nodeplugin.sampling import Sample
from settings.configuration import MonitorSettings as Settings
from settings.probes import TEXT, Check, QuietHandler
from vcuda.decision import Unavailable
from vcuda.vocabulary import CORES_PER_CARD

JSON, HTML = "application/json", "text/html; charset=utf-8"
STATUS = {
    200: "200 OK",
    401: "401 Unauthorized",
    403: "403 Forbidden",
    404: "404 Not Found",
    503: "503 Service Unavailable",
}
Answer = tuple[int, str, bytes]
STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2rem;color:#222}"
    "h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}"
    "table{border-collapse:collapse}th,td{padding:.25rem .9rem .25rem 0;text-align:left;border-bottom:1px solid #ddd}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}.bad{color:#b00}"
)


class MonitorServer:
    """Serves the page."""

    def __init__(
        self,
        settings: Settings,
        node: str,
        registry: CollectorRegistry,
        sample: Callable[[], Sample],
        authorizer: CachedAuthorizer,
        *,
        live: Check,
        ready: Check,
    ) -> None:
        self._settings, self._node, self._registry = settings, node, registry
        self._sample, self._authorizer = sample, authorizer
        self._checks = {"/livez": live, "/healthz": live, "/readyz": ready}
        self._server = make_server(
            settings.address, settings.port, self._serve, threaded=True, request_handler=QuietHandler
        )
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="monitor", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        status, kind, body = self._answer(environ)
        headers = [("Content-Type", kind), ("Cache-Control", "no-store")]
        if kind == HTML:
            headers.append(("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'"))
        start(STATUS[status], headers)
        return [body]

    def _answer(self, environ: WSGIEnvironment) -> Answer:
        path = environ.get("PATH_INFO", "")
        if path in self._checks:
            amiss = self._checks[path]()
            return 503 if amiss else 200, TEXT, "".join(f"{line}\n" for line in amiss or ["ok"]).encode()
        path = {"/metric": "/metrics", "/": "/usage"}.get(path, path)
        if path not in {"/metrics", "/usage"}:
            return 404, TEXT, b"there are /metrics, /usage, /livez and /readyz\n"
        if refusal := self._refusal(environ, path):
            return refusal[0], TEXT, f"{refusal[1]}\n".encode()
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        sample = self._sample()
        if "text/html" in environ.get("HTTP_ACCEPT", ""):
            return 200, HTML, page(self._node, sample).encode()
        return 200, JSON, msgspec.json.encode({"usage": usage(sample), "cards": cards(sample)})

    def _refusal(self, environ: WSGIEnvironment, path: str) -> tuple[int, str] | None:
        if self._settings.open or is_loopback(environ.get("REMOTE_ADDR", "")):
            return None
        try:
            return self._authorizer.failure(environ.get("HTTP_AUTHORIZATION", ""), path)
        except Unavailable as away:
            return 503, f"the cluster cannot be asked who this is: {away}"


def is_loopback(address: str) -> bool:
    """Tell whether somebody asks from this machine."""
    try:
        found = ip_address(address)
    except ValueError:
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def usage(sample: Sample) -> dict[str, Any]:
    """Write what containers use, as gpu-manager did; what is zero is left out."""
    pods: dict[str, Any] = {}
    for each in sample.containers:
        pod = pods.setdefault(
            each.pod.uid,
            {"project": each.pod.metadata.namespace, "pod": each.pod.metadata.name, "stat": {}, "spec": {}},
        )
        device = {
            "id": each.card.bus_id,
            "card_idx": str(each.card.index),
            "uuid": each.card.uuid,
            "gpu": each.utilization,
            "mem": each.used_mib,
            "pids": [process.pid for process in each.processes],
            "device_mem": each.card.memory_mib,
        }
        stat = pod["stat"].setdefault(each.container, {"dev": []})
        stat["dev"].append({key: value for key, value in device.items() if value})
        spec = pod["spec"].setdefault(each.container, {"gpu": 0.0, "mem": 0})
        spec["gpu"] = round(spec["gpu"] + each.given.cores / CORES_PER_CARD, 2)
        spec["mem"] += each.given.memory_mib
    return pods


def cards(sample: Sample) -> list[dict[str, Any]]:
    """Write how the cards are."""
    return [
        {
            "uuid": each.card.uuid,
            "index": each.card.index,
            "model": each.card.model,
            "healthy": each.condition.healthy,
            "cordoned": bool(each.condition.cordon),
            "reason": each.condition.closed,
            "cores": {"allocated": each.cores_held},
            "memoryMiB": {"total": each.card.memory_mib, "allocated": each.held_mib, "used": each.usage.used_mib},
            "utilization": each.usage.utilization,
        }
        for each in sample.cards
    ]


def page(node: str, sample: Sample) -> str:
    """Write the same for people."""
    rows = [
        row(
            each.card.index,
            each.card.model,
            each.card.uuid,
            ("bad", each.condition.closed) if each.condition.closed else "well",
            f"{each.cores_held} of {CORES_PER_CARD}",
            f"{each.held_mib} of {each.card.memory_mib}",
            unknown(each.usage.utilization, " %"),
            unknown(each.usage.used_mib),
        )
        for each in sample.cards
    ]
    containers = [
        row(
            each.pod.title,
            each.container,
            each.card.index,
            each.given.cores,
            each.given.memory_mib,
            f"{each.utilization} %",
            ("bad", str(each.used_mib)) if each.used_mib > each.given.memory_mib else each.used_mib,
            isolation_of(each, "none"),
        )
        for each in sample.containers
    ]
    card_head = ("GPU", "model", "uuid", "state", "cores given", "MiB given", "busy", "MiB used")
    container_head = ("pod", "container", "GPU", "cores", "MiB", "busy", "MiB used", "limits held by")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=10>"
        f"<title>{html.escape(node)} - Quotient</title><style>{STYLE}</style><h1>GPUs of {html.escape(node)}</h1>"
        f"{table(card_head, rows) if rows else '<p>The driver shows no card.</p>'}<h2>Containers</h2>"
        f"{table(container_head, containers) if containers else '<p>None holds a GPU here.</p>'}"
        '<p>The same for programs: <a href="/usage">/usage</a> as JSON, <a href="/metrics">/metrics</a>.</p>'
    )


def unknown(value: float | None, unit: str = "") -> str:
    """Write a number that the driver may not tell."""
    return "unknown" if value is None else f"{value}{unit}"


def row(*cells: object) -> str:
    """Write a row of a table; a pair is a class and its text."""
    parts = []
    for cell in cells:
        kind, text = cell if isinstance(cell, tuple) else ("n" if isinstance(cell, int) else "", cell)
        parts.append(f"<td{f' class={kind}' if kind else ''}>{html.escape(str(text))}")
    return f"<tr>{''.join(parts)}"


def table(head: Iterable[str], rows: Iterable[str]) -> str:
    """Write a table."""
    return f"<table><tr>{''.join(f'<th>{html.escape(each)}' for each in head)}{''.join(rows)}</table>"
