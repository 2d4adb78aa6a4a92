"""The webhook process: its parts, built from the configuration, and the answers to its probes."""

import time
from pathlib import Path

import msgspec
import structlog

from certs.key_pairs import format_time
from cluster.authorization import authorization_failure
from cluster.errors import NotFound
from cluster.events import EventRecorder
from cluster.interface import Cluster
from cluster.objects import PODS
from ledger.committing import LedgerCommitter, LedgerWriter
from ledger.ledger_store import LedgerStore
from settings.configuration import Configuration
from settings.probes import Probes
from vcuda.decision import Unavailable
from vcuda.names import WEBHOOK, names_for
from vcuda.scheme import build_scheme
from vcuda.webhook_paths import REPORT_PATH, encode_report
from webhook.admission import Admission, AdmissionOutcome
from webhook.admission_config import AdmissionConfig
from webhook.asgi_app import AsgiApp
from webhook.callers import CallerPaths
from webhook.decisions import PATH, DecisionLog
from webhook.flask_app import create_app
from webhook.metrics import Metrics
from webhook.owner_events import OwnerEventRecorder
from webhook.quota_sources import ClusterQuotaSource
from webhook.registration_cache import RegistrationCache
from webhook.responding import JSON, TEXT, HttpReply, Responder
from webhook.review import Request
from webhook.serving_certificate import CertificateLoaded, CertificateRejected, ServingCertificate
from webhook.validating import PodToBind

MIB = 2**20
# The event loop records a heartbeat four times a second; without one for this long it hangs.
HEARTBEAT_TIMEOUT_S = 10.0
# Without one for this long it answers no request either: other replicas do.
READY_TIMEOUT_S = 3.0
# After a pause this long some call probably got no answer in time, although its connection was not seen to be closed.
STALL_S = 5.0


def admission_config_of(configuration: Configuration) -> AdmissionConfig:
    webhook = configuration.webhook
    return AdmissionConfig(
        scheme=build_scheme(names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies),
        cluster_mode=configuration.mode,
        system_namespace=configuration.system_namespace,
        scheduler_aliases=webhook.scheduler_aliases,
        tolerations=tuple(msgspec.to_builtins(each) for each in webhook.tolerations),
        binders=webhook.binders,
        cluster_privileged=webhook.privileged,
        injection=configuration.node_plugin.injection,
    )


class Service:
    """The parts of a webhook process. `ledgers` replaces the committer in tests."""

    def __init__(self, configuration: Configuration, cluster: Cluster, ledgers: LedgerWriter | None = None) -> None:
        self.settings = settings = configuration.webhook
        self.config = admission_config_of(configuration)
        self.quota_source = ClusterQuotaSource(
            cluster, self.config.scheme, configuration.system_namespace, configuration.parse_default_quota()
        )
        self.committer = LedgerCommitter(LedgerStore(cluster, configuration.system_namespace))
        self.metrics = Metrics(self.committer.counts)
        self._cluster = cluster
        self.decisions = DecisionLog()
        self.owner_events = OwnerEventRecorder(cluster, EventRecorder(cluster, WEBHOOK))
        self.paths = CallerPaths(is_authenticated=bool(settings.client_ca or settings.api_server_cidrs))
        self.registration = RegistrationCache(cluster, self.paths.update)
        self.responder = Responder(
            Admission(self.config, self.quota_source),
            self.find_pod,
            ledgers or self.committer,
            self,
            settings.answer_within_s,
            fails_closed=lambda: self.paths.fails_closed,
        )
        self.asgi_app = AsgiApp(
            create_app(self.responder, settings.max_body_mib * MIB, self.list_decisions, self.paths),
            max_body=settings.max_body_mib * MIB,
            body_timeout_s=settings.body_timeout_s,
            paths=self.paths,
        )
        self.certificates = ServingCertificate(
            Path(settings.certificates),
            configuration.served_names()[0],
            Path(settings.client_ca) if settings.client_ca else None,
        )
        self.probes = Probes(
            settings.address,
            settings.ops_port,
            self.metrics.registry,
            self.liveness_problems,
            self.readiness_problems,
            routes={REPORT_PATH: lambda _: ("200 OK", JSON, encode_report(self.paths.report()))},
        )
        self.is_draining = False
        self._last_heartbeat = time.monotonic()
        self._log = structlog.get_logger()

    def start(self) -> None:
        # The certificate is not waited for here: probes have to answer while there is none.
        self.registration.start()
        self.quota_source.start()
        self.committer.start()
        self.owner_events.start()
        self.probes.start()

    def stop(self) -> None:
        # Probes last: until everything else has stopped, they report why the process is not ready.
        self.owner_events.stop()
        self.committer.stop()
        self.quota_source.stop()
        self.registration.stop()
        self.probes.stop()

    def record_heartbeat(self) -> None:
        """Tell the liveness probe that the event loop runs."""
        now = time.monotonic()
        if now - self._last_heartbeat > STALL_S:
            self.paths.record_failure()
        self._last_heartbeat = now

    def refresh_certificate(self) -> None:
        """Reload the certificate if it changed, and update the gauges. Reads files, so it runs on a thread."""
        change = self.certificates.refresh()
        if isinstance(change, CertificateLoaded):
            # A pair that callers reject is loaded only when there is no better one.
            log = self._log.error if change.problem else self._log.info
            names, not_after = list(change.pair.names), format_time(change.pair.not_after)
            log("certificate_loaded", names=names, not_after=not_after, problem=change.problem)
        elif isinstance(change, CertificateRejected):
            log = self._log.warning if self.certificates.is_valid else self._log.error
            log("certificate_rejected", error=change.error)
        in_use = self.certificates.in_use
        self.metrics.certificate_not_after.set(in_use.not_after.timestamp() if in_use else 0)
        self.metrics.certificates_rejected.set(self.certificates.rejected_count)
        self.metrics.quotas_invalid.set(self.quota_source.invalid)

    def record_decision(self, route: str, request: Request, outcome: AdmissionOutcome, took_s: float) -> None:
        # For every decision, and often on the event loop: none of these may block. Events are queued for a thread.
        self.metrics.record_decision(route, request, outcome, took_s)
        self.decisions.record(route, request, outcome)
        if outcome.decision.reasons:
            self.owner_events.enqueue(request, outcome)

    def record_failure(self, route: str, cause: str) -> None:
        self.metrics.record_failure(route, cause)

    def list_decisions(self, authorization: str, namespace: str, limit: int) -> HttpReply:
        """Reply with the recent decisions, or with 401 or 403 if the Authorization header does not permit that."""
        # One token review and one access review per request: `/decisions` is read by people, so nothing is cached.
        try:
            refused = authorization_failure(
                self._cluster.with_timeout(self.settings.answer_within_s), authorization, PATH
            )
        except Unavailable as error:
            return HttpReply(503, f"{error}\n".encode(), TEXT)
        if refused is not None:
            return HttpReply(refused[0], f"{refused[1]}\n".encode(), TEXT)
        return HttpReply(200, msgspec.json.encode({"decisions": self.decisions.recent(namespace, max(0, limit))}))

    def find_pod(self, namespace: str, name: str, within_s: float) -> PodToBind | None:
        """Read a pod from the API server; None if it does not exist."""
        try:
            pod = self._cluster.with_timeout(within_s).get(PODS, name, namespace)
        except NotFound:
            return None
        return PodToBind(pod.metadata.uid, pod.metadata.annotations, pod.spec)

    def liveness_problems(self) -> list[str]:
        """Return why the process has to be restarted; an unreachable API server is never a reason."""
        problems = []
        silent_s = time.monotonic() - self._last_heartbeat
        if silent_s > HEARTBEAT_TIMEOUT_S:
            problems.append(f"event loop: no heartbeat for {silent_s:.0f} s")
        if not self.committer.alive:
            problems.append("ledger committer: a thread has died")
        return problems

    def readiness_problems(self) -> list[str]:
        """Return why the API server should send its requests to other replicas."""
        problems = []
        silent_s = time.monotonic() - self._last_heartbeat
        if silent_s > READY_TIMEOUT_S:
            problems.append(f"event loop: no heartbeat for {silent_s:.0f} s")
        if self.is_draining:
            problems.append("draining: the process is terminating")
        if not self.certificates.is_valid:
            problems.append(f"serving certificate: no valid certificate in {self.settings.certificates}")
        if not self.quota_source.synced:
            problems.append("quotas: not yet listed from the API server")
        if not self.registration.synced:
            problems.append("webhook configurations: not yet listed from the API server")
        return problems
