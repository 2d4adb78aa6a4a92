"""Decides what to look at when: each namespace when something happened in it, and once in a while anyway."""

import random
import threading
import time
from collections.abc import Callable, Mapping

import structlog

from cluster.errors import ApiError
from cluster.events import EventRecorder
from cluster.interface import Cluster
from cluster.objects import ConfigMap, Metadata, Namespace, Owners
from controller.caches import ControllerCaches
from controller.config_maps import write_config_map
from controller.pod_usage import GpuNode, PodUsage
from controller.reconciling import AGAIN_S, APART_S, SOON_S, NamespaceReconciler, NamespaceStates
from ledger.ledger_store import ledger_namespace
from ledger.quota_cache import QuotaCache
from ledger.workqueue import WorkQueue
from vcuda.catalogue import CardModel, encode_catalogue
from vcuda.decision import Unavailable
from vcuda.ledger import Ledger, reserved_pods_in
from vcuda.names import CATALOGUE, CATALOGUE_KEY, LEDGER_KEY
from vcuda.namespace_policy import Mode
from vcuda.scheme import Scheme

WORKERS = 4
# Where something ended, others may wait for the room; that something began has been accounted for at admission.
APART_AT_EASE_S = 1.0
RETRY_S = 1.0
# How often one that has nothing to do yet looks whether that has changed.
STANDBY_S = 0.1
CATALOGUE_TURN = ""


class QuotaController:
    """Looks after all ledgers. Works only while `is_leading` says so; follows the cluster all the time."""

    def __init__(
        self,
        cluster: Cluster,
        scheme: Scheme,
        system_namespace: str,
        quotas: QuotaCache,
        recorder: EventRecorder,
        *,
        cluster_mode: Mode = Mode.ENFORCE,
        is_leading: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        owners: Owners = list,
    ) -> None:
        self._cluster, self._system_namespace, self._owners = cluster, system_namespace, owners
        self._is_leading, self._clock = is_leading, clock
        self.caches = ControllerCaches(cluster, scheme, system_namespace, quotas)
        self._notes = NamespaceStates()
        self.reconciler = NamespaceReconciler(
            cluster,
            self.caches,
            self._notes,
            recorder,
            scheme=scheme,
            system_namespace=system_namespace,
            cluster_mode=cluster_mode,
            clock=clock,
            wall=wall,
            owners=owners,
        )
        self._turns = WorkQueue(clock)
        # What was not looked at since we began to lead, and when that was; None until everything is known.
        self._behind: set[str] | None = None
        self._began = clock()
        self._ending = threading.Event()
        self._log = structlog.get_logger()
        self._follow()
        self._threads = [
            threading.Thread(target=self._run, name=f"keeper-{index}", daemon=True) for index in range(WORKERS)
        ]

    def _follow(self) -> None:
        caches = self.caches
        caches.pods.on_change(self._pod_changed)
        caches.nodes.on_change(self._node_changed)
        caches.namespaces.on_change(lambda old, new: self._touch((new or old or Namespace()).metadata.name))
        caches.ledgers.on_change(self._ledger_changed)
        caches.statuses.on_change(lambda old, new: self._touch((new or old or ConfigMap()).metadata.namespace))
        caches.catalogue.on_change(lambda *_: self._turns.add_after(CATALOGUE_TURN, SOON_S))
        caches.quotas.on_change(self._touch)

    @property
    def alive(self) -> bool:
        """Whether all threads run."""
        return self.caches.alive and all(thread.is_alive() for thread in self._threads)

    def start(self) -> "QuotaController":
        """Begin to follow, and to look after ledgers."""
        self.caches.start()
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """End."""
        self._ending.set()
        self._turns.shut_down()
        self.caches.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10)

    def look_at_everything(self) -> None:
        """Look at every namespace: after becoming the leader, nothing that another one knew is known."""
        with self._notes.lock:
            self._behind, self._began = None, self._clock()
        self.reconciler.begin()
        self._turns.add(CATALOGUE_TURN)  # whoever takes it sees that there is everything to do

    def _on_duty(self) -> bool:
        """Wait until we lead and everything is known; False at the end."""
        while not (self._is_leading() and self.caches.synced):
            if self._ending.wait(STANDBY_S):
                return False
        with self._notes.lock:
            if self._behind is not None:
                return True
            self._behind = {namespace.metadata.name for namespace in self.caches.namespaces.all()}
            self._behind |= {ledger_namespace(found) for found in self.caches.ledgers.all()}
            behind = set(self._behind)
        for namespace in behind:
            self._turns.add(namespace)
        return True

    def _caught_up(self, namespace: str) -> None:
        """Say so when everything has been looked at that was there when we began to lead."""
        with self._notes.lock:
            if not self._behind or namespace not in self._behind:
                return
            self._behind.remove(namespace)
            is_last = not self._behind
        if is_last:
            took_s = round(self._clock() - self._began, 1)
            self._log.info(
                "caught_up", namespaces=len(self.caches.namespaces), pods=len(self.caches.pods), took_s=took_s
            )

    def idle(self) -> bool:
        """Tell whether there is nothing to do at the moment."""
        return self.caches.synced and self._turns.pending() == 0

    def ledgers(self) -> dict[str, Ledger]:
        """Give all ledgers as they were last seen, for the metrics."""
        with self._notes.lock:
            return {name: seen.ledger for name, seen in self._notes.all().items() if seen.ledger is not None}

    def lag_s(self) -> float:
        """Say how long the oldest change has been waiting to be accounted for; a standby accounts for none."""
        now = self._clock()
        if not self._is_leading():
            return 0.0
        with self._notes.lock:
            return max(
                (now - seen.changed for seen in self._notes.all().values() if seen.changed is not None), default=0.0
            )

    def _pod_changed(self, old: PodUsage | None, new: PodUsage | None) -> None:
        found = new or old
        if found is None:
            return
        namespace = found.metadata.namespace
        # A standby need not remember: when it begins to lead, it looks at everything.
        if new is None and self._is_leading():
            with self._notes.lock:
                self._notes.of(namespace).gone.add(found.key)
        if old is None or new is None or matters(old) != matters(new):
            self._touch(namespace, at_ease=old is None)

    def _node_changed(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if old is not None and new is not None and cards_of(old) == cards_of(new) and old.lost == new.lost:
            return
        self._turns.add_after(CATALOGUE_TURN, SOON_S)
        name = (new or old or GpuNode()).metadata.name
        for namespace in self.caches.namespaces_on(name):
            self._touch(namespace)

    def _ledger_changed(self, old: ConfigMap | None, new: ConfigMap | None) -> None:
        found = new or old
        if found is None:
            return
        namespace, now = ledger_namespace(found), self._clock()
        reserved = reserved_pods_in(new.data.get(LEDGER_KEY, "")) if new is not None else ()
        with self._notes.lock:
            seen = self._notes.of(namespace)
            is_first = not self.caches.ledgers.synced
            seen.reserved = {pod: seen.reserved.get(pod, (now, is_first)) for pod in reserved}
            is_ours = new is not None and seen.written == new.metadata.resource_version
        if not is_ours:
            self._touch(namespace, at_ease=old is not None and new is not None)

    def _touch(self, namespace: str, *, at_ease: bool = False) -> None:
        """Look at a namespace soon; one who is not on duty yet will look at everything anyway."""
        now = self._clock()
        with self._notes.lock:
            if self._behind is None:
                return
            seen = self._notes.of(namespace)
            seen.touched += 1
            if seen.changed is None:
                seen.changed = now
            at = max(now + SOON_S, seen.last + (APART_AT_EASE_S if at_ease else APART_S))
        self._turns.add_after(namespace, at - now)

    def _run(self) -> None:
        while self._on_duty() and (namespace := self._turns.get()) is not None:
            try:
                if not self._is_leading():
                    self._turns.add(namespace)
                elif namespace == CATALOGUE_TURN:
                    self._write_catalogue()
                else:
                    self.look_at(namespace)
            except Unavailable as away:
                self.reconciler.note_trouble()
                self._retry(namespace, str(away))
            except ApiError as refused:  # of this namespace alone; the cluster is well
                self._retry(namespace, str(refused))
            except Exception:  # the outermost frame of the thread: it has to go on
                self._log.exception("keeper_failed", namespace=namespace)
                self._retry(namespace, "a fault")
            finally:
                self._turns.done(namespace)

    def _retry(self, namespace: str, cause: str) -> None:
        with self._notes.lock:
            seen = self._notes.of(namespace)
            seen.failures += 1
            pause = RETRY_S * (1 << min(seen.failures - 1, 4)) * random.uniform(0.5, 1.0)
        self._log.warning("namespace_not_kept", namespace=namespace, cause=cause, again_s=round(pause, 1))
        self._turns.add_after(namespace, pause)

    def look_at(self, namespace: str) -> None:
        """Have a namespace kept, and look at it again when it is time."""
        again_s = self.reconciler.look_at(namespace)
        if again_s is not None:
            self._turns.add_after(namespace, again_s)
        self._caught_up(namespace)

    def _write_catalogue(self) -> None:
        """Write down which cards there are."""
        data = {CATALOGUE_KEY: encode_catalogue(self.caches.cards())}
        metadata = Metadata(name=CATALOGUE, namespace=self._system_namespace, owner_references=self._owners())
        write_config_map(self._cluster, ConfigMap(metadata=metadata, data=data))
        with self._notes.lock:
            self._notes.of(CATALOGUE_TURN).failures = 0
        self._turns.add_after(CATALOGUE_TURN, AGAIN_S)


def matters(held: PodUsage) -> tuple[object, ...]:
    """Give what accounting looks at."""
    return held.node, held.placed, held.is_terminal, held.due_s, held.request


def cards_of(machine: GpuNode) -> Mapping[str, CardModel]:
    """Give what is asked of a node's cards."""
    return {gpu.uuid: CardModel(gpu.model, gpu.memory_mib, machine.pool) for gpu in machine.gpus} | {
        "": CardModel(machine.model, machine.memory_mib, machine.pool)
    }
