"""Quotient's webhook and controller on an in-memory cluster, in this process: the same code as in a real one."""

import json
import time
from collections.abc import Callable

from msgspec.structs import replace

from cluster.admission import Hook, Review
from cluster.interface import Cluster
from cluster.memory import MemoryCluster
from cluster.objects import CONFIG_MAPS, NAMESPACES
from console.quotas import Status, read_status
from controller.service import Service as ControllerService
from ledger.books import Books
from ledger.committing import Cashier
from settings.configuration import Configuration
from vcuda.decision import Unavailable
from vcuda.model import parse_model
from vcuda.names import QUOTA_STATUS, STATUS_KEY
from webhook.admission import Admission
from webhook.answering import JSON, MUTATE, VALIDATE, Responder
from webhook.metrics import Metrics
from webhook.policies import ClusterPolicies
from webhook.service import rules_of

CALM_S = 10.0
LOOK_S = 0.02
WRITTEN = ("CREATE", "UPDATE")


class Governed:
    """Admission and accounting on a cluster."""

    def __init__(self, cluster: MemoryCluster, configuration: Configuration) -> None:
        self._cluster, self._system_namespace = cluster, configuration.system_namespace
        self._rules = rules = rules_of(configuration)
        cluster.create(NAMESPACES, {"metadata": {"name": configuration.system_namespace}})
        # Its probes are of no use here, and must not be in anybody's way.
        quiet = replace(configuration.controller, address="127.0.0.1", ops_port=0)
        self._controller = ControllerService(replace(configuration, controller=quiet), cluster)
        default = configuration.quota_by_default()
        self._policies = ClusterPolicies(cluster, rules.language, configuration.system_namespace, default)
        self._cashier = Cashier(Books(cluster, configuration.system_namespace))
        admission = Admission(rules, self._policies)
        self._responder = Responder(admission, lambda *_: None, self._cashier, Metrics(), CALM_S)
        cluster.hooks += [
            Hook("mutate.quotient.dev", self._call(MUTATE), mutating=True, operations=WRITTEN),
            Hook("validate.quotient.dev", self._call(VALIDATE), operations=WRITTEN, resources=("pods", "configmaps")),
        ]

    def start(self) -> None:
        """Begin, and wait until everything is known."""
        self._policies.start()
        self._cashier.start()
        self._controller.start()
        self._until(lambda: self._policies.synced and self._controller.elector.leading)
        self.calm_down()

    def stop(self) -> None:
        """End."""
        self._cashier.stop()
        self._policies.stop()
        self._controller.stop()

    def calm_down(self) -> None:
        """Wait until the controller has done what there is to do."""
        self._until(lambda: self._controller.keeper.idle() and self._controller.keeper.lag_s() == 0)

    def status(self, cluster: Cluster) -> dict[str, Status]:
        """Give how namespaces stand with their quotas."""
        return {
            each.metadata.namespace: read_status(each.data.get(STATUS_KEY, ""))
            for each in cluster.list(CONFIG_MAPS).items
            if each.metadata.name == QUOTA_STATUS
        }

    def grants(self, namespace: str, model: str) -> bool:
        """Tell whether a namespace's quotas allow a model at all: what it is not charged for it must not run on."""
        quotas, _ = self._policies.quotas(namespace)
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
