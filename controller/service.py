"""All that one controller process is made of, put together from the configuration."""

import gc
import os
import socket
import threading

import structlog

from cluster import election
from cluster.election import Elector
from cluster.events import Recorder
from cluster.interface import Cluster
from controller.certificates import CertificateKeeper, Terms
from controller.keeping import Keeper
from controller.metrics import Metrics
from controller.owning import Ownership
from ledger.books import Books
from ledger.following import QuotaFollower
from settings.configuration import Configuration
from settings.probes import Probes
from vcuda.language import language
from vcuda.names import names_for

LEASE = "quotient-controller"
GARBAGE = (50_000, 20, 20)


class Service:
    """The parts of a running controller, and how it is with them."""

    def __init__(self, configuration: Configuration, cluster: Cluster, terms: election.Terms | None = None) -> None:
        spoken = language(names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies)
        owners = Ownership(cluster)
        books = Books(cluster, configuration.system_namespace)
        self.quotas = QuotaFollower(cluster, spoken, configuration.quota_by_default(), books)
        self.elector = Elector(
            cluster,
            LEASE,
            configuration.system_namespace,
            configuration.controller.identity or f"{socket.gethostname()}-{os.getpid()}",
            terms=terms,
            on_start=self._begin_to_lead,
            owners=owners,
        )
        self.keeper = Keeper(
            cluster,
            spoken,
            configuration.system_namespace,
            self.quotas,
            Recorder(cluster, "quotient-controller"),
            cluster_mode=configuration.mode,
            is_leading=lambda: self.elector.leading,
            owners=owners,
        )
        self.certificates = CertificateKeeper(
            cluster,
            configuration.system_namespace,
            Terms(
                names=configuration.served_names(),
                port=configuration.webhook.port,
                managed=configuration.certificates.manage,
                settle_s=configuration.certificates.settle_s,
            ),
            is_leading=lambda: self.elector.leading,
            owners=owners,
        )
        self.metrics = Metrics(
            self.keeper.ledgers, self.keeper.lag_s, lambda: self.elector.leading, lambda: self.certificates.found
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
        self.keeper.start()
        self.certificates.start()
        self.elector.start()
        self._log.info("controller_started", identity=self.elector.identity, ops_port=self.probes.port)
        return self

    def _begin_to_lead(self) -> None:
        self.keeper.look_at_everything()
        self.certificates.look_again()

    def stop(self) -> None:
        """End, and leave the lease to another."""
        self.certificates.stop()
        self.elector.stop()
        self.keeper.stop()
        self.quotas.stop()
        self.probes.stop()

    def run(self) -> None:
        """Serve until told to end."""
        self.start()
        self.ending.wait()
        self.stop()

    def not_live(self) -> list[str]:
        """Say why the process should be started anew."""
        amiss = [] if self.keeper.alive else ["a thread has ended that keeps the ledgers"]
        if not self.certificates.alive:
            amiss.append("a thread has ended that keeps the certificates")
        return amiss if self.elector.alive else [*amiss, "the elector has ended"]

    def not_ready(self) -> list[str]:
        """Say what is not known yet; a standby is ready, too."""
        return [] if self.keeper.sight.synced else ["the cluster is not yet known"]
