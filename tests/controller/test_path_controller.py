"""The path controller on an in-memory cluster; simulated replicas read webhook configurations as real ones do."""

from datetime import datetime
from typing import Any

import pytest

from cluster.in_memory import InMemoryCluster
from cluster.objects import DEPLOYMENTS, MUTATING_WEBHOOKS, NAMESPACES, PODS, VALIDATING_WEBHOOKS
from controller.path_controller import TERMINATION_S, PathController, PathTerms
from controller.path_rotation import MIN_AGE_S, PathStep
from settings.configuration import Configuration
from vcuda.names import PATHS_ANNOTATION, SECRET_PATHS_ANNOTATION, WEBHOOK
from vcuda.webhook_paths import IDLE_S, MAX_FORMER_S, PLAIN, PathReport, secret_in
from webhook.callers import Caller, CallerPaths, registered_paths
from webhook.registration import registration
from webhook.service import admission_config_of

SYSTEM = "quotient-system"
LABELS = {"app.kubernetes.io/name": "quotient", "app.kubernetes.io/component": "webhook"}
MARK = {SECRET_PATHS_ANNOTATION: "true"}
KINDS = (MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS)
ROTATION_S = 3600.0


class World:
    """A cluster with the chart's objects, replicas by address, and a path controller."""

    def __init__(self) -> None:
        self.cluster = InMemoryCluster()
        self.now = 1_000_000.0
        self.replicas: dict[str, CallerPaths] = {}
        self.lagging: set[str] = set()
        self.cluster.create(NAMESPACES, {"metadata": {"name": SYSTEM}})
        metadata = {"name": WEBHOOK, "namespace": SYSTEM, "annotations": MARK}
        self.cluster.create(DEPLOYMENTS, {"metadata": metadata})
        for each, kind in zip(
            registration(admission_config_of(Configuration()), f"{SYSTEM}/{WEBHOOK}"), KINDS, strict=False
        ):
            self.cluster.create(kind, each)
        self.reset_paths(None)
        self.controller = self.new_controller()

    def new_controller(self) -> PathController:
        terms = PathTerms(rotation_s=ROTATION_S, ops_port=8080)
        return PathController(self.cluster, SYSTEM, terms, wall=lambda: self.now, fetch_report=self.fetch)

    def fetch(self, address: str, port: int) -> PathReport | None:
        assert port == 8080
        replica = self.replicas.get(address)
        return replica.report() if replica else None

    def start_replica(self, number: int, annotations: dict[str, str] = MARK, **status: Any) -> None:
        address = f"10.0.0.{number}"
        metadata = {"name": f"webhook-{number}", "namespace": SYSTEM, "labels": LABELS, "annotations": annotations}
        self.cluster.create(PODS, {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}]}})
        ready = [{"type": "Ready", "status": "True"}]
        patch = {"status": {"phase": "Running", "podIP": address, "conditions": ready} | status}
        self.cluster.patch(PODS, f"webhook-{number}", SYSTEM, patch, subresource="status")
        self.replicas[address] = CallerPaths(now=lambda: self.now)
        self.sync()

    def stop_replica(self, number: int) -> None:
        self.cluster.delete(PODS, f"webhook-{number}", SYSTEM, grace_s=0)
        del self.replicas[f"10.0.0.{number}"]

    def sync(self) -> None:
        """Let the replicas see the webhook configurations."""
        paths = registered_paths(self.cluster.get(kind, "quotient") for kind in KINDS)
        for address, replica in self.replicas.items():
            if address not in self.lagging:
                replica.update(paths)

    def reconcile(self) -> PathStep:
        step = self.controller.reconcile()
        self.sync()
        return step

    def settle(self) -> str:
        """Reconcile until nothing is left to do; after every step each replica serves the registered path."""
        for _ in range(10):
            step = self.reconcile()
            for replica in self.replicas.values():
                assert replica.identify(self.secret()) is not Caller.REFUSED
            if step is PathStep.REST:
                return self.secret()
        raise AssertionError("there is always another step")

    def secret(self) -> str:
        (secret,) = {secret_in(path) for path in self.paths()}
        assert secret is not None
        return secret

    def paths(self) -> list[str]:
        return [
            hook.client_config.service.path for kind in KINDS for hook in self.cluster.get(kind, "quotient").webhooks
        ]

    def reset_paths(self, path: str | None) -> None:
        """Write paths as another client would."""
        for kind in KINDS:
            current = self.cluster.get(kind, "quotient")
            hooks = [{"name": hook.name, "clientConfig": {"service": {"path": path}}} for hook in current.webhooks]
            self.cluster.apply(kind, current, {"webhooks": hooks}, manager="helm")

    def mark_deployment(self, mark: dict[str, Any]) -> None:
        self.cluster.patch(DEPLOYMENTS, WEBHOOK, SYSTEM, {"metadata": {"annotations": mark}})


@pytest.fixture
def world() -> World:
    return World()


def installed(world: World) -> str:
    world.start_replica(1)
    world.start_replica(2)
    return world.settle()


def test_an_installation_gets_a_path_at_once_and_a_secret_as_soon_as_replicas_accept_it(world: World) -> None:
    assert world.reconcile() is PathStep.REGISTER
    assert world.secret() == PLAIN
    secret = installed(world)
    assert len(secret) == 32
    assert {path.split("/")[1] for path in world.paths()} == {"mutate", "validate"}
    assert all(
        secret not in world.cluster.get(kind, "quotient").metadata.annotations[PATHS_ANNOTATION] for kind in KINDS
    )


def test_secrets_are_replaced_and_former_ones_retired(world: World) -> None:
    """A replica that was started since accepts the former one for as long as the others."""
    first = installed(world)
    world.now += ROTATION_S
    second = world.settle()
    assert second != first
    world.start_replica(3)
    for replica in world.replicas.values():
        assert replica.identify(second) is Caller.KNOWN
        assert replica.identify(first) is Caller.ANONYMOUS
    world.now += IDLE_S
    assert {replica.identify(first) for replica in world.replicas.values()} == {Caller.REFUSED}


def test_a_former_secret_is_retired_even_if_it_is_used_all_the_time(world: World) -> None:
    first = installed(world)
    world.now += ROTATION_S
    world.settle()
    (replica, *_) = world.replicas.values()
    for _ in range(MAX_FORMER_S // (IDLE_S // 2) - 1):
        world.now += IDLE_S // 2
        assert replica.identify(first) is Caller.ANONYMOUS
    world.now += IDLE_S // 2
    assert replica.identify(first) is Caller.REFUSED


def test_a_secret_is_replaced_after_a_call_that_failed(world: World) -> None:
    """Not on each failure: API servers would get a new path all the time."""
    first = installed(world)
    (replica, *_) = world.replicas.values()
    replica.record_failure(first)
    assert world.settle() == first
    world.now += MIN_AGE_S
    second = world.settle()
    assert second != first
    world.now += MIN_AGE_S
    assert world.settle() == second


def test_a_secret_is_replaced_when_a_replica_died(world: World) -> None:
    """Its calls may have failed, and it cannot say so any more."""
    first = installed(world)
    world.now += MIN_AGE_S
    assert world.settle() == first
    world.stop_replica(1)
    assert world.settle() != first


def test_no_path_is_registered_that_a_replica_does_not_accept_yet(world: World) -> None:
    first = installed(world)
    world.lagging.add("10.0.0.2")
    world.now += ROTATION_S
    assert [world.reconcile() for _ in range(3)] == [PathStep.ANNOUNCE, PathStep.WAIT, PathStep.WAIT]
    assert world.secret() == first
    world.lagging.clear()
    assert world.settle() != first


def test_a_replica_that_is_not_called_holds_nothing_up(world: World) -> None:
    """One that crashes again and again is not ready, and reads the configurations when it starts."""
    first = installed(world)
    world.start_replica(3, conditions=[{"type": "Ready", "status": "False"}])
    del world.replicas["10.0.0.3"]
    world.now += ROTATION_S
    assert world.settle() != first


def test_a_replica_on_a_node_that_is_gone_holds_nothing_up(world: World) -> None:
    """Its pod is terminating for ever; until the end of its grace period it may still be called."""
    first = installed(world)
    world.cluster.patch(PODS, "webhook-2", SYSTEM, {"metadata": {"finalizers": ["test/kept"]}})
    world.cluster.delete(PODS, "webhook-2", SYSTEM)
    del world.replicas["10.0.0.2"]
    ends = world.cluster.get(PODS, "webhook-2", SYSTEM).metadata.deletion_timestamp
    assert ends is not None
    world.now = datetime.fromisoformat(ends).timestamp()
    assert [world.reconcile() for _ in range(2)] == [PathStep.ANNOUNCE, PathStep.WAIT]
    world.now += TERMINATION_S
    assert world.settle() != first


def test_a_new_leader_replaces_the_secret_once(world: World) -> None:
    """A replica may have been lost together with the former leader."""
    first = installed(world)
    world.controller = world.new_controller()
    assert world.settle() == first
    world.now += MIN_AGE_S
    second = world.settle()
    assert second != first
    world.now += MIN_AGE_S
    assert world.settle() == second


def test_replicas_serve_what_is_registered_without_a_controller(world: World) -> None:
    """Also those that start while it is away, however long."""
    secret = installed(world)
    world.now += 30 * 24 * 3600
    world.start_replica(3)
    assert {replica.identify(secret) for replica in world.replicas.values()} == {Caller.KNOWN}


@pytest.mark.parametrize("path", [None, "/mutate", f"/mutate/{'e' * 32}"])
def test_a_path_that_another_client_writes_is_served_and_then_replaced(world: World, path: str | None) -> None:
    """As `helm rollback` writes a former one, and `kubectl replace` with the manifests none."""
    first = installed(world)
    world.reset_paths(path)
    world.sync()
    for replica in world.replicas.values():
        assert path is None or replica.identify(secret_in(path) or PLAIN) is not Caller.REFUSED
        assert replica.identify(first) is not Caller.REFUSED, "an API server that has not read the new path"
    assert world.settle() not in (first, PLAIN, "e" * 32)


def test_a_lost_record_is_written_again_with_another_secret(world: World) -> None:
    """As `kubectl replace` loses the annotation."""
    first = installed(world)
    for kind in KINDS:
        current = world.cluster.get(kind, "quotient")
        world.cluster.apply(kind, current, {"metadata": {"annotations": {PATHS_ANNOTATION: ""}}}, manager="kubectl")
    world.sync()
    assert world.settle() != first
    assert {replica.identify(first) for replica in world.replicas.values()} == {Caller.ANONYMOUS}


def test_an_upgrade_keeps_the_plain_path_until_all_replicas_serve_secrets(world: World) -> None:
    world.reset_paths("/mutate")
    world.start_replica(1, {})
    world.start_replica(2)
    assert world.settle() == PLAIN
    world.stop_replica(1)
    assert world.settle() != PLAIN
    (replica,) = world.replicas.values()
    assert replica.identify(PLAIN) is Caller.ANONYMOUS
    world.now += IDLE_S
    assert replica.identify(PLAIN) is Caller.REFUSED


def test_a_rollback_restores_the_plain_path_before_an_old_replica_starts(world: World) -> None:
    """The Deployment is changed first. This controller may still lead, and must not register a secret again."""
    installed(world)
    world.mark_deployment({SECRET_PATHS_ANNOTATION: None})
    assert world.settle() == PLAIN
    world.start_replica(3, {})
    world.now += ROTATION_S
    assert world.settle() == PLAIN


def test_a_new_leader_completes_a_rotation(world: World) -> None:
    """It cannot know the secret that was announced."""
    first = installed(world)
    world.now += ROTATION_S
    assert world.reconcile() is PathStep.ANNOUNCE
    world.controller = world.new_controller()
    assert world.settle() != first


def test_webhooks_of_others_and_at_urls_are_left_alone(world: World) -> None:
    """The latter run outside of the cluster, where this controller does not know the replicas."""
    for kind in KINDS:
        world.cluster.delete(kind, "quotient")
    for each, kind in zip(registration(admission_config_of(Configuration()), "https://h"), KINDS, strict=False):
        world.cluster.create(kind, each)
    world.start_replica(1)
    assert world.controller.reconcile() is PathStep.REST
    assert {hook.client_config.url for hook in world.cluster.get(KINDS[0], "quotient").webhooks} == {"https://h/mutate"}
