"""Keeps the webhook's certificates: renewed in time, rotated in the safe order, trusted and served.

One pass reads everything there is, takes the steps that can be taken now, and puts the webhook configurations right.
What it knows of earlier passes is only how long callers have been able to hear of a bundle.
"""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
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
from controller.webhook_configurations import (
    CONFIGURATION_NAME,
    CONTROLLER,
    WEBHOOK,
    WEBHOOK_KINDS,
    WebhookConfigurations,
)
from vcuda.decision import Unavailable
from vcuda.names import CA_SECRET, LEAF_SECRET

BEHIND = Selector(labels=f"kubernetes.io/service-name={WEBHOOK}")
REPLICAS = Selector(labels="app.kubernetes.io/name=quotient,app.kubernetes.io/component=webhook")
# How often to look when nothing happens, and while something is on its way.
AGAIN_S, SOON_S = 60.0, 2.0
HEARD_S = 1.5
MOST_STEPS = 8
DIAL_S = 3.0


class CertificateTerms(Struct, frozen=True):
    """Whether certificates are made here, for which names, where they are served, and how patient to be."""

    names: tuple[str, ...]
    port: int
    managed: bool = True
    settle_s: float = 30.0


class CertificateStatus(Struct, frozen=True):
    """What a pass found, for the metrics."""

    kept: CertificateState = CertificateState()
    last: NextStep = NextStep(Step.WAIT, "nothing was looked at yet")


class CertificateController:
    """Looks after certificates and webhook configurations, while `is_leading` says so."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        terms: CertificateTerms,
        *,
        is_leading: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
        dial: Callable[[str, int], bytes] | None = None,
        trusts: Callable[[str, int, bytes], bool] | None = None,
        owners: Owners = list,
    ) -> None:
        self._cluster, self._namespace, self._terms = cluster, namespace, terms
        self._is_leading, self._clock, self._wall = is_leading, clock, wall
        self._dial = dial or served_at
        self._trusts = trusts or partial(is_trusted_at, name=f"{WEBHOOK}.{namespace}.svc")
        self._vault, self._hooks = (
            CertificateSecrets(cluster, namespace, owners),
            WebhookConfigurations(cluster, namespace),
        )
        self._seen: tuple[bytes, float] = b"", 0.0
        self._answering: float | None = None
        self._told = ""
        self.found = CertificateStatus()
        self._wake, self._ending = threading.Event(), threading.Event()
        secrets = (CA_SECRET, LEAF_SECRET) if terms.managed else ()
        self._informers: list[
            Informer[Secret] | Informer[WebhookConfiguration] | Informer[Workload] | Informer[Namespace]
        ] = [
            *(Informer(cluster, SECRETS, namespace, named(name)) for name in secrets),
            *(Informer(cluster, kind, selector=named(CONFIGURATION_NAME)) for kind in WEBHOOK_KINDS),
            Informer(cluster, DEPLOYMENTS, namespace, named(WEBHOOK)),
            # One that is deleted loses its pods first: by its Deployments it would be noticed too late.
            Informer(cluster, NAMESPACES, selector=named(namespace)),
        ]
        for informer in self._informers:
            informer.on_change(lambda *_: self._wake.set())
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="certificates", daemon=True)

    def start(self) -> "CertificateController":
        """Begin."""
        for informer in self._informers:
            informer.start()
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; if we are being taken away for good, let the API server do without us first."""
        self._ending.set()
        self._wake.set()
        for informer in self._informers:
            informer.stop()
        if self._thread.is_alive():
            self._thread.join(10)
        try:
            if self._hooks.is_taken_away(CONTROLLER) and self._hooks.arm(armed=False):
                self._log.warning("webhooks_disarmed", cause="the controller is taken away")
        except (ApiError, Unavailable) as broken:
            self._log.warning("webhooks_not_disarmed", cause=str(broken))

    @property
    def alive(self) -> bool:
        """Whether its threads run."""
        return self._thread.is_alive() and all(informer.alive for informer in self._informers)

    def look_again(self) -> None:
        """Look at once: after becoming the leader, or because something changed."""
        self._wake.set()

    def _run(self) -> None:
        pause = SOON_S
        while not self._ending.is_set():
            self._wake.wait(pause)
            if self._ending.is_set():
                return
            self._wake.clear()
            if not self._is_leading():
                pause = AGAIN_S
                continue
            try:
                pause = AGAIN_S if self.look() is Step.REST else SOON_S
            except (Conflict, AlreadyExists):
                pause = SOON_S  # somebody else wrote: look again
            except (ApiError, Unavailable) as broken:
                self._log.warning("certificates_not_kept", cause=str(broken))
                pause = SOON_S
            except Exception:  # the outermost frame of the thread: it has to go on
                self._log.exception("certificates_failed")
                pause = AGAIN_S

    def look(self) -> Step:
        """Look at everything once, and do what can be done now; gives where it stands."""
        if self._hooks.is_taken_away() and self._hooks.arm(armed=False):
            self._log.warning("webhooks_disarmed", cause="the webhook is taken away")
        if not self._terms.managed:
            return self._arm()
        found = NextStep(Step.WAIT, "")
        for _ in range(MOST_STEPS):
            stored = self._vault.read(self._wall())
            wanted, outside = self._wanted(stored), self._outside(stored.state)
            found = next_step(stored.state, wanted, self._wall(), outside)
            # Once everything is remembered that somebody relies on, this is what callers should trust.
            if found.step not in (Step.BEGIN, Step.REMEMBER) and self._hooks.publish(stored.state.bundle):
                outside = self._outside(stored.state)
                found = next_step(stored.state, wanted, self._wall(), outside)
            self.found = CertificateStatus(stored.state, found)
            if found.step in (Step.WAIT, Step.REST):
                break
            self._take(found, stored, wanted, outside)
        arming = self._arm()
        return Step.WAIT if Step.WAIT in (found.step, arming) else Step.REST

    def _wanted(self, stored: StoredCertificates) -> RotationRequest:
        if stored.requested and stored.requested not in [*RotationTarget]:
            self._log.warning(
                "wish_not_understood", wish=stored.requested, remedy=f"write one of {', '.join(RotationTarget)}"
            )
        return RotationRequest(
            self._terms.names,
            new_authority=stored.requested == RotationTarget.AUTHORITY,
            new_leaf=stored.requested == RotationTarget.LEAF,
        )

    def _take(
        self, found: NextStep, stored: StoredCertificates, wanted: RotationRequest, outside: ObservedTrust
    ) -> None:
        """Take a step, and store what came of it; Conflict if somebody else did meanwhile."""
        kept = apply_step(found.step, stored.state, wanted, self._wall(), outside)
        granted = (found.step is Step.PREPARE and wanted.new_authority) or (
            found.step is Step.ISSUE and wanted.new_leaf
        )
        self._vault.write(stored, kept, clear_request=granted)
        self._log.info("certificates", step=found.step.value, why=found.why)

    def _outside(self, kept: CertificateState) -> ObservedTrust:
        """See what callers trust, and since when; and what replicas serve."""
        bundles = self._hooks.bundles()
        is_there = all(bundle == kept.bundle for bundle in bundles)
        if not is_there or self._seen[0] != kept.bundle:
            self._seen = kept.bundle if is_there else b"", self._clock()
        # Where nobody is registered, nobody has to hear of it.
        published = is_there and (not bundles or self._clock() - self._seen[1] >= self._terms.settle_s)
        serving = tuple(self._served())
        return ObservedTrust(
            merge_bundles(bundles), published, all(each == kept.leaf.certificate for each in serving), serving
        )

    def _served(self) -> Iterable[bytes]:
        """Ask each replica what it serves, those on their way out too; nothing for one that does not answer."""
        for address in self._addresses():
            yield self._dial(address, self._terms.port)

    def _addresses(self) -> list[str]:
        """Find the replicas that may be called: one that is not running yet reads what there is when it begins."""
        pods = self._cluster.list(PODS, self._namespace, REPLICAS).items
        return [pod.status.pod_ip for pod in pods if pod.status.pod_ip and pod.status.phase == "Running"]

    def _is_behind_service(self) -> bool:
        """Tell whether the Service has a replica that takes calls."""
        slices = self._cluster.list(ENDPOINT_SLICES, self._namespace, BEHIND).items
        return any(endpoint.conditions.ready for each in slices for endpoint in each.endpoints or ())

    def _is_trusted(self) -> bool:
        """Tell whether some replica would be believed by the API server, for each of our webhooks."""
        bundles = set(self._hooks.bundles())
        return any(
            all(self._trusts(each, self._terms.port, bundle) for bundle in bundles) for each in self._addresses()
        )

    def _why_not_armed(self) -> str:
        """Say why the API server would get no answer; nothing if it would get one."""
        if not self._is_behind_service():
            return f"no replica is ready behind the Service {WEBHOOK}"
        return "" if self._is_trusted() else "no replica answers with a certificate that the API server would trust"

    def _arm(self) -> Step:
        """Let the API server insist on an answer from the first one on, until the webhook is taken away for good."""
        if self._hooks.is_taken_away():
            return Step.REST
        if why := self._why_not_armed():
            if why != self._told:
                self._log.info("webhooks_not_armed", cause=why)
            self._told, self._answering = why, None
        elif self._answering is None:
            self._answering = self._clock()
        # API servers hear a little later of what is behind the Service.
        if self._answering is None or self._clock() - self._answering < HEARD_S:
            self._hooks.arm(armed=None)
            return Step.WAIT
        self._told = ""
        if self._hooks.arm(armed=True):
            self._log.info("webhooks_armed")
        return Step.REST


def named(name: str) -> Selector:
    """Select the one object of this name."""
    return Selector(fields=f"metadata.name={name}")


def is_trusted_at(address: str, port: int, bundle: bytes, *, name: str) -> bool:
    """Tell whether one who trusts these CAs would believe who answers there: shakes hands as an API server does."""
    try:
        context = ssl.create_default_context(cadata=bundle.decode("ascii"))
        with (
            socket.create_connection((address, port), DIAL_S) as connection,
            context.wrap_socket(connection, server_hostname=name),
        ):
            return True
    except (OSError, ValueError):
        return False


def served_at(address: str, port: int) -> bytes:
    """Give the certificate that is served somewhere; nothing if none is."""
    try:
        return x509.load_pem_x509_certificate(
            ssl.get_server_certificate((address, port), timeout=DIAL_S).encode()
        ).public_bytes(Encoding.PEM)
    except (OSError, ValueError):
        return b""
