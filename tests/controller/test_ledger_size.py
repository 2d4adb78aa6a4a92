"""A ledger that grows too large or cannot be written: nothing that a tenant writes causes it, and it is reported."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.errors import Rejected
from cluster.objects import CONFIG_MAPS, EVENTS, PODS, Event, Pod
from tests.controller.test_quota_controller import TEAM, World
from tests.waiting import eventually
from vcuda.amounts import Amounts
from vcuda.decision import Unavailable
from vcuda.dimensions import CORES
from vcuda.ledger import ChargeRequest, pack_uid, reserve
from vcuda.names import DEFAULT_SYSTEM_NAMESPACE, LEDGER_KEY, LEDGER_PREFIX, QUOTA_STATUS, STATUS_KEY
from vcuda.namespace_policy import Mode
from vcuda.pod_options import PodOptions

LONG = "x" * 280_000


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.stop()


def owned_pod(world: World, name: str, owner: str) -> str:
    """Create a bound pod with a controller of this name."""
    uid = world.pod(name, models="A100", nodeName="n")
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner, "uid": owner, "controller": True}
    world.cluster.patch(PODS, name, TEAM, {"metadata": {"ownerReferences": [reference]}})
    return uid


def test_the_names_of_owners_do_not_fill_ledger_and_status(world: World) -> None:
    """Four pods with owners of 280 kB: the ledger would pass 1 MiB, and every refusal would name them."""
    world.quota("types: {A100: {cores: 400}}")
    for number in range(4):
        owned_pod(world, f"p{number}", f"{number}{LONG}")
    world.start()
    eventually(lambda: world.taken("A100") == 400, "the usage")
    eventually(lambda: len(world.status().get("holders", [])) == 4, "the holders")
    assert all(len(holder.name) <= 317 for holder in world.ledger().holders)
    ledger = world.ledger()
    request = ChargeRequest(pack_uid(str(uuid.uuid4())), lambda _: Amounts({CORES: 100}), PodOptions(), {})
    (reason,) = reserve(ledger, request, 1, Mode.ENFORCE).reasons
    assert len(str(reason)) < 2000
    world.pod("late", models="A100")
    eventually(lambda: world.status()["waiting"], "the waiting pod")
    status = world.cluster.get(CONFIG_MAPS, QUOTA_STATUS, TEAM).data[STATUS_KEY]
    assert len(status) < 10_000
    world.cluster.delete(PODS, "p0", TEAM, grace_s=0)
    eventually(lambda: {pack_uid(each.metadata.uid) for each in pods_of(world)} == set(world.ledger().pods()), "room")


def pods_of(world: World) -> list[Pod]:
    return world.cluster.list(PODS, TEAM).items


def notes(world: World) -> str:
    return " ".join(world.status().get("notes", []))


def events(world: World, reason: str) -> list[Event]:
    return [each for each in world.cluster.list(EVENTS, TEAM).items if each.reason == reason]


def large_quota(number: int) -> str:
    lines = (f"  A{line}-{number}-{'X' * 40}: {{cores: 1, memory: 1Gi, pods: 1}}" for line in range(250))
    return "\n".join(("types:", *lines))


def test_a_ledger_that_is_too_large_for_its_quotas_is_reported(world: World) -> None:
    """The former quotas stay in force, and all is well again once the new ones are gone."""
    world.quota("types: {A100: {cores: 400}}")
    world.pod("p", models="A100", nodeName="n")
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")
    for number in range(60):
        world.quota(large_quota(number), name=f"q{number}")
    eventually(lambda: "the ledger cannot be updated" in notes(world), "the note")
    assert "delete or shorten quotas of this namespace" in notes(world)
    assert len(world.cluster.get(CONFIG_MAPS, QUOTA_STATUS, TEAM).data[STATUS_KEY]) < 1 << 20
    eventually(lambda: events(world, "LedgerNotUpdated"), "the event")
    event = events(world, "LedgerNotUpdated")[0]
    assert (event.involved_object.kind, event.involved_object.name) == ("ConfigMap", QUOTA_STATUS)
    assert world.taken("A100") == 100
    for number in range(60):
        world.cluster.delete(CONFIG_MAPS, f"q{number}", TEAM)
    eventually(lambda: "the ledger" not in notes(world), "the end of the note", timeout_s=60)


@pytest.mark.parametrize("error", [Rejected("forbidden: no right to update configmaps", code=403), Unavailable("503")])
def test_a_ledger_that_cannot_be_written_is_reported(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """What the status shows is old then, and it has to say so; the event is recorded once for each error."""
    world.quota("types: {A100: {cores: 400}}")
    world.start()
    eventually(world.status, "the quota")
    update = world.cluster.update

    def fail(kind: Any, obj: Any) -> Any:
        if obj.metadata.name.startswith(LEDGER_PREFIX):
            raise error
        return update(kind, obj)

    monkeypatch.setattr(world.cluster, "update", fail)
    world.pod("p", models="A100", nodeName="n")
    eventually(lambda: "the ledger cannot be updated" in notes(world), "the note", timeout_s=60)
    assert str(error) in notes(world)
    (event,) = events(world, "LedgerNotUpdated")
    assert event.type == "Warning"
    monkeypatch.setattr(world.cluster, "update", update)
    eventually(lambda: world.taken("A100") == 100 and not notes(world), "the end of the note", timeout_s=60)


def test_an_unreadable_ledger_that_cannot_be_deleted_is_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limits of the quotas: the numbers from before would look as if all were well."""
    world.quota("types: {A100: {cores: 400}}")
    world.start()
    eventually(world.status, "the quota")
    delete = world.cluster.delete

    def fail(kind: Any, name: str, *arguments: Any, **options: Any) -> None:
        if name.startswith(LEDGER_PREFIX):
            raise Rejected("forbidden: no right to delete configmaps", code=403)
        delete(kind, name, *arguments, **options)

    monkeypatch.setattr(world.cluster, "delete", fail)
    world.cluster.patch(CONFIG_MAPS, LEDGER_PREFIX + TEAM, DEFAULT_SYSTEM_NAMESPACE, {"data": {LEDGER_KEY: "{}"}})
    eventually(lambda: "no right to delete configmaps" in notes(world), "the note", timeout_s=60)
    monkeypatch.setattr(world.cluster, "delete", delete)


def test_pods_for_which_a_ledger_has_no_room_are_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were created while no webhook was registered; the ledger can still be written, and admits no other."""
    monkeypatch.setattr("controller.accounting.MAX_STORED_BYTES", 14_000)
    world.quota("types: {A100: {cores: 400}}")
    for number in range(100):
        world.pod(f"p{number}", core=100 * (number + 1), models="A100", nodeName="n")
    world.start()
    eventually(lambda: "are not charged, because the ledger of this namespace is full" in notes(world), "the note")
    eventually(lambda: events(world, "LedgerNotUpdated"), "the event")
    charged = len(world.ledger())
    assert 0 < charged < 100
    assert f"{100 - charged} pods that use GPUs" in notes(world)
    for pod in sorted(pods_of(world), key=lambda each: each.metadata.name)[10:]:
        world.cluster.delete(PODS, pod.metadata.name, TEAM, grace_s=0)
    eventually(lambda: len(world.ledger()) == 10 and "not charged" not in notes(world), "room for all")
