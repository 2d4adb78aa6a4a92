"""The node's HTTP server on port 5678: `/metrics` (also as gpu-manager's `/metric`), `/usage`, and the probes.

Probes and requests from loopback need no authentication. Other requests need TLS and a bearer token whose user may
`get` the path (RBAC on `nonResourceURLs`), unless `monitor.open` is true.
"""

import html
import threading
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from cluster.authorization import CachedAuthorizer
from nodeplugin.http_server import TEXT, HttpServer, Request, Response
from nodeplugin.isolation_ladder import group_not_offered
from nodeplugin.limit_checks import LimitCheck, describe_check, limits_hold
from nodeplugin.monitor_certificate import MonitorCertificate
from nodeplugin.sampling import CardSample, ContainerSample, Sample
from settings.configuration import MonitorSettings as Settings
from vcuda.decision import Unavailable
from vcuda.isolation import COMPUTE, MEMORY
from vcuda.vocabulary import CORES_PER_CARD

# Returns the problems found; none means that the probe succeeds.
Check = Callable[[], list[str]]
JSON, HTML = "application/json", "text/html; charset=utf-8"
STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2rem;color:#222}"
    "h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}"
    "table{border-collapse:collapse}th,td{padding:.25rem .9rem .25rem 0;text-align:left;border-bottom:1px solid #ddd}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}.bad{color:#b00}"
)
CARD_HEAD = (
    "GPU",
    "model",
    "uuid",
    "state",
    "cores allocated",
    "MiB allocated",
    "utilization",
    "MiB used",
    "isolation",
)
NOT_OFFERED_HEAD = ("GPUs", "limit of", "by", "not offered because")
CONTAINER_HEAD = ("pod", "container", "GPU", "cores", "MiB", "utilization", "MiB used", "memory limit", "compute limit")


class MonitorServer:
    """Serves metrics, usage and probes. `live` and `ready` return problems; an empty list means success."""

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
        certificate = MonitorCertificate(Path(settings.certificates))
        self._server = HttpServer(settings.address, settings.port, self.respond, certificate.context)
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.serve_forever, name="monitor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def respond(self, request: Request) -> Response:
        if request.path in self._checks:
            # Before authorization: the kubelet's probes carry no token, and do not speak TLS.
            problems = self._checks[request.path]()
            return plain_text(503 if problems else 200, "\n".join(problems or ["ok"]))
        path = {"/metric": "/metrics", "/": "/usage"}.get(request.path, request.path)
        if path not in {"/metrics", "/usage"}:
            return plain_text(404, "not found: the paths are /metrics, /usage, /livez and /readyz")
        if refusal := self._authorize(request, path):
            return plain_text(*refusal)
        if path == "/metrics":
            return Response(200, CONTENT_TYPE_LATEST, generate_latest(self._registry))
        sample = self._sample()
        if "text/html" in request.headers.get("accept", ""):
            # The page has no scripts: should a pod's name ever get through unescaped, it cannot run as one.
            policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
            return Response(200, HTML, render_page(self._node, sample).encode(), policy)
        report = {
            "usage": usage_by_pod(sample),
            "cards": card_states(sample),
            "containers": container_states(self._node, sample),
        }
        return Response(200, JSON, msgspec.json.encode(report))

    def _authorize(self, request: Request, path: str) -> tuple[int, str] | None:
        """Return status and message of a refusal; None if the request is allowed."""
        if self._settings.open or is_loopback(request.peer):
            return None
        if not request.is_tls:
            # Its token was sent in the clear; accepting it would hide that.
            return 403, "use https: from other machines and pods, plain HTTP is served for probes only"
        try:
            return self._authorizer.failure(request.headers.get("authorization", ""), path, request.peer)
        except Unavailable as error:
            return 503, f"cannot verify the bearer token: {error}"


def plain_text(status: int, text: str) -> Response:
    return Response(status, TEXT, f"{text}\n".encode())


def is_loopback(address: str) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    # A dual-stack socket reports IPv4 clients as ::ffff:127.0.0.1, which `is_loopback` of older Pythons denies.
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_loopback


def usage_by_pod(sample: Sample) -> dict[str, Any]:
    """Return usage in gpu-manager's JSON format, by pod uid; like gpu-manager, it omits keys whose value is zero."""
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
            "pids": [process.pid for process in each.processes or ()],
            "device_mem": each.card.memory_mib,
        }
        stat = pod["stat"].setdefault(each.container, {"dev": []})
        stat["dev"].append({key: value for key, value in device.items() if value})
        spec = pod["spec"].setdefault(each.container, {"gpu": 0.0, "mem": 0})
        spec["gpu"] = round(spec["gpu"] + each.allocated.cores / CORES_PER_CARD, 2)
        spec["mem"] += each.allocated.memory_mib
    return pods


def card_states(sample: Sample) -> list[dict[str, Any]]:
    """Return the condition and usage of every card as JSON values; null if the driver does not report one."""
    return [
        {
            "uuid": each.card.uuid,
            "index": each.card.index,
            "model": each.card.model,
            "healthy": each.condition.healthy,
            "cordoned": bool(each.condition.cordon),
            "reason": each.condition.unschedulable_reason,
            "cores": {"allocated": each.allocated_cores},
            "memoryMiB": {"total": each.card.memory_mib, "allocated": each.allocated_mib, "used": each.usage.used_mib},
            "utilization": each.usage.utilization,
            "isolation": each.ladder.isolation,
            "notOffered": each.ladder.not_offered,
        }
        for each in sample.cards
    ]


def container_states(node: str, sample: Sample) -> list[dict[str, Any]]:
    """Return share, usage and limits of every container on each of its cards; null where it is not known."""
    return [
        {
            "node": node,
            "namespace": each.pod.metadata.namespace,
            "pod": each.pod.metadata.name,
            "podUID": each.pod.uid,
            "container": each.container,
            "uuid": each.card.uuid,
            "index": each.card.index,
            "cores": each.allocated.cores,
            "memoryMiB": {"limit": each.allocated.memory_mib, "used": each.measured_mib},
            "utilization": each.utilization if each.is_measured else None,
            "limits": {
                MEMORY: limit_state(limits_hold(each).memory),
                COMPUTE: limit_state(limits_hold(each).compute),
            },
        }
        for each in sample.containers
    ]


def limit_state(check: LimitCheck) -> dict[str, Any]:
    return {"rung": check.rung, "enforced": check.is_enforced, "holds": check.holds, "overMiB": check.over_mib}


def render_page(node: str, sample: Sample) -> str:
    cards = [card_row(each) for each in sample.cards]
    containers = [container_row(each) for each in sample.containers]
    ladders = [(each.card.index, each.ladder) for each in sample.cards]
    not_offered = [
        html_row(", ".join(map(str, cards)), rung.dimension, rung.rung, rung.reason)
        for rung, cards in group_not_offered(ladders).items()
    ]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=10>"
        f"<title>{html.escape(node)} - Quotient</title><style>{STYLE}</style><h1>GPUs of node {html.escape(node)}</h1>"
        f"{html_table(CARD_HEAD, cards) if cards else '<p>The driver lists no GPUs.</p>'}"
        f"{html_table(NOT_OFFERED_HEAD, not_offered) if not_offered else ''}<h2>Containers</h2>"
        f"{html_table(CONTAINER_HEAD, containers) if containers else '<p>No container uses a GPU of this node.</p>'}"
        '<p>For programs: <a href="/usage">/usage</a> (JSON), <a href="/metrics">/metrics</a> (Prometheus).</p>'
    )


def card_row(each: CardSample) -> str:
    reason = each.condition.unschedulable_reason
    return html_row(
        each.card.index,
        each.card.model,
        each.card.uuid,
        ("bad", reason) if reason else "healthy",
        f"{each.allocated_cores} of {CORES_PER_CARD}",
        f"{each.allocated_mib} of {each.card.memory_mib}",
        format_number(each.usage.utilization, " %"),
        format_number(each.usage.used_mib),
        each.ladder.isolation,
    )


def container_row(each: ContainerSample) -> str:
    checks = limits_hold(each)
    return html_row(
        each.pod.title,
        each.container,
        each.card.index,
        each.allocated.cores,
        each.allocated.memory_mib,
        format_number(each.utilization, " %"),
        "unknown" if each.measured_mib is None else each.measured_mib,
        limit_cell(checks.memory),
        limit_cell(checks.compute),
    )


def limit_cell(check: LimitCheck) -> object:
    text = describe_check(check)
    return ("bad", text) if check.holds is False else text


def format_number(value: float | None, unit: str = "") -> str:
    """Format a measurement; None is one that the driver does not report."""
    return "unknown" if value is None else f"{value}{unit}"


def html_row(*cells: object) -> str:
    """Render a table row; a tuple is a CSS class and a text, and integers are aligned right."""
    parts = []
    for cell in cells:
        css, text = cell if isinstance(cell, tuple) else ("n" if isinstance(cell, int) else "", cell)
        parts.append(f"<td{f' class={css}' if css else ''}>{html.escape(str(text))}")
    return f"<tr>{''.join(parts)}"


def html_table(head: Iterable[str], rows: Iterable[str]) -> str:
    return f"<table><tr>{''.join(f'<th>{html.escape(each)}' for each in head)}{''.join(rows)}</table>"
