"""The controller on an in-memory cluster: what it makes of pods, quotas, nodes and namespaces."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cluster.errors import NotFound
from cluster.in_memory import InMemoryCluster
from cluster.objects import CONFIG_MAPS, NAMESPACES, NODES, PODS
from controller.service import Service
from settings.configuration import Configuration, ControllerSettings
from tests.waiting import eventually
from vcuda.catalogue import decode_catalogue
from vcuda.decision import Unavailable
from vcuda.dimensions import CORES, MEMORY
from vcuda.ledger import Ledger, LedgerState, decode_ledger
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
from vcuda.strict_yaml import parse_documents

TEAM, SYSTEM = "team", "quotient-system"
NAMES = Names()
CONFIGURATION = Configuration(controller=ControllerSettings(address="127.0.0.1", ops_port=0))

Obj = dict[str, Any]


class World:
    """A cluster, and a controller in it."""

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

    def pod(self, name: str, core: int = 100, memory: int = 1, models: str = "", **spec: Any) -> str:
        limits = {NAMES.core: str(core), NAMES.memory: str(memory)}
        container = {"name": "c", "image": "i", "resources": {"limits": limits, "requests": limits}}
        notes = {NAMES.use_models: models} if models else {}
        made = {
            "metadata": {"name": name, "namespace": TEAM, "annotations": notes},
            "spec": {"containers": [container], **spec},
        }
        return self.cluster.create(PODS, made).metadata.uid

    def node(self, name: str, *gpus: tuple[str, int], **labels: str) -> None:
        cards = [
            {"uuid": f"GPU-{name}-{index}", "index": index, "model": model, "memoryMiB": mib, "healthy": True}
            for index, (model, mib) in enumerate(gpus)
        ]
        notes = {NAMES.inventory: json.dumps({"v": 1, "gpus": cards})} if cards else {}
        marks = {key.replace("__", "/").replace("_", "-"): value for key, value in labels.items()}
        self.cluster.create(NODES, {"metadata": {"name": name, "annotations": notes, "labels": marks}})

    def ledger(self, namespace: str = TEAM) -> Ledger:
        found = self.cluster.get(CONFIG_MAPS, LEDGER_PREFIX + namespace, SYSTEM)
        return decode_ledger(found.data[LEDGER_KEY])

    def taken(self, line: str, dimension: str = CORES, quota: str = "team/q") -> int:
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
            found = self.cluster.get(CONFIG_MAPS, QUOTA_STATUS, TEAM)
        except NotFound:
            return {}
        return dict(parse_documents(found.data[STATUS_KEY])[0])


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.stop()


def test_what_runs_before_quotient_is_taken_over(world: World) -> None:
    """By the model of the node it is on: its inventory, its label, an ancestor's; or by the first it may run on."""
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


def test_a_whole_card_is_charged_all_the_memory_it_has(world: World) -> None:
    """The largest there may be before it is on a node, its own afterwards."""
    world.quota("types: {A100: {cores: 400, memory: 400Gi}}")
    world.node("small", ("A100-PCIE-40GB", 40960))
    world.node("large", ("A100-PCIE-80GB", 81920))
    world.start()
    eventually(world.status, "the quota")
    uid = world.pod("p", models="A100")
    eventually(lambda: world.taken("A100", MEMORY) == 81920, "the largest")
    placement = {"v": 1, "containers": {"c": [{"uuid": "GPU-small-0", "cores": 100, "memoryMiB": 40960}]}}
    world.cluster.bind("p", TEAM, "small", uid=uid, annotations={NAMES.placement: json.dumps(placement)})
    eventually(lambda: world.taken("A100", MEMORY) == 40960, "its own")


def test_cards_are_written_down_for_who_charges(world: World) -> None:
    """Models, memory and pools; and again when nodes change."""
    world.node("a", ("Tesla T4", 15360), ("Tesla T4", 15360), inspur_com__gpu_pool="x")
    world.cluster.patch(NODES, "a", "", {"metadata": {"labels": {NAMES.pool_label: "training"}}})
    world.start()

    def cards() -> list[tuple[str, int, str]]:
        try:
            found = world.cluster.get(CONFIG_MAPS, CATALOGUE, SYSTEM)
        except NotFound:
            return []
        return [(card.model, card.memory_mib, card.pool) for card in decode_catalogue(found.data[CATALOGUE_KEY])]

    eventually(lambda: cards() == [("Tesla T4", 15360, "training")], "the catalogue")
    world.cluster.delete(NODES, "a")
    eventually(lambda: cards() == [], "the node to go")


def test_quotas_under_every_domains_label_apply_and_count_once(world: World) -> None:
    """One that carries several labels is still one."""
    world.quota("types: {A100: {cores: 10}}", "ours")
    world.quota("types: {A100: {cores: 20}}", "theirs", "tencent.com/gpu-quota")
    world.cluster.patch(CONFIG_MAPS, "ours", TEAM, {"metadata": {"labels": {"nvidia.com/gpu-quota": "true"}}})
    world.start()
    eventually(lambda: [each["name"] for each in world.status().get("quotas", [])] == ["team/ours", "team/theirs"])


def test_the_last_good_quota_stays_in_force_over_a_restart(world: World) -> None:
    """It stands in the ledger; and the status says what is wrong."""
    world.quota("types: {A100: {cores: 10}}")
    world.start()
    eventually(world.status, "the quota")
    world.stop()
    world.quota("types: {A100: {core: 99}}")
    world.start()
    eventually(lambda: "core" in str(world.status()["notes"]), "the note")
    assert world.ledger().quotas[0].types == {"A100": {"cores": 10}}
    world.quota("types: {A100: {cores: 20}}")
    eventually(lambda: world.ledger().quotas[0].types == {"A100": {"cores": 20}}, "the good one")


def test_a_quota_that_goes_sets_the_namespace_free(world: World) -> None:
    """And takes its status with it; the charges stay, for the next one."""
    world.quota("types: {A100: {cores: 10}}")
    world.pod("p", nodeName="n", models="A100")
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")
    world.cluster.delete(CONFIG_MAPS, "q", TEAM)
    eventually(lambda: not world.status() and not world.ledger().quotas, "the quota to go")
    assert len(world.ledger()) == 1


def test_namespaces_without_a_quota_have_the_default_one(world: World) -> None:
    """If one is configured; until they have their own."""
    world.pod("p", nodeName="n", models="A100")
    world.start(Configuration(controller=CONFIGURATION.controller, default_quota="types: {A100: {cores: 150}}"))
    eventually(lambda: world.taken("A100", quota="configuration/defaultQuota") == 100, "the default")
    world.quota("types: {A100: {cores: 10}}")
    eventually(lambda: world.taken("A100") == 100, "its own")


def test_a_ledger_that_somebody_spoilt_is_made_anew(world: World) -> None:
    """Closed first, as one that was lost."""
    world.quota("types: {A100: {cores: 100}}")
    world.pod("p", nodeName="n", models="A100")
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")
    world.cluster.patch(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM, {"data": {LEDGER_KEY: "spoilt"}})

    def is_closed() -> bool:
        try:
            return world.ledger().state is LedgerState.REBUILDING
        except (ValueError, NotFound):
            return False

    eventually(is_closed, "a new ledger")
    assert world.taken("A100") == 100


def test_a_tampered_ledger_is_put_right(world: World) -> None:
    """Charges of nobody go, and those that are missing come back."""
    world.quota("types: {A100: {cores: 1000}}")
    world.pod("p", nodeName="n", models="A100")
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")
    found = world.cluster.get(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM)
    (key,) = world.ledger().pods()
    forged = found.data[LEDGER_KEY].replace(key, "A" * 22)
    world.cluster.patch(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM, {"data": {LEDGER_KEY: forged}})
    eventually(lambda: set(world.ledger().pods()) == {key}, "the truth")


def test_pods_in_quotients_own_namespace_and_static_ones_are_not_charged(world: World) -> None:
    """Nobody admits them."""
    world.quota("types: {A100: {cores: 1000}}")
    made = world.pod("static", nodeName="n", models="A100")
    world.cluster.patch(PODS, "static", TEAM, {"metadata": {"annotations": {"kubernetes.io/config.mirror": "x"}}})
    world.start()
    eventually(world.status, "the quota")
    world.pod("p", nodeName="n", models="A100")
    eventually(lambda: world.taken("A100") == 100, "the other one")
    assert made


def test_a_namespace_that_is_gone_leaves_nothing(world: World) -> None:
    """Neither a ledger nor a memory of it."""
    world.quota("types: {A100: {cores: 1000}}")
    world.start()
    eventually(world.status, "the quota")
    world.cluster.delete(NAMESPACES, TEAM)
    eventually(lambda: world.taken("A100") == -1, "the ledger to go")
    eventually(
        lambda: TEAM not in str(world.cluster.get(CONFIG_MAPS, LEDGER_REGISTRY, SYSTEM).data), "it to be forgotten"
    )


def test_a_forged_status_is_written_anew(world: World) -> None:
    """Soon."""
    world.quota("types: {A100: {cores: 10}}")
    world.start()
    eventually(world.status, "the quota")
    world.cluster.patch(CONFIG_MAPS, QUOTA_STATUS, TEAM, {"data": {STATUS_KEY: "v: 2"}})
    eventually(lambda: world.status().get("v") == 1, "the truth")
    world.cluster.delete(CONFIG_MAPS, QUOTA_STATUS, TEAM)
    eventually(lambda: world.status().get("v") == 1, "the truth again")


def test_what_a_pod_has_counts_however_it_was_asked_for(world: World) -> None:
    """Pods that today's rules refuse hold their GPUs all the same; nothing a tenant writes on one takes that away."""
    world.quota("types: {A100: {cores: 1000}}")
    world.pod("odd", core=150, nodeName="n", models="A100")
    world.pod("bare", core=50, memory=0, nodeName="n", models="A100")
    world.pod("plain", core=20, nodeName="n", models="A100")
    world.start()
    eventually(lambda: world.taken("A100") == 220, "all of them")
    world.cluster.patch(PODS, "plain", TEAM, {"metadata": {"annotations": {NAMES.memory_follows_core: "c"}}})
    world.pod("last", core=1, nodeName="n", models="A100")
    eventually(lambda: world.taken("A100") == 221, "the last one")


def test_a_quota_that_was_never_good_is_not_passed_over_in_silence(world: World) -> None:
    """It limits nothing, and that is said."""
    world.quota("types: {A100: {core: 1}}")
    world.start()
    eventually(lambda: "NOT in force" in str(world.status().get("notes")), "the note")


def test_the_list_of_cards_is_written_again_at_once(world: World) -> None:
    """Whoever deletes it."""
    world.node("a", ("Tesla T4", 15360))
    world.start()

    def is_there() -> bool:
        try:
            return "T4" in world.cluster.get(CONFIG_MAPS, CATALOGUE, SYSTEM).data[CATALOGUE_KEY]
        except NotFound:
            return False

    eventually(is_there, "the catalogue")
    world.cluster.delete(CONFIG_MAPS, CATALOGUE, SYSTEM)
    eventually(is_there, "the catalogue again")


def names_in(world: World) -> set[str]:
    return {each.metadata.name for each in world.cluster.list(CONFIG_MAPS, SYSTEM).items}


@pytest.mark.parametrize("harm", ["deleted", "spoilt"])
def test_without_the_list_of_ledgers_a_missing_one_counts_as_lost(world: World, harm: str) -> None:
    """For as long as a pod may appear that it had admitted; and the list is made anew."""
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
    eventually(lambda: "other" in str(world.cluster.get(CONFIG_MAPS, LEDGER_REGISTRY, SYSTEM).data), "the list")


def test_a_standby_remembers_nothing(world: World) -> None:
    """It looks at everything when it begins to lead."""
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
        eventually(lambda: world.taken("A100") == 0, "the room")
        assert all(not seen.gone for seen in standby.quota_controller._notes.all().values())
        assert standby.quota_controller.lag_s() == 0
    finally:
        standby.stop()


@pytest.mark.parametrize("model", ["NVIDIA", "", "Tesla"])
def test_a_card_that_cannot_be_read_hides_no_other(world: World, model: str) -> None:
    """One node's odd inventory must not stop the accounting of all namespaces."""
    world.quota("types: {A100: {cores: 100}}")
    world.node("odd", (model, 1024))
    world.node("good", ("A100-SXM4-40GB", 40960))
    world.pod("p", models="A100", nodeName="good")
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")


def test_where_a_node_does_not_say_the_memory_stays_charged(world: World) -> None:
    """As much as admission charged: that of the largest card of the model."""
    world.quota("types: {A100: {cores: 400, memory: 80Gi}}")
    world.node("told", ("A100-SXM4-40GB", 40960))
    world.node("untold", **{NAMES.model_label: "A100"})
    world.node("small", ("A100", 8192))
    world.pod("p", models="A100", nodeName="untold")
    world.start()
    eventually(lambda: world.taken("A100", "memory") == 40960, "the memory")


def test_lag_is_told_while_nothing_can_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there for just that."""
    world.quota("types: {A100: {cores: 400}}")
    world.start()
    eventually(world.status, "the quota")
    assert world.service is not None
    quota_controller = world.service.quota_controller
    update = world.cluster.update

    def away(*arguments: Any) -> Any:
        raise Unavailable("the cluster is away")

    monkeypatch.setattr(world.cluster, "update", away)
    world.pod("p", models="A100", nodeName="n")
    eventually(lambda: quota_controller.lag_s() > 2, "the lag")
    monkeypatch.setattr(world.cluster, "update", update)
    eventually(lambda: world.taken("A100") == 100, "the usage")
    eventually(lambda: quota_controller.lag_s() == 0, "the end of it")


def test_a_lost_ledger_is_closed_though_others_begin_meanwhile(world: World) -> None:
    """Who notes many beginnings at once must not take one for new that another has begun and lost."""
    world.quota("types: {A100: {cores: 400}}")
    world.start()
    eventually(world.status, "the quota")
    assert world.service is not None
    reconciler = world.service.quota_controller.reconciler
    uid = world.cluster.get(NAMESPACES, TEAM).metadata.uid
    reconciler._known._known = {}  # as one sees it that has been stopped since before the ledger was begun
    ledger = reconciler._begin(TEAM, uid, reconciler._notes.of(TEAM))
    assert ledger.state is LedgerState.REBUILDING


def test_the_last_good_quota_outlives_a_restart(world: World) -> None:
    """With all that it says: pools and limits too, and nothing of a default beside it."""
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
    held = quotas.namespace_quotas(TEAM)
    assert [quota.name for quota in held.quotas] == ["team/q"]
    assert (held.policy.pools, held.policy.core_limit.max) == (("training",), 20)
    assert "team/q" in held.mistakes


def test_a_legacy_quota_that_is_put_right_reaches_all(world: World) -> None:
    """Those too that it no longer names."""
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
