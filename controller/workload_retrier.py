"""Retries workloads whose pods were refused, as soon as there is room for them.

The controllers of Kubernetes try again only after a backoff, of up to 1,000 s for a ReplicaSet. An update of the object
makes them try at once, and an annotation is an update without any other effect. Never of a Deployment: its controller
copies its annotations to ReplicaSets, and creates no pods.
"""

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import cast

import structlog

from cluster.errors import ApiError, Conflict, NotFound
from cluster.informer import Informer
from cluster.interface import Cluster
from cluster.objects import ConfigMap, Kind
from cluster.pod_creators import POD_CREATORS, PodCreator
from controller.caches import BY_NAMESPACE, ControllerCaches
from controller.choosing_retries import Attempts, Choice, Room, choose_retries
from controller.waiting_workloads import WaitingWorkload, waiting_workload_of
from ledger.ledger_store import ledger_namespace
from ledger.workqueue import WorkQueue
from vcuda.catalogue import CardModel, card_sizes_mib
from vcuda.decision import Unavailable
from vcuda.ledger_snapshot import LedgerSnapshot, decode_snapshot
from vcuda.names import LEDGER_KEY, RETRIED_ANNOTATION
from vcuda.scheme import Scheme

# Changes that come together are looked at together: a ledger, and the status of the workload whose pod it charges.
COALESCE_S = 0.05
# Least time between two rounds of a namespace in which not all could be retried.
ROUND_S = 1.0
# After each retry: at most 50 per second in all namespaces together, each of which has its turn after ten.
PAUSE_S = 0.02
# After each round a pause of this many times its CPU time: it shares the interpreter with the accounting.
PAUSES_PER_ROUND, MAX_PAUSE_S = 4, 1.0
# How long the cards of the cluster are remembered: to collect them takes 4 ms with 5,000 nodes.
CARDS_S = 5.0
CALL_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 10.0


class WorkloadRetrier:
    """Caches waiting workloads only, and updates them on a thread of its own while `is_leading` says so."""

    def __init__(
        self,
        cluster: Cluster,
        scheme: Scheme,
        caches: ControllerCaches,
        *,
        is_leading: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._unit_mib, self._caches = cluster.with_timeout(CALL_TIMEOUT_S), scheme.unit_mib, caches
        self._is_leading, self._clock = is_leading, clock
        self.retries = 0
        self._kinds = {kind.name: kind for kind in POD_CREATORS}
        self._informers = [waiting_informer(cluster, kind, scheme) for kind in POD_CREATORS]
        # By UID. Informers add and remove entries of their workloads, the worker replaces existing ones: the lock keeps
        # an entry from coming back after its workload is gone.
        self._lock = threading.Lock()
        self._attempts: dict[str, Attempts] = {}
        # Used by the worker only.
        self._cards: set[CardModel] = set()
        self._cards_at = float("-inf")
        self._queue = WorkQueue(clock)
        self._stopping = threading.Event()
        self._log = structlog.get_logger()
        for informer in self._informers:
            informer.on_change(self._on_workload_change)
        caches.ledgers.on_change(self._on_ledger_change)
        self._thread = threading.Thread(target=self._run, name="workload-retrier", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and all(informer.alive for informer in self._informers)

    @property
    def waiting(self) -> int:
        """How many workloads with GPU pods lack some."""
        return sum(map(len, self._informers))

    def start(self) -> "WorkloadRetrier":
        for informer in self._informers:
            informer.start()
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._queue.shut_down()
        for informer in self._informers:
            informer.stop()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def retry_all(self) -> None:
        """Look at every namespace: a standby drops changes."""
        for namespace in {each.metadata.namespace for informer in self._informers for each in informer.all()}:
            self._enqueue(namespace)

    def _on_workload_change(self, old: WaitingWorkload | None, new: WaitingWorkload | None) -> None:
        with self._lock:
            if old is not None and new is None:
                self._attempts.pop(old.metadata.uid, None)
            elif new is not None:
                self._attempts.setdefault(new.metadata.uid, Attempts(self._clock()))
        if new is not None:
            self._enqueue(new.metadata.namespace)

    def _on_ledger_change(self, _: ConfigMap | None, new: ConfigMap | None) -> None:
        if new is not None and self._waiting_in(namespace := ledger_namespace(new)):
            self._enqueue(namespace)

    def _enqueue(self, namespace: str) -> None:
        if self._is_leading():
            self._queue.add_after(namespace, COALESCE_S)

    def _waiting_in(self, namespace: str) -> list[WaitingWorkload]:
        return [each for informer in self._informers for each in informer.by_index(BY_NAMESPACE, namespace)]

    def _run(self) -> None:
        while (namespace := self._queue.get()) is not None:
            began = time.thread_time()
            try:
                if self._is_leading():
                    self.retry_fitting(namespace)
            except Exception:  # the outermost frame of the thread, which has to go on
                self._log.exception("retry_failed", namespace=namespace)
            finally:
                self._queue.done(namespace)
            self._stopping.wait(min(PAUSES_PER_ROUND * (time.thread_time() - began), MAX_PAUSE_S))

    def retry_fitting(self, namespace: str) -> None:
        """Retry the waiting workloads of a namespace for which there is room now."""
        choice = self._choose(namespace)
        for workload in choice.retries:
            self._retry(workload)
            if self._stopping.wait(PAUSE_S):
                return
        if choice.next_at is not None:
            self._queue.add_after(namespace, max(ROUND_S, choice.next_at - self._clock()))

    def _choose(self, namespace: str) -> Choice:
        if not self._caches.synced:
            return Choice(next_at=self._clock() + ROUND_S)
        waiting, ledger = self._waiting_in(namespace), self._ledger(namespace)
        if not waiting or ledger is None or not ledger.is_open:
            return Choice()
        pools = self._caches.quotas.namespace_quotas(namespace).policy.pools
        room = Room(ledger.usage, card_sizes_mib(self._recent_cards(), pools), self._unit_mib)
        with self._lock:
            attempts = {each.metadata.uid: self._attempts.get(each.metadata.uid) for each in waiting}
        known = {uid: each for uid, each in attempts.items() if each is not None}
        choice = choose_retries([each for each in waiting if each.metadata.uid in known], known, room, self._clock())
        with self._lock:
            for uid in choice.without_room:
                if (before := self._attempts.get(uid)) is not None:
                    self._attempts[uid] = before.without_room()
        return choice

    def _recent_cards(self) -> set[CardModel]:
        if self._clock() - self._cards_at > CARDS_S:
            self._cards, self._cards_at = self._caches.cards(), self._clock()
        return self._cards

    def _ledger(self, namespace: str) -> LedgerSnapshot | None:
        config_map = self._caches.ledger_of(namespace)
        try:
            return decode_snapshot(config_map.data.get(LEDGER_KEY, "")) if config_map is not None else None
        except ValueError:
            return None  # the controller rebuilds it

    def _retry(self, workload: WaitingWorkload) -> None:
        metadata = workload.metadata
        with self._lock:
            before = self._attempts.get(metadata.uid)
            if before is None:
                return  # it is gone, or complete
            self._attempts[metadata.uid] = before.after_retry(workload, self._clock())
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        changes = {"metadata": {"uid": metadata.uid, "annotations": {RETRIED_ANNOTATION: now}}}
        where = {"kind": workload.kind, "workload": f"{metadata.namespace}/{metadata.name}"}
        try:
            self._cluster.patch(self._kinds[workload.kind], metadata.name, metadata.namespace, changes)
        except (NotFound, Conflict):
            return  # deleted, or another one by now
        except (ApiError, Unavailable) as error:
            self._log.warning("workload_not_retried", **where, error=str(error))
            return
        self.retries += 1
        self._log.info("workload_retried", **where, missing=workload.missing)


def waiting_informer(cluster: Cluster, kind: Kind[PodCreator], scheme: Scheme) -> Informer[WaitingWorkload]:
    """Return an informer that caches the waiting workloads of a kind."""
    # The cast: it caches other objects than the API server sends for its kind.
    return Informer(
        cluster,
        cast("Kind[WaitingWorkload]", kind),
        convert=lambda creator: waiting_workload_of(kind.name, creator, scheme),
        indexes={BY_NAMESPACE: lambda workload: workload.metadata.namespace},
    )
