"""Reservations of pods that cannot be created, because another pod has their name: released only if that is certain."""

import time
import uuid
from collections.abc import Iterator

import pytest

from cluster.objects import PODS, Metadata
from controller.accounting import release_failed_creates
from controller.namespace_state import LOOK_UP_AFTER_S, LOOK_UP_AGAIN_S, MAX_LOOKUPS, NamespaceStates
from ledger.ledger_store import LedgerStore
from tests.controller.test_quota_controller import SYSTEM, TEAM, World
from tests.waiting import eventually
from vcuda.ledger import Ledger, LedgerState, PodKey, pack_uid
from vcuda.quota_usage import Charge

A100 = Charge("A100", 50, 256)
OURS, OTHER = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.quota("types: {A100: {cores: 1000}}")
    yield world
    world.stop()


def reserve_in(world: World, name: str, uid: str = OURS) -> None:
    """Reserve for a pod as a webhook does, whose creation then fails."""
    store = LedgerStore(world.cluster, SYSTEM)
    stored = store.read(TEAM)
    assert stored is not None
    ledger = stored.ledger.copy()
    ledger.reserve(pack_uid(uid), A100, int(time.time()), name)
    store.write(stored, ledger)


HOLDERS = {
    "another pod has the name": (Metadata(name="p", uid=OTHER), False),
    "another pod has the name, and is being deleted": (
        Metadata(name="p", uid=OTHER, deletion_timestamp="2026-01-01T00:00:00Z"),
        True,
    ),
    "the pod itself has it": (Metadata(name="p", uid=OURS), True),
}


@pytest.mark.parametrize(("holder", "stays"), HOLDERS.values(), ids=HOLDERS.keys())
def test_a_reservation_is_released_if_another_pod_that_stays_has_the_name(holder: Metadata, stays: bool) -> None:  # noqa: FBT001
    ledger = Ledger("uid", LedgerState.OPEN)
    ledger.reserve(pack_uid(OURS), A100, 1, "p")
    release_failed_creates(ledger, {pack_uid(OURS): holder})
    assert (pack_uid(OURS) in ledger) is stays


def test_a_reservation_for_an_existing_name_is_released_before_it_expires(world: World) -> None:
    """Whether the pod that has the name uses GPUs or not."""
    world.pod("with-gpu", 100, models="A100", nodeName="n")
    plain = {"containers": [{"name": "c", "image": "i"}]}
    world.cluster.create(PODS, {"metadata": {"name": "plain", "namespace": TEAM}, "spec": plain})
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")
    for uid, name in ((OURS, "with-gpu"), (OTHER, "plain")):
        reserve_in(world, name, uid)
        eventually(lambda uid=uid: pack_uid(uid) not in world.ledger(), "the end of the reservation", 10)  # type: ignore[misc]
    assert world.taken("A100") == 100


def test_a_reservation_whose_name_no_pod_has_is_kept(world: World) -> None:
    """Its pod may still be created: also beside pods of the same owner, and where the name was taken before."""
    world.start()
    eventually(world.status, "the quota")
    assert world.service is not None
    world.pod("gone", 100, models="A100", nodeName="n")
    eventually(lambda: world.taken("A100") == 100, "the usage")
    # The cached pod is out of date: only what is read after the charge counts.
    informer = world.service.quota_controller.caches.pods
    stale = informer.get("gone", TEAM)
    world.cluster.delete(PODS, "gone", TEAM, grace_s=0)
    eventually(lambda: world.taken("A100") == 0, "the end of the pod")
    assert stale is not None
    looked_up: list[str] = []
    get = world.cluster.get

    def watched_get(kind, name, namespace=""):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if kind is PODS:
            looked_up.append(name)
        return get(kind, name, namespace)

    world.cluster.get = watched_get  # type: ignore[method-assign]
    informer._objects[TEAM, "gone"] = stale
    reserve_in(world, "gone")
    eventually(lambda: looked_up == ["gone"], "the name to be looked up", 10)
    world.pod("other", 10, models="A100", nodeName="n")
    eventually(lambda: world.taken("A100") >= 60, "another reconcile")
    assert pack_uid(OURS) in world.ledger()


def test_only_pods_that_do_not_appear_are_looked_up_and_then_seldom() -> None:
    """Most pods appear at once; one that waits for another webhook must not cost a read for each reconcile."""
    states = NamespaceStates()
    assert states.due_lookups(TEAM, ["a"], now=10) == []
    assert states.due_times(TEAM) == [10 + LOOK_UP_AFTER_S]
    for _ in range(2):  # again after a conflict, which undoes what was found
        assert states.due_lookups(TEAM, ["a"], now=10 + LOOK_UP_AFTER_S) == ["a"]
    states.looked_up(TEAM, ["a"], now=11)
    assert states.due_lookups(TEAM, ["a"], now=11) == []
    assert states.due_lookups(TEAM, ["a"], now=11 + LOOK_UP_AGAIN_S) == ["a"]
    assert states.due_lookups(TEAM, [], now=12) == []
    assert states.due_times(TEAM) == []


def test_a_reconcile_looks_up_a_limited_number_of_names() -> None:
    """The others follow in the next."""
    states = NamespaceStates()
    pods: list[PodKey] = [str(number) for number in range(2 * MAX_LOOKUPS)]
    states.due_lookups(TEAM, pods, now=0)
    first = states.due_lookups(TEAM, pods, now=1)
    states.looked_up(TEAM, first, now=1)
    second = states.due_lookups(TEAM, pods, now=1)
    assert sorted(first + second) == sorted(pods)
