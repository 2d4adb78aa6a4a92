"""Reconciles one namespace: its ledger with the pods that exist, its status with the ledger."""

import threading
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import suppress

import structlog

from cluster.backoff import jittered
from cluster.errors import ApiError, Conflict, NotFound
from cluster.events import WARNING, EventRecorder
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, NAMESPACES, PODS, ConfigMap, Metadata, ObjectReference, Owners
from cluster.retrying import retry_on_conflict
from controller.accounting import (
    NamespaceView,
    ReconcileReport,
    lifetime_s,
    reconcile_ledger,
    release_failed_creates,
    remove_missing,
    revert_stalled,
)
from controller.caches import ControllerCaches
from controller.config_maps import write_config_map
from controller.ledger_registry import LedgerRegistry
from controller.namespace_state import NamespaceStates
from controller.pod_usage import PodUsage, counts_against_quota, pod_usage_of
from controller.quota_status import encode_status, status_of
from ledger.ledger_store import LedgerStore, StoredLedger, UnreadableLedger, read_ledger
from ledger.quota_config_maps import LEGACY_QUOTA, is_quota_config_map, parse_quota_config_map
from vcuda.catalogue import card_sizes_mib
from vcuda.decision import Unavailable, printable, shorten
from vcuda.ledger import Ledger, LedgerState, PodKey, Reservation, pack_uid
from vcuda.ledger_quotas import reconcile_quotas
from vcuda.names import QUOTA_STATUS, STATUS_KEY, STATUS_LABEL
from vcuda.namespace_policy import Mode
from vcuda.quota import QuotaError
from vcuda.quota_refusals import RemedyContext
from vcuda.quota_usage import RESERVATION_S
from vcuda.scheme import Scheme

MAX_ATTEMPTS = 20
# Namespaces added to the registry in one write: at the first start all namespaces of a cluster are new.
REGISTER_TOGETHER = 50
# Every namespace is reconciled at least this often, whatever the watches deliver.
RESYNC_S = 240.0
# Least time between two reconciles of a namespace that frees quota.
MIN_INTERVAL_S = 0.25
# A reconcile for something that is due comes a little later, not at the very moment.
DUE_MARGIN_S = 0.05
# A create that the API server accepted before it became slow or unreachable can take effect when it recovers. For this
# long after that, no reservation expires and no ledger opens.
OUTAGE_MARGIN_S = 10.0
# A read that takes longer counts as an outage.
SLOW_READ_S = 2.0
# By how much the clocks of machines may differ, where a time that another machine wrote has to be used.
SKEW_S = 12.0
# Failures in a row before an API server that does not answer is reported.
REPORTED_FAILURES = 3
# Characters of an error or a reason in the status.
MAX_ERROR = 1000


class NamespaceReconciler:
    """Several workers may call it, each for another namespace: the work queue gives a namespace to one at a time."""

    def __init__(
        self,
        cluster: Cluster,
        caches: ControllerCaches,
        states: NamespaceStates,
        recorder: EventRecorder,
        *,
        scheme: Scheme,
        system_namespace: str,
        cluster_mode: Mode,
        clock: Callable[[], float],
        wall: Callable[[], float],
        owners: Owners = list,
    ) -> None:
        self._cluster, self._scheme, self._system_namespace = cluster, scheme, system_namespace
        self._caches, self._states, self._recorder = caches, states, recorder
        self._cluster_mode, self._clock, self._wall = cluster_mode, clock, wall
        self._owners = owners
        self._ledger_store = LedgerStore(cluster, system_namespace, owners)
        self._registry = LedgerRegistry(cluster, system_namespace, caches.has_ledgers, clock, owners)
        self._last_outage = float("-inf")
        # Makes looking into the registry, adding to it and recording the result one step: a worker registers other
        # workers' namespaces too, and they must not take their own first ledgers for lost ones. Held during calls to
        # the API server, but only by namespaces that have no ledger.
        self._first_ledger_lock = threading.Lock()
        self._log = structlog.get_logger()

    def reset(self) -> None:
        """Drop what may be out of date after an election: another process may have led in between."""
        self._states.forget_first_ledgers()
        self._registry.invalidate()

    def record_outage(self) -> None:
        """Record that the API server was slow or unreachable just now."""
        self._last_outage = self._clock()

    def _is_api_stable(self) -> bool:
        return self._clock() - self._last_outage > OUTAGE_MARGIN_S

    def reconcile(self, namespace: str) -> float | None:
        """Reconcile ledger and status; returns after how many seconds to do it again, None for only after a change."""
        changes = self._states.reconcile_started(namespace, self._clock())
        if namespace == self._system_namespace:
            # Quotient's own pods are not charged. A state left behind would count its changes as lag for ever.
            self._states.forget(namespace)
            return None
        try:
            stored, report = self._update_ledger_with_retries(namespace)
        except (ApiError, Unavailable) as error:
            self._report_failure(namespace, error)
            raise
        if stored is None:
            self._states.forget(namespace)
            return None
        self._states.reconciled(namespace, stored.ledger, changes)
        self._report_waiting(namespace, report)
        problem = pods_not_recorded(report.unrecorded) if report.unrecorded else ""
        self._report_problem(namespace, problem)
        self._write_status(namespace, stored.ledger, problem)
        return self._requeue_after_s(namespace)

    def _report_failure(self, namespace: str, error: ApiError | Unavailable) -> None:
        """Say in the status and in an event that the ledger could not be reconciled. Best effort."""
        # An API server that does not answer for a moment is no news, and most likely takes no status either.
        if isinstance(error, Unavailable) and self._states.failures(namespace) < REPORTED_FAILURES:
            return
        problem = (
            "the ledger cannot be updated, so these numbers are old, and pods that have ended still count: "
            + printable(error, MAX_ERROR)
        )
        with suppress(ApiError, Unavailable):
            self._report_problem(namespace, problem)
            self._write_status(namespace, self._last_known_ledger(namespace), problem)

    def _last_known_ledger(self, namespace: str) -> Ledger:
        """Return the cached ledger; one with the quotas alone if there is none, or it cannot be read."""
        cached = self._caches.ledger_of(namespace)
        with suppress(UnreadableLedger):
            if cached is not None:
                return read_ledger(cached).ledger
        ledger, quotas = Ledger(), self._caches.quotas.namespace_quotas(namespace)
        ledger.set_quotas(quotas.quotas, 0, quotas.versions)
        return ledger

    def _report_problem(self, namespace: str, problem: str) -> None:
        """Record an event about a problem that is new."""
        if self._states.set_problem(namespace, problem) and problem:
            regarding = ObjectReference(api_version="v1", kind="ConfigMap", namespace=namespace, name=QUOTA_STATUS)
            self._recorder.record(regarding, "LedgerNotUpdated", problem, type_=WARNING)

    def _update_ledger_with_retries(self, namespace: str) -> tuple[StoredLedger | None, ReconcileReport]:
        # After a conflict the cache may still hold the version that lost: read from the API server.
        return retry_on_conflict(
            lambda attempt: self._update_ledger(namespace, self._read(namespace, allow_cached=attempt == 0)),
            attempts=MAX_ATTEMPTS,
        )

    def _update_ledger(
        self, namespace: str, stored: StoredLedger | None
    ) -> tuple[StoredLedger | None, ReconcileReport]:
        """Reconcile a ledger and write it; None if the namespace has none, and needs none.

        Raises Conflict, NotFound or AlreadyExists if another process wrote it in between.
        """
        existing = self._caches.namespaces.get(namespace)
        if existing is None:
            self._clean_up(namespace, stored)
            return None, ReconcileReport()
        if stored is None and not self._caches.needs_ledger(namespace):
            return None, ReconcileReport()
        ledger = self._prepare_ledger(namespace, existing.metadata.uid, stored)
        deleted = self._states.deleted_pods(namespace)
        report = self._account(namespace, ledger, deleted)
        stored = self._release_failed_creates(namespace, self._write(namespace, stored, ledger))
        if report.missing or report.stalled:
            # Only a list that is made after the ledger was read proves that a charged pod does not exist, or is not
            # bound.
            nodes = {
                pack_uid(pod.metadata.uid): pod.spec.node_name for pod in self._cluster.list(PODS, namespace).items
            }
            ledger = stored.ledger.copy()
            remove_missing(ledger, report.missing, nodes, self._wall())
            revert_stalled(ledger, report.stalled, {key for key, node in nodes.items() if not node})
            stored = self._write(namespace, stored, ledger)
        self._states.first_ledger_created(namespace)
        self._registry.add({namespace: existing.metadata.uid})
        self._states.pods_freed(namespace, deleted)
        return stored, report

    def _release_failed_creates(self, namespace: str, stored: StoredLedger) -> StoredLedger:
        """Look up the names of reserved pods that have not appeared, and release those that another pod has.

        Pods without GPUs are not cached, and a cache may be behind: so each is read from the API server.
        """
        names = stored.ledger.reserved_names()
        due = self._states.due_lookups(namespace, names, self._clock())
        if not due:
            return stored
        holders: dict[PodKey, Metadata] = {}
        for key in due:
            with suppress(NotFound):
                holders[key] = self._cluster.get(PODS, names[key], namespace).metadata
        ledger = stored.ledger.copy()
        release_failed_creates(ledger, holders)
        written = self._write(namespace, stored, ledger)
        self._states.looked_up(namespace, due, self._clock())
        return written

    def _clean_up(self, namespace: str, stored: StoredLedger | None) -> None:
        """Delete what is left of a namespace that is gone. A stale cache does not prove it: ask the API server."""
        try:
            self._cluster.get(NAMESPACES, namespace)
        except NotFound:
            if stored is not None:
                self._ledger_store.delete(stored.config_map)
            self._registry.remove(namespace)

    def _read(self, namespace: str, *, allow_cached: bool) -> StoredLedger | None:
        """Read a ledger; an invalid one is deleted, and then rebuilt like one that was lost."""
        started = self._clock()
        try:
            cached = self._caches.ledger_of(namespace) if allow_cached else None
            if cached is not None and self._states.may_use_cached_ledger(namespace, cached.metadata.resource_version):
                with suppress(UnreadableLedger):  # it may be valid by now: read it before it is deleted
                    return read_ledger(cached)
            return self._ledger_store.read(namespace)
        except UnreadableLedger as error:
            self._log.error("ledger_invalid", namespace=namespace, error=str(error))
            self._ledger_store.delete(error.config_map)
            return None
        finally:
            if self._clock() - started > SLOW_READ_S:
                self.record_outage()

    def _write(self, namespace: str, stored: StoredLedger | None, ledger: Ledger) -> StoredLedger:
        if stored is not None and not ledger.changes:
            return stored
        written = (
            self._ledger_store.write(stored, ledger)
            if stored is not None
            else self._ledger_store.create(namespace, ledger)
        )
        self._states.ledger_written(namespace, written.config_map.metadata.resource_version)
        return written

    def _prepare_ledger(self, namespace: str, uid: str, stored: StoredLedger | None) -> Ledger:
        """Return the ledger to reconcile: a copy of the stored one, opened if it is time, or a new one."""
        ledger = stored.ledger.copy() if stored is not None else Ledger()
        if ledger.state is LedgerState.REQUESTED or ledger.namespace != uid:
            new = self._new_ledger(namespace, uid)
            # The namespace may have been deleted and created again: then the old ledger has reservations that webhooks
            # made for pods of the new namespace.
            for each in ledger.reservations():
                new.put(each.pod, ledger.charge(each.pod), each.since)
            return new
        if ledger.state is LedgerState.REBUILDING:
            self._open_if_due(namespace, ledger)
        return ledger

    def _new_ledger(self, namespace: str, uid: str) -> Ledger:
        """Return an empty ledger: open if it is the namespace's first one, closed if the last one was lost."""
        with self._first_ledger_lock:
            # The state says so until the ledger is written. After a conflict this is called again, and the registry
            # alone would then say that the namespace has had a ledger.
            if not self._states.creates_first_ledger(namespace, uid) and not self._registry.has(namespace, uid):
                self._register_first_ledgers(namespace, uid)
            is_first = self._states.creates_first_ledger(namespace, uid)
        if is_first:
            ledger = Ledger(uid, LedgerState.OPEN)
        else:
            self._log.warning("ledger_lost", namespace=namespace, opens_in_s=RESERVATION_S)
            self._states.ledger_closed(namespace, self._clock() + RESERVATION_S)
            ledger = Ledger(uid, LedgerState.REBUILDING)
        ledger.changes += 1  # an empty ledger has to be written as well
        return ledger

    def _register_first_ledgers(self, namespace: str, uid: str) -> None:
        """Register a namespace, and with it others that are about to get their first ledger."""
        namespaces = {namespace: uid}
        for other in self._caches.namespaces.all():
            if len(namespaces) >= REGISTER_TOGETHER:
                break
            name, other_uid = other.metadata.name, other.metadata.uid
            has_ledger = self._caches.ledger_of(name) is not None or self._registry.has(name, other_uid)
            if not has_ledger and name != self._system_namespace and self._caches.needs_ledger(name):
                namespaces[name] = other_uid
        # Another process may have registered some of them since: only those that were really added are first ledgers.
        self._states.first_ledgers_registered(self._registry.add(namespaces))

    def _open_if_due(self, namespace: str, ledger: Ledger) -> None:
        """Open a rebuilt ledger once no pod that the lost one admitted can still appear, and all pods are cached."""
        opens_at = self._states.ledger_opens_at(namespace, self._clock())
        if self._clock() < opens_at or not self._is_api_stable():
            return
        pods = self._cluster.list(PODS, namespace).items
        existing = {pack_uid(pod.metadata.uid) for pod in pods if pod_usage_of(pod, self._scheme) is not None}
        if existing <= {pod.key for pod in self._caches.pods_in(namespace)}:
            ledger.set_state(LedgerState.OPEN, ledger.namespace)
            self._states.ledger_opened(namespace)

    def _account(self, namespace: str, ledger: Ledger, deleted: AbstractSet[PodKey]) -> ReconcileReport:
        """Reconcile a ledger with the caches."""
        quotas = self._caches.quotas.namespace_quotas(namespace)
        reconcile_quotas(
            ledger,
            quotas.quotas,
            quotas.versions,
            self._caches.quotas.version,
            lambda name: self._is_quota_gone(name, namespace),
        )
        now_s = self._wall()
        pods: dict[PodKey, PodUsage] = {}
        gone = set(deleted)
        for pod in self._caches.pods_in(namespace):
            if counts_against_quota(pod, self._caches.node_of(pod), now_s):
                pods[pod.key] = pod
            else:
                gone.add(pod.key)
        view = NamespaceView(
            pods=pods,
            gone=gone - pods.keys(),
            actual_charge=self._caches.charge_of,
            cards=card_sizes_mib(self._caches.cards(), quotas.policy.pools),
            unit_mib=self._scheme.unit_mib,
            cluster_mode=self._cluster_mode,
            remedies=RemedyContext(self._scheme.names.use_models, self._scheme.unit_mib),
        )
        return reconcile_ledger(ledger, view, now_s, self._expiry_check(namespace, ledger, now_s))

    def _is_quota_gone(self, quota: str, namespace: str) -> bool:
        """Ask the API server whether a quota no longer applies to a namespace; an invalid one still does."""
        if quota in self._caches.quotas.invalid_names:
            return False
        where, _, name = quota.partition("/")
        try:
            config_map = self._cluster.get(CONFIG_MAPS, name, where)
            if not is_quota_config_map(where, name, config_map.metadata.labels, self._scheme):
                return True
            return namespace not in parse_quota_config_map(where, name, config_map.data, self._scheme.unit_mib)
        except NotFound:
            return True
        except QuotaError:
            return False

    def _expiry_check(self, namespace: str, ledger: Ledger, now_s: float) -> Callable[[Reservation], bool]:
        """Return a function that says whether a reservation, made at `since` by the webhook's clock, has expired."""
        now, is_api_stable = self._clock(), self._is_api_stable()
        first_seen = self._states.reservations_seen(namespace, ledger.reservations(), now)

        def is_expired(reservation: Reservation) -> bool:
            seen, lasts_s = first_seen[reservation], lifetime_s(reservation)
            # Clocks of machines differ, so what counts is how long this process has seen the reservation. Only for one
            # that was there at the start the webhook's clock is used, with a margin; else each restart would extend it.
            is_old = seen.at_start and now_s - reservation.since >= lasts_s + SKEW_S
            return is_api_stable and (is_old or now - seen.at >= lasts_s)

        return is_expired

    def _requeue_after_s(self, namespace: str) -> float:
        """Return when the next thing is due in a namespace: an expiry, an opening, the end of a grace period."""
        now, now_s = self._clock(), self._wall()
        delays = [jittered(RESYNC_S)]  # spread, so that namespaces do not resync together
        delays += [due - now for due in self._states.due_times(namespace)]
        delays += [
            pod.delete_by_s - now_s
            for pod in self._caches.pods_in(namespace)
            if pod.delete_by_s is not None and pod.delete_by_s > now_s
        ]
        return max(MIN_INTERVAL_S, min(delays)) + DUE_MARGIN_S

    def _write_status(self, namespace: str, ledger: Ledger, problem: str) -> None:
        """Write `gpu-quota-status`, or delete it if the namespace has no quota."""
        quotas = self._caches.quotas.namespace_quotas(namespace)
        cached = self._caches.statuses.get(QUOTA_STATUS, namespace)
        mistakes = {**quotas.mistakes, **self._caches.quotas.mistakes_in(LEGACY_QUOTA, ledger.quotas)}
        if not ledger.quotas and not mistakes and not problem:
            if cached is not None:
                self._cluster.delete(CONFIG_MAPS, QUOTA_STATUS, namespace, uid=cached.metadata.uid)
            return
        names = {pod.key: pod.metadata.name for pod in self._caches.pods_in(namespace)}
        waiting = {names[key]: reason for key, reason in self._states.waiting(namespace).items() if key in names}
        problems = [problem] if problem else []
        data = {STATUS_KEY: encode_status(status_of(ledger, self._cluster_mode, waiting, mistakes, problems))}
        if cached is not None and cached.data == data:
            return
        labels = {STATUS_LABEL: "true"}
        try:
            metadata = Metadata(name=QUOTA_STATUS, namespace=namespace, labels=labels, owner_references=self._owners())
            write_config_map(self._cluster, ConfigMap(metadata=metadata, data=data), cached)
        except (Conflict, NotFound):
            pass  # the cache was stale: its update enqueues the namespace again
        except ApiError as error:
            # The namespace may be terminating, or another policy may forbid the write. The ledger is right without it.
            self._log.info("status_not_written", namespace=namespace, error=str(error))

    def _report_waiting(self, namespace: str, report: ReconcileReport) -> None:
        """Record an event on each pod that newly waits for a charge."""
        before = self._states.waiting(namespace)
        waiting = {key: shorten(str(reasons[0]), MAX_ERROR) for key, reasons in report.waiting.items()}
        self._states.set_waiting(namespace, waiting)
        pods = {pod.key: pod for pod in self._caches.pods_in(namespace)}
        for key, reason in waiting.items():
            if key not in before and key in pods:
                metadata = pods[key].metadata
                regarding = ObjectReference(
                    api_version="v1", kind="Pod", namespace=namespace, name=metadata.name, uid=metadata.uid
                )
                message = f"not scheduled, because it could not be charged to the GPU quota: {reason}"
                self._recorder.record(regarding, "QuotaExceeded", message, type_=WARNING)


def pods_not_recorded(count: int) -> str:
    return (
        f"{count} pods that use GPUs are not charged, because the ledger of this namespace is full; no pod with GPUs "
        "is admitted until others have ended"
    )
