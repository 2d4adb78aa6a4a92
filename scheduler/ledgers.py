"""The ledgers of all namespaces, as the scheduler reads them: whether a pod is charged, and for which GPU models.

A ledger is decoded only when a pod of its namespace is filtered: a busy namespace writes it many times a second.
"""

import copy
import threading
from collections.abc import Callable, Mapping

import structlog
from msgspec import Struct
from msgspec.structs import replace

from cluster.informer import Informer
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, ConfigMap
from ledger.ledger_store import LEDGER_SELECTOR, ledger_namespace
from vcuda.charge_moves import is_covered, move_problems
from vcuda.charging import PodDemand
from vcuda.decision import Reason
from vcuda.dimensions import CORES, MEMORY
from vcuda.gpu_model import parse_model
from vcuda.ledger import PodKey
from vcuda.ledger_snapshot import LedgerSnapshot, decode_snapshot
from vcuda.names import LEDGER_KEY, LEDGER_PREFIX
from vcuda.namespace_policy import Mode
from vcuda.placement_strategies import PlacementStrategy
from vcuda.quota_usage import Charge, QuotaUsage
from vcuda.request import PodRequest

# A ledger is written before its pod is created, but the two arrive by different watches. A pod that is filtered before
# its ledger has arrived would have to be requeued, which takes longer than this wait.
CHARGE_WAIT_S = 0.1
# After a wait in vain, no pod is waited for: others must not be held up again and again.
NO_WAIT_S = 10.0


class Grant(Struct, frozen=True):
    """What the quota of its namespace allows a pod.

    `models` are the GPU models it may be placed on, None means all; `refusals` the reasons against each of the others.
    """

    is_charged: bool
    models: frozenset[str] | None = None
    pools: tuple[str, ...] | None = None
    refusals: Mapping[str, tuple[Reason, ...]] = {}
    # Which nodes and GPUs its quotas prefer; None means as the configuration says.
    placement: PlacementStrategy | None = None


class LedgerCache:
    """Follows the ledgers. `on_change` is called with the namespace of every ledger that changes."""

    def __init__(self, cluster: Cluster, system_namespace: str, cluster_mode: Mode, clock: Callable[[], float]) -> None:
        self._system_namespace, self._cluster_mode, self._clock = system_namespace, cluster_mode, clock
        self.informer: Informer[ConfigMap] = Informer(cluster, CONFIG_MAPS, system_namespace, LEDGER_SELECTOR)
        self.informer.on_change(self._handle)
        # Guards the fields below, and is notified when a ledger changes; `_generation` counts these changes.
        self._changed = threading.Condition()
        self._generation = 0
        self._snapshots: dict[str, tuple[str, LedgerSnapshot | None]] = {}
        self._no_wait_until = 0.0
        self.on_change: Callable[[str], None] = lambda _: None
        self._log = structlog.get_logger()

    def _handle(self, old: ConfigMap | None, new: ConfigMap | None) -> None:
        config_map = new or old
        if config_map is None:
            return
        namespace = ledger_namespace(config_map)
        with self._changed:
            self._snapshots.pop(namespace, None)
            self._generation += 1
            self._changed.notify_all()
        self.on_change(namespace)

    def version(self, namespace: str) -> str:
        """Return the resourceVersion of a namespace's ledger; empty if it has none."""
        config_map = self.informer.get(LEDGER_PREFIX + namespace, self._system_namespace)
        return config_map.metadata.resource_version if config_map else ""

    def snapshot(self, namespace: str) -> LedgerSnapshot | None:
        """Return the current ledger of a namespace; None if it has none, or it is not valid."""
        config_map = self.informer.get(LEDGER_PREFIX + namespace, self._system_namespace)
        if config_map is None:
            return None
        version = config_map.metadata.resource_version
        with self._changed:
            cached = self._snapshots.get(namespace)
        if cached is not None and cached[0] == version:
            return cached[1]
        try:
            snapshot: LedgerSnapshot | None = decode_snapshot(config_map.data.get(LEDGER_KEY, ""))
        except ValueError as error:
            self._log.warning("ledger_invalid", namespace=namespace, error=str(error))
            snapshot = None
        with self._changed:
            self._snapshots[namespace] = version, snapshot
        return snapshot

    def needs_charge(self, namespace: str, snapshot: LedgerSnapshot | None) -> bool:
        """Whether pods of a namespace are bound only if they are charged: not in audit mode, nor our own."""
        if namespace == self._system_namespace:
            return False
        if snapshot is None:
            return self._cluster_mode is Mode.ENFORCE
        return snapshot.policy.effective_mode(self._cluster_mode) is Mode.ENFORCE

    @property
    def may_wait(self) -> bool:
        """Whether charges are waited for, as none was waited for in vain a moment ago."""
        return self._clock() >= self._no_wait_until

    def wait_for_charge(self, namespace: str, pod: PodKey) -> Charge | None:
        """Return the charge of a pod; waits a moment for a ledger that may be on its way."""
        deadline = self._clock() + CHARGE_WAIT_S
        while True:
            generation, snapshot = self._generation, self.snapshot(namespace)
            if snapshot is not None and (charge := snapshot.charge(pod)) is not None:
                return charge
            with self._changed:
                now = self._clock()
                if now < self._no_wait_until:
                    return None
                if now >= deadline:
                    self._no_wait_until = now + NO_WAIT_S
                    return None
                if generation == self._generation:
                    self._changed.wait(deadline - now)

    def grant(
        self,
        namespace: str,
        pod: PodKey,
        request: PodRequest,
        unit_mib: int,
        cards: Mapping[str, int],
        *,
        waits: bool = True,
    ) -> Grant:
        """Return what the quota allows a pod, given the memory of the largest GPU of each model."""
        snapshot = self.snapshot(namespace)
        if not self.needs_charge(namespace, snapshot):
            if snapshot is None or namespace == self._system_namespace:
                return Grant(is_charged=True)
            return Grant(is_charged=True, pools=snapshot.policy.pools, placement=snapshot.policy.placement or None)
        if waits:
            charge = self.wait_for_charge(namespace, pod)
        else:
            charge = snapshot.charge(pod) if snapshot is not None else None
        # Read again: the charge may have arrived with a newer one.
        snapshot = self.snapshot(namespace)
        if charge is None or snapshot is None:
            return Grant(is_charged=False)
        models, refusals = granted_models(snapshot, charge, PodDemand(request, unit_mib), cards)
        policy = snapshot.policy
        return Grant(
            is_charged=True,
            models=models,
            pools=policy.pools,
            refusals=refusals,
            placement=policy.placement or None,
        )


class TrialCharges:
    """Charges of pods that are tried together, on top of the ledgers: what one is granted, the next cannot have."""

    def __init__(self, ledgers: LedgerCache) -> None:
        self._ledgers = ledgers
        self._usages: dict[str, QuotaUsage] = {}

    def move(self, namespace: str, pod: PodKey, wanted: Charge) -> bool:
        """Charge a pod for the model it is placed on; returns whether its quota allows that."""
        snapshot = self._ledgers.snapshot(namespace)
        held = snapshot.charge(pod) if snapshot else None
        if snapshot is None or held is None or not self._ledgers.needs_charge(namespace, snapshot):
            return True
        usage = self._usages.get(namespace) or copy.copy(snapshot.usage)
        if not is_covered(usage, held, wanted):
            if move_problems(usage, held, wanted):
                return False
            usage.taken += usage.charged_by_limit(replace(wanted, moved_from=held)) - usage.charged_by_limit(held)
        self._usages[namespace] = usage
        return True


def granted_models(
    snapshot: LedgerSnapshot, charge: Charge, demand: PodDemand, cards: Mapping[str, int]
) -> tuple[frozenset[str] | None, dict[str, tuple[Reason, ...]]]:
    """Return the models to which a charged pod can be bound, and why not to each of the others."""
    usage = snapshot.usage
    if not usage.quotas:
        return None, {}
    refusals: dict[str, tuple[Reason, ...]] = {}
    for model, card_mib in cards.items():
        wanted = charge_for(model, demand, card_mib)
        if not is_covered(usage, charge, wanted) and (reasons := move_problems(usage, charge, wanted)):
            refusals[model] = reasons
    return frozenset(cards).difference(refusals), refusals


def charge_for(model: str, demand: PodDemand, card_mib: int) -> Charge:
    """Return the charge of a pod that is placed on GPUs of a model with this much memory."""
    amounts = demand(card_mib)
    return Charge(parse_model(model).name, amounts[CORES], amounts[MEMORY])
