"""The node plugin as a whole: builds its parts from the configuration, connects them, starts and stops them.

The reconciler is here because it touches several parts: it releases the allocations of pods that are gone.
"""

import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import structlog

from cluster.authorization import CachedAuthorizer
from cluster.backoff import Backoff
from cluster.errors import ApiError
from cluster.interface import Cluster
from cluster.objects import NODES
from nodeplugin.allocating import Allocator
from nodeplugin.allocation_store import AllocationStore, UnreleasedPods
from nodeplugin.cards import Card, NodeCards
from nodeplugin.cgroups import running_pods
from nodeplugin.checkpoint import CHECKPOINT_FILE, AllocationCheckpoint, BadCheckpoint, PodAllocation, read_checkpoint
from nodeplugin.device_ids import Resource
from nodeplugin.device_plugin import Registrar
from nodeplugin.discovery import CannotServe, CardDiscovery
from nodeplugin.health import HealthWatcher
from nodeplugin.host_driver import HostDriver
from nodeplugin.injection import Injector, detect_mode
from nodeplugin.isolation_ladder import CardLadder, group_not_offered
from nodeplugin.kubelet import Kubelet
from nodeplugin.metrics import Metrics
from nodeplugin.monitor import MonitorServer
from nodeplugin.node_publisher import NodePublisher
from nodeplugin.nvml import Driver
from nodeplugin.pending_resets import PendingResets
from nodeplugin.pods import NodePods, PodsByUid
from nodeplugin.sampling import Sampler
from nodeplugin.share_enforcement import ShareEnforcement
from settings.configuration import Configuration
from vcuda.decision import Unavailable
from vcuda.injection_modes import InjectionMode
from vcuda.names import names_for
from vcuda.scheme import build_scheme

# Allocations are also compared with the pods without any event, in case one was missed.
RESYNC_S = 60.0
# How often the reconciler wakes up. While it has work left it retries earlier, with exponential backoff.
RECONCILE_S = 5.0
RETRY_BACKOFF = Backoff(first_s=0.5, max_s=RECONCILE_S)
# How long it waits for further pod changes, so that a deleted Deployment costs one checkpoint and not one per pod.
COALESCE_S = 0.1
# Registration waits for this call, and an API server that is down must not delay it.
DETECT_TIMEOUT_S = 1.0


class Service:
    """The node plugin of one node. Raises OSError if its folder cannot be created or its port is in use."""

    def __init__(self, configuration: Configuration, cluster: Cluster, driver: Driver | None = None) -> None:
        settings = configuration.node_plugin
        self.node = settings.node_name or socket.gethostname()
        self._cluster, self._unit_mib = cluster, configuration.memory_unit_mib
        self._folder = Path(settings.folder)
        self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        scheme = build_scheme(
            names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies
        )
        self.host_driver = HostDriver(Path(settings.host_root), settings.driver_root)
        self.driver = driver or Driver()
        self.driver.library = self.host_driver.find_library()
        boot = boot_id()
        # Read before the driver is asked: a card that is in the checkpoint and not listed is missing, not unknown.
        self._previous = previous_checkpoint(self._folder)
        self.node_cards = NodeCards(previous_cards(self._previous, boot), self._ladder_of)
        self.kubelet = Kubelet(Path(settings.device_plugins), Path(settings.pod_resources) / "kubelet.sock")
        self.pods = NodePods(cluster, self.node, scheme, self._folder / "pods.json")
        self._mode: InjectionMode | None = None if settings.injection == "auto" else settings.injection
        self.injector = Injector(
            self._mode or "native",
            self._folder,
            self.host_driver,
            self.node_cards,
            names=scheme.names,
            cdi=Path(settings.cdi),
        )
        self.allocations = AllocationStore(
            self._folder,
            scheme,
            self.node_cards,
            pods=self.pods,
            kubelet=self.kubelet,
            injector=self.injector,
            running_pods=running_pods,
            boot_id=boot,
        )
        self.allocator = Allocator(
            self.allocations,
            scheme,
            self.node_cards,
            pods=self.pods,
            kubelet=self.kubelet,
            injector=self.injector,
            policy=settings.policy,
        )
        self.publisher = NodePublisher(
            cluster,
            self.node,
            scheme.names,
            self.node_cards,
            on_change=self._on_change,
            unwritten_placements=lambda: unwritten_placements(self.allocations.all(), self.pods.cached_pods()),
            driver_version=lambda: self.discovery.version,
            namespace=configuration.system_namespace,
        )
        self.allocations.on_change(self._on_change)
        self.health = HealthWatcher(
            self.driver, self.node_cards, settings.health, self._on_change, resets=PendingResets(self._folder, boot)
        )
        self.discovery = CardDiscovery(
            self.driver,
            self.host_driver,
            self.node_cards,
            configuration.memory_unit_mib,
            cards_in_use=lambda: {uuid for pod in self.allocations.all().values() for uuid in pod.usage},
            on_version=self._start_injector,
            on_change=self._on_change,
            on_forget=self.health.forget,
            on_failure=self._fail,
        )
        self.sampler = Sampler(self.driver, self.node_cards, self.pods.cached_pods, self.allocations.all)
        self.enforcement = ShareEnforcement(
            settings.isolation,
            self._folder,
            host=self.host_driver.host,
            driver=self.driver,
            injector=self.injector,
            node_cards=self.node_cards,
            allocations=self.allocations.all,
            sample=self.sampler.sample,
            # Not before all parts are there that the first cards are published by.
            driver_version=lambda: self.discovery.version if self._may_inject else "",
            find_library=self.host_driver.find_library,
        )
        self.metrics = Metrics(
            self.node,
            self.sampler.sample,
            lambda: dict(self.health.xids),
            self._status,
            self.enforcement.feedback.residual,
        )
        names = {resource: resource.name_in(scheme.names) for resource in Resource}
        self.registrar = Registrar(self.kubelet, self.allocator, names, self.metrics.observe)
        self.monitor = MonitorServer(
            configuration.monitor,
            self.node,
            self.metrics.registry,
            self.sampler.sample,
            CachedAuthorizer(cluster.with_timeout(5.0)),
            live=self.not_live,
            ready=self.not_ready,
        )
        self.ending = threading.Event()
        # Coalesces pod changes.
        self._pods_changed = threading.Event()
        # Guards the start of the injector, once its mode is known, with the newest version of the driver.
        self._injecting = threading.Lock()
        self._may_inject = False
        self._has_started = False
        self.failure = ""
        self._log = structlog.get_logger()
        self._reconciler = threading.Thread(target=self._reconcile_loop, name="reconciler", daemon=True)

    def start(self) -> "Service":
        """Start all parts; waits neither for the kubelet, which may not run yet, nor long for the driver."""
        began = time.monotonic()
        self.monitor.start()
        self.discovery.start()
        if self.failure:
            raise CannotServe(self.failure)
        self.publisher.start()
        self.pods.start(self._on_pod_change)
        if self._mode is None:
            self.injector.mode = self._detect_injection()
        self._may_inject = True
        self._start_injector()
        self._log_ladders()
        # What the cards offer depends on the mode, and may have been published before it was known.
        self.publisher.enqueue()
        # Before registration: a kubelet may send calls at once, and they must see all existing allocations.
        self.allocations.recover()
        self.enforcement.start()
        self.registrar.start()
        self.health.start()
        self._reconciler.start()
        self._has_started = True
        self._log.info(
            "nodeplugin_started",
            node=self.node,
            cards=len(self.node_cards.cards()),
            injector=self.injector.mode,
            took_s=round(time.monotonic() - began, 3),
        )
        return self

    def stop(self) -> None:
        """Stop all parts. Containers keep their GPUs, and allocations stay in the checkpoint."""
        self.ending.set()
        self._pods_changed.set()
        self.registrar.stop()
        self.enforcement.stop()
        self.publisher.stop()
        self.pods.stop()
        self._reconciler.join(10)
        self.health.stop()
        self.discovery.stop()
        self.monitor.stop()
        self.kubelet.close()
        self.driver.close()

    def run(self) -> None:
        """Serve until `ending` is set; raises CannotServe if the plugin cannot continue."""
        self.start()
        self.ending.wait()
        self.stop()
        if self.failure:
            raise CannotServe(self.failure)

    def _detect_injection(self) -> InjectionMode:
        try:
            info = self._cluster.with_timeout(DETECT_TIMEOUT_S).get(NODES, self.node).status.node_info
        except (ApiError, Unavailable) as error:
            self._log.warning("container_runtime_unknown", error=str(error))
            return self._previous.mode or "native"
        return detect_mode(info.container_runtime_version, info.kubelet_version)

    def _ladder_of(self, card: Card) -> CardLadder:
        return self.enforcement.ladder_of(card)

    def _log_ladders(self) -> None:
        ladders = [(card.index, self.enforcement.ladder_of(card)) for card in self.node_cards.cards()]
        self._log.info(
            "isolation_detected",
            offered=sorted({str(ladder.isolation) for _, ladder in ladders}),
            not_offered=[f"{each.dimension} {each.rung}: {each.reason}" for each in group_not_offered(ladders)],
        )

    def _reconcile_loop(self) -> None:
        """Release the allocations of pods that are gone, after pod changes and periodically."""
        resynced = time.monotonic()
        swept, unreleased, retries = False, UnreleasedPods(), 0
        while not self.ending.is_set():
            # Looking for the processes of pods that are gone reads all of /proc, hence the backoff.
            self._pods_changed.wait(RECONCILE_S if swept and not unreleased else RETRY_BACKOFF.delay_s(retries + 1))
            changed = self._pods_changed.is_set()
            if changed:
                self.ending.wait(COALESCE_S)
            # Cleared before the pods are read: a change from now on starts another round.
            self._pods_changed.clear()
            try:
                now = time.monotonic()
                if changed:
                    self.pods.save()
                # On this thread, which makes no driver calls.
                self.health.detect_hang()
                self.discovery.detect_hang()
                self.enforcement.measure_contexts()
                if changed or unreleased or now - resynced > RESYNC_S or not swept:
                    unreleased = self.allocations.release_ended()
                    self.enforcement.release_ended()
                    retries = retries + 1 if unreleased and not changed else 0
                    resynced = now
                # Once per start, and not before all pods are known.
                if not swept and self.pods.informer.synced:
                    self._sweep()
                    swept = True
            except Exception:  # the outermost frame of the thread, which must not end
                self._log.exception("reconcile_failed")

    def _sweep(self) -> None:
        self.allocations.remove_orphans()
        self.enforcement.verify(self.pods.cached_pods())
        if not self.allocations.all():
            self.injector.remove_old_drivers()

    def _start_injector(self) -> None:
        with self._injecting:
            if self._may_inject:
                self.injector.start(self.discovery.version)

    def _fail(self, failure: str) -> None:
        """End the process by `run`, on the main thread."""
        self.failure = failure
        self.ending.set()

    def _on_pod_change(self) -> None:
        self._pods_changed.set()
        self.publisher.enqueue()

    def _on_change(self) -> None:
        """Update the kubelet and the Node after a change of cards, conditions or allocations."""
        self.registrar.notify()
        self.publisher.enqueue()

    def _status(self) -> Mapping[str, float]:
        return {
            "registered": float(self.registrar.registered),
            "registrations": float(self.registrar.registrations),
            "api_age_seconds": self.pods.informer.age_s(),
            "health_age_seconds": time.monotonic() - self.health.last_poll_at,
            "pods": float(len(self.allocations.all())),
        }

    def not_live(self) -> list[str]:
        """Return why the process has to be restarted: a thread that has ended does not come back."""
        if not self._has_started:
            return []  # no part has ended, and none is waited for without limit
        is_alive = {
            "discovery": self.discovery.alive,
            "registrar": self.registrar.alive,
            "reconciler": self._reconciler.is_alive(),
            "publisher": self.publisher.alive,
            "health watcher": self.health.alive,
            **self.enforcement.running_parts(),
        }
        return [f"the {part} is not running" for part, alive in is_alive.items() if not alive]

    def not_ready(self) -> list[str]:
        """Return what keeps the plugin from serving pods."""
        unregistered = "" if self.registrar.registered else "not registered: the kubelet does not watch the devices yet"
        return [
            problem
            for problem in (
                unregistered,
                self.discovery.problem(),
                self.allocations.write_error,
                self.enforcement.problem(),
            )
            if problem
        ]


def unwritten_placements(allocations: Mapping[str, PodAllocation], pods: PodsByUid) -> list[PodAllocation]:
    """Return the allocations that this node placed itself and whose placement is not on the pod yet."""
    return [
        each
        for uid, each in allocations.items()
        if each.chosen_here and uid in pods and pods[uid].placed != each.placed
    ]


def previous_checkpoint(folder: Path) -> AllocationCheckpoint:
    """Read the checkpoint that the plugin wrote before this start; empty if there is none that can be read."""
    try:
        return read_checkpoint(folder / CHECKPOINT_FILE)
    except BadCheckpoint:
        # Only a hint here: `recover` reads it again, and rebuilds it from the kubelet's checkpoint.
        return AllocationCheckpoint()


def previous_cards(checkpoint: AllocationCheckpoint, boot: str) -> tuple[Card, ...]:
    """Return the cards of the checkpoint that may be missing now.

    A card that disappears while the machine runs is broken; one that is gone after a reboot was removed, and counts
    only while a pod holds it.
    """
    in_use = {uuid for pod in checkpoint.pods.values() for uuid in pod.usage}
    return tuple(card for card in checkpoint.cards if checkpoint.boot_id == boot or card.uuid in in_use)


def boot_id() -> str:
    """Return the kernel's id of the current boot; empty if there is none, outside of Linux."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
