"""Builds all parts of a controller process from the configuration, and starts and stops them."""

import gc
import os
import socket
import threading

import structlog

from cluster.events import EventRecorder
from cluster.interface import Cluster
from cluster.leader_election import ElectionTimings, LeaderElector
from controller.certificate_controller import CertificateController, CertificateTerms
from controller.metrics import Metrics
from controller.owner_refs import OwnerReferences
from controller.path_controller import PathController, PathTerms
from controller.quota_controller import QuotaController
from controller.workload_retrier import WorkloadRetrier
from ledger.ledger_store import LedgerStore
from ledger.quota_cache import QuotaCache
from settings.configuration import Configuration
from settings.probes import Probes
from vcuda.names import CONTROLLER, names_for
from vcuda.scheme import build_scheme

# The caches of a large cluster are long-lived objects: with Python's default thresholds, traversing them again and
# again costs more than all other work of this process.
GC_THRESHOLDS = (50_000, 20, 20)


class Service:
    """The parts of a controller process. Any number of replicas may run; the elected leader reconciles."""

    def __init__(self, configuration: Configuration, cluster: Cluster, terms: ElectionTimings | None = None) -> None:
        scheme = build_scheme(
            names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies
        )
        owners = OwnerReferences(cluster)
        ledger_store = LedgerStore(cluster, configuration.system_namespace)
        self.quotas = QuotaCache(cluster, scheme, configuration.parse_default_quota(), ledger_store)
        self.elector = LeaderElector(
            cluster,
            CONTROLLER,
            configuration.system_namespace,
            configuration.controller.identity or f"{socket.gethostname()}-{os.getpid()}",
            timings=terms,
            on_start=self._on_started_leading,
            owners=owners,
        )
        self.quota_controller = QuotaController(
            cluster,
            scheme,
            configuration.system_namespace,
            self.quotas,
            EventRecorder(cluster, CONTROLLER),
            cluster_mode=configuration.mode,
            is_leading=lambda: self.elector.leading,
            owners=owners,
        )
        settings = configuration.controller
        self.retrier = (
            WorkloadRetrier(cluster, scheme, self.quota_controller.caches, is_leading=lambda: self.elector.leading)
            if settings.retry_workloads
            else None
        )
        self.certificates = CertificateController(
            cluster,
            configuration.system_namespace,
            CertificateTerms(
                names=configuration.served_names(),
                port=configuration.webhook.port,
                monitor_names=configuration.monitor_names(),
                managed=configuration.certificates.manage,
                settle_s=configuration.certificates.settle_s,
            ),
            is_leading=lambda: self.elector.leading,
            owners=owners,
        )
        self.paths = PathController(
            cluster,
            configuration.system_namespace,
            PathTerms(rotation_s=configuration.webhook.path_rotation_s, ops_port=configuration.webhook.ops_port),
            is_leading=lambda: self.elector.leading,
        )
        self.metrics = Metrics(
            self.quota_controller.ledgers,
            self.quota_controller.lag_s,
            lambda: self.elector.leading,
            lambda: self.certificates.status,
            self.retrier,
        )
        self.probes = Probes(settings.address, settings.ops_port, self.metrics.registry, self.not_live, self.not_ready)
        self.ending = threading.Event()
        self._log = structlog.get_logger()

    def start(self) -> "Service":
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self.probes.start()
        self.quotas.start()
        self.quota_controller.start()
        if self.retrier is not None:
            self.retrier.start()
        self.certificates.start()
        self.paths.start()
        # Last: the elector's callback needs the others.
        self.elector.start()
        self._log.info("controller_started", identity=self.elector.identity, ops_port=self.probes.port)
        return self

    def _on_started_leading(self) -> None:
        self.quota_controller.reconcile_all()
        if self.retrier is not None:
            self.retrier.retry_all()
        self.certificates.enqueue()
        self.paths.enqueue()

    def stop(self) -> None:
        """Stop all threads, and release the lease so that another replica leads at once."""
        self.paths.stop()
        self.certificates.stop()
        self.elector.stop()
        if self.retrier is not None:
            self.retrier.stop()
        self.quota_controller.stop()
        self.quotas.stop()
        self.probes.stop()

    def run(self) -> None:
        """Serve until `ending` is set."""
        self.start()
        self.ending.wait()
        self.stop()

    def not_live(self) -> list[str]:
        """Return why the process should be restarted; empty if it should not."""
        problems = [] if self.quota_controller.alive else ["a thread of the quota controller has stopped"]
        if not self.certificates.alive:
            problems.append("a thread of the certificate controller has stopped")
        if self.retrier is not None and not self.retrier.alive:
            problems.append("a thread that retries workloads has stopped")
        if not self.paths.alive:
            problems.append("a thread of the path controller has stopped")
        return problems if self.elector.alive else [*problems, "the thread of the leader election has stopped"]

    def not_ready(self) -> list[str]:
        """Return what is missing until this replica could lead; a standby is ready, too."""
        return [] if self.quota_controller.caches.synced else ["the caches are not synced yet"]
