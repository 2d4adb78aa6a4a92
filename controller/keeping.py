"""Keeps the ledgers right: every namespace is looked at when something happened in it, and once in a while anyway."""

import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import cast

import structlog
from msgspec import Struct
from msgspec.structs import replace

from cluster.errors import AlreadyExists, ApiError, Conflict, NotFound
from cluster.events import WARNING, Recorder
from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import (
    CONFIG_MAPS,
    NAMESPACES,
    NODES,
    PODS,
    ConfigMap,
    Kind,
    Metadata,
    Namespace,
    ObjectReference,
    Pod,
)
from controller.accounting import RESERVATION_S, Report, View, drop, reconcile
from controller.holdings import Holding, Machine, charge_of, holding_of, holds, machine_of
from controller.known import KnownLedgers
from controller.status import encode_status, status_of
from ledger.books import LEDGERS, Books, Page, Unreadable, namespace_of, read_page
from ledger.following import QuotaFollower, is_quota, quotas_in
from ledger.turns import Turns
from vcuda.catalogue import Card, encode_cards, sizes_mib
from vcuda.charging import Charge
from vcuda.decision import Unavailable
from vcuda.language import Language
from vcuda.ledger import Key, Ledger, State, confirm, packed, reserved_in
from vcuda.names import (
    CATALOGUE,
    CATALOGUE_KEY,
    LEDGER_KEY,
    LEDGER_PREFIX,
    LEGACY_NAME,
    LEGACY_NAMESPACE,
    QUOTA_STATUS,
    STATUS_KEY,
    STATUS_LABEL,
)
from vcuda.policy import Mode
from vcuda.quota import QuotaError

WORKERS = 4
TRIES = 20
# How soon after something happened, and how often at the most, a namespace is looked at: where something ended, others
# may wait for the room; that something began has been accounted for at admission.
SOON_S, APART_S, APART_AT_EASE_S = 0.05, 0.25, 1.0
AGAIN_S = 240.0
RETRY_S = 1.0
# How often one that has nothing to do yet looks whether that has changed.
STANDBY_S = 0.1
# After the API server was slow or away, what it was asked before may still take effect.
TROUBLE_S, SLOW_S = 10.0, 2.0
# By how much the clocks of machines may differ where they have to be believed.
SKEW_S = 12.0
BY_NAMESPACE = "namespace"
CATALOGUE_TURN = ""
WANTED = f'"state":"{State.WANTED}"'
LEGACY_QUOTA = f"{LEGACY_NAMESPACE}/{LEGACY_NAME}"


class Seen(Struct):
    """What is remembered of a namespace between two looks."""

    last: float = float("-inf")
    gone: set[Key] = set()
    # Since when each reservation has been seen, and whether it was there before we began to look.
    reserved: dict[Key, tuple[float, bool]] = {}
    waiting: dict[Key, str] = {}
    opens: float | None = None
    begun: str = ""
    failures: int = 0
    ledger: Ledger | None = None
    written: str = ""
    changed: float | None = None


class Keeper:
    """Looks after all ledgers. Works only while `is_leading` says so; follows the cluster all the time."""

    def __init__(
        self,
        cluster: Cluster,
        spoken: Language,
        system_namespace: str,
        quotas: QuotaFollower,
        recorder: Recorder,
        *,
        cluster_mode: Mode = Mode.ENFORCE,
        is_leading: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._cluster, self._spoken, self._system_namespace = cluster, spoken, system_namespace
        self._quotas, self._recorder, self._cluster_mode = quotas, recorder, cluster_mode
        self._is_leading, self._clock, self._wall = is_leading, clock, wall
        self._books = Books(cluster, system_namespace)
        self._known = KnownLedgers(cluster, system_namespace, self._has_ledgers, clock)
        self._pods: Informer[Holding] = Informer(
            cluster,
            cast("Kind[Holding]", PODS),
            convert=lambda pod: holding_of(pod, spoken),
            indexes={BY_NAMESPACE: lambda held: held.metadata.namespace},
        )
        self._nodes: Informer[Machine] = Informer(
            cluster, cast("Kind[Machine]", NODES), convert=lambda node: machine_of(node, spoken)
        )
        self._namespaces = Informer(cluster, NAMESPACES)
        self._ledgers = Informer(cluster, CONFIG_MAPS, system_namespace, LEDGERS)
        self._statuses = Informer(cluster, CONFIG_MAPS, selector=Selector(labels=STATUS_LABEL))
        self._catalogue = Informer(
            cluster, CONFIG_MAPS, system_namespace, Selector(fields=f"metadata.name={CATALOGUE}")
        )
        self._turns = Turns(clock)
        # Guards what is remembered: informers note what is gone, workers take it.
        self._lock = threading.Lock()
        self._seen: dict[str, Seen] = {}
        self._actual: dict[Key, tuple[Holding, Machine, Charge | None]] = {}
        self._trouble = float("-inf")
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
        self._pods.on_change(self._pod_changed)
        self._nodes.on_change(self._node_changed)
        self._namespaces.on_change(lambda old, new: self._touch((new or old or Namespace()).metadata.name))
        self._ledgers.on_change(self._ledger_changed)
        self._statuses.on_change(lambda old, new: self._touch((new or old or ConfigMap()).metadata.namespace))
        self._catalogue.on_change(lambda *_: self._turns.want(CATALOGUE_TURN, self._clock() + SOON_S))
        self._quotas.on_change(self._touch)

    @property
    def informers(
        self,
    ) -> tuple[Informer[Holding] | Informer[Machine] | Informer[Namespace] | Informer[ConfigMap], ...]:
        """What is followed, beside the quotas."""
        return self._pods, self._nodes, self._namespaces, self._ledgers, self._statuses, self._catalogue

    @property
    def synced(self) -> bool:
        """Whether everything is known."""
        return self._quotas.synced and all(informer.synced for informer in self.informers)

    @property
    def alive(self) -> bool:
        """Whether all threads run."""
        return all(thread.is_alive() for thread in self._threads) and all(each.alive for each in self.informers)

    def start(self) -> "Keeper":
        """Begin to follow, and to look after ledgers."""
        for informer in self.informers:
            informer.start()
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """End."""
        self._ending.set()
        self._turns.stop()
        for informer in self.informers:
            informer.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10)

    def look_at_everything(self) -> None:
        """Look at every namespace: after becoming the leader, nothing that another one knew is known."""
        with self._lock:
            self._behind, self._began = None, self._clock()
            for seen in self._seen.values():
                seen.begun = ""
        self._known.forget()
        self._turns.want(CATALOGUE_TURN)  # whoever takes it sees that there is everything to do

    def _on_duty(self) -> bool:
        """Wait until we lead and everything is known; False at the end."""
        while not (self._is_leading() and self.synced):
            if self._ending.wait(STANDBY_S):
                return False
        with self._lock:
            if self._behind is not None:
                return True
            self._behind = {namespace.metadata.name for namespace in self._namespaces.all()}
            self._behind |= {namespace_of(found) for found in self._ledgers.all()}
            behind = set(self._behind)
        for namespace in behind:
            self._turns.want(namespace)
        return True

    def _caught_up(self, namespace: str) -> None:
        """Say so when everything has been looked at that was there when we began to lead."""
        with self._lock:
            if not self._behind or namespace not in self._behind:
                return
            self._behind.remove(namespace)
            is_last = not self._behind
        if is_last:
            took_s = round(self._clock() - self._began, 1)
            self._log.info("caught_up", namespaces=len(self._namespaces), pods=len(self._pods), took_s=took_s)

    def idle(self) -> bool:
        """Tell whether there is nothing to do at the moment."""
        return self.synced and self._turns.waiting() == 0

    def ledgers(self) -> dict[str, Ledger]:
        """Give all ledgers as they were last seen, for the metrics."""
        with self._lock:
            return {name: seen.ledger for name, seen in self._seen.items() if seen.ledger is not None}

    def lag_s(self) -> float:
        """Say how long the oldest change has been waiting to be accounted for; a standby accounts for none."""
        now = self._clock()
        if not self._is_leading():
            return 0.0
        with self._lock:
            return max((now - seen.changed for seen in self._seen.values() if seen.changed is not None), default=0.0)

    def _pod_changed(self, old: Holding | None, new: Holding | None) -> None:
        found = new or old
        if found is None:
            return
        namespace = found.metadata.namespace
        if new is None and old is not None:
            self._actual.pop(old.key, None)
            # A standby need not remember: when it begins to lead, it looks at everything.
            if self._is_leading():
                with self._lock:
                    self._of(namespace).gone.add(old.key)
        if old is None or new is None or matters(old) != matters(new):
            self._touch(namespace, at_ease=old is None)

    def _node_changed(self, old: Machine | None, new: Machine | None) -> None:
        if old is not None and new is not None and cards_of(old) == cards_of(new) and old.lost == new.lost:
            return
        self._turns.want(CATALOGUE_TURN, self._clock() + SOON_S)
        name = (new or old or Machine()).metadata.name
        for namespace in {held.metadata.namespace for held in self._pods.all() if held.node == name}:
            self._touch(namespace)

    def _ledger_changed(self, old: ConfigMap | None, new: ConfigMap | None) -> None:
        found = new or old
        if found is None:
            return
        namespace, now = namespace_of(found), self._clock()
        reserved = reserved_in(new.data.get(LEDGER_KEY, "")) if new is not None else ()
        with self._lock:
            seen = self._of(namespace)
            is_first = not self._ledgers.synced
            seen.reserved = {pod: seen.reserved.get(pod, (now, is_first)) for pod in reserved}
            is_ours = new is not None and seen.written == new.metadata.resource_version
        if not is_ours:
            self._touch(namespace, at_ease=old is not None and new is not None)

    def _touch(self, namespace: str, *, at_ease: bool = False) -> None:
        """Look at a namespace soon."""
        now = self._clock()
        with self._lock:
            seen = self._of(namespace)
            if seen.changed is None:
                seen.changed = now
            at = max(now + SOON_S, seen.last + (APART_AT_EASE_S if at_ease else APART_S))
        self._turns.want(namespace, at)

    def _has_ledgers(self) -> bool:
        """Tell whether any ledger was ever begun; one that is only wanted was not."""
        return any(WANTED not in found.data.get(LEDGER_KEY, "") for found in self._ledgers.all())

    def _of(self, namespace: str) -> Seen:
        """Give what is remembered of a namespace; to be called with the lock held."""
        found = self._seen.get(namespace)
        if found is None:
            found = self._seen[namespace] = Seen()
        return found

    def _run(self) -> None:
        while self._on_duty() and (namespace := self._turns.next()) is not None:
            try:
                if not self._is_leading():
                    self._turns.want(namespace)
                elif namespace == CATALOGUE_TURN:
                    self._write_catalogue()
                else:
                    self._look_at(namespace)
                    self._caught_up(namespace)
            except Unavailable as away:
                self._trouble = self._clock()
                self._retry(namespace, str(away))
            except ApiError as refused:  # of this namespace alone; the cluster is well
                self._retry(namespace, str(refused))
            except Exception:  # the outermost frame of the thread: it has to go on
                self._log.exception("keeper_failed", namespace=namespace)
                self._retry(namespace, "a fault")
            finally:
                self._turns.done(namespace)

    def _retry(self, namespace: str, cause: str) -> None:
        with self._lock:
            seen = self._of(namespace)
            seen.failures += 1
            pause = RETRY_S * (1 << min(seen.failures - 1, 4)) * random.uniform(0.5, 1.0)
        self._log.warning("namespace_not_kept", namespace=namespace, cause=cause, again_s=round(pause, 1))
        self._turns.want(namespace, self._clock() + pause)

    def _look_at(self, namespace: str) -> None:
        """Bring one namespace's ledger and status up to date."""
        with self._lock:
            seen = self._of(namespace)
            seen.last, seen.changed = self._clock(), None
        if namespace == self._system_namespace:
            return
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
            with self._lock:
                self._seen.pop(namespace, None)
            return
        with self._lock:
            seen.ledger = page.ledger
        self._tell_waiting(namespace, seen, report)
        self._write_status(namespace, page.ledger, seen)
        self._turns.want(namespace, self._clock() + self._next_look_s(namespace, seen))

    def _keep(self, namespace: str, seen: Seen, page: Page | None) -> tuple[Page | None, Report]:
        """Account, and write; Conflict if somebody else wrote meanwhile."""
        existing = self._namespaces.get(namespace)
        if existing is None:
            self._forget(namespace, page)
            return None, Report()
        ledger = page.ledger.copy() if page is not None else Ledger()
        if page is None and not self._is_our_business(namespace):
            return None, Report()
        if ledger.state is State.WANTED or ledger.namespace != existing.metadata.uid:
            before = ledger
            ledger = self._begin(namespace, existing.metadata.uid, seen)
            # One of the same name may have gone and come back: who was promised something still has it.
            for pod, since in before.reservations():
                ledger.put(pod, before.charge(pod), since)
        elif ledger.state is State.CLOSED:
            self._open_in_time(namespace, ledger, seen)
        gone = set(seen.gone)
        report = self._account(namespace, ledger, seen)
        page = self._write(namespace, page, ledger, seen)
        if report.missing:
            listed = self._cluster.list(PODS, namespace).items
            alive = {packed(pod.metadata.uid) for pod in listed}
            ledger = page.ledger.copy()
            drop(ledger, report.missing, alive)
            page = self._write(namespace, page, ledger, seen)
        seen.begun = ""
        self._known.add({namespace: existing.metadata.uid})
        with self._lock:
            seen.gone -= gone
        return page, report

    def _forget(self, namespace: str, page: Page | None) -> None:
        """Leave nothing behind of a namespace that is gone; that it is not in our cache does not prove it."""
        try:
            self._cluster.get(NAMESPACES, namespace)
        except NotFound:
            if page is not None:
                self._books.delete(page.written)
            self._known.remove(namespace)
        else:
            self._turns.want(namespace, self._clock() + SOON_S)

    def _read(self, namespace: str, seen: Seen, *, may_be_old: bool) -> Page | None:
        """Read a ledger; one that cannot be read is removed, and then made anew as one that was lost.

        What was heard of it last will do where nothing has to be freed: what is written is compared all the same.
        """
        began = self._clock()
        try:
            cached = self._ledgers.get(LEDGER_PREFIX + namespace, self._system_namespace) if may_be_old else None
            if cached is not None and not seen.gone and int(cached.metadata.resource_version) >= int(seen.written or 0):
                with suppress(Unreadable):  # it may have been put right since
                    return read_page(cached)
            return self._books.read(namespace)
        except Unreadable as wrong:
            self._log.error("ledger_unreadable", namespace=namespace, cause=str(wrong))
            self._books.delete(wrong.found)
            return None
        finally:
            if self._clock() - began > SLOW_S:
                self._trouble = self._clock()

    def _write(self, namespace: str, page: Page | None, ledger: Ledger, seen: Seen) -> Page:
        if page is not None and not ledger.changes:
            return page
        page = self._books.write(page, ledger) if page is not None else self._books.create(namespace, ledger)
        with self._lock:
            seen.written = page.written.metadata.resource_version
        return page

    def _begin(self, namespace: str, uid: str, seen: Seen) -> Ledger:
        """Begin a ledger: open if the namespace never had one, closed for a while if it was lost."""
        if self._known.has(namespace, uid) and seen.begun != uid:
            self._log.warning("ledger_lost", namespace=namespace, opens_in_s=RESERVATION_S)
            seen.opens = self._clock() + RESERVATION_S
            ledger = Ledger(uid, State.CLOSED)
        else:
            # Remembered until it is written: another may write first, and then this one has not been lost.
            if seen.begun != uid:
                self._begin_others(namespace, uid)
            ledger = Ledger(uid, State.OPEN)
        ledger.changes += 1
        return ledger

    def _begin_others(self, namespace: str, uid: str) -> None:
        """Note that a namespace begins a ledger, and with it all that are about to: there may be very many at once."""
        beginning = {namespace: uid}
        for other in self._namespaces.all():
            name, its_uid = other.metadata.name, other.metadata.uid
            has_ledger = self._ledgers.get(LEDGER_PREFIX + name, self._system_namespace) is not None
            if not has_ledger and self._is_our_business(name) and not self._known.has(name, its_uid):
                beginning[name] = its_uid
        with self._lock:
            for name, its_uid in beginning.items():
                self._of(name).begun = its_uid
        self._known.add(beginning)

    def _is_our_business(self, namespace: str) -> bool:
        """Tell whether a namespace without a ledger needs one."""
        governed = self._quotas.governance(namespace)
        return bool(governed.quotas or governed.mistakes) or self._holding(namespace)

    def _open_in_time(self, namespace: str, ledger: Ledger, seen: Seen) -> None:
        """Open a ledger when no pod can appear any more that the lost one had admitted, and all that did are known."""
        if seen.opens is None:
            seen.opens = self._clock() + RESERVATION_S
        if self._clock() < seen.opens or self._clock() - self._trouble <= TROUBLE_S:
            return
        there = {packed(pod.metadata.uid) for pod in self._cluster.list(PODS, namespace).items if self._concerns(pod)}
        if there <= {held.key for held in self._pods.indexed(BY_NAMESPACE, namespace)}:
            ledger.set_state(State.OPEN, ledger.namespace)
            seen.opens = None

    def _concerns(self, pod: Pod) -> bool:
        return holding_of(pod, self._spoken) is not None

    def _account(self, namespace: str, ledger: Ledger, seen: Seen) -> Report:
        """Make a ledger say what is true, as far as it is known."""
        governed = self._quotas.governance(namespace)
        confirm(
            ledger,
            governed.quotas,
            governed.versions,
            self._quotas.version,
            lambda name: self._is_gone(name, namespace),
        )
        now_s = self._wall()
        holdings: dict[Key, Holding] = {}
        gone = set(seen.gone)
        for held in self._pods.indexed(BY_NAMESPACE, namespace):
            if holds(held, self._machine(held), now_s):
                holdings[held.key] = held
            else:
                gone.add(held.key)
        view = View(
            holdings=holdings,
            gone=gone - holdings.keys(),
            actual=self._charge_of,
            cards=sizes_mib(self._cards(), governed.policy.pools),
            unit_mib=self._spoken.unit_mib,
            cluster_mode=self._cluster_mode,
        )
        return reconcile(ledger, view, now_s, self._expiry(ledger, seen, now_s))

    def _is_gone(self, quota: str, namespace: str) -> bool:
        """Ask the cluster whether a quota is really gone; one that cannot be read now stays as it was."""
        if quota in self._quotas.unreadable:
            return False
        where, _, name = quota.partition("/")
        try:
            found = self._cluster.get(CONFIG_MAPS, name, where)
            if not is_quota(where, name, found.metadata.labels, self._spoken):
                return True
            return namespace not in quotas_in(where, name, found.data, self._spoken.unit_mib)
        except NotFound:
            return True
        except QuotaError:
            return False

    def _expiry(self, ledger: Ledger, seen: Seen, now_s: float) -> Callable[[Key, int], bool]:
        """Tell which reservations are over: by how long we have seen them, for clocks of machines differ.

        Only of one that was there before this process does its maker's clock have to be believed, with a margin.
        """
        now = self._clock()
        with self._lock:
            seen.reserved = {pod: seen.reserved.get(pod, (now, False)) for pod, _ in ledger.reservations()}
            first_seen = dict(seen.reserved)
        is_quiet = now - self._trouble > TROUBLE_S

        def expired(pod: Key, since: int) -> bool:
            at, was_there = first_seen[pod]
            is_old = was_there and now_s - since >= RESERVATION_S + SKEW_S
            return is_quiet and (is_old or now - at >= RESERVATION_S)

        return expired

    def _next_look_s(self, namespace: str, seen: Seen) -> float:
        """Say when to look again even if nothing happens."""
        now, now_s = self._clock(), self._wall()
        times = [AGAIN_S * random.uniform(0.8, 1.0)]
        times += [at + RESERVATION_S - now for at, _ in seen.reserved.values()]
        times += [
            held.due_s - now_s
            for held in self._pods.indexed(BY_NAMESPACE, namespace)
            if held.due_s is not None and held.due_s > now_s
        ]
        if seen.opens is not None:
            times.append(seen.opens - now)
        return max(APART_S, min(times)) + SOON_S

    def _holding(self, namespace: str) -> bool:
        return bool(self._pods.indexed(BY_NAMESPACE, namespace))

    def _machine(self, held: Holding) -> Machine | None:
        return self._nodes.get(held.node) if held.node else None

    def _charge_of(self, held: Holding) -> Charge | None:
        """Give what a pod really holds; worked out once, until it or its node changes."""
        machine = self._machine(held)
        if machine is None:
            return None
        before = self._actual.get(held.key)
        if before is not None and before[0] is held and before[1] is machine:
            return before[2]
        charge = charge_of(held, machine, self._spoken.unit_mib)
        self._actual[held.key] = held, machine, charge
        return charge

    def _cards(self) -> set[Card]:
        return {card for machine in self._nodes.all() for card in machine.cards()}

    def _write_catalogue(self) -> None:
        """Write down which cards there are."""
        data = {CATALOGUE_KEY: encode_cards(self._cards())}
        self._put(ConfigMap(metadata=Metadata(name=CATALOGUE, namespace=self._system_namespace), data=data))
        self._turns.want(CATALOGUE_TURN, self._clock() + AGAIN_S)

    def _put(self, wanted: ConfigMap, found: ConfigMap | None = None) -> None:
        """Write a ConfigMap that is ours alone, if it is not so already; `found` is what was last heard of it."""
        if found is None:
            try:
                self._cluster.create(CONFIG_MAPS, wanted)
            except AlreadyExists:
                found = self._cluster.get(CONFIG_MAPS, wanted.metadata.name, wanted.metadata.namespace)
            else:
                return
        if (found.data, found.metadata.labels) != (wanted.data, wanted.metadata.labels):
            labels = replace(found.metadata, labels=wanted.metadata.labels)
            self._cluster.update(CONFIG_MAPS, replace(found, metadata=labels, data=wanted.data))

    def _write_status(self, namespace: str, ledger: Ledger, seen: Seen) -> None:
        """Show the namespace how it stands, if it has quotas."""
        governed = self._quotas.governance(namespace)
        found = self._statuses.get(QUOTA_STATUS, namespace)
        mistakes = {**governed.mistakes, **self._quotas.mistakes_of(LEGACY_QUOTA, ledger.quotas)}
        if not ledger.quotas and not mistakes:
            if found is not None:
                self._cluster.delete(CONFIG_MAPS, QUOTA_STATUS, namespace, uid=found.metadata.uid)
            return
        names = {held.key: held.metadata.name for held in self._pods.indexed(BY_NAMESPACE, namespace)}
        waiting = {names[pod]: why for pod, why in seen.waiting.items() if pod in names}
        data = {STATUS_KEY: encode_status(status_of(ledger, self._cluster_mode, waiting, mistakes))}
        if found is not None and found.data == data:
            return
        labels = {STATUS_LABEL: "true"}
        try:
            metadata = Metadata(name=QUOTA_STATUS, namespace=namespace, labels=labels)
            self._put(ConfigMap(metadata=metadata, data=data), found)
        except (Conflict, NotFound):
            self._touch(namespace)
        except ApiError as refused:
            # The namespace may be on its way out, or somebody guards it: the ledger is right all the same.
            self._log.info("status_not_written", namespace=namespace, cause=str(refused))

    def _tell_waiting(self, namespace: str, seen: Seen, report: Report) -> None:
        """Tell pods that got in without a charge why they stay where they are."""
        before = seen.waiting
        seen.waiting = {pod: str(reasons[0]) for pod, reasons in report.waiting.items()}
        held = {each.key: each for each in self._pods.indexed(BY_NAMESPACE, namespace)}
        for pod, why in seen.waiting.items():
            if pod not in before and pod in held:
                metadata = held[pod].metadata
                about = ObjectReference(
                    api_version="v1", kind="Pod", namespace=namespace, name=metadata.name, uid=metadata.uid
                )
                told = f"not charged to the quota, so it gets no GPU: {why}"
                self._recorder.record(about, "QuotaExceeded", told, type_=WARNING)


def matters(held: Holding) -> tuple[object, ...]:
    """Give what accounting looks at."""
    return held.node, held.placed, held.is_terminal, held.due_s, held.request


def cards_of(machine: Machine) -> Mapping[str, Card]:
    """Give what is asked of a node's cards."""
    return {gpu.uuid: Card(gpu.model, gpu.memory_mib, machine.pool) for gpu in machine.gpus} | {
        "": Card(machine.model, machine.memory_mib, machine.pool)
    }
