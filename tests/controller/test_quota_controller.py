"""The quota controller on an in-memory cluster: how ledger, status and catalogue follow pods, quotas and nodes."""

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cluster.errors import NotFound
from cluster.in_memory import InMemoryCluster
from cluster.interface import Selector
from cluster.objects import CONFIG_MAPS, NAMESPACES, NODES, PODS
from controller import accounting
from controller.service import Service
from ledger.ledger_store import LedgerStore
from settings.configuration import Configuration, ControllerSettings
from tests.waiting import eventually
from vcuda.catalogue import decode_catalogue
from vcuda.charge_moves import extend_charge
from vcuda.decision import Unavailable
from vcuda.dimensions import CORES, MEMORY
from vcuda.ledger import Ledger, LedgerState, decode_ledger, pack_uid
from vcuda.names import (
    CATALOGUE,
    CATALOGUE_KEY,
    LEDGER_KEY,
    LEDGER_PREFIX,
    LEDGER_REGISTRY,
    QUOTA_STATUS,
    STATUS_KEY,
    Names,
)
from vcuda.quota_usage import Charge
from vcuda.strict_yaml import parse_documents
from vcuda.unconfirmed import ExpiredAmounts

TEAM, SYSTEM = "team", "quotient-system"
NAMES = Names()
CONFIGURATION = Configuration(controller=ControllerSettings(address="127.0.0.1", ops_port=0))

Obj = dict[str, Any]


class World:
    """An in-memory cluster, and a controller service that can be started and stopped."""

    def __init__(self) -> None:
        self.cluster = InMemoryCluster()
        for name in (TEAM, SYSTEM):
            self.cluster.create(NAMESPACES, {"metadata": {"name": name}})
        self.service: Service | None = None

    def start(self, configuration: Configuration = CONFIGURATION) -> None:
        self.service = Service(configuration, self.cluster).start()

    def stop(self) -> None:
        if self.service is not None:
            self.service.stop()
            self.service = None

    def quota(self, text: str, name: str = "q", label: str = NAMES.quota_label, namespace: str = TEAM) -> None:
        metadata = {"name": name, "namespace": namespace, "labels": {label: "true"}}
        try:
            self.cluster.patch(CONFIG_MAPS, name, namespace, {"data": {"quota.yaml": text}})
        except NotFound:
            self.cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {"quota.yaml": text}})

    def pod(
        self, name: str, core: int = 100, memory: int = 1, models: str = "", namespace: str = TEAM, **spec: Any
    ) -> str:
        limits = {NAMES.core: str(core), NAMES.memory: str(memory)}
        container = {"name": "c", "image": "i", "resources": {"limits": limits, "requests": limits}}
        annotations = {NAMES.use_models: models} if models else {}
        made = {
            "metadata": {"name": name, "namespace": namespace, "annotations": annotations},
            "spec": {"containers": [container], **spec},
        }
        return self.cluster.create(PODS, made).metadata.uid

    def node(self, name: str, *gpus: tuple[str, int], **labels: str) -> None:
        cards = [
            {"uuid": f"GPU-{name}-{index}", "index": index, "model": model, "memoryMiB": mib, "healthy": True}
            for index, (model, mib) in enumerate(gpus)
        ]
        annotations = {NAMES.inventory: json.dumps({"v": 1, "gpus": cards})} if cards else {}
        keyed = {key.replace("__", "/").replace("_", "-"): value for key, value in labels.items()}
        self.cluster.create(NODES, {"metadata": {"name": name, "annotations": annotations, "labels": keyed}})

    def ledger(self, namespace: str = TEAM) -> Ledger:
        config_map = self.cluster.get(CONFIG_MAPS, LEDGER_PREFIX + namespace, SYSTEM)
        return decode_ledger(config_map.data[LEDGER_KEY])

    def taken(self, line: str, dimension: str = CORES, quota: str = "team/q") -> int:
        """Return what is charged to a line; -1 without a ledger."""
        try:
            return self.ledger().usage.taken[quota, line, dimension]
        except NotFound:
            return -1

    def hard(self, line: str, quota: str = "kube-system/gpuquota") -> int | None:
        try:
            return self.ledger().usage.hard.get((quota, line, CORES))
        except NotFound:
            return None

    def status(self) -> Obj:
        try:
            config_map = self.cluster.get(CONFIG_MAPS, QUOTA_STATUS, TEAM)
        except NotFound:
            return {}
        return dict(parse_documents(config_map.data[STATUS_KEY])[0])


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.stop()


def test_pods_from_before_quotient_are_charged(world: World) -> None:
    """To the model in the node's inventory or in its labels; on an unknown node to the first one the pod names."""
    world.quota("types: {A100: {cores: 100}, T4: {cores: 100}, V100: {cores: 100}}")
    world.node("a", ("NVIDIA A100-SXM4-40GB", 40960))
    world.node("b", nvidia_com__gpu_product="x")
    world.cluster.patch(NODES, "b", "", {"metadata": {"labels": {"nvidia.com/gpu.product": "Tesla-T4"}}})
    world.pod("on-a", nodeName="a")
    world.pod("on-b", nodeName="b")
    world.pod("somewhere", nodeName="unknown", models="V100")
    world.start()
    for line in ("A100", "T4", "V100"):
        eventually(lambda line=line: world.taken(line) == 100, line)  # type: ignore[misc]


def test_a_whole_card_is_charged_all_of_its_memory(world: World) -> None:
    """Before the bind that of the largest matching card, afterwards that of its own."""
    world.quota("types: {A100: {cores: 400, memory: 400Gi}}")
    world.node("small", ("A100-PCIE-40GB", 40960))
    world.node("large", ("A100-PCIE-80GB", 81920))
    world.start()
    eventually(world.status, "the quota")
    uid = world.pod("p", models="A100")
    eventually(lambda: world.taken("A100", MEMORY) == 81920, "the memory of the largest card")
    placement = {"v": 1, "containers": {"c": [{"uuid": "GPU-small-0", "cores": 100, "memoryMiB": 40960}]}}
    world.cluster.bind("p", TEAM, "small", uid=uid, annotations={NAMES.placement: json.dumps(placement)})
    eventually(lambda: world.taken("A100", MEMORY) == 40960, "the memory of its own card")


def test_the_catalogue_lists_the_cards_of_all_nodes(world: World) -> None:
    """Model, memory and pool; it follows when nodes change."""
    world.node("a", ("Tesla T4", 15360), ("Tesla T4", 15360), inspur_com__gpu_pool="x")
    world.cluster.patch(NODES, "a", "", {"metadata": {"labels": {NAMES.pool_label: "training"}}})
    world.start()

    def cards() -> list[tuple[str, int, str]]:
        try:
            config_map = world.cluster.get(CONFIG_MAPS, CATALOGUE, SYSTEM)
        except NotFound:
            return []
        return [(card.model, card.memory_mib, card.pool) for card in decode_catalogue(config_map.data[CATALOGUE_KEY])]

    eventually(lambda: cards() == [("Tesla T4", 15360, "training")], "the catalogue")
    world.cluster.delete(NODES, "a")
    eventually(lambda: cards() == [], "the cards of the deleted node to go")


def test_the_quota_label_of_every_domain_counts(world: World) -> None:
    """A quota with several of these labels counts once."""
    world.quota("types: {A100: {cores: 10}}", "ours")
    world.quota("types: {A100: {cores: 20}}", "theirs", "tencent.com/gpu-quota")
    world.cluster.patch(CONFIG_MAPS, "ours", TEAM, {"metadata": {"labels": {"nvidia.com/gpu-quota": "true"}}})
    world.start()
    eventually(lambda: [each["name"] for each in world.status().get("quotas", [])] == ["team/ours", "team/theirs"])


def test_an_invalid_quota_leaves_its_last_valid_version_in_force_over_a_restart(world: World) -> None:
    """The ledger holds that version, and the status shows the mistake."""
    world.quota("types: {A100: {cores: 10}}")
    world.start()
    eventually(world.status, "the quota")
    world.stop()
    world.quota("types: {A100: {core: 99}}")
    world.start()
    eventually(lambda: "core" in str(world.status()["notes"]), "the note")
    assert world.ledger().quotas[0].types == {"A100": {"cores": 10}}
    world.quota("types: {A100: {cores: 20}}")
    eventually(lambda: world.ledger().quotas[0].types == {"A100": {"cores": 20}}, "the valid quota")


def test_deleting_a_quota_removes_its_limits_and_the_status(world: World) -> None:
    """The charges stay in the ledger, for the next quota."""
    world.quota("types: {A100: {cores: 10}}")
    world.pod("p", nodeName="n", models="A100")
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")
    world.cluster.delete(CONFIG_MAPS, "q", TEAM)
    eventually(lambda: not world.status() and not world.ledger().quotas, "the quota to go")
    assert len(world.ledger()) == 1


def test_a_namespace_without_a_quota_gets_the_configured_default(world: World) -> None:
    """Until it has a quota of its own."""
    world.pod("p", nodeName="n", models="A100")
    world.start(Configuration(controller=CONFIGURATION.controller, default_quota="types: {A100: {cores: 150}}"))
    eventually(lambda: world.taken("A100", quota="configuration/defaultQuota") == 100, "the default quota")
    world.quota("types: {A100: {cores: 10}}")
    eventually(lambda: world.taken("A100") == 100, "its own quota")


def test_an_invalid_ledger_is_rebuilt(world: World) -> None:
    """Closed at first, like one that was lost."""
    world.quota("types: {A100: {cores: 100}}")
    world.pod("p", nodeName="n", models="A100")
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")
    world.cluster.patch(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM, {"data": {LEDGER_KEY: "invalid"}})

    def is_closed() -> bool:
        try:
            return world.ledger().state is LedgerState.REBUILDING
        except (ValueError, NotFound):
            return False

    eventually(is_closed, "a new ledger")
    assert world.taken("A100") == 100
    eventually(lambda: "being rebuilt" in str(world.status()["notes"]), "the status to say so")


def test_a_ledger_with_wrong_charges_is_corrected(world: World) -> None:
    """Charges without a pod are removed, and missing ones are added."""
    world.quota("types: {A100: {cores: 1000}}")
    world.pod("p", nodeName="n", models="A100")
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")
    config_map = world.cluster.get(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM)
    (key,) = world.ledger().pods()
    forged = config_map.data[LEDGER_KEY].replace(key, "A" * 22)
    world.cluster.patch(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM, {"data": {LEDGER_KEY: forged}})
    eventually(lambda: set(world.ledger().pods()) == {key}, "the right charges")


def test_static_pods_are_not_charged(world: World) -> None:
    """The kubelet runs them without admission."""
    world.quota("types: {A100: {cores: 1000}}")
    uid = world.pod("static", nodeName="n", models="A100")
    world.cluster.patch(PODS, "static", TEAM, {"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}})
    world.start()
    eventually(world.status, "the quota")
    world.pod("p", nodeName="n", models="A100")
    eventually(lambda: world.taken("A100") == 100, "the other pod")
    assert uid


def test_quotients_own_namespace_has_no_ledger_and_causes_no_lag(world: World) -> None:
    world.quota("types: {A100: {cores: 1000}}")
    world.start()
    eventually(world.status, "the quota")
    assert world.service is not None
    quota_controller = world.service.quota_controller
    world.pod("own", namespace=SYSTEM, nodeName="n", models="A100")
    eventually(lambda: quota_controller.caches.pods_in(SYSTEM), "the pod in the cache")
    quota_controller.states.record_change(SYSTEM, time.monotonic() - 1, 0)
    quota_controller.reconcile(SYSTEM)
    eventually(lambda: quota_controller.lag_s() == 0, "the end of the lag")
    assert LEDGER_PREFIX + SYSTEM not in names_in(world)


def test_a_deleted_namespace_leaves_no_ledger_and_no_registry_entry(world: World) -> None:
    world.quota("types: {A100: {cores: 1000}}")
    world.start()
    eventually(world.status, "the quota")
    world.cluster.delete(NAMESPACES, TEAM)
    eventually(lambda: world.taken("A100") == -1, "the ledger to be deleted")
    eventually(
        lambda: TEAM not in str(world.cluster.get(CONFIG_MAPS, LEDGER_REGISTRY, SYSTEM).data), "the registry to follow"
    )


def test_a_changed_or_deleted_status_is_restored(world: World) -> None:
    world.quota("types: {A100: {cores: 10}}")
    world.start()
    eventually(world.status, "the quota")
    world.cluster.patch(CONFIG_MAPS, QUOTA_STATUS, TEAM, {"data": {STATUS_KEY: "v: 2"}})
    eventually(lambda: world.status().get("v") == 1, "the status")
    world.cluster.delete(CONFIG_MAPS, QUOTA_STATUS, TEAM)
    eventually(lambda: world.status().get("v") == 1, "the status again")


def test_an_existing_pod_is_charged_even_if_admission_would_refuse_it(world: World) -> None:
    """An annotation that its user adds later does not lower the charge."""
    world.quota("types: {A100: {cores: 1000}}")
    world.pod("odd", core=150, nodeName="n", models="A100")
    world.pod("bare", core=50, memory=0, nodeName="n", models="A100")
    world.pod("plain", core=20, nodeName="n", models="A100")
    world.start()
    eventually(lambda: world.taken("A100") == 220, "all pods")
    world.cluster.patch(PODS, "plain", TEAM, {"metadata": {"annotations": {NAMES.memory_follows_core: "c"}}})
    world.pod("last", core=1, nodeName="n", models="A100")
    eventually(lambda: world.taken("A100") == 221, "the last pod")


def test_a_quota_that_was_never_valid_limits_nothing_and_the_status_says_so(world: World) -> None:
    world.quota("types: {A100: {core: 1}}")
    world.start()
    eventually(lambda: "not in force" in str(world.status().get("notes")), "the note")


def test_a_deleted_catalogue_is_restored(world: World) -> None:
    world.node("a", ("Tesla T4", 15360))
    world.start()

    def exists() -> bool:
        try:
            return "T4" in world.cluster.get(CONFIG_MAPS, CATALOGUE, SYSTEM).data[CATALOGUE_KEY]
        except NotFound:
            return False

    eventually(exists, "the catalogue")
    world.cluster.delete(CONFIG_MAPS, CATALOGUE, SYSTEM)
    eventually(exists, "the catalogue again")


def names_in(world: World) -> set[str]:
    return {each.metadata.name for each in world.cluster.list(CONFIG_MAPS, SYSTEM).items}


@pytest.mark.parametrize("harm", ["deleted", "invalid"])
def test_without_the_registry_a_missing_ledger_counts_as_lost(world: World, harm: str) -> None:
    """While a pod that it admitted may still appear; the registry is restored."""
    world.quota("types: {A100: {cores: 1000}}")
    world.cluster.create(NAMESPACES, {"metadata": {"name": "other"}})
    world.quota("types: {A100: {cores: 1000}}", namespace="other")
    world.start()
    eventually(world.status, "the quota")
    eventually(lambda: LEDGER_PREFIX + "other" in names_in(world), "the other quota")
    world.stop()
    if harm == "deleted":
        world.cluster.delete(CONFIG_MAPS, LEDGER_REGISTRY, SYSTEM)
    else:
        world.cluster.patch(CONFIG_MAPS, LEDGER_REGISTRY, SYSTEM, {"data": {"namespaces": "["}})
    world.cluster.delete(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM)
    world.start()
    eventually(lambda: world.taken("A100") == 0 and world.ledger().state is LedgerState.REBUILDING, "a closed ledger")
    # The ledger is rebuilt before the registry is written again, so the registry may not exist yet.
    registry = Selector(fields=f"metadata.name={LEDGER_REGISTRY}")
    eventually(lambda: '"other"' in str(world.cluster.list(CONFIG_MAPS, SYSTEM, registry).items), "the registry")


def test_a_standby_collects_no_deleted_pods_and_has_no_lag(world: World) -> None:
    """It reconciles everything when it becomes the leader."""
    world.quota("types: {A100: {cores: 1000}}")
    world.start()
    eventually(world.status, "the quota")
    second = Configuration(controller=ControllerSettings(address="127.0.0.1", ops_port=0, identity="second"))
    standby = Service(second, world.cluster).start()
    try:
        eventually(lambda: standby.quota_controller.caches.synced, "the standby")
        for index in range(5):
            world.pod(f"p-{index}", nodeName="n", models="A100")
        eventually(lambda: world.taken("A100") == 500, "the usage")
        for index in range(5):
            world.cluster.delete(PODS, f"p-{index}", TEAM, grace_s=0)
        eventually(lambda: world.taken("A100") == 0, "the free quota")
        assert not any(standby.quota_controller.states.deleted_pods(name) for name in (TEAM, SYSTEM))
        assert standby.quota_controller.lag_s() == 0
    finally:
        standby.stop()


@pytest.mark.parametrize("model", ["NVIDIA", "", "Tesla"])
def test_a_node_with_an_invalid_model_does_not_affect_other_nodes(world: World, model: str) -> None:
    """Its inventory must not stop the accounting of all namespaces."""
    world.quota("types: {A100: {cores: 100}}")
    world.node("odd", (model, 1024))
    world.node("good", ("A100-SXM4-40GB", 40960))
    world.pod("p", models="A100", nodeName="good")
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")


def test_a_card_of_unknown_memory_is_charged_like_the_largest_of_its_model(world: World) -> None:
    """As at admission."""
    world.quota("types: {A100: {cores: 400, memory: 80Gi}}")
    world.node("with-inventory", ("A100-SXM4-40GB", 40960))
    world.node("with-label", **{NAMES.model_label: "A100"})
    world.node("small", ("A100", 8192))
    world.pod("p", models="A100", nodeName="with-label")
    world.start()
    eventually(lambda: world.taken("A100", "memory") == 40960, "the memory")


def test_the_lag_grows_while_ledgers_cannot_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.quota("types: {A100: {cores: 400}}")
    world.start()
    eventually(world.status, "the quota")
    assert world.service is not None
    quota_controller = world.service.quota_controller
    update = world.cluster.update

    def fail(*arguments: Any) -> Any:
        raise Unavailable("the API server does not answer")

    monkeypatch.setattr(world.cluster, "update", fail)
    world.pod("p", models="A100", nodeName="n")
    eventually(lambda: quota_controller.lag_s() > 2, "the lag")
    monkeypatch.setattr(world.cluster, "update", update)
    eventually(lambda: world.taken("A100") == 100, "the usage")
    eventually(lambda: quota_controller.lag_s() == 0, "the end of the lag")


def test_a_lost_ledger_is_closed_even_if_the_cached_registry_lacks_it(world: World) -> None:
    """A process that registers many namespaces at once must not take one for new that another has registered."""
    world.quota("types: {A100: {cores: 400}}")
    world.start()
    eventually(world.status, "the quota")
    assert world.service is not None
    reconciler = world.service.quota_controller.reconciler
    uid = world.cluster.get(NAMESPACES, TEAM).metadata.uid
    reconciler._registry._cache = {}  # as in a process that was paused since before the ledger was created
    ledger = reconciler._new_ledger(TEAM, uid)
    assert ledger.state is LedgerState.REBUILDING


def test_the_last_valid_version_of_a_quota_keeps_its_policy_over_a_restart(world: World) -> None:
    """Pools and core limits too, and no default quota beside it."""
    world.quota("types: {A100: {cores: 400}}\npools: [training]\ncoreLimit: {max: 20}")
    world.start()
    eventually(world.status, "the quota")
    world.stop()
    world.cluster.patch(CONFIG_MAPS, "q", TEAM, {"data": {"quota.yaml": "types: ["}})
    configuration = msgspec.structs.replace(CONFIGURATION, default_quota="types: {A100: {cores: 1}}")
    world.start(configuration)
    assert world.service is not None
    quotas = world.service.quotas
    eventually(lambda: quotas.synced, "the quotas")
    applied = quotas.namespace_quotas(TEAM)
    assert [quota.name for quota in applied.quotas] == ["team/q"]
    assert (applied.policy.pools, applied.policy.core_limit.max) == (("training",), 20)
    assert "team/q" in applied.mistakes


def test_a_corrected_legacy_quota_applies_to_all_namespaces(world: World) -> None:
    """Namespaces that it no longer names have no limit from it any more."""
    metadata = {"name": "gpuquota", "namespace": "kube-system"}
    world.cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {"gpu_quota": '{"team": {"quota": {"A100": 1}}}'}})
    world.start()
    eventually(lambda: world.hard("A100") == 100, "the quota")
    world.stop()
    world.cluster.patch(CONFIG_MAPS, "gpuquota", "kube-system", {"data": {"gpu_quota": "{"}})
    world.start()
    assert world.service is not None
    eventually(lambda: world.service.quotas.invalid == 1, "the mistake")  # type: ignore[union-attr]
    assert world.service.quotas.namespace_quotas(TEAM).quotas
    world.cluster.patch(CONFIG_MAPS, "gpuquota", "kube-system", {"data": {"gpu_quota": '{"other": {"quota": {}}}'}})
    eventually(lambda: world.hard("A100") is None, "the end of the quota")


def move_charge(world: World, uid: str, model: str) -> None:
    """Extend a pod's charge as a scheduler does before it binds the pod."""
    store = LedgerStore(world.cluster, SYSTEM)
    stored = store.read(TEAM)
    assert stored is not None
    ledger = stored.ledger.copy()
    assert not extend_charge(ledger, pack_uid(uid), Charge(model, 50, 256), int(time.time())).reasons
    store.write(stored, ledger)


@pytest.mark.parametrize("lasts_s", [90, 1])
def test_a_moved_charge_is_reverted_if_the_pod_is_not_bound_in_time(
    world: World, monkeypatch: pytest.MonkeyPatch, lasts_s: int
) -> None:
    """The scheduler may have been killed between the two writes: the pod must not hold two models for ever."""
    monkeypatch.setattr(accounting, "MOVE_S", lasts_s)
    world.node("a", ("A100", 40960))
    world.node("b", ("T4", 15360))
    world.quota("types: {A100: {cores: 100}, T4: {cores: 100}}")
    world.start()
    uid = world.pod("p", 50, models="A100,T4")
    eventually(lambda: world.taken("A100") == 50)
    move_charge(world, uid, "T4")
    assert (world.taken("A100"), world.taken("T4")) == (50, 50)
    if lasts_s == 1:
        eventually(lambda: (world.taken("A100"), world.taken("T4")) == (50, 0), "the former charge")
        assert not list(world.ledger().reservations())
    else:
        world.pod("other", 10, models="A100")
        eventually(lambda: world.taken("A100") == 60, "another reconcile")
        assert world.taken("T4") == 50
        world.cluster.bind("p", TEAM, "b", uid=uid, annotations={})
        eventually(lambda: (world.taken("A100"), world.taken("T4")) == (10, 50), "the charge of the node")


def test_what_expires_unconfirmed_is_recorded_in_the_ledger(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """There it limits callers of the webhook that may not be API servers. A pod that has ended is not recorded."""
    monkeypatch.setattr(accounting, "RESERVATION_S", 1)
    world.quota("types: {A100: {cores: 100}}")
    world.start()
    world.pod("ended", 40, models="A100")
    eventually(lambda: world.taken("A100") == 40)
    store = LedgerStore(world.cluster, SYSTEM)
    stored = store.read(TEAM)
    assert stored is not None
    ledger = stored.ledger.copy()
    ledger.reserve(pack_uid(str(uuid.uuid4())), Charge("A100", 50, 256), int(time.time()))
    store.write(stored, ledger)
    world.cluster.delete(PODS, "ended", TEAM, grace_s=0)
    eventually(lambda: world.taken("A100") == 0, "the reservation to expire")
    unconfirmed = world.ledger().unconfirmed
    assert unconfirmed is not None
    assert unconfirmed.models == {"A100": ExpiredAmounts(cores=50, memory_mib=256, pods=1)}
