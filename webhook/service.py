"""All that one webhook process is made of, put together from the configuration."""

import time
from pathlib import Path

import msgspec
import structlog

from cluster.access import refusal_of
from cluster.errors import NotFound
from cluster.events import Recorder
from cluster.interface import Cluster
from cluster.objects import PODS
from ledger.books import Books
from ledger.committing import Cashier, Charging
from settings.configuration import Configuration
from settings.probes import Probes
from vcuda.decision import Unavailable
from vcuda.language import language
from vcuda.names import names_for
from webhook.admission import Admission, Outcome
from webhook.answering import TEXT, Reply, Responder
from webhook.app import create_app
from webhook.certificates import Certificates
from webhook.decisions import PATH, Decisions
from webhook.front import Front
from webhook.metrics import Metrics
from webhook.policies import ClusterPolicies
from webhook.review import Request
from webhook.rules import Rules
from webhook.telling import Herald
from webhook.validating import Bound

MIB = 2**20
# The event loop says every second that it runs; without a word for so long it is stuck.
STUCK_S = 10.0


def rules_of(configuration: Configuration) -> Rules:
    """Take from the configuration what pods are held to."""
    webhook = configuration.webhook
    return Rules(
        language=language(names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies),
        cluster_mode=configuration.mode,
        system_namespace=configuration.system_namespace,
        scheduler_aliases=webhook.scheduler_aliases,
        tolerations=tuple(msgspec.to_builtins(each) for each in webhook.tolerations),
        binders=webhook.binders,
    )


class Service:
    """The parts of a running webhook, and how it is with them."""

    def __init__(self, configuration: Configuration, cluster: Cluster, charging: Charging | None = None) -> None:
        self.settings = settings = configuration.webhook
        self.rules = rules_of(configuration)
        self.policies = ClusterPolicies(
            cluster, self.rules.language, configuration.system_namespace, configuration.quota_by_default()
        )
        self.cashier = Cashier(Books(cluster, configuration.system_namespace))
        self.metrics = Metrics(self.cashier.counts)
        self._cluster = cluster
        self.decisions = Decisions()
        self.herald = Herald(cluster, Recorder(cluster, "quotient-webhook"))
        self.responder = Responder(
            Admission(self.rules, self.policies),
            self.find_pod,
            charging or self.cashier,
            self,
            settings.answer_within_s,
        )
        self.front = Front(
            create_app(self.responder, settings.max_body_mib * MIB, self.show_decisions),
            max_body=settings.max_body_mib * MIB,
            body_timeout_s=settings.body_timeout_s,
        )
        self.certificates = Certificates(
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
        self.policies.start()
        self.cashier.start()
        self.herald.start()
        self.ops.start()

    def stop(self) -> None:
        """End the threads."""
        self.herald.stop()
        self.cashier.stop()
        self.policies.stop()
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
        self.metrics.quotas_invalid.set(self.policies.invalid)

    def decided(self, route: str, request: Request, outcome: Outcome, took_s: float) -> None:
        """Count a decision, remember it, and tell whom it concerns."""
        self.metrics.decided(route, request, outcome, took_s)
        self.decisions.note(route, request, outcome)
        if outcome.decision.reasons:
            self.herald.note(request, outcome)

    def failed(self, route: str, cause: str) -> None:
        """Count a call without decision."""
        self.metrics.failed(route, cause)

    def show_decisions(self, authorization: str, namespace: str, limit: int) -> Reply:
        """Show the last decisions to whoever may see them."""
        try:
            refused = refusal_of(self._cluster.bounded(self.settings.answer_within_s), authorization, PATH)
        except Unavailable as away:
            return Reply(503, f"{away}\n".encode(), TEXT)
        if refused is not None:
            return Reply(refused[0], f"{refused[1]}\n".encode(), TEXT)
        return Reply(200, msgspec.json.encode({"decisions": self.decisions.shown(namespace, max(0, limit))}))

    def find_pod(self, namespace: str, name: str, within_s: float) -> Bound | None:
        """Look a pod up; None if there is none."""
        try:
            found = self._cluster.bounded(within_s).get(PODS, name, namespace)
        except NotFound:
            return None
        return Bound(found.metadata.uid, found.metadata.annotations, found.spec)

    def not_live(self) -> list[str]:
        """Say why the process should be started anew; the cluster's state is no reason."""
        silent = time.monotonic() - self._beat
        amiss = [f"the event loop has not run for {silent:.0f} s"] if silent > STUCK_S else []
        return amiss if self.cashier.alive else [*amiss, "a thread has ended that charges pods"]

    def not_ready(self) -> list[str]:
        """Say why no call should come here."""
        amiss = []
        if self.draining:
            amiss.append("draining: this process is about to end")
        if not self.certificates.is_good:
            amiss.append(f"no valid certificate for this server in {self.settings.certificates}")
        if not self.policies.synced:
            amiss.append("quotas are not yet known")
        return amiss
