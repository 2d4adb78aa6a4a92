"""Waiting workloads on an in-memory cluster are updated when there is room for their pods."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from cluster.objects import NAMESPACES, PODS
from cluster.pod_creators import POD_CREATORS, PodCreator
from controller.choosing_retries import SETTLE_S, Attempts
from controller.workload_retrier import WorkloadRetrier
from settings.configuration import ControllerSettings
from tests.controller.test_quota_controller import CONFIGURATION, TEAM, World
from tests.controller.workloads import failed_set
from tests.waiting import eventually
from vcuda.names import RETRIED_ANNOTATION

REPLICA_SETS = POD_CREATORS[0]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    world.quota("types: {A100: {cores: 100}}")
    world.pod("first", 100, models="A100", nodeName="n")
    yield world
    world.stop()


def get(world: World, name: str, namespace: str = TEAM) -> PodCreator:
    return world.cluster.get(REPLICA_SETS, name, namespace)


def is_retried(world: World, name: str, namespace: str = TEAM) -> bool:
    return RETRIED_ANNOTATION in get(world, name, namespace).metadata.annotations


def retrier_of(world: World) -> WorkloadRetrier:
    assert world.service is not None
    assert world.service.retrier is not None
    return world.service.retrier


def start_full(world: World) -> None:
    """Start with a full quota."""
    world.start()
    eventually(lambda: world.taken("A100") == 100, "the usage")


def end_first(world: World) -> None:

    world.cluster.delete(PODS, "first", TEAM, grace_s=0)


def test_one_workload_is_retried_for_the_room_of_one_pod(world: World) -> None:
    """The oldest; nothing but the annotation changes."""
    for name in ("a", "b", "c"):
        world.cluster.create(REPLICA_SETS, failed_set(name))
    before = get(world, "a")
    start_full(world)
    eventually(lambda: retrier_of(world).waiting == 3, "the workloads")
    end_first(world)
    eventually(lambda: is_retried(world, "a"), "the oldest to be retried")
    after = get(world, "a")
    kept = {key: value for key, value in after.metadata.annotations.items() if key != RETRIED_ANNOTATION}
    assert kept == before.metadata.annotations
    assert (after.spec, after.status) == (before.spec, before.status)
    world.quota("types: {A100: {cores: 100}, T4: {cores: 1}}")
    eventually(lambda: "T4" in str(world.ledger().quotas), "another change of the ledger")
    assert not is_retried(world, "b")
    assert retrier_of(world).retries == 1


def test_a_raised_quota_makes_room_as_well(world: World) -> None:
    world.cluster.create(REPLICA_SETS, failed_set("a"))
    start_full(world)
    world.quota("types: {A100: {cores: 200}}")
    eventually(lambda: is_retried(world, "a"), "the workload to be retried")


def test_a_workload_that_fails_while_there_is_room_is_retried(world: World) -> None:
    """Its pod was refused a moment before the room was free."""
    world.quota("types: {A100: {cores: 500}}")
    start_full(world)
    world.cluster.create(REPLICA_SETS, failed_set("a"))
    eventually(lambda: is_retried(world, "a"), "the workload to be retried")


def test_room_in_one_namespace_is_no_room_in_another(world: World) -> None:
    world.cluster.create(NAMESPACES, {"metadata": {"name": "other"}})
    world.quota("types: {A100: {cores: 0}}", namespace="other")
    world.cluster.create(REPLICA_SETS, failed_set("a", namespace="other"))
    world.cluster.create(REPLICA_SETS, failed_set("b"))
    start_full(world)
    end_first(world)
    eventually(lambda: is_retried(world, "b"), "the workload to be retried")
    assert not is_retried(world, "a", "other")


def test_a_workload_that_has_its_pods_is_forgotten(world: World) -> None:
    """Only waiting workloads take memory: a cluster has many that lack nothing."""
    world.cluster.create(REPLICA_SETS, failed_set("a"))
    start_full(world)
    retrier = retrier_of(world)
    eventually(lambda: retrier.waiting == 1, "the workload")
    world.cluster.patch(REPLICA_SETS, "a", TEAM, {"status": {"replicas": 1, "conditions": None}}, subresource="status")
    eventually(lambda: retrier.waiting == 0 and not retrier._attempts, "the workload to be forgotten")


def test_a_standby_retries_nothing_and_a_new_leader_what_it_finds(world: World) -> None:
    world.quota("types: {A100: {cores: 500}}")
    world.cluster.create(REPLICA_SETS, failed_set("a"))
    start_full(world)
    retrier = retrier_of(world)
    eventually(lambda: retrier.retries == 1, "the retry")
    retrier._is_leading = lambda: False
    world.cluster.create(REPLICA_SETS, failed_set("b"))
    eventually(lambda: retrier.waiting == 2, "the other workload")
    eventually(lambda: retrier._queue.pending() == 0)
    assert not is_retried(world, "b")
    retrier._is_leading = lambda: True
    retrier.retry_all()
    eventually(lambda: is_retried(world, "b"), "the other workload to be retried")


def test_a_workload_that_lost_its_room_is_retried_when_there_is_room_again(world: World) -> None:
    """Not after the backoff, of ten minutes by then."""
    world.cluster.create(REPLICA_SETS, failed_set("a"))
    start_full(world)
    retrier = retrier_of(world)
    eventually(lambda: retrier.waiting == 1, "the workload")
    (workload,) = retrier._waiting_in(TEAM)
    failed = Attempts(0.0, tries=9, tried_at=retrier._clock() - SETTLE_S, progress=workload.progress)
    retrier._attempts[workload.metadata.uid] = failed
    retrier.retry_fitting(TEAM)
    end_first(world)
    eventually(lambda: is_retried(world, "a"), "the workload to be retried")


def test_it_can_be_switched_off(world: World) -> None:
    """For clusters in which the controller may not patch workloads."""
    world.start(replace(CONFIGURATION, controller=replace(CONFIGURATION.controller, retry_workloads=False)))
    assert world.service is not None
    assert world.service.retrier is None
    assert ControllerSettings().retry_workloads
