"""Reconciles the webhook's certificates and webhook configurations.

One reconcile reads the secrets, the configurations and what the replicas serve, takes the steps of a rotation that are
possible now (the order is in certs/rotation.py), and sets caBundle and failurePolicy. It is level-triggered: all it
remembers is since when the caBundle has been published, and since when a replica has answered.
"""

import socket
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec import Struct

from certs.certificate_secrets import CertificateSecrets, RotationTarget, StoredCertificates
from certs.rotation import (
    CertificateState,
    NextStep,
    ObservedTrust,
    RotationRequest,
    Step,
    apply_step,
    merge_bundles,
    next_step,
)
from cluster.errors import AlreadyExists, ApiError, Conflict
from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import (
    DEPLOYMENTS,
    ENDPOINT_SLICES,
    NAMESPACES,
    PODS,
    SECRETS,
    Namespace,
    Owners,
    Secret,
    WebhookConfiguration,
    Workload,
)
from controller.monitor_certificate import reconcile_monitor_certificate
from controller.webhook_configurations import (
    WEBHOOK_KINDS,
    FailurePolicy,
    WebhookConfigurations,
)
from vcuda.decision import Unavailable
from vcuda.names import (
    APP,
    APP_LABEL,
    CA_SECRET,
    COMPONENT_LABEL,
    CONTROLLER,
    LEAF_SECRET,
    MONITOR_SECRET,
    SERVICE_NAME_LABEL,
    WEBHOOK,
    WEBHOOK_CONFIGURATION,
)

WEBHOOK_ENDPOINTS = Selector(labels=f"{SERVICE_NAME_LABEL}={WEBHOOK}")
WEBHOOK_PODS = Selector(labels=f"{APP_LABEL}={APP},{COMPONENT_LABEL}=webhook")
# Expiry comes without an event, so everything is reconciled this often.
RESYNC_S = 60.0
# While a rotation waits for callers or replicas, and after a failure.
RETRY_S = 2.0
# How long API servers may take to learn that the Service has an endpoint. Fail before that would refuse GPU pods.
ENDPOINT_PROPAGATION_S = 1.5
# A rotation has fewer steps; this only ends a loop whose writes have no effect.
MAX_STEPS = 8
DIAL_TIMEOUT_S = 3.0


class CertificateTerms(Struct, frozen=True):
    """Settings. `managed`: this controller issues the certificates, rather than cert-manager or the administrator.

    `names` are the DNS names and addresses in the webhook's certificate, `monitor_names` those in the node plugins'.
    `settle_s` is how long a caBundle must be published until all API servers are taken to know it.
    """

    names: tuple[str, ...]
    port: int
    monitor_names: tuple[str, ...]
    managed: bool = True
    settle_s: float = 30.0


class CertificateStatus(Struct, frozen=True):
    """The result of the last reconcile, for the metrics."""

    certificates: CertificateState = CertificateState()
    last_step: NextStep = NextStep(Step.WAIT, "not reconciled yet")


class CertificateController:
    """Reconciles on a thread of its own, while `is_leading` says so.

    `fetch_certificate(address, port)` returns what a replica serves, empty if it does not answer.
    `is_trusted(address, port, bundle)` says whether an API server with this caBundle would accept that.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        terms: CertificateTerms,
        *,
        is_leading: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        fetch_certificate: Callable[[str, int], bytes] | None = None,
        is_trusted: Callable[[str, int, bytes], bool] | None = None,
        owners: Owners = list,
    ) -> None:
        self._cluster, self._namespace, self._terms = cluster, namespace, terms
        self._is_leading, self._clock, self._wall = is_leading, clock, wall
        self._fetch_certificate = fetch_certificate or served_certificate
        self._is_trusted = is_trusted or partial(passes_handshake, name=f"{WEBHOOK}.{namespace}.svc")
        self._secrets = CertificateSecrets(cluster, namespace, owners)
        self._webhooks = WebhookConfigurations(cluster, namespace)
        # The bundle that all webhooks have now, and since when.
        self._published: tuple[bytes, float] = b"", 0.0
        self._answering_since: float | None = None
        # Why the failurePolicy is not Fail; logged once, not at every reconcile.
        self._last_obstacle = ""
        self.status = CertificateStatus()
        self._wake, self._stopping = threading.Event(), threading.Event()
        secrets = (CA_SECRET, LEAF_SECRET, MONITOR_SECRET) if terms.managed else ()
        self._informers: list[
            Informer[Secret] | Informer[WebhookConfiguration] | Informer[Workload] | Informer[Namespace]
        ] = [
            *(Informer(cluster, SECRETS, namespace, by_name(name)) for name in secrets),
            *(Informer(cluster, kind, selector=by_name(WEBHOOK_CONFIGURATION)) for kind in WEBHOOK_KINDS),
            Informer(cluster, DEPLOYMENTS, namespace, by_name(WEBHOOK)),
            # A namespace that is deleted loses its pods before its Deployments: the latter would be noticed too late.
            Informer(cluster, NAMESPACES, selector=by_name(namespace)),
        ]
        for informer in self._informers:
            informer.on_change(lambda *_: self.enqueue())
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="certificate-controller", daemon=True)

    def start(self) -> "CertificateController":
        for informer in self._informers:
            informer.start()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop; if the controller is being removed, set Ignore first, because nothing else would."""
        self._stopping.set()
        self._wake.set()
        for informer in self._informers:
            informer.stop()
        if self._thread.is_alive():
            self._thread.join(10)
        try:
            if self._webhooks.is_being_removed(CONTROLLER):
                self._fail_open("the controller is being removed")
        except (ApiError, Unavailable) as error:
            self._log.warning("failure_policy_not_set", policy=FailurePolicy.IGNORE.value, error=str(error))

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and all(informer.alive for informer in self._informers)

    def enqueue(self) -> None:
        """Reconcile at once: something changed, or this process became the leader."""
        self._wake.set()

    def _run(self) -> None:
        delay_s = RETRY_S
        while not self._stopping.is_set():
            self._wake.wait(delay_s)
            if self._stopping.is_set():
                return
            # Before the reconcile: a change during it has to wake the next one.
            self._wake.clear()
            if not self._is_leading():
                delay_s = RESYNC_S
                continue
            try:
                delay_s = RESYNC_S if self.reconcile() is Step.REST else RETRY_S
            except (Conflict, AlreadyExists):
                delay_s = RETRY_S  # another process wrote: read again
            except (ApiError, Unavailable) as error:
                self._log.warning("certificate_reconcile_failed", error=str(error), retry_in_s=RETRY_S)
                delay_s = RETRY_S
            except Exception:  # the outermost frame of the thread, which has to go on
                self._log.exception("certificate_worker_crashed")
                delay_s = RESYNC_S

    def reconcile(self) -> Step:
        """Take all steps that are possible now; returns REST if nothing is left to do, else WAIT."""
        if self._webhooks.is_being_removed():
            self._fail_open("the webhook is being removed")
        if not self._terms.managed:
            return self._reconcile_failure_policy()
        step = NextStep(Step.WAIT, "")
        for _ in range(MAX_STEPS):
            stored = self._secrets.read(self._wall())
            request, observed = self._rotation_request(stored), self._observe(stored.state)
            step = next_step(stored.state, request, self._wall(), observed)
            # Not before BEGIN and REMEMBER: until then the stored bundle may lack a CA that a served certificate needs.
            if step.step not in (Step.BEGIN, Step.REMEMBER) and self._webhooks.set_ca_bundle(stored.state.bundle):
                observed = self._observe(stored.state)
                step = next_step(stored.state, request, self._wall(), observed)
            self.status = CertificateStatus(stored.state, step)
            if step.step in (Step.WAIT, Step.REST):
                break
            self._take_step(step, stored, request, observed)
        policy_step = self._reconcile_failure_policy()
        # Last: what admission needs comes first.
        self._reconcile_monitor_certificate()
        return Step.WAIT if Step.WAIT in (step.step, policy_step) else Step.REST

    def _reconcile_monitor_certificate(self) -> None:
        authorities = self._secrets.read(self._wall()).state
        if why := reconcile_monitor_certificate(self._secrets, authorities, self._terms.monitor_names, self._wall()):
            self._log.info("monitor_certificate_written", reason=why)

    def _rotation_request(self, stored: StoredCertificates) -> RotationRequest:
        if stored.requested and stored.requested not in [*RotationTarget]:
            self._log.warning(
                "rotation_request_invalid", value=stored.requested, remedy=f"write one of {', '.join(RotationTarget)}"
            )
        return RotationRequest(
            self._terms.names,
            new_authority=stored.requested == RotationTarget.AUTHORITY,
            new_leaf=stored.requested == RotationTarget.LEAF,
        )

    def _take_step(
        self, step: NextStep, stored: StoredCertificates, request: RotationRequest, observed: ObservedTrust
    ) -> None:
        """Take a step and store its result; raises Conflict if another process wrote the secrets in between."""
        certificates = apply_step(step.step, stored.state, request, self._wall(), observed)
        is_request_done = (step.step is Step.PREPARE and request.new_authority) or (
            step.step is Step.ISSUE and request.new_leaf
        )
        self._secrets.write(stored, certificates, clear_request=is_request_done)
        self._log.info("certificate_step_taken", step=step.step.value, reason=step.why)

    def _observe(self, certificates: CertificateState) -> ObservedTrust:
        """Return what the API servers trust, whether they have known it for long enough, and what replicas serve."""
        bundles = self._webhooks.bundles()
        is_everywhere = all(bundle == certificates.bundle for bundle in bundles)
        if not is_everywhere or self._published[0] != certificates.bundle:
            self._published = certificates.bundle if is_everywhere else b"", self._clock()
        # Without registered webhooks no API server has to learn of the bundle.
        is_known = is_everywhere and (not bundles or self._clock() - self._published[1] >= self._terms.settle_s)
        serving = tuple(self._fetch_certificate(address, self._terms.port) for address in self._replica_addresses())
        is_served = all(served == certificates.leaf.certificate for served in serving)
        return ObservedTrust(merge_bundles(bundles), is_known, is_served, serving)

    def _replica_addresses(self) -> list[str]:
        """Return the addresses of running replicas, terminating ones included: they may still be called.

        A replica that is not running yet reads the stored certificate when it starts.
        """
        pods = self._cluster.list(PODS, self._namespace, WEBHOOK_PODS).items
        return [pod.status.pod_ip for pod in pods if pod.status.pod_ip and pod.status.phase == "Running"]

    def _has_ready_endpoint(self) -> bool:
        slices = self._cluster.list(ENDPOINT_SLICES, self._namespace, WEBHOOK_ENDPOINTS).items
        return any(endpoint.conditions.ready for each in slices for endpoint in each.endpoints or ())

    def _is_any_replica_trusted(self) -> bool:
        """Whether some replica would be accepted with the caBundle of each webhook."""
        bundles = set(self._webhooks.bundles())
        port = self._terms.port
        return any(
            all(self._is_trusted(address, port, bundle) for bundle in bundles) for address in self._replica_addresses()
        )

    def _obstacle_to_fail(self) -> str:
        """Return why the API server would get no answer from the webhook; empty if it would."""
        if None in self._webhooks.paths()[0]:
            return "not every webhook has a path yet"
        if not self._has_ready_endpoint():
            return f"Service {WEBHOOK} has no ready endpoint"
        return "" if self._is_any_replica_trusted() else "no replica serves a certificate that the caBundle trusts"

    def _reconcile_failure_policy(self) -> Step:
        """Set Fail once the webhook answers. It stays Fail when the webhook is down, until it is being removed."""
        if self._webhooks.is_being_removed():
            return Step.REST
        if obstacle := self._obstacle_to_fail():
            if obstacle != self._last_obstacle:
                self._log.info("webhook_not_answering", reason=obstacle)
            self._last_obstacle, self._answering_since = obstacle, None
        elif self._answering_since is None:
            self._answering_since = self._clock()
        if self._answering_since is None or self._clock() - self._answering_since < ENDPOINT_PROPAGATION_S:
            # Even so, a configuration with the annotation `never` gets Ignore.
            self._webhooks.set_failure_policy(None)
            return Step.WAIT
        self._last_obstacle = ""
        if self._webhooks.set_failure_policy(FailurePolicy.FAIL):
            self._log.info("failure_policy_set", policy=FailurePolicy.FAIL.value)
        return Step.REST

    def _fail_open(self, reason: str) -> None:
        if self._webhooks.set_failure_policy(FailurePolicy.IGNORE):
            self._log.warning("failure_policy_set", policy=FailurePolicy.IGNORE.value, reason=reason)


def by_name(name: str) -> Selector:
    return Selector(fields=f"metadata.name={name}")


def passes_handshake(address: str, port: int, bundle: bytes, *, name: str) -> bool:
    """Whether a TLS handshake succeeds as the API server makes it: with only these CAs, and the Service's name."""
    try:
        context = ssl.create_default_context(cadata=bundle.decode("ascii"))
        with (
            socket.create_connection((address, port), DIAL_TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=name),
        ):
            return True
    except (OSError, ValueError):
        return False


def served_certificate(address: str, port: int) -> bytes:
    """Return the certificate that is served at an address as PEM, without verifying it; empty if there is none."""
    try:
        return x509.load_pem_x509_certificate(
            ssl.get_server_certificate((address, port), timeout=DIAL_TIMEOUT_S).encode()
        ).public_bytes(Encoding.PEM)
    except (OSError, ValueError):
        return b""
