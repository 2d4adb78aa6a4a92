"""All that the plugin of one node is made of, put together from the configuration."""

import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import structlog

from cluster.authorization import CachedAuthorizer
from cluster.errors import ApiError
from cluster.interface import Cluster
from cluster.objects import NODES
from nodeplugin.allocating import Allocator
from nodeplugin.allocation_store import AllocationStore
from nodeplugin.cards import Card, NodeCards
from nodeplugin.cgroups import running_pods
from nodeplugin.checkpoint import (
    CHECKPOINT_FILE,
    AllocationCheckpoint,
    BadCheckpoint,
    InjectionMode,
    PodAllocation,
    read_checkpoint,
)
from nodeplugin.device_ids import Resource, too_many
from nodeplugin.device_plugin import Registrar
from nodeplugin.health import HealthWatcher
from nodeplugin.host_driver import HostDriver
from nodeplugin.injection import Injector, detect_mode
from nodeplugin.kubelet import Kubelet
from nodeplugin.metrics import Metrics
from nodeplugin.monitor import MonitorServer
from nodeplugin.node_publisher import NodePublisher
from nodeplugin.nvml import Driver, DriverError
from nodeplugin.pods import NodePods, PodsByUid
from nodeplugin.sampling import Sampler
from settings.configuration import Configuration
from vcuda.decision import Unavailable
from vcuda.names import names_for
from vcuda.scheme import build_scheme

# How often cards are looked for anew, and gone pods let go of in case a change was missed.
REDISCOVER_S = 30.0
REDISCOVER_SOON_S = 5.0
COLLECT_S = 60.0
SOON_S, KEEP_S, TOGETHER_S = 0.5, 5.0, 0.1
DETECT_S = 1.0


class CannotServe(Exception):  # noqa: N818 - the configuration's fault, or the node's
    """The plugin cannot do its work on this node as it is configured; the message says why."""


class Service:
    """The parts of a running plugin, and how it is with them."""

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
        self.driver.library = self.host_driver.library()
        boot = boot_id()
        self._remembered = remembered(self._folder)
        self.node_cards = NodeCards(remembered_cards(self._remembered, boot))
        self.kubelet = Kubelet(Path(settings.device_plugins), Path(settings.pod_resources) / "kubelet.sock")
        self.pods = NodePods(cluster, self.node, scheme, self._folder / "pods.json")
        self._way: InjectionMode | None = None if settings.injection == "auto" else settings.injection
        self.injector = Injector(
            self._way or "native",
            self._folder,
            self.host_driver,
            self.node_cards,
            names=scheme.names,
            cdi=Path(settings.cdi),
        )
        self.book = AllocationStore(
            self._folder,
            scheme,
            self.node_cards,
            pods=self.pods,
            kubelet=self.kubelet,
            injection=self.injector,
            running=running_pods,
            boot=boot,
        )
        self.allocator = Allocator(
            self.book,
            scheme,
            self.node_cards,
            pods=self.pods,
            kubelet=self.kubelet,
            injection=self.injector,
            policy=settings.policy,
        )
        self.publisher = NodePublisher(
            cluster,
            self.node,
            scheme.names,
            self.node_cards,
            on_change=self._changed,
            deviating=lambda: deviating(self.book.holds(), self.pods.known()),
            driver=lambda: self._driver_version,
        )
        self.book.on_change(self._changed)
        self.watch = HealthWatcher(
            self.driver, self.node_cards, settings.health, self._changed, rediscover=self._rediscover
        )
        self.sampler = Sampler(self.driver, self.node_cards, self.pods.known, self.book.holds)
        self.metrics = Metrics(self.node, self.sampler.sample, lambda: dict(self.watch.xids), self._standing)
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
        # Guards nothing but the wish to be told once: changes that come together are looked at together.
        self._pods_changed = threading.Event()
        self._driver_error = "not asked yet"
        self._driver_version = ""
        self._library: tuple[int, int] | None = None
        self._rediscovered = time.monotonic()
        self.failure = ""
        self._log = structlog.get_logger()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def start(self) -> "Service":
        """Begin: registered first, everything else beside it."""
        began = time.monotonic()
        self.monitor.start()
        self._find_cards()
        self.publisher.start()
        self.pods.start(self._pods_have_changed)
        if self._way is None:
            self.injector.way = self._detected()
        self.injector.start(self._driver_version)
        self.book.recover()
        self.registrar.start()
        self.watch.start()
        self._keeper.start()
        self._log.info(
            "nodeplugin_started",
            node=self.node,
            cards=len(self.node_cards.cards()),
            injection=self.injector.way,
            took_s=round(time.monotonic() - began, 3),
        )
        return self

    def stop(self) -> None:
        """End; what containers were given stays theirs."""
        self.ending.set()
        self._pods_changed.set()
        self.registrar.stop()
        self.publisher.stop()
        self.pods.stop()
        self._keeper.join(10)
        self.watch.stop()
        self.monitor.stop()
        self.kubelet.close()
        self.driver.close()

    def run(self) -> None:
        """Serve until told to end; a CannotServe if that has become impossible."""
        self.start()
        self.ending.wait()
        self.stop()
        if self.failure:
            raise CannotServe(self.failure)

    def _find_cards(self) -> None:
        """Ask the driver which cards there are; without one the node has none, until it comes."""
        try:
            self._check_library()
            if self._driver_error:
                self.driver.open()
            cards = self.driver.cards()
        except DriverError as wrong:
            if str(wrong) != self._driver_error:
                self._log.error("no_driver", cause=str(wrong))
            self._driver_error = str(wrong)
            return
        self._driver_error = ""
        if (version := self.driver.version()) != self._driver_version:
            if self._keeper.is_alive():
                self.injector.start(version)
            self._driver_version = version
        if why := too_many(cards, self._unit_mib):
            raise CannotServe(why)
        before = self.node_cards.cards()
        self.node_cards.found(cards)
        self._forget_divided(cards)
        if before != self.node_cards.cards():
            self._log.info("cards_found", cards=[f"{card.index}: {card.product}" for card in cards])

    def _check_library(self) -> None:
        """Find the driver's library; one that was replaced can be loaded by another process alone."""
        self.host_driver.find()
        library = self.host_driver.library()
        found = (library.stat().st_ino, library.stat().st_mtime_ns) if library else None
        if self._library is not None and found not in {None, self._library}:
            raise CannotServe("the driver was replaced: begin anew with the new one")
        self._library = found or self._library
        self.driver.library = library

    def _forget_divided(self, cards: Iterable[Card]) -> None:
        """Forget cards that were divided into parts, or parts that were put together again, once nobody holds them."""
        there = {card.uuid for card in cards} | {card.parent for card in cards}
        held = {uuid for hold in self.book.holds().values() for uuid in hold.held}
        missing = self.node_cards.missing() - held
        self.node_cards.forget(
            card.uuid
            for card in self.node_cards.cards()
            if card.uuid in missing and {card.uuid, card.parent} & there - {""}
        )

    def _detected(self) -> InjectionMode:
        try:
            info = self._cluster.with_timeout(DETECT_S).get(NODES, self.node).status.node_info
        except (ApiError, Unavailable) as away:
            self._log.warning("runtime_unknown", cause=str(away))
            return self._remembered.way or "native"
        return detect_mode(info.container_runtime_version, info.kubelet_version)

    def _keep(self) -> None:
        """Let go of what gone pods held, and look for cards anew, from time to time."""
        collected = time.monotonic()
        swept, dying, waited = False, set[str](), 0
        while not self.ending.is_set():
            # Processes that do not end are looked for less and less often.
            self._pods_changed.wait(KEEP_S if swept and not dying else min(SOON_S * 2**waited, KEEP_S))
            changed = self._pods_changed.is_set()
            if changed:
                # Changes that come together are looked at together.
                self.ending.wait(TOGETHER_S)
            self._pods_changed.clear()
            try:
                now = time.monotonic()
                if changed:
                    self.pods.keep()
                self.watch.look_after_the_look()
                if changed or dying or now - collected > COLLECT_S or not swept:
                    dying = self.book.collect()
                    waited = waited + 1 if dying and not changed else 0
                    collected = now
                if not swept and self.pods.informer.synced:
                    self._sweep()
                    swept = True
            except Exception:  # the outermost frame of the thread: it has to go on
                self._log.exception("keeper_failed")

    def _rediscover(self) -> None:
        """Look for cards anew from time to time, soon if some may come back; on the thread that asks the driver."""
        amiss = bool(self._driver_error or self.node_cards.missing())
        if time.monotonic() - self._rediscovered < (REDISCOVER_SOON_S if amiss else REDISCOVER_S):
            return
        self._rediscovered = time.monotonic()
        try:
            self._find_cards()
        except CannotServe as wrong:
            self._log.error("cannot_serve", cause=str(wrong))
            self.failure = str(wrong)
            self.ending.set()
        self._changed()

    def _sweep(self) -> None:
        self.book.sweep()
        if not self.book.holds():
            self.injector.remove_old_drivers()

    def _pods_have_changed(self) -> None:
        self._pods_changed.set()
        self.publisher.look_again()

    def _changed(self) -> None:
        self.registrar.changed()
        self.publisher.look_again()

    def _standing(self) -> Mapping[str, float]:
        return {
            "registered": float(self.registrar.registered),
            "registrations": float(self.registrar.registrations),
            "api_age_seconds": self.pods.informer.age_s(),
            "health_age_seconds": time.monotonic() - self.watch.looked_at,
            "pods": float(len(self.book.holds())),
        }

    def not_live(self) -> list[str]:
        """Say why the process should be started anew."""
        amiss = [] if self.registrar.alive else ["the thread has ended that keeps the plugin registered"]
        if not self._keeper.is_alive():
            amiss.append("the thread has ended that keeps the book")
        if not self.publisher.alive:
            amiss.append("the thread has ended that publishes")
        return amiss if self.watch.alive else [*amiss, "a thread has ended that watches the cards"]

    def not_ready(self) -> list[str]:
        """Say what is missing for serving pods."""
        unheard = "" if self.registrar.registered else "the kubelet does not listen yet"
        return [why for why in (unheard, self._driver_error, self.book.failure) if why]


def deviating(holds: Mapping[str, PodAllocation], known: PodsByUid) -> list[PodAllocation]:
    """Give the pods that this node placed, and that do not say so yet."""
    return [
        hold for uid, hold in holds.items() if hold.chosen_here and uid in known and known[uid].placed != hold.placed
    ]


def remembered(folder: Path) -> AllocationCheckpoint:
    """Read the book of the plugin before, as far as it can be read."""
    try:
        return read_checkpoint(folder / CHECKPOINT_FILE)
    except BadCheckpoint:
        return AllocationCheckpoint()


def remembered_cards(book: AllocationCheckpoint, boot: str) -> tuple[Card, ...]:
    """Give the cards that the plugin before knew; since the last boot only those that pods hold.

    A card that is missing while the machine runs is broken. One that is missing after a boot was taken out.
    """
    held = {uuid for hold in book.holds.values() for uuid in hold.held}
    return tuple(card for card in book.cards if book.boot == boot or card.uuid in held)


def boot_id() -> str:
    """Tell one boot of this machine from the next."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
