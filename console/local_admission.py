"""Quotient's webhook and controller on an in-memory cluster, in this process: the same code as in a real one."""

import json
import time
from collections.abc import Callable

from msgspec.structs import replace

from cluster.in_memory import InMemoryCluster
from cluster.in_memory_admission import InMemoryWebhook, Review
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, NAMESPACES
from console.quota import Status, read_status
from controller.service import Service as ControllerService
from ledger.committing import LedgerCommitter
from ledger.ledger_store import LedgerStore
from settings.configuration import Configuration
from vcuda.decision import Unavailable
from vcuda.gpu_model import parse_model
from vcuda.names import QUOTA_STATUS, STATUS_KEY
from webhook.admission import Admission
from webhook.metrics import Metrics
from webhook.quota_sources import ClusterQuotaSource
from webhook.responding import JSON, MUTATE, VALIDATE, Responder
from webhook.service import admission_config_of

CALM_S = 10.0
LOOK_S = 0.02
WRITTEN = ("CREATE", "UPDATE")


class LocalAdmission:
    """Admission and accounting on a cluster."""

    def __init__(self, cluster: InMemoryCluster, configuration: Configuration) -> None:
        self._cluster, self._system_namespace = cluster, configuration.system_namespace
        self._rules = rules = admission_config_of(configuration)
        cluster.create(NAMESPACES, {"metadata": {"name": configuration.system_namespace}})
        # Its probes are of no use here, and must not be in anybody's way.
        quiet = replace(configuration.controller, address="127.0.0.1", ops_port=0)
        self._controller = ControllerService(replace(configuration, controller=quiet), cluster)
        default = configuration.parse_default_quota()
        self._quota_source = ClusterQuotaSource(cluster, rules.scheme, configuration.system_namespace, default)
        self._committer = LedgerCommitter(LedgerStore(cluster, configuration.system_namespace))
        admission = Admission(rules, self._quota_source)
        self._responder = Responder(admission, lambda *_: None, self._committer, Metrics(), CALM_S)
        cluster.hooks += [
            InMemoryWebhook("mutate.quotient.dev", self._call(MUTATE), mutating=True, operations=WRITTEN),
            InMemoryWebhook(
                "validate.quotient.dev", self._call(VALIDATE), operations=WRITTEN, resources=("pods", "configmaps")
            ),
        ]

    def start(self) -> None:
        """Begin, and wait until everything is known."""
        self._quota_source.start()
        self._committer.start()
        self._controller.start()
        self._until(lambda: self._quota_source.synced and self._controller.elector.leading)
        self.calm_down()

    def stop(self) -> None:
        """End."""
        self._committer.stop()
        self._quota_source.stop()
        self._controller.stop()

    def calm_down(self) -> None:
        """Wait until the controller has done what there is to do."""
        self._until(lambda: self._controller.quota_controller.idle() and self._controller.quota_controller.lag_s() == 0)

    def status(self, cluster: Cluster) -> dict[str, Status]:
        """Give how namespaces stand with their quotas."""
        return {
            each.metadata.namespace: read_status(each.data.get(STATUS_KEY, ""))
            for each in cluster.list(CONFIG_MAPS).items
            if each.metadata.name == QUOTA_STATUS
        }

    def grants(self, namespace: str, model: str) -> bool:
        """Tell whether a namespace's quotas allow a model at all: what it is not charged for it must not run on."""
        quotas, _ = self._quota_source.quotas(namespace)
        return all(quota.grants(parse_model(model)) for quota in quotas)

    def _until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + CALM_S
        while not condition() and time.monotonic() < until:
            time.sleep(LOOK_S)

    def _call(self, route: str) -> Callable[[Review], Review]:
        def call(asked: Review) -> Review:
            request = asked.get("request", {})
            if request.get("namespace") == self._system_namespace:
                return asked | {"response": {"uid": request.get("uid"), "allowed": True}}
            reply = self._responder.reply(route, JSON, "", json.dumps(asked).encode())
            if reply.status != 200:  # noqa: PLR2004
                raise Unavailable(reply.body.decode().strip())
            answered: Review = json.loads(reply.body)
            return answered

        return call
