"""How one namespace is kept: its ledger made to say what is true, and its status to show it."""

import random
import threading
from collections.abc import Callable
from contextlib import suppress

import structlog
from msgspec import Struct

from cluster.errors import AlreadyExists, ApiError, Conflict, NotFound
from cluster.events import WARNING, EventRecorder
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, NAMESPACES, PODS, ConfigMap, Metadata, ObjectReference, Owners, Pod
from controller.accounting import RESERVATION_S, NamespaceView, ReconcileReport, drop_missing, reconcile
from controller.caches import ControllerCaches
from controller.config_maps import write_config_map
from controller.ledger_registry import LedgerRegistry
from controller.pod_usage import PodUsage, counts_against_quota, pod_usage_of
from controller.quota_status import encode_status, status_of
from ledger.ledger_store import LedgerStore, StoredLedger, UnreadableLedger, read_ledger
from ledger.quota_config_maps import LEGACY_QUOTA, is_quota_config_map, parse_quota_config_map
from vcuda.catalogue import card_sizes_mib
from vcuda.charging import RemedyContext
from vcuda.ledger import Ledger, LedgerState, PodKey, pack_uid, reconcile_quotas
from vcuda.names import QUOTA_STATUS, STATUS_KEY, STATUS_LABEL
from vcuda.namespace_policy import Mode
from vcuda.quota import QuotaError
from vcuda.scheme import Scheme

TRIES = 20
BEGIN_TOGETHER = 50
AGAIN_S = 240.0
# Not sooner than this after the last look, and not at the very moment something is due.
APART_S, SOON_S = 0.25, 0.05
# After the API server was slow or away, what it was asked before may still take effect.
TROUBLE_S, SLOW_S = 10.0, 2.0
# By how much the clocks of machines may differ where they have to be believed.
SKEW_S = 12.0


class NamespaceState(Struct):
    """What is remembered of a namespace between two looks."""

    last: float = float("-inf")
    gone: set[PodKey] = set()
    # Since when each reservation has been seen, and whether it was there before we began to look.
    reserved: dict[PodKey, tuple[float, bool]] = {}
    waiting: dict[PodKey, str] = {}
    opens: float | None = None
    begun: str = ""
    failures: int = 0
    ledger: Ledger | None = None
    written: str = ""
    # Since when something waits to be accounted for, and how often that was said.
    changed: float | None = None
    touched: int = 0


class NamespaceStates:
    """What is remembered of each namespace. Informers write down what is gone, and workers take it: under the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._seen: dict[str, NamespaceState] = {}

    def of(self, namespace: str) -> NamespaceState:
        """Give what is remembered of a namespace; to be called with the lock held."""
        found = self._seen.get(namespace)
        if found is None:
            found = self._seen[namespace] = NamespaceState()
        return found

    def all(self) -> dict[str, NamespaceState]:
        """Give everything; to be called with the lock held."""
        return self._seen

    def forget(self, namespace: str) -> None:
        """Remember nothing of a namespace any more; to be called with the lock held."""
        self._seen.pop(namespace, None)


class NamespaceReconciler:
    """Keeps one namespace at a time, whichever it is asked to; several threads may ask, each for another."""

    def __init__(
        self,
        cluster: Cluster,
        caches: ControllerCaches,
        notes: NamespaceStates,
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
        self._caches, self._notes, self._recorder = caches, notes, recorder
        self._cluster_mode, self._clock, self._wall = cluster_mode, clock, wall
        self._owners = owners
        self._ledger_store = LedgerStore(cluster, system_namespace, owners)
        self._known = LedgerRegistry(cluster, system_namespace, caches.has_ledgers, clock, owners)
        self._trouble = float("-inf")
        # Held while it is found out whether a ledger is the first: workers note each other's namespaces, too.
        self._beginning = threading.Lock()
        self._log = structlog.get_logger()

    def begin(self) -> None:
        """Rely on nothing that was known before: another process may have led meanwhile."""
        with self._notes.lock:
            for seen in self._notes.all().values():
                seen.begun = ""
        self._known.forget()

    def note_trouble(self) -> None:
        """Note that the API server was slow, or away."""
        self._trouble = self._clock()

    def look_at(self, namespace: str) -> float | None:
        """Bring a namespace's ledger and status up to date; gives when to look again, if at all."""
        with self._notes.lock:
            seen = self._notes.of(namespace)
            seen.last, touched = self._clock(), seen.touched
        if namespace == self._system_namespace:
            return None
        for tries in range(TRIES):
            try:
                page, report = self._keep(namespace, seen, self._read(namespace, seen, may_be_old=tries == 0))
                break
            except (Conflict, NotFound, AlreadyExists):
                continue  # somebody else wrote it: read it again
        else:
            # Of this namespace alone: whoever keeps it busy must not hold up the others.
            raise Conflict("others write the ledger all the time", code=409, reason="Conflict")
        seen.failures = 0
        if page is None:
            with self._notes.lock:
                self._notes.forget(namespace)
            return None
        with self._notes.lock:
            seen.ledger = page.ledger
            seen.changed = None if seen.touched == touched else seen.last
        self._tell_waiting(namespace, seen, report)
        self._write_status(namespace, page.ledger, seen)
        return self._next_look_s(namespace, seen)

    def _keep(
        self, namespace: str, seen: NamespaceState, page: StoredLedger | None
    ) -> tuple[StoredLedger | None, ReconcileReport]:
        """Account, and write; Conflict if somebody else wrote meanwhile."""
        existing = self._caches.namespaces.get(namespace)
        if existing is None:
            self._forget(namespace, page)
            return None, ReconcileReport()
        ledger = page.ledger.copy() if page is not None else Ledger()
        if page is None and not self._caches.needs_ledger(namespace):
            return None, ReconcileReport()
        if ledger.state is LedgerState.WANTED or ledger.namespace != existing.metadata.uid:
            before = ledger
            ledger = self._begin(namespace, existing.metadata.uid, seen)
            # One of the same name may have gone and come back: who was promised something still has it.
            for pod, since in before.reservations():
                ledger.put(pod, before.charge(pod), since)
        elif ledger.state is LedgerState.CLOSED:
            self._open_in_time(namespace, ledger, seen)
        gone = set(seen.gone)
        report = self._account(namespace, ledger, seen)
        page = self._write(namespace, page, ledger, seen)
        if report.missing:
            listed = self._cluster.list(PODS, namespace).items
            alive = {pack_uid(pod.metadata.uid) for pod in listed}
            ledger = page.ledger.copy()
            drop_missing(ledger, report.missing, alive)
            page = self._write(namespace, page, ledger, seen)
        seen.begun = ""
        self._known.add({namespace: existing.metadata.uid})
        with self._notes.lock:
            seen.gone -= gone
        return page, report

    def _forget(self, namespace: str, page: StoredLedger | None) -> None:
        """Leave nothing behind of a namespace that is gone; that it is not in our cache does not prove it."""
        try:
            self._cluster.get(NAMESPACES, namespace)
        except NotFound:
            if page is not None:
                self._ledger_store.delete(page.config_map)
            self._known.remove(namespace)

    def _read(self, namespace: str, seen: NamespaceState, *, may_be_old: bool) -> StoredLedger | None:
        """Read a ledger; one that cannot be read is removed, and then made anew as one that was lost.

        What was heard of it last will do where nothing has to be freed: what is written is compared all the same.
        """
        began = self._clock()
        try:
            cached = self._caches.ledger_of(namespace) if may_be_old else None
            if cached is not None and not seen.gone and int(cached.metadata.resource_version) >= int(seen.written or 0):
                with suppress(UnreadableLedger):  # it may have been put right since
                    return read_ledger(cached)
            return self._ledger_store.read(namespace)
        except UnreadableLedger as wrong:
            self._log.error("ledger_unreadable", namespace=namespace, cause=str(wrong))
            self._ledger_store.delete(wrong.config_map)
            return None
        finally:
            if self._clock() - began > SLOW_S:
                self._trouble = self._clock()

    def _write(self, namespace: str, page: StoredLedger | None, ledger: Ledger, seen: NamespaceState) -> StoredLedger:
        if page is not None and not ledger.changes:
            return page
        page = (
            self._ledger_store.write(page, ledger) if page is not None else self._ledger_store.create(namespace, ledger)
        )
        with self._notes.lock:
            seen.written = page.config_map.metadata.resource_version
        return page

    def _begin(self, namespace: str, uid: str, seen: NamespaceState) -> Ledger:
        """Begin a ledger: open if the namespace never had one, closed for a while if it was lost."""
        with self._beginning:
            # Remembered until it is written: another may write first, and then this one has not been lost.
            if seen.begun != uid and not self._known.has(namespace, uid):
                self._note_beginning(namespace, uid)
            is_first = seen.begun == uid
        if is_first:
            ledger = Ledger(uid, LedgerState.OPEN)
        else:
            self._log.warning("ledger_lost", namespace=namespace, opens_in_s=RESERVATION_S)
            seen.opens = self._clock() + RESERVATION_S
            ledger = Ledger(uid, LedgerState.CLOSED)
        ledger.changes += 1
        return ledger

    def _note_beginning(self, namespace: str, uid: str) -> None:
        """Note that a namespace begins a ledger, and with it some that are about to: there may be very many at once."""
        beginning = {namespace: uid}
        for other in self._caches.namespaces.all():
            if len(beginning) >= BEGIN_TOGETHER:
                break
            name, its_uid = other.metadata.name, other.metadata.uid
            is_without = self._caches.ledger_of(name) is None and not self._known.has(name, its_uid)
            if is_without and name != self._system_namespace and self._caches.needs_ledger(name):
                beginning[name] = its_uid
        added = self._known.add(beginning)
        with self._notes.lock:
            for name, its_uid in added.items():
                self._notes.of(name).begun = its_uid

    def _open_in_time(self, namespace: str, ledger: Ledger, seen: NamespaceState) -> None:
        """Open a ledger when no pod can appear any more that the lost one had admitted, and all that did are known."""
        if seen.opens is None:
            seen.opens = self._clock() + RESERVATION_S
        if self._clock() < seen.opens or self._clock() - self._trouble <= TROUBLE_S:
            return
        there = {pack_uid(pod.metadata.uid) for pod in self._cluster.list(PODS, namespace).items if self._concerns(pod)}
        if there <= {held.key for held in self._caches.pods_in(namespace)}:
            ledger.set_state(LedgerState.OPEN, ledger.namespace)
            seen.opens = None

    def _concerns(self, pod: Pod) -> bool:
        return pod_usage_of(pod, self._scheme) is not None

    def _account(self, namespace: str, ledger: Ledger, seen: NamespaceState) -> ReconcileReport:
        """Make a ledger say what is true, as far as it is known."""
        governed = self._caches.quotas.namespace_quotas(namespace)
        reconcile_quotas(
            ledger,
            governed.quotas,
            governed.versions,
            self._caches.quotas.version,
            lambda name: self._is_gone(name, namespace),
        )
        now_s = self._wall()
        holdings: dict[PodKey, PodUsage] = {}
        gone = set(seen.gone)
        for held in self._caches.pods_in(namespace):
            if counts_against_quota(held, self._caches.node_of(held), now_s):
                holdings[held.key] = held
            else:
                gone.add(held.key)
        view = NamespaceView(
            holdings=holdings,
            gone=gone - holdings.keys(),
            actual=self._caches.charge_of,
            cards=card_sizes_mib(self._caches.cards(), governed.policy.pools),
            unit_mib=self._scheme.unit_mib,
            cluster_mode=self._cluster_mode,
            remedies=RemedyContext(self._scheme.names.use_models, self._scheme.unit_mib),
        )
        return reconcile(ledger, view, now_s, self._expiry(ledger, seen, now_s))

    def _is_gone(self, quota: str, namespace: str) -> bool:
        """Ask the cluster whether a quota is really gone; one that cannot be read now stays as it was."""
        if quota in self._caches.quotas.invalid_names:
            return False
        where, _, name = quota.partition("/")
        try:
            found = self._cluster.get(CONFIG_MAPS, name, where)
            if not is_quota_config_map(where, name, found.metadata.labels, self._scheme):
                return True
            return namespace not in parse_quota_config_map(where, name, found.data, self._scheme.unit_mib)
        except NotFound:
            return True
        except QuotaError:
            return False

    def _expiry(self, ledger: Ledger, seen: NamespaceState, now_s: float) -> Callable[[PodKey, int], bool]:
        """Tell which reservations are over: by how long we have seen them, for clocks of machines differ.

        Only of one that was there before this process does its maker's clock have to be believed, with a margin.
        """
        now = self._clock()
        with self._notes.lock:
            seen.reserved = {pod: seen.reserved.get(pod, (now, False)) for pod, _ in ledger.reservations()}
            first_seen = dict(seen.reserved)
        is_quiet = now - self._trouble > TROUBLE_S

        def expired(pod: PodKey, since: int) -> bool:
            at, was_there = first_seen[pod]
            is_old = was_there and now_s - since >= RESERVATION_S + SKEW_S
            return is_quiet and (is_old or now - at >= RESERVATION_S)

        return expired

    def _next_look_s(self, namespace: str, seen: NamespaceState) -> float:
        """Say when to look again even if nothing happens."""
        now, now_s = self._clock(), self._wall()
        times = [AGAIN_S * random.uniform(0.8, 1.0)]
        times += [at + RESERVATION_S - now for at, _ in seen.reserved.values()]
        times += [
            held.due_s - now_s
            for held in self._caches.pods_in(namespace)
            if held.due_s is not None and held.due_s > now_s
        ]
        if seen.opens is not None:
            times.append(seen.opens - now)
        return max(APART_S, min(times)) + SOON_S

    def _write_status(self, namespace: str, ledger: Ledger, seen: NamespaceState) -> None:
        """Show the namespace how it stands, if it has quotas."""
        governed = self._caches.quotas.namespace_quotas(namespace)
        found = self._caches.statuses.get(QUOTA_STATUS, namespace)
        mistakes = {**governed.mistakes, **self._caches.quotas.mistakes_in(LEGACY_QUOTA, ledger.quotas)}
        if not ledger.quotas and not mistakes:
            if found is not None:
                self._cluster.delete(CONFIG_MAPS, QUOTA_STATUS, namespace, uid=found.metadata.uid)
            return
        names = {held.key: held.metadata.name for held in self._caches.pods_in(namespace)}
        waiting = {names[pod]: why for pod, why in seen.waiting.items() if pod in names}
        data = {STATUS_KEY: encode_status(status_of(ledger, self._cluster_mode, waiting, mistakes))}
        if found is not None and found.data == data:
            return
        labels = {STATUS_LABEL: "true"}
        try:
            metadata = Metadata(name=QUOTA_STATUS, namespace=namespace, labels=labels, owner_references=self._owners())
            write_config_map(self._cluster, ConfigMap(metadata=metadata, data=data), found)
        except (Conflict, NotFound):
            pass  # somebody else changed it: we shall hear of that, and look again
        except ApiError as refused:
            # The namespace may be on its way out, or somebody guards it: the ledger is right all the same.
            self._log.info("status_not_written", namespace=namespace, cause=str(refused))

    def _tell_waiting(self, namespace: str, seen: NamespaceState, report: ReconcileReport) -> None:
        """Tell pods that got in without a charge why they stay where they are."""
        before = seen.waiting
        seen.waiting = {pod: str(reasons[0]) for pod, reasons in report.waiting.items()}
        held = {each.key: each for each in self._caches.pods_in(namespace)}
        for pod, why in seen.waiting.items():
            if pod not in before and pod in held:
                metadata = held[pod].metadata
                about = ObjectReference(
                    api_version="v1", kind="Pod", namespace=namespace, name=metadata.name, uid=metadata.uid
                )
                told = f"not charged to the quota, so it gets no GPU: {why}"
                self._recorder.record(about, "QuotaExceeded", told, type_=WARNING)
