"""The controller keeps certificates and webhook configurations, on a cluster in memory with replicas that are told."""

import base64
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from queue import Empty, Queue
from typing import Any

import pytest
from cryptography import x509

from certs.certificate_secrets import CertificateSecrets, RotationTarget
from certs.renewal import is_signed_by
from certs.rotation import Step
from cluster.errors import NotFound
from cluster.in_memory import InMemoryCluster
from cluster.objects import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    PODS,
    SECRETS,
    VALIDATING_WEBHOOKS,
    WebhookConfiguration,
)
from controller.certificate_controller import CertificateController, CertificateTerms
from controller.webhook_configurations import ARM, CONTROLLER, WEBHOOK, WebhookConfigurations
from settings.configuration import Configuration
from vcuda.names import CA_SECRET, LEAF_SECRET
from webhook.registration import registration
from webhook.service import admission_config_of

SYSTEM = "quotient-system"
CONFIGURATION = Configuration()
LABELS = {"app.kubernetes.io/name": "quotient", "app.kubernetes.io/component": "webhook"}
HOOKS = (MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS)
START = datetime(2026, 11, 16, tzinfo=UTC)


class World:
    """A cluster with Quotient registered, replicas by address, and a keeper."""

    def __init__(self) -> None:
        self.cluster = InMemoryCluster()
        self.now, self.ticks = START, 0.0
        self.serving: dict[str, bytes] = {}
        self.cluster.create(NAMESPACES, {"metadata": {"name": SYSTEM}})
        for name in (WEBHOOK, CONTROLLER):
            self.cluster.create(DEPLOYMENTS, {"metadata": {"name": name, "namespace": SYSTEM}})
        self.register()
        self.certificate_controller = self.new_certificate_controller()

    def register(self, arm: str = "auto") -> None:
        for each in registration(admission_config_of(CONFIGURATION), f"{SYSTEM}/{WEBHOOK}")[:2]:
            each["metadata"]["annotations"] = {ARM: arm}
            for hook in each["webhooks"]:
                hook["failurePolicy"] = "Ignore"
            self.cluster.create(HOOKS[0] if each["kind"].startswith("Mutating") else HOOKS[1], each)

    def new_certificate_controller(self, **terms: Any) -> CertificateController:
        return CertificateController(
            self.cluster,
            SYSTEM,
            CertificateTerms(names=CONFIGURATION.served_names(), port=8443, **terms),
            clock=lambda: self.ticks,
            wall=lambda: self.now,
            dial=lambda address, _: self.serving.get(address, b""),
            trusts=lambda address, _, bundle: self.believes(address, bundle),
        )

    def replica(self, number: int) -> None:
        """Start a replica; it serves what is in its secret."""
        address = f"10.0.0.{number}"
        metadata = {"name": f"webhook-{number}", "namespace": SYSTEM, "labels": LABELS}
        container = {"name": "c", "image": "i"}
        made = self.cluster.create(PODS, {"metadata": metadata, "spec": {"containers": [container]}})
        status = {"status": {"phase": "Running", "podIP": address}}
        self.cluster.patch(PODS, made.metadata.name, SYSTEM, status, subresource="status")
        self.put_behind_service(f"webhook-{number}")
        self.read(number)

    def put_behind_service(self, name: str, *, ready: bool = True) -> None:
        metadata = {"name": name, "namespace": SYSTEM, "labels": {"kubernetes.io/service-name": WEBHOOK}}
        endpoints = [{"addresses": ["10.0.0.1"], "conditions": {"ready": ready}}]
        self.cluster.create(
            ENDPOINT_SLICES, {"metadata": metadata, "addressType": "IPv4", "endpoints": endpoints, "ports": []}
        )

    def read(self, *numbers: int) -> None:
        """Let replicas notice that their secret changed; one that finds none serves on what it has."""
        for number in numbers:
            with suppress(NotFound):
                self.serving[f"10.0.0.{number}"] = self.leaf()

    def believes(self, address: str, bundle: bytes) -> bool:
        """Do what a handshake does: is what is served there signed by one of these, and good now."""
        served = self.serving.get(address, b"")
        if not served.startswith(b"-----"):
            return bool(served) and served == bundle
        try:
            until = x509.load_pem_x509_certificate(served).not_valid_after_utc
        except ValueError:
            return False
        return bool(bundle) and signed(served, bundle) and self.now < until

    @staticmethod
    def present() -> datetime:
        return datetime.now(UTC)

    def leaf(self) -> bytes:
        return base64.b64decode(self.cluster.get(SECRETS, LEAF_SECRET, SYSTEM).data["tls.crt"])

    def hooks(self) -> list[WebhookConfiguration]:
        return [self.cluster.get(kind, "quotient") for kind in HOOKS]

    def policies(self) -> set[str]:
        return {hook.failure_policy for each in self.hooks() for hook in each.webhooks}

    def bundles(self) -> set[bytes]:
        return {base64.b64decode(hook.client_config.ca_bundle) for each in self.hooks() for hook in each.webhooks}

    def kept(self) -> Any:
        return CertificateSecrets(self.cluster, SYSTEM).read(self.now).state

    def settle(self) -> None:
        """Let everybody go on until there is nothing left to do."""
        for _ in range(20):
            step = self.certificate_controller.look()
            self.ticks += 31
            self.read(*(int(address.rpartition(".")[2]) for address in self.serving))
            if step is Step.REST and self.certificate_controller.look() is Step.REST:
                return
        raise AssertionError("it never rests")


@pytest.fixture
def world() -> World:
    return World()


def test_from_nothing(world: World) -> None:
    """A CA, a certificate, trusted by both configurations; insisted upon when a replica serves it."""
    assert world.certificate_controller.look() is Step.WAIT
    assert world.bundles() == {world.kept().bundle, b""}, "validation waits for mutation"
    assert world.policies() == {"Ignore"}, "nobody answers yet"
    world.replica(1)
    assert world.certificate_controller.look() is Step.WAIT
    assert world.policies() == {"Ignore"}, "API servers may not have heard of it yet"
    world.ticks += 2
    world.certificate_controller.look()
    mutating, validating = world.hooks()
    assert {hook.failure_policy for hook in mutating.webhooks} == {"Fail"}
    assert {hook.failure_policy for hook in validating.webhooks} == {"Ignore"}
    assert world.certificate_controller.look() is Step.REST
    assert world.bundles() == {world.kept().bundle}
    assert world.policies() == {"Fail"}
    assert {each.metadata.owner_references[0].kind for each in world.hooks()} == {"Namespace"}
    assert world.cluster.get(SECRETS, LEAF_SECRET, SYSTEM).type == "kubernetes.io/tls"
    assert set(world.cluster.get(SECRETS, LEAF_SECRET, SYSTEM).data) == {"tls.crt", "tls.key"}, "no key of the CA"


def test_it_rests(world: World) -> None:
    """Where all is well, nothing is written."""
    world.certificate_controller.look()
    world.replica(1)
    world.settle()
    before = world.cluster.list(SECRETS).resource_version
    world.certificate_controller.look()
    assert world.cluster.list(SECRETS).resource_version == before


def test_what_is_wiped_comes_back(world: World) -> None:
    """By name, whatever else was changed."""
    world.certificate_controller.look()
    world.replica(1)
    world.settle()
    bundle = world.bundles()
    for kind in HOOKS:
        found = world.cluster.get(kind, "quotient")
        world.cluster.delete(kind, "quotient")
        assert found.metadata.name
    world.register()
    assert world.bundles() == {b""}
    world.certificate_controller.look()  # mutation first, and it is armed
    world.certificate_controller.look()
    assert world.bundles() == bundle
    assert world.policies() == {"Fail"}


def test_rotation_waits_for_callers_and_replicas(world: World) -> None:
    """Step by step, and after each one the keeper may be another one."""
    world.certificate_controller.look()
    world.replica(1)
    world.replica(2)
    world.settle()
    first = world.kept()
    CertificateSecrets(world.cluster, SYSTEM).request_rotation(RotationTarget.AUTHORITY)
    world.certificate_controller = world.new_certificate_controller()
    assert world.certificate_controller.look() is Step.WAIT
    both = world.kept()
    assert both.current == first.current
    assert world.bundles() == {both.bundle}
    assert world.leaf() == first.leaf.certificate, "callers may not have heard of the new CA yet"
    world.ticks += 31
    world.certificate_controller.look()
    after = world.kept()
    assert after.current == both.next
    assert world.leaf() != first.leaf.certificate
    assert world.bundles() == {both.bundle}
    world.read(1)
    world.ticks += 31
    assert world.certificate_controller.look() is Step.WAIT
    assert world.bundles() == {both.bundle}, "one replica still serves the old one"
    world.read(2)
    world.settle()
    assert world.bundles() == {after.current.certificate}
    assert first.current.certificate not in world.kept().bundle


def test_a_new_leaf_can_be_asked_for(world: World) -> None:
    """Of the same CA; the wish is taken back when it is granted."""
    world.certificate_controller.look()
    world.replica(1)
    world.settle()
    first = world.kept()
    CertificateSecrets(world.cluster, SYSTEM).request_rotation(RotationTarget.LEAF)
    world.settle()
    assert world.kept().current == first.current
    assert world.kept().leaf != first.leaf
    assert CertificateSecrets(world.cluster, SYSTEM).read(world.now).requested == ""


def expired(world: World) -> None:
    world.now += timedelta(days=400)


def half_written(world: World) -> None:
    data = {"tls.crt": base64.b64encode(world.leaf()[:200]).decode()}
    world.cluster.patch(SECRETS, LEAF_SECRET, SYSTEM, {"data": data})


def no_base64(world: World) -> None:
    world.cluster.patch(SECRETS, CA_SECRET, SYSTEM, {"data": {"ca.crt": "%%%", "ca.key": "="}})


def swapped_leaf(world: World) -> None:
    other = World()
    other.certificate_controller.look()
    world.cluster.patch(SECRETS, LEAF_SECRET, SYSTEM, {"data": other.cluster.get(SECRETS, LEAF_SECRET, SYSTEM).data})


def swapped_authority(world: World) -> None:
    other = World()
    other.certificate_controller.look()
    world.cluster.patch(SECRETS, CA_SECRET, SYSTEM, {"data": other.cluster.get(SECRETS, CA_SECRET, SYSTEM).data})


def deleted_leaf(world: World) -> None:
    world.cluster.delete(SECRETS, LEAF_SECRET, SYSTEM)


def deleted_authority(world: World) -> None:
    world.cluster.delete(SECRETS, CA_SECRET, SYSTEM)


def deleted_both(world: World) -> None:
    deleted_leaf(world)
    deleted_authority(world)


@pytest.mark.parametrize(
    "harm",
    [expired, half_written, no_base64, swapped_leaf, swapped_authority, deleted_leaf, deleted_authority, deleted_both],
)
def test_harm_is_repaired(world: World, harm: Any) -> None:
    """And while it is, callers trust what replicas serve, if that was good before."""
    world.certificate_controller.look()
    world.replica(1)
    world.settle()
    served = next(iter(world.serving.values()))
    harm(world)
    still_good = harm in {no_base64, swapped_authority, deleted_leaf, deleted_authority, deleted_both}
    for _ in range(3):
        world.certificate_controller.look()
        if still_good and world.serving["10.0.0.1"] == served:
            assert any(signed(served, bundle) for bundle in world.bundles())
        world.ticks += 5
    world.settle()
    assert all(signed(world.leaf(), bundle) for bundle in world.bundles())
    assert world.serving["10.0.0.1"] == world.leaf()
    assert world.policies() == {"Fail"}


def signed(leaf: bytes, bundle: bytes) -> bool:
    return is_signed_by(x509.load_pem_x509_certificate(leaf), bundle)


@pytest.mark.parametrize("going", ["deployment", "namespace"])
def test_a_webhook_that_is_taken_away_holds_nobody_up(world: World, going: str) -> None:
    """But one that is only away does: pods with GPUs wait for it."""
    world.certificate_controller.look()
    world.replica(1)
    world.settle()
    world.serving["10.0.0.1"] = b""
    world.certificate_controller.look()
    assert world.policies() == {"Fail"}
    if going == "deployment":
        world.cluster.delete(DEPLOYMENTS, WEBHOOK, SYSTEM)
    else:
        held = {"metadata": {"finalizers": ["quotient.dev/test"]}}
        world.cluster.patch(DEPLOYMENTS, WEBHOOK, SYSTEM, held)
        world.cluster.delete(NAMESPACES, SYSTEM)
    assert WebhookConfigurations(world.cluster, SYSTEM).is_taken_away()
    world.certificate_controller.look()
    assert world.policies() == {"Ignore"}


def test_a_change_of_the_namespace_is_looked_at_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is announced there first: its pods go next, and its Deployments last."""
    looks: Queue[None] = Queue()

    def look() -> Step:
        looks.put(None)
        return Step.REST

    monkeypatch.setattr(world.certificate_controller, "look", look)
    world.certificate_controller.start()
    try:
        with suppress(Empty):
            while True:
                looks.get(timeout=1)
        world.cluster.patch(NAMESPACES, SYSTEM, "", {"metadata": {"labels": {"a": "b"}}})
        looks.get(timeout=10)
    finally:
        world.certificate_controller.stop()


def test_the_emergency_exit(world: World) -> None:
    """One annotation, and it stays so until it is taken back."""
    world.certificate_controller.look()
    world.replica(1)
    world.settle()
    for kind in HOOKS:
        world.cluster.patch(kind, "quotient", "", {"metadata": {"annotations": {ARM: "never"}}})
    world.certificate_controller.look()
    assert world.policies() == {"Ignore"}
    for kind in HOOKS:
        world.cluster.patch(kind, "quotient", "", {"metadata": {"annotations": {ARM: "auto"}}})
    world.certificate_controller.look()
    assert world.policies() == {"Fail"}


def test_a_controller_that_is_taken_away_disarms(world: World) -> None:
    """One that is restarted does not."""
    world.certificate_controller.look()
    world.replica(1)
    world.settle()
    world.certificate_controller.stop()
    assert world.policies() == {"Fail"}
    world.cluster.delete(DEPLOYMENTS, CONTROLLER, SYSTEM)
    world.certificate_controller.stop()
    assert world.policies() == {"Ignore"}


def test_certificates_of_others_are_left_alone(world: World) -> None:
    """cert-manager's, or one's own: nothing is written but whether an answer is insisted upon."""
    world.certificate_controller = world.new_certificate_controller(managed=False)
    world.serving["10.0.0.1"] = b"somebody's"
    metadata = {"name": "webhook-1", "namespace": SYSTEM, "labels": LABELS}
    world.cluster.create(PODS, {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}]}})
    status = {"status": {"phase": "Running", "podIP": "10.0.0.1"}}
    world.cluster.patch(PODS, "webhook-1", SYSTEM, status, subresource="status")
    assert world.certificate_controller.look() is Step.WAIT, "it is not behind its Service yet"
    world.put_behind_service("webhook")
    world.certificate_controller.look()
    world.ticks += 2
    assert world.certificate_controller.look() is Step.WAIT, "the API server would not believe it"
    assert world.policies() == {"Ignore"}
    their = base64.b64encode(b"somebody's").decode()
    for kind in HOOKS:
        found = world.cluster.get(kind, "quotient")
        fields = {"webhooks": [{"name": hook.name, "clientConfig": {"caBundle": their}} for hook in found.webhooks]}
        world.cluster.apply(kind, found, fields, manager="cert-manager")
    world.certificate_controller.look()
    world.ticks += 2
    assert world.certificate_controller.look() is Step.REST
    assert world.bundles() == {b"somebody's"}
    assert world.policies() == {"Fail"}
    assert world.cluster.list(SECRETS).items == []


def test_webhooks_elsewhere_are_left_alone(world: World) -> None:
    """Those at a URL have certificates of their own."""
    for kind in HOOKS:
        world.cluster.delete(kind, "quotient")
    for each in registration(admission_config_of(CONFIGURATION), "https://127.0.0.1:8443", b"own")[:2]:
        world.cluster.create(HOOKS[0] if each["kind"].startswith("Mutating") else HOOKS[1], each)
    world.certificate_controller.look()
    assert world.bundles() == {b"own"}
    assert world.policies() == {"Fail"}
