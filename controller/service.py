"""All that one controller process is made of, put together from the configuration."""

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
from controller.quota_controller import QuotaController
from ledger.ledger_store import LedgerStore
from ledger.quota_cache import QuotaCache
from settings.configuration import Configuration
from settings.probes import Probes
from vcuda.names import names_for
from vcuda.scheme import build_scheme

LEASE = "quotient-controller"
GARBAGE = (50_000, 20, 20)


class Service:
    """The parts of a running controller, and how it is with them."""

    def __init__(self, configuration: Configuration, cluster: Cluster, terms: ElectionTimings | None = None) -> None:
        scheme = build_scheme(
            names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies
        )
        owners = OwnerReferences(cluster)
        ledger_store = LedgerStore(cluster, configuration.system_namespace)
        self.quotas = QuotaCache(cluster, scheme, configuration.parse_default_quota(), ledger_store)
        self.elector = LeaderElector(
            cluster,
            LEASE,
            configuration.system_namespace,
            configuration.controller.identity or f"{socket.gethostname()}-{os.getpid()}",
            timings=terms,
            on_start=self._begin_to_lead,
            owners=owners,
        )
        self.quota_controller = QuotaController(
            cluster,
            scheme,
            configuration.system_namespace,
            self.quotas,
            EventRecorder(cluster, "quotient-controller"),
            cluster_mode=configuration.mode,
            is_leading=lambda: self.elector.leading,
            owners=owners,
        )
        self.certificates = CertificateController(
            cluster,
            configuration.system_namespace,
            CertificateTerms(
                names=configuration.served_names(),
                port=configuration.webhook.port,
                managed=configuration.certificates.manage,
                settle_s=configuration.certificates.settle_s,
            ),
            is_leading=lambda: self.elector.leading,
            owners=owners,
        )
        self.metrics = Metrics(
            self.quota_controller.ledgers,
            self.quota_controller.lag_s,
            lambda: self.elector.leading,
            lambda: self.certificates.found,
        )
        settings = configuration.controller
        self.probes = Probes(settings.address, settings.ops_port, self.metrics.registry, self.not_live, self.not_ready)
        self.ending = threading.Event()
        self._log = structlog.get_logger()

    def start(self) -> "Service":
        """Begin."""
        # A large cluster is held in memory for long: looking through it for garbage at every turn would cost more than
        # all other work.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GARBAGE)
        self.probes.start()
        self.quotas.start()
        self.quota_controller.start()
        self.certificates.start()
        self.elector.start()
        self._log.info("controller_started", identity=self.elector.identity, ops_port=self.probes.port)
        return self

    def _begin_to_lead(self) -> None:
        self.quota_controller.look_at_everything()
        self.certificates.look_again()

    def stop(self) -> None:
        """End, and leave the lease to another."""
        self.certificates.stop()
        self.elector.stop()
        self.quota_controller.stop()
        self.quotas.stop()
        self.probes.stop()

    def run(self) -> None:
        """Serve until told to end."""
        self.start()
        self.ending.wait()
        self.stop()

    def not_live(self) -> list[str]:
        """Say why the process should be started anew."""
        amiss = [] if self.quota_controller.alive else ["a thread has ended that keeps the ledgers"]
        if not self.certificates.alive:
            amiss.append("a thread has ended that keeps the certificates")
        return amiss if self.elector.alive else [*amiss, "the elector has ended"]

    def not_ready(self) -> list[str]:
        """Say what is not known yet; a standby is ready, too."""
        return [] if self.quota_controller.caches.synced else ["the cluster is not yet known"]
