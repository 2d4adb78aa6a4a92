"""All that one webhook process is made of, put together from the configuration."""

import time
from pathlib import Path

import msgspec
import structlog

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
from vcuda.names import names_for
from vcuda.scheme import build_scheme
from webhook.admission import Admission, AdmissionOutcome
from webhook.admission_config import AdmissionConfig
from webhook.asgi_app import AsgiApp
from webhook.decisions import PATH, DecisionLog
from webhook.flask_app import create_app
from webhook.metrics import Metrics
from webhook.owner_events import OwnerEventRecorder
from webhook.quota_sources import ClusterQuotaSource
from webhook.responding import TEXT, HttpReply, Responder
from webhook.review import Request
from webhook.serving_certificate import ServingCertificate
from webhook.validating import PodToBind

MIB = 2**20
# The event loop says every second that it runs; without a word for so long it is stuck.
STUCK_S = 10.0


def admission_config_of(configuration: Configuration) -> AdmissionConfig:
    """Take from the configuration what pods are held to."""
    webhook = configuration.webhook
    return AdmissionConfig(
        scheme=build_scheme(names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies),
        cluster_mode=configuration.mode,
        system_namespace=configuration.system_namespace,
        scheduler_aliases=webhook.scheduler_aliases,
        tolerations=tuple(msgspec.to_builtins(each) for each in webhook.tolerations),
        binders=webhook.binders,
    )


class Service:
    """The parts of a running webhook, and how it is with them."""

    def __init__(self, configuration: Configuration, cluster: Cluster, charging: LedgerWriter | None = None) -> None:
        self.settings = settings = configuration.webhook
        self.config = admission_config_of(configuration)
        self.quota_source = ClusterQuotaSource(
            cluster, self.config.scheme, configuration.system_namespace, configuration.quota_by_default()
        )
        self.committer = LedgerCommitter(LedgerStore(cluster, configuration.system_namespace))
        self.metrics = Metrics(self.committer.counts)
        self._cluster = cluster
        self.decisions = DecisionLog()
        self.owner_events = OwnerEventRecorder(cluster, EventRecorder(cluster, "quotient-webhook"))
        self.responder = Responder(
            Admission(self.config, self.quota_source),
            self.find_pod,
            charging or self.committer,
            self,
            settings.answer_within_s,
        )
        self.front = AsgiApp(
            create_app(self.responder, settings.max_body_mib * MIB, self.show_decisions),
            max_body=settings.max_body_mib * MIB,
            body_timeout_s=settings.body_timeout_s,
        )
        self.certificates = ServingCertificate(
            Path(settings.certificates),
            configuration.served_names()[0],
            Path(settings.client_ca) if settings.client_ca else None,
        )
        self.ops = Probes(settings.address, settings.ops_port, self.metrics.registry, self.not_live, self.not_ready)
        self.draining = False
        self._beat = time.monotonic()
        self._log = structlog.get_logger()

    def start(self) -> None:
        """Begin to follow the cluster and to answer probes."""
        self.quota_source.start()
        self.committer.start()
        self.owner_events.start()
        self.ops.start()

    def stop(self) -> None:
        """End the threads."""
        self.owner_events.stop()
        self.committer.stop()
        self.quota_source.stop()
        self.ops.stop()

    def beat(self) -> None:
        """Say that the event loop runs."""
        self._beat = time.monotonic()

    def refresh_certificate(self) -> None:
        """Look whether the certificate changed."""
        told = self.certificates.refresh()
        if told:
            (self._log.info if self.certificates.is_good else self._log.error)("certificate", told=told)
        in_use = self.certificates.in_use
        self.metrics.certificate_until.set(in_use.not_after.timestamp() if in_use else 0)
        self.metrics.certificate_failures.set(self.certificates.failures)
        self.metrics.quotas_invalid.set(self.quota_source.invalid)

    def decided(self, route: str, request: Request, outcome: AdmissionOutcome, took_s: float) -> None:
        """Count a decision, remember it, and tell whom it concerns."""
        self.metrics.decided(route, request, outcome, took_s)
        self.decisions.note(route, request, outcome)
        if outcome.decision.reasons:
            self.owner_events.enqueue(request, outcome)

    def failed(self, route: str, cause: str) -> None:
        """Count a call without decision."""
        self.metrics.failed(route, cause)

    def show_decisions(self, authorization: str, namespace: str, limit: int) -> HttpReply:
        """Show the last decisions to whoever may see them."""
        try:
            refused = authorization_failure(self._cluster.bounded(self.settings.answer_within_s), authorization, PATH)
        except Unavailable as away:
            return HttpReply(503, f"{away}\n".encode(), TEXT)
        if refused is not None:
            return HttpReply(refused[0], f"{refused[1]}\n".encode(), TEXT)
        return HttpReply(200, msgspec.json.encode({"decisions": self.decisions.shown(namespace, max(0, limit))}))

    def find_pod(self, namespace: str, name: str, within_s: float) -> PodToBind | None:
        """Look a pod up; None if there is none."""
        try:
            found = self._cluster.bounded(within_s).get(PODS, name, namespace)
        except NotFound:
            return None
        return PodToBind(found.metadata.uid, found.metadata.annotations, found.spec)

    def not_live(self) -> list[str]:
        """Say why the process should be started anew; the cluster's state is no reason."""
        silent = time.monotonic() - self._beat
        amiss = [f"the event loop has not run for {silent:.0f} s"] if silent > STUCK_S else []
        return amiss if self.committer.alive else [*amiss, "a thread has ended that charges pods"]

    def not_ready(self) -> list[str]:
        """Say why no call should come here."""
        amiss = []
        if self.draining:
            amiss.append("draining: this process is about to end")
        if not self.certificates.is_good:
            amiss.append(f"no valid certificate for this server in {self.settings.certificates}")
        if not self.quota_source.synced:
            amiss.append("quotas are not yet known")
        return amiss
