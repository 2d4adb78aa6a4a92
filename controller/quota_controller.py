"""The quota controller: enqueues namespaces when something in them changes, and reconciles them on a few workers."""

import threading
import time
from collections.abc import Callable, Mapping

import structlog

from cluster.backoff import Backoff
from cluster.errors import ApiError
from cluster.events import EventRecorder
from cluster.gpu_nodes import GpuNode
from cluster.interface import Cluster
from cluster.objects import ConfigMap, Metadata, Namespace, Owners
from controller.caches import ControllerCaches
from controller.config_maps import write_config_map
from controller.namespace_state import InitialReconcile, NamespaceStates
from controller.pod_usage import PodUsage
from controller.reconciling import MIN_INTERVAL_S, RESYNC_S, NamespaceReconciler
from ledger.ledger_store import ledger_namespace
from ledger.quota_cache import QuotaCache
from ledger.workqueue import WorkQueue
from vcuda.catalogue import CardModel, encode_catalogue
from vcuda.decision import Unavailable
from vcuda.ledger import Ledger, reservations_in
from vcuda.names import CATALOGUE, CATALOGUE_KEY, LEDGER_KEY
from vcuda.namespace_policy import Mode
from vcuda.scheme import Scheme

WORKERS = 4
# A change is reconciled this much later, together with those that come with it.
COALESCE_S = 0.05
# Least time between reconciles after a change that frees nothing: a created pod was charged at admission.
RELAXED_INTERVAL_S = 1.0
RETRY_BACKOFF = Backoff(first_s=1.0, max_s=16.0)
# How often a worker of a standby checks whether it leads and the caches are synced.
STANDBY_POLL_S = 0.1
# The key of the GPU catalogue in the work queue; no namespace has an empty name.
CATALOGUE_ITEM = ""


class QuotaController:
    """Reconciles all namespaces while `is_leading` says so. The caches are kept up to date on a standby too."""

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
        self.states = NamespaceStates()
        self.reconciler = NamespaceReconciler(
            cluster,
            self.caches,
            self.states,
            recorder,
            scheme=scheme,
            system_namespace=system_namespace,
            cluster_mode=cluster_mode,
            clock=clock,
            wall=wall,
            owners=owners,
        )
        self._queue = WorkQueue(clock)
        self._initial = InitialReconcile(clock())
        self._stopping = threading.Event()
        self._log = structlog.get_logger()
        self._register_handlers()
        self._threads = [
            threading.Thread(target=self._run, name=f"quota-worker-{index}", daemon=True) for index in range(WORKERS)
        ]

    def _register_handlers(self) -> None:
        caches = self.caches
        caches.pods.on_change(self._on_pod_change)
        caches.nodes.on_change(self._on_node_change)
        caches.namespaces.on_change(lambda old, new: self._enqueue((new or old or Namespace()).metadata.name))
        caches.ledgers.on_change(self._on_ledger_change)
        caches.statuses.on_change(self._on_status_change)
        caches.catalogue.on_change(lambda *_: self._queue.add_after(CATALOGUE_ITEM, COALESCE_S))
        caches.quotas.on_change(self._enqueue)

    @property
    def alive(self) -> bool:
        return self.caches.alive and all(thread.is_alive() for thread in self._threads)

    def start(self) -> "QuotaController":
        self.caches.start()
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._queue.shut_down()
        self.caches.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10)

    def reconcile_all(self) -> None:
        """Reconcile every namespace: for a new leader, which does not know what its predecessor has done."""
        self._initial.reset(self._clock())
        self.reconciler.reset()
        # Wakes a worker; `_wait_until_leading_and_synced` then enqueues the namespaces.
        self._queue.add(CATALOGUE_ITEM)

    def _wait_until_leading_and_synced(self) -> bool:
        """Block until there is work for this process, and enqueue all namespaces if it is new; False at the end."""
        while not (self._is_leading() and self.caches.synced):
            if self._stopping.wait(STANDBY_POLL_S):
                return False
        for namespace in self._initial.begin(self._list_namespaces):
            self._queue.add(namespace)
        return True

    def _list_namespaces(self) -> set[str]:
        """Return all namespaces, and those that are gone and left a ledger."""
        namespaces = {namespace.metadata.name for namespace in self.caches.namespaces.all()}
        return namespaces | {ledger_namespace(config_map) for config_map in self.caches.ledgers.all()}

    def idle(self) -> bool:
        """Whether no key is due or being processed."""
        return self.caches.synced and self._queue.pending() == 0

    def ledgers(self) -> dict[str, Ledger]:
        return self.states.ledgers()

    def lag_s(self) -> float:
        """Return how long the oldest change has been waiting to be reconciled; a standby reconciles none."""
        return self.states.lag_s(self._clock()) if self._is_leading() else 0.0

    def _on_pod_change(self, old: PodUsage | None, new: PodUsage | None) -> None:
        pod = new or old
        if pod is None:
            return
        namespace = pod.metadata.namespace
        # A standby need not remember deleted pods, and must not collect them for ever: a new leader finds charges
        # without pods in its first reconcile.
        if new is None and self._is_leading():
            self.states.pod_deleted(namespace, pod.key)
        if old is None or new is None or accounted_fields(old) != accounted_fields(new):
            # Room that becomes free is awaited. A pod that was created or bound only changes what is shown.
            self._enqueue(namespace, MIN_INTERVAL_S if new is None or new.is_terminal else RELAXED_INTERVAL_S)

    def _on_node_change(self, old: GpuNode | None, new: GpuNode | None) -> None:
        if old is not None and new is not None and cards_by_uuid(old) == cards_by_uuid(new) and old.lost == new.lost:
            return
        self._queue.add_after(CATALOGUE_ITEM, COALESCE_S)
        name = (new or old or GpuNode()).metadata.name
        for namespace in self.caches.namespaces_on(name):
            self._enqueue(namespace)

    def _on_ledger_change(self, old: ConfigMap | None, new: ConfigMap | None) -> None:
        config_map = new or old
        if config_map is None:
            return
        namespace = ledger_namespace(config_map)
        reserved = list(reservations_in(new.data.get(LEDGER_KEY, ""))) if new is not None else []
        is_first_list = not self.caches.ledgers.synced
        self.states.reservations_seen(namespace, reserved, self._clock(), at_start=is_first_list)
        # What this process wrote itself needs no reconcile.
        if new is None or not self.states.is_own_write(namespace, new.metadata.resource_version):
            is_update = old is not None and new is not None
            self._enqueue(namespace, RELAXED_INTERVAL_S if is_update else MIN_INTERVAL_S)

    def _on_status_change(self, old: ConfigMap | None, new: ConfigMap | None) -> None:
        config_map = new or old
        if config_map is not None:
            # Nearly always a write of this process, right after a reconcile.
            self._enqueue(config_map.metadata.namespace, RELAXED_INTERVAL_S)

    def _enqueue(self, namespace: str, min_interval_s: float = MIN_INTERVAL_S) -> None:
        """Enqueue a namespace that changed; `min_interval_s` is the least time since its last reconcile."""
        if not self._initial.has_begun():
            return  # all namespaces are enqueued when it begins
        delay_s = self.states.record_change(namespace, self._clock(), min_interval_s)
        self._queue.add_after(namespace, max(COALESCE_S, delay_s))

    def _run(self) -> None:
        while self._wait_until_leading_and_synced() and (namespace := self._queue.get()) is not None:
            try:
                if not self._is_leading():
                    self._queue.add(namespace)  # leadership was lost since the check
                elif namespace == CATALOGUE_ITEM:
                    self._write_catalogue()
                else:
                    self.reconcile(namespace)
            except Unavailable as error:
                self.reconciler.record_outage()
                self._retry(namespace, str(error))
            except ApiError as error:  # an answer about this namespace: the API server works
                self._retry(namespace, str(error))
            except Exception:  # the outermost frame of the thread, which has to go on
                self._log.exception("worker_crashed", namespace=namespace)
                self._retry(namespace, "internal error, see worker_crashed")
            finally:
                self._queue.done(namespace)

    def _retry(self, namespace: str, error: str) -> None:
        delay_s = RETRY_BACKOFF.delay_s(self.states.failed(namespace))
        self._log.warning("reconcile_failed", namespace=namespace, error=error, retry_in_s=round(delay_s, 1))
        self._queue.add_after(namespace, delay_s)

    def reconcile(self, namespace: str) -> None:
        """Reconcile a namespace, and enqueue it for when something is due in it."""
        delay_s = self.reconciler.reconcile(namespace)
        if delay_s is not None:
            self._queue.add_after(namespace, delay_s)
        leading_since = self._initial.reconciled(namespace)
        if leading_since is not None:
            self._log.info(
                "initial_reconcile_done",
                namespaces=len(self.caches.namespaces),
                pods=len(self.caches.pods),
                took_s=round(self._clock() - leading_since, 1),
            )

    def _write_catalogue(self) -> None:
        """Write the GPU models of the cluster, which the webhook needs to charge whole cards."""
        data = {CATALOGUE_KEY: encode_catalogue(self.caches.cards())}
        metadata = Metadata(name=CATALOGUE, namespace=self._system_namespace, owner_references=self._owners())
        write_config_map(self._cluster, ConfigMap(metadata=metadata, data=data))
        self.states.succeeded(CATALOGUE_ITEM)
        self._queue.add_after(CATALOGUE_ITEM, RESYNC_S)


def accounted_fields(pod: PodUsage) -> tuple[object, ...]:
    """Return the fields of a pod whose change affects its charge."""
    return pod.node, pod.gpu_uuids, pod.is_terminal, pod.delete_by_s, pod.request


def cards_by_uuid(node: GpuNode) -> Mapping[str, CardModel]:
    """Return a node's GPUs by uuid, and under an empty one what its labels say."""
    return {gpu.uuid: CardModel(gpu.model, gpu.memory_mib, node.pool) for gpu in node.gpus} | {
        "": CardModel(node.model, node.memory_mib, node.pool)
    }
