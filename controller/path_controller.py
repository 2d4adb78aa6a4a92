"""Keeps a secret in the path by which API servers call the webhook, and replaces it (see `path_rotation.py`).

Level-triggered: a reconcile reads configurations, Deployment and pods, asks the replicas, and takes one step. It
remembers the secret it has announced, and which replicas it has seen.
"""

import http.client
import secrets
import threading
import time
from collections.abc import Callable
from datetime import datetime

import structlog
from msgspec import Struct

from cluster.errors import ApiError, NotFound
from cluster.informer import Informer
from cluster.interface import Cluster
from cluster.objects import DEPLOYMENTS, PODS, Pod, WebhookConfiguration, Workload
from controller.certificate_controller import WEBHOOK_PODS, by_name
from controller.path_rotation import NextPathStep, ObservedPaths, PathStep, next_path_step
from controller.webhook_configurations import WEBHOOK_KINDS, WebhookConfigurations
from vcuda.decision import Unavailable
from vcuda.names import SECRET_PATHS_ANNOTATION, WEBHOOK, WEBHOOK_CONFIGURATION
from vcuda.webhook_paths import (
    PLAIN,
    REPORT_PATH,
    SECRET_BYTES,
    PathReport,
    decode_report,
    with_next,
    with_registered,
)

# A call that failed is noticed this late.
POLL_S = 10.0
# While replicas are to accept the next secret, and after a failure.
RETRY_S = 1.0
FETCH_TIMEOUT_S = 3.0
# After its grace period a replica is killed; clocks differ.
TERMINATION_S = 10.0
MAX_REPORT_BYTES = 64 * 1024

FetchReport = Callable[[str, int], PathReport | None]


class PathTerms(Struct, frozen=True):
    """Settings: how long a secret is used, and the operations port of the replicas."""

    rotation_s: float
    ops_port: int


class PathController:
    """Reconciles on a thread of its own, while `is_leading` says so.

    `fetch_report(address, port)` asks a replica which secrets it accepts; None if it does not answer.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        terms: PathTerms,
        *,
        is_leading: Callable[[], bool] = lambda: True,
        wall: Callable[[], float] = time.time,
        fetch_report: FetchReport | None = None,
    ) -> None:
        self._cluster, self._namespace, self._terms = cluster, namespace, terms
        self._is_leading, self._wall = is_leading, wall
        self._fetch_report = fetch_report or fetch_report_over_http
        self._webhooks = WebhookConfigurations(cluster, namespace)
        self._announced = PLAIN
        self._instances: set[str] = set()
        # Until it has seen all replicas: one may have been lost together with the process that led before.
        self._has_lost_replica = True
        self._last_why = ""
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._informers: list[Informer[WebhookConfiguration] | Informer[Workload]] = [
            *(Informer(cluster, kind, selector=by_name(WEBHOOK_CONFIGURATION)) for kind in WEBHOOK_KINDS),
            Informer(cluster, DEPLOYMENTS, namespace, by_name(WEBHOOK)),
        ]
        for informer in self._informers:
            informer.on_change(lambda *_: self.enqueue())
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="path-controller", daemon=True)

    def start(self) -> "PathController":
        for informer in self._informers:
            informer.start()
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        for informer in self._informers:
            informer.stop()
        if self._thread.is_alive():
            self._thread.join(10)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and all(informer.alive for informer in self._informers)

    def enqueue(self) -> None:
        """Reconcile at once: something changed, or this process became the leader."""
        self._wake.set()

    def _run(self) -> None:
        delay_s = RETRY_S
        while not self._stopping.is_set():
            self._wake.wait(delay_s)
            # Before the reconcile: a change during it has to wake the next one.
            self._wake.clear()
            delay_s = POLL_S
            if self._stopping.is_set() or not self._is_leading():
                continue
            try:
                delay_s = POLL_S if self.reconcile() is PathStep.REST else RETRY_S
            except (ApiError, Unavailable) as error:
                self._log.warning("path_reconcile_failed", error=str(error))
            except Exception:  # the outermost frame of the thread, which has to go on
                self._log.exception("path_worker_crashed")

    def reconcile(self) -> PathStep:
        """Take the next step, and return it."""
        observed = self._observe()
        if observed is None:
            return PathStep.REST
        now = self._wall()
        step = next_path_step(observed, self._terms.rotation_s, now)
        if step.step is PathStep.ANNOUNCE:
            self._announced = secrets.token_hex(SECRET_BYTES)
            current = next(secret for secret in observed.registered if secret is not None)
            self._webhooks.set_paths(current, with_next(observed.record, self._announced))
        elif step.step is PathStep.REGISTER:
            replaced = {secret for secret in observed.registered if secret is not None}
            self._webhooks.set_paths(step.secret, with_registered(observed.record, step.secret, replaced, int(now)))
            self._announced, self._has_lost_replica = PLAIN, False
        self._log_step(step)
        return step.step

    def _log_step(self, step: NextPathStep) -> None:
        """Log a step, without the secret; WAIT and REST only when their reason changes."""
        if step.step in (PathStep.ANNOUNCE, PathStep.REGISTER) or step.why != self._last_why:
            self._log.info("webhook_path_step", step=step.step.value, reason=step.why)
        self._last_why = step.why

    def _observe(self) -> ObservedPaths | None:
        """Return what there is to decide on; None if the webhook is not installed."""
        try:
            deployment = self._cluster.get(DEPLOYMENTS, WEBHOOK, self._namespace)
        except NotFound:
            return None
        registered, records = self._webhooks.paths()
        if not registered or deployment.metadata.deletion_timestamp:
            return None
        listed = self._cluster.list(PODS, self._namespace, WEBHOOK_PODS).items
        pods = [pod for pod in listed if not pod.status.has_ended]
        is_supported = all(
            SECRET_PATHS_ANNOTATION in metadata.annotations
            for metadata in (deployment.metadata, *(pod.metadata for pod in pods))
        )
        addresses = [pod.status.pod_ip for pod in pods if is_called(pod, self._wall())] if is_supported else []
        reports = [self._fetch_report(address, self._terms.ops_port) for address in addresses]
        self._notice_lost_replicas({report.instance for report in reports if report is not None})
        return ObservedPaths(
            registered=registered,
            records=records,
            reports=reports,
            is_supported=is_supported,
            has_lost_replica=self._has_lost_replica,
            announced=self._announced,
        )

    def _notice_lost_replicas(self, instances: set[str]) -> None:
        if self._instances - instances:
            self._has_lost_replica = True
        self._instances = instances


def is_called(pod: Pod, now: float) -> bool:
    """Whether API servers may call a replica: it is ready, or it is terminating and was so a moment ago."""
    # Another one reads the configurations before it is ready.
    if not pod.status.pod_ip or pod.status.phase != "Running":
        return False
    if (deletion := pod.metadata.deletion_timestamp) is not None:
        # Of a node that is gone, pods stay terminating for ever. The timestamp is the end of the grace period.
        return now < datetime.fromisoformat(deletion).timestamp() + TERMINATION_S
    return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions)


def fetch_report_over_http(address: str, port: int) -> PathReport | None:
    connection = http.client.HTTPConnection(address, port, timeout=FETCH_TIMEOUT_S)
    try:
        connection.request("GET", REPORT_PATH)
        response = connection.getresponse()
        body = response.read(MAX_REPORT_BYTES)
        return decode_report(body) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
