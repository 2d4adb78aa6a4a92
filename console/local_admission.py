"""Quotient's webhook and controller on an in-memory cluster, in this process: the same code as in a real cluster."""

import json
import time
from collections.abc import Callable

from msgspec.structs import replace

from cluster.in_memory import InMemoryCluster
from cluster.in_memory_admission import InMemoryWebhook, Review
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, NAMESPACES
from console.quota_status_view import QuotaStatus, read_status
from controller.service import Service as ControllerService
from ledger.committing import LedgerCommitter
from ledger.ledger_store import LedgerStore
from settings.configuration import Configuration
from vcuda.decision import Unavailable
from vcuda.names import API_GROUP, QUOTA_STATUS, STATUS_KEY
from vcuda.webhook_paths import MUTATE, VALIDATE
from webhook.admission import Admission
from webhook.metrics import Metrics
from webhook.quota_sources import ClusterQuotaSource
from webhook.responding import JSON, Responder
from webhook.service import admission_config_of

TIMEOUT_S = 10.0
POLL_S = 0.02
OPERATIONS = ("CREATE", "UPDATE")


class LocalAdmission:
    """The webhook and the controller of one in-memory cluster."""

    def __init__(self, cluster: InMemoryCluster, configuration: Configuration) -> None:
        self._cluster, self._system_namespace = cluster, configuration.system_namespace
        self._config = config = admission_config_of(configuration)
        cluster.create(NAMESPACES, {"metadata": {"name": configuration.system_namespace}})
        # The probes need a port; any free one on loopback, so that they cannot collide with another process.
        probes = replace(configuration.controller, address="127.0.0.1", ops_port=0)
        self._controller = ControllerService(replace(configuration, controller=probes), cluster)
        default = configuration.parse_default_quota()
        self._quota_source = ClusterQuotaSource(cluster, config.scheme, configuration.system_namespace, default)
        self._committer = LedgerCommitter(LedgerStore(cluster, configuration.system_namespace))
        admission = Admission(config, self._quota_source)
        self._responder = Responder(admission, lambda *_: None, self._committer, Metrics(), TIMEOUT_S)
        cluster.hooks += [
            InMemoryWebhook(f"mutate.{API_GROUP}", self._caller(MUTATE), mutating=True, operations=OPERATIONS),
            InMemoryWebhook(
                f"validate.{API_GROUP}",
                self._caller(VALIDATE),
                operations=OPERATIONS,
                resources=("pods", "configmaps"),
            ),
        ]

    def start(self) -> None:
        """Start, and wait until the caches are synced and the controller is idle."""
        self._quota_source.start()
        self._committer.start()
        self._controller.start()
        self._wait_until(lambda: self._quota_source.synced and self._controller.elector.leading)
        self.wait_idle()

    def stop(self) -> None:
        self._committer.stop()
        self._quota_source.stop()
        self._controller.stop()

    def wait_idle(self) -> None:
        """Wait until the controller has reconciled every change."""
        controller = self._controller.quota_controller
        self._wait_until(lambda: controller.idle() and controller.lag_s() == 0)

    def statuses(self, cluster: Cluster) -> dict[str, QuotaStatus]:
        """Return the quota status of each namespace."""
        return {
            each.metadata.namespace: read_status(each.data.get(STATUS_KEY, ""))
            for each in cluster.list(CONFIG_MAPS).items
            if each.metadata.name == QUOTA_STATUS
        }

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _caller(self, route: str) -> Callable[[Review], Review]:
        def call(review: Review) -> Review:
            request = review.get("request", {})
            # A real registration excludes this namespace with a namespaceSelector.
            if request.get("namespace") == self._system_namespace:
                return review | {"response": {"uid": request.get("uid"), "allowed": True}}
            # What a user of this process may not know, it does not contain.
            reply = self._responder.reply(route, JSON, "", json.dumps(review).encode(), is_known=True)
            if reply.status != 200:  # noqa: PLR2004
                raise Unavailable(reply.body.decode().strip())
            response: Review = json.loads(reply.body)
            return response

        return call
