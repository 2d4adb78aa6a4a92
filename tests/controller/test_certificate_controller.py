"""The certificate controller on an in-memory cluster, with simulated webhook replicas."""

import base64
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from queue import Empty, Queue
from typing import Any

import pytest
from cryptography import x509

from certs.certificate_secrets import CertificateSecrets, RotationTarget
from certs.key_pairs import names_of
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
from controller.webhook_configurations import WebhookConfigurations
from settings.configuration import Configuration
from vcuda.names import ARM_ANNOTATION, CA_SECRET, CONTROLLER, LEAF_SECRET, MONITOR_SECRET, WEBHOOK
from webhook.registration import registration
from webhook.service import admission_config_of

SYSTEM = "quotient-system"
CONFIGURATION = Configuration()
LABELS = {"app.kubernetes.io/name": "quotient", "app.kubernetes.io/component": "webhook"}
HOOKS = (MUTATING_WEBHOOKS, VALIDATING_WEBHOOKS)
START = datetime(2026, 11, 16, tzinfo=UTC)


class World:
    """A cluster with the webhooks registered, what each replica serves by address, and a certificate controller."""

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
            each["metadata"]["annotations"] = {ARM_ANNOTATION: arm}
            for hook in each["webhooks"]:
                hook["failurePolicy"] = "Ignore"
            self.cluster.create(HOOKS[0] if each["kind"].startswith("Mutating") else HOOKS[1], each)

    def new_certificate_controller(self, **terms: Any) -> CertificateController:
        return CertificateController(
            self.cluster,
            SYSTEM,
            CertificateTerms(
                names=CONFIGURATION.served_names(), port=8443, monitor_names=CONFIGURATION.monitor_names(), **terms
            ),
            clock=lambda: self.ticks,
            wall=lambda: self.now,
            fetch_certificate=lambda address, _: self.serving.get(address, b""),
            is_trusted=lambda address, _, bundle: self.is_trusted(address, bundle),
        )

    def replica(self, number: int) -> None:
        """Start a replica; it serves the certificate in its secret."""
        address = f"10.0.0.{number}"
        metadata = {"name": f"webhook-{number}", "namespace": SYSTEM, "labels": LABELS}
        container = {"name": "c", "image": "i"}
        made = self.cluster.create(PODS, {"metadata": metadata, "spec": {"containers": [container]}})
        status = {"status": {"phase": "Running", "podIP": address}}
        self.cluster.patch(PODS, made.metadata.name, SYSTEM, status, subresource="status")
        self.add_endpoint(f"webhook-{number}")
        self.reload(number)

    def add_endpoint(self, name: str, *, ready: bool = True) -> None:
        metadata = {"name": name, "namespace": SYSTEM, "labels": {"kubernetes.io/service-name": WEBHOOK}}
        endpoints = [{"addresses": ["10.0.0.1"], "conditions": {"ready": ready}}]
        self.cluster.create(
            ENDPOINT_SLICES, {"metadata": metadata, "addressType": "IPv4", "endpoints": endpoints, "ports": []}
        )

    def reload(self, *numbers: int) -> None:
        """Let replicas load their secret again; without one they keep what they serve."""
        for number in numbers:
            with suppress(NotFound):
                self.serving[f"10.0.0.{number}"] = self.leaf()

    def is_trusted(self, address: str, bundle: bytes) -> bool:
        """Whether a handshake would succeed: what is served is signed by one of these CAs, and not expired."""
        served = self.serving.get(address, b"")
        if not served.startswith(b"-----"):
            return bool(served) and served == bundle
        try:
            not_after = x509.load_pem_x509_certificate(served).not_valid_after_utc
        except ValueError:
            return False
        return bool(bundle) and is_signed(served, bundle) and self.now < not_after

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

    def certificates(self) -> Any:
        return CertificateSecrets(self.cluster, SYSTEM).read(self.now).state

    def settle(self) -> None:
        """Reconcile, reload and let time pass, until nothing is left to do."""
        for _ in range(20):
            step = self.certificate_controller.reconcile()
            self.ticks += 31
            self.reload(*(int(address.rpartition(".")[2]) for address in self.serving))
            if step is Step.REST and self.certificate_controller.reconcile() is Step.REST:
                return
        raise AssertionError("there is always something left to do")


@pytest.fixture
def world() -> World:
    return World()


def test_a_new_installation_fails_closed_once_a_replica_answers(world: World) -> None:
    """A CA and a serving certificate are created, and trusted in both configurations, the mutating one first."""
    assert world.certificate_controller.reconcile() is Step.WAIT
    assert world.bundles() == {world.certificates().bundle, b""}, "the validating webhook waits for the mutating one"
    assert world.policies() == {"Ignore"}, "no replica answers yet"
    world.replica(1)
    assert world.certificate_controller.reconcile() is Step.WAIT
    assert world.policies() == {"Ignore"}, "API servers may not know the endpoint yet"
    world.ticks += 2
    world.certificate_controller.reconcile()
    mutating, validating = world.hooks()
    assert {hook.failure_policy for hook in mutating.webhooks} == {"Fail"}
    assert {hook.failure_policy for hook in validating.webhooks} == {"Ignore"}
    assert world.certificate_controller.reconcile() is Step.REST
    assert world.bundles() == {world.certificates().bundle}
    assert world.policies() == {"Fail"}
    assert {each.metadata.owner_references[0].kind for each in world.hooks()} == {"Namespace"}
    assert world.cluster.get(SECRETS, LEAF_SECRET, SYSTEM).type == "kubernetes.io/tls"
    assert set(world.cluster.get(SECRETS, LEAF_SECRET, SYSTEM).data) == {"tls.crt", "tls.key"}, (
        "the CA's key must not be in the mounted secret"
    )


def monitor_secret(world: World) -> dict[str, bytes]:
    data = world.cluster.get(SECRETS, MONITOR_SECRET, SYSTEM).data
    return {key: base64.b64decode(value) for key, value in data.items()}


def test_node_plugins_get_a_certificate_of_the_same_ca(world: World) -> None:
    """In a secret with the CAs to trust, and without the CA's key; it is renewed, and issued again if it is lost."""
    world.certificate_controller.reconcile()
    first = monitor_secret(world)
    assert set(first) == {"tls.crt", "tls.key", "ca.crt"}
    assert is_signed(first["tls.crt"], first["ca.crt"])
    (certificate,) = x509.load_pem_x509_certificates(first["tls.crt"])
    assert names_of(certificate) == (
        f"gpu-manager-metric.{SYSTEM}.svc",
        f"gpu-manager-metric.{SYSTEM}.svc.cluster.local",
    )
    world.certificate_controller.reconcile()
    assert monitor_secret(world) == first
    world.now += timedelta(days=21)
    world.certificate_controller.reconcile()
    assert monitor_secret(world)["tls.crt"] != first["tls.crt"]
    world.cluster.delete(SECRETS, MONITOR_SECRET, SYSTEM)
    world.certificate_controller.reconcile()
    assert is_signed(monitor_secret(world)["tls.crt"], first["ca.crt"])


def test_the_certificate_of_node_plugins_follows_a_new_ca(world: World) -> None:
    """Clients get the new CA before it signs anything."""
    world.certificate_controller.reconcile()
    world.replica(1)
    world.settle()
    first = monitor_secret(world)
    CertificateSecrets(world.cluster, SYSTEM).request_rotation(RotationTarget.AUTHORITY)
    world.certificate_controller.reconcile()
    both = monitor_secret(world)
    assert both["tls.crt"] == first["tls.crt"]
    assert both["ca.crt"] == world.certificates().bundle != first["ca.crt"]
    world.ticks += 31
    world.certificate_controller.reconcile()
    after = monitor_secret(world)
    assert after["tls.crt"] != first["tls.crt"]
    assert is_signed(after["tls.crt"], both["ca.crt"])
    world.reload(1)
    world.settle()
    assert monitor_secret(world)["ca.crt"] == world.certificates().bundle


def test_nothing_is_written_when_nothing_is_to_do(world: World) -> None:
    world.certificate_controller.reconcile()
    world.replica(1)
    world.settle()
    before = world.cluster.list(SECRETS).resource_version
    world.certificate_controller.reconcile()
    assert world.cluster.list(SECRETS).resource_version == before


def test_overwritten_webhook_configurations_are_restored(world: World) -> None:
    world.certificate_controller.reconcile()
    world.replica(1)
    world.settle()
    bundle = world.bundles()
    for kind in HOOKS:
        world.cluster.delete(kind, "quotient")
    world.register()
    assert world.bundles() == {b""}
    world.certificate_controller.reconcile()  # the mutating one first, with Fail
    world.certificate_controller.reconcile()
    assert world.bundles() == bundle
    assert world.policies() == {"Fail"}


def test_rotation_waits_for_callers_and_replicas(world: World) -> None:
    """After each step another process may go on: only the cluster has the state."""
    world.certificate_controller.reconcile()
    world.replica(1)
    world.replica(2)
    world.settle()
    first = world.certificates()
    CertificateSecrets(world.cluster, SYSTEM).request_rotation(RotationTarget.AUTHORITY)
    world.certificate_controller = world.new_certificate_controller()
    assert world.certificate_controller.reconcile() is Step.WAIT
    both = world.certificates()
    assert both.current == first.current
    assert world.bundles() == {both.bundle}
    assert world.leaf() == first.leaf.certificate, "API servers may not know the new CA yet"
    world.ticks += 31
    world.certificate_controller.reconcile()
    after = world.certificates()
    assert after.current == both.next
    assert world.leaf() != first.leaf.certificate
    assert world.bundles() == {both.bundle}
    world.reload(1)
    world.ticks += 31
    assert world.certificate_controller.reconcile() is Step.WAIT
    assert world.bundles() == {both.bundle}, "one replica still serves the old certificate"
    world.reload(2)
    world.settle()
    assert world.bundles() == {after.current.certificate}
    assert first.current.certificate not in world.certificates().bundle


def test_a_new_serving_certificate_can_be_requested(world: World) -> None:
    """From the same CA; the request is removed once it is done."""
    world.certificate_controller.reconcile()
    world.replica(1)
    world.settle()
    first = world.certificates()
    CertificateSecrets(world.cluster, SYSTEM).request_rotation(RotationTarget.LEAF)
    world.settle()
    assert world.certificates().current == first.current
    assert world.certificates().leaf != first.leaf
    assert CertificateSecrets(world.cluster, SYSTEM).read(world.now).requested == ""


def expired(world: World) -> None:
    world.now += timedelta(days=400)


def truncated(world: World) -> None:
    data = {"tls.crt": base64.b64encode(world.leaf()[:200]).decode()}
    world.cluster.patch(SECRETS, LEAF_SECRET, SYSTEM, {"data": data})


def not_base64(world: World) -> None:
    world.cluster.patch(SECRETS, CA_SECRET, SYSTEM, {"data": {"ca.crt": "%%%", "ca.key": "="}})


def replaced_leaf(world: World) -> None:
    other = World()
    other.certificate_controller.reconcile()
    world.cluster.patch(SECRETS, LEAF_SECRET, SYSTEM, {"data": other.cluster.get(SECRETS, LEAF_SECRET, SYSTEM).data})


def replaced_authority(world: World) -> None:
    other = World()
    other.certificate_controller.reconcile()
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
    [expired, truncated, not_base64, replaced_leaf, replaced_authority, deleted_leaf, deleted_authority, deleted_both],
)
def test_damaged_certificates_are_repaired(world: World, harm: Any) -> None:
    """Until then, API servers keep trusting what replicas serve, if that is still valid."""
    world.certificate_controller.reconcile()
    world.replica(1)
    world.settle()
    served = next(iter(world.serving.values()))
    harm(world)
    still_valid = harm in {not_base64, replaced_authority, deleted_leaf, deleted_authority, deleted_both}
    for _ in range(3):
        world.certificate_controller.reconcile()
        if still_valid and world.serving["10.0.0.1"] == served:
            assert any(is_signed(served, bundle) for bundle in world.bundles())
        world.ticks += 5
    world.settle()
    assert all(is_signed(world.leaf(), bundle) for bundle in world.bundles())
    assert world.serving["10.0.0.1"] == world.leaf()
    assert world.policies() == {"Fail"}


def is_signed(leaf: bytes, bundle: bytes) -> bool:
    return is_signed_by(x509.load_pem_x509_certificate(leaf), bundle)


@pytest.mark.parametrize("removed", ["deployment", "namespace"])
def test_a_webhook_that_is_being_removed_fails_open(world: World, removed: str) -> None:
    """One that is only down fails closed."""
    world.certificate_controller.reconcile()
    world.replica(1)
    world.settle()
    world.serving["10.0.0.1"] = b""
    world.certificate_controller.reconcile()
    assert world.policies() == {"Fail"}
    if removed == "deployment":
        world.cluster.delete(DEPLOYMENTS, WEBHOOK, SYSTEM)
    else:
        finalizers = {"metadata": {"finalizers": ["quotient.dev/test"]}}
        world.cluster.patch(DEPLOYMENTS, WEBHOOK, SYSTEM, finalizers)
        world.cluster.delete(NAMESPACES, SYSTEM)
    assert WebhookConfigurations(world.cluster, SYSTEM).is_being_removed()
    world.certificate_controller.reconcile()
    assert world.policies() == {"Ignore"}


def test_a_change_of_the_namespace_triggers_a_reconcile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deletion shows there first: then its pods are deleted, and its Deployments last."""
    reconciles: Queue[None] = Queue()

    def reconcile() -> Step:
        reconciles.put(None)
        return Step.REST

    monkeypatch.setattr(world.certificate_controller, "reconcile", reconcile)
    world.certificate_controller.start()
    try:
        with suppress(Empty):
            while True:
                reconciles.get(timeout=1)
        world.cluster.patch(NAMESPACES, SYSTEM, "", {"metadata": {"labels": {"a": "b"}}})
        reconciles.get(timeout=10)
    finally:
        world.certificate_controller.stop()


def test_annotation_never_keeps_failing_open_until_it_is_auto_again(world: World) -> None:
    world.certificate_controller.reconcile()
    world.replica(1)
    world.settle()
    for kind in HOOKS:
        world.cluster.patch(kind, "quotient", "", {"metadata": {"annotations": {ARM_ANNOTATION: "never"}}})
    world.certificate_controller.reconcile()
    assert world.policies() == {"Ignore"}
    for kind in HOOKS:
        world.cluster.patch(kind, "quotient", "", {"metadata": {"annotations": {ARM_ANNOTATION: "auto"}}})
    world.certificate_controller.reconcile()
    assert world.policies() == {"Fail"}


def test_a_controller_that_is_being_removed_makes_webhooks_fail_open(world: World) -> None:
    """A restart does not."""
    world.certificate_controller.reconcile()
    world.replica(1)
    world.settle()
    world.certificate_controller.stop()
    assert world.policies() == {"Fail"}
    world.cluster.delete(DEPLOYMENTS, CONTROLLER, SYSTEM)
    world.certificate_controller.stop()
    assert world.policies() == {"Ignore"}


def test_certificates_that_quotient_does_not_manage_are_not_changed(world: World) -> None:
    """cert-manager's, or the administrator's: only the failurePolicy is set."""
    world.certificate_controller = world.new_certificate_controller(managed=False)
    world.serving["10.0.0.1"] = b"foreign"
    metadata = {"name": "webhook-1", "namespace": SYSTEM, "labels": LABELS}
    world.cluster.create(PODS, {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}]}})
    status = {"status": {"phase": "Running", "podIP": "10.0.0.1"}}
    world.cluster.patch(PODS, "webhook-1", SYSTEM, status, subresource="status")
    assert world.certificate_controller.reconcile() is Step.WAIT, "the Service has no endpoint yet"
    world.add_endpoint("webhook")
    world.certificate_controller.reconcile()
    world.ticks += 2
    assert world.certificate_controller.reconcile() is Step.WAIT, "the caBundle does not trust it yet"
    assert world.policies() == {"Ignore"}
    foreign = base64.b64encode(b"foreign").decode()
    for kind in HOOKS:
        existing = world.cluster.get(kind, "quotient")
        hooks = [{"name": hook.name, "clientConfig": {"caBundle": foreign}} for hook in existing.webhooks]
        world.cluster.apply(kind, existing, {"webhooks": hooks}, manager="cert-manager")
    world.certificate_controller.reconcile()
    world.ticks += 2
    assert world.certificate_controller.reconcile() is Step.REST
    assert world.bundles() == {b"foreign"}
    assert world.policies() == {"Fail"}
    assert world.cluster.list(SECRETS).items == []


def test_webhooks_at_a_url_are_not_changed(world: World) -> None:
    """They have certificates of their own."""
    for kind in HOOKS:
        world.cluster.delete(kind, "quotient")
    for each in registration(admission_config_of(CONFIGURATION), "https://127.0.0.1:8443", b"own")[:2]:
        world.cluster.create(HOOKS[0] if each["kind"].startswith("Mutating") else HOOKS[1], each)
    world.certificate_controller.reconcile()
    assert world.bundles() == {b"own"}
    assert world.policies() == {"Fail"}
