"""What the quota controller remembers of namespaces between two reconciles.

Informer threads record what happens, workers take it up when they reconcile, and the metrics read it. Each class here
guards its fields with its own lock, and no other class takes these locks.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping

from msgspec import Struct

from controller.accounting import lifetime_s
from vcuda.ledger import Ledger, PodKey, Reservation
from vcuda.quota_usage import RESERVATION_S

# A reserved pod that does not appear for this long is looked up by its name, and then seldom: most pods appear at once.
LOOK_UP_AFTER_S, LOOK_UP_AGAIN_S = 0.5, 10.0
# How many are looked up in one reconcile; the others follow in the next.
MAX_LOOKUPS = 20


class FirstSeen(Struct, frozen=True):
    """When this process first saw a reservation, on its own clock.

    `at_start` says that it was in the first list: then it may be older than that.
    """

    at: float
    at_start: bool


class NamespaceState(Struct):
    """What is remembered of one namespace; times are on the controller's clock."""

    last_started: float = float("-inf")
    deleted_pods: set[PodKey] = set()
    reservations: dict[Reservation, FirstSeen] = {}
    # Reserved pods that have not appeared, with the time at which their name is looked up.
    lookups: dict[PodKey, float] = {}
    # Pods without a charge, with the reason.
    waiting: dict[PodKey, str] = {}
    # When a closed ledger may open; None unless it is closed.
    opens_at: float | None = None
    # uid of the namespace while this process creates its first ledger.
    first_ledger_uid: str = ""
    failures: int = 0
    # Why the ledger is not up to date; empty if it is.
    problem: str = ""
    ledger: Ledger | None = None
    # resourceVersion of the ledger that this process wrote last.
    written_version: str = ""
    # Since when a change waits to be reconciled, and how many changes were seen.
    changed_at: float | None = None
    changes: int = 0


class NamespaceStates:
    """The state of every namespace, by name. Safe for any thread."""

    def __init__(self) -> None:
        # Guards `_states` and all fields in it. Informers may record a deleted pod or a change at any moment of a
        # reconcile, so a worker clears only what it took itself (`pods_freed`, `reconciled`), and nothing is lost.
        self._lock = threading.Lock()
        self._states: dict[str, NamespaceState] = {}

    def _state(self, namespace: str) -> NamespaceState:
        """Return a namespace's state, created if needed; the lock must be held."""
        state = self._states.get(namespace)
        if state is None:
            state = self._states[namespace] = NamespaceState()
        return state

    def forget(self, namespace: str) -> None:
        """Drop the state of a namespace that is gone or needs no ledger; its next change creates a new one."""
        with self._lock:
            self._states.pop(namespace, None)

    def pod_deleted(self, namespace: str, pod: PodKey) -> None:
        with self._lock:
            self._state(namespace).deleted_pods.add(pod)

    def record_change(self, namespace: str, now: float, min_interval_s: float) -> float:
        """Record a change; returns after how many seconds `min_interval_s` has passed since the last reconcile."""
        with self._lock:
            state = self._state(namespace)
            state.changes += 1
            if state.changed_at is None:
                state.changed_at = now
            return state.last_started + min_interval_s - now

    def reservations_seen(
        self, namespace: str, reservations: Iterable[Reservation], now: float, *, at_start: bool = False
    ) -> Mapping[Reservation, FirstSeen]:
        """Record which reservations a ledger has now; returns when each was first seen."""
        with self._lock:
            state = self._state(namespace)
            known = state.reservations
            # Replaced, never changed in place: so the caller may keep what is returned.
            state.reservations = {each: known.get(each) or FirstSeen(now, at_start) for each in reservations}
            return state.reservations

    def due_lookups(self, namespace: str, unseen: Iterable[PodKey], now: float) -> list[PodKey]:
        """Record which reserved pods have not appeared; returns those whose names are to be looked up now."""
        with self._lock:
            state = self._state(namespace)
            state.lookups = {pod: state.lookups.get(pod, now + LOOK_UP_AFTER_S) for pod in unseen}
            return [pod for pod, at in state.lookups.items() if at <= now][:MAX_LOOKUPS]

    def looked_up(self, namespace: str, pods: Iterable[PodKey], now: float) -> None:
        """Record that the names of reserved pods were looked up, and that the ledger was written accordingly."""
        with self._lock:
            self._state(namespace).lookups.update(dict.fromkeys(pods, now + LOOK_UP_AGAIN_S))

    def is_own_write(self, namespace: str, resource_version: str) -> bool:
        """Whether a version of the ledger is the one that this process wrote last."""
        with self._lock:
            return self._state(namespace).written_version == resource_version

    def reconcile_started(self, namespace: str, now: float) -> int:
        """Record the start of a reconcile; returns the number of changes until then, for `reconciled`."""
        with self._lock:
            state = self._state(namespace)
            state.last_started = now
            return state.changes

    def reconciled(self, namespace: str, ledger: Ledger, changes: int) -> None:
        """Record a successful reconcile that covers the first `changes` changes."""
        with self._lock:
            state = self._state(namespace)
            state.failures = 0
            state.ledger = ledger
            # A change during the reconcile may not be covered: it counts from the start, which is never too late.
            state.changed_at = None if state.changes == changes else state.last_started

    def failed(self, namespace: str) -> int:
        """Record a failed reconcile; returns how many have failed in a row."""
        with self._lock:
            state = self._state(namespace)
            state.failures += 1
            return state.failures

    def failures(self, namespace: str) -> int:
        """Return how many reconciles have failed in a row."""
        with self._lock:
            return self._state(namespace).failures

    def set_problem(self, namespace: str, problem: str) -> bool:
        """Record why the ledger is not up to date; returns whether that is new."""
        with self._lock:
            state = self._state(namespace)
            is_new, state.problem = state.problem != problem, problem
            return is_new

    def succeeded(self, namespace: str) -> None:
        with self._lock:
            self._state(namespace).failures = 0

    def deleted_pods(self, namespace: str) -> frozenset[PodKey]:
        with self._lock:
            return frozenset(self._state(namespace).deleted_pods)

    def pods_freed(self, namespace: str, pods: Collection[PodKey]) -> None:
        """Forget deleted pods whose charges are no longer in the ledger."""
        with self._lock:
            self._state(namespace).deleted_pods.difference_update(pods)

    def may_use_cached_ledger(self, namespace: str, resource_version: str) -> bool:
        """Whether the cached ledger can start a reconcile: the cache has our last write, and no pod is to be freed.

        A stale start is safe, because the write is a compare-and-swap, but costs a conflict and a second pass. Freeing
        quota must be fast, so it reads the ledger at once.
        """
        with self._lock:
            state = self._state(namespace)
            return not state.deleted_pods and int(resource_version) >= int(state.written_version or 0)

    def ledger_written(self, namespace: str, resource_version: str) -> None:
        with self._lock:
            self._state(namespace).written_version = resource_version

    def creates_first_ledger(self, namespace: str, uid: str) -> bool:
        """Whether this process registered exactly this namespace, and has not written its first ledger yet."""
        with self._lock:
            return self._state(namespace).first_ledger_uid == uid

    def first_ledgers_registered(self, uids: Mapping[str, str]) -> None:
        """Record that this process is about to create the first ledgers of these namespaces."""
        with self._lock:
            for namespace, uid in uids.items():
                self._state(namespace).first_ledger_uid = uid

    def first_ledger_created(self, namespace: str) -> None:
        with self._lock:
            self._state(namespace).first_ledger_uid = ""

    def forget_first_ledgers(self) -> None:
        """Forget which first ledgers were about to be created: another leader may have created and lost them."""
        with self._lock:
            for state in self._states.values():
                state.first_ledger_uid = ""

    def ledger_closed(self, namespace: str, until: float) -> None:
        with self._lock:
            self._state(namespace).opens_at = until

    def ledger_opens_at(self, namespace: str, now: float) -> float:
        """Return when a closed ledger may open; one that another process closed, as if it had been closed now."""
        with self._lock:
            state = self._state(namespace)
            if state.opens_at is None:
                state.opens_at = now + RESERVATION_S
            return state.opens_at

    def ledger_opened(self, namespace: str) -> None:
        with self._lock:
            self._state(namespace).opens_at = None

    def due_times(self, namespace: str) -> list[float]:
        """Return when reservations expire, when reserved pods are looked up, and when a closed ledger may open."""
        with self._lock:
            state = self._state(namespace)
            times = [seen.at + lifetime_s(reservation) for reservation, seen in state.reservations.items()]
            times += state.lookups.values()
            return times if state.opens_at is None else [*times, state.opens_at]

    def waiting(self, namespace: str) -> Mapping[PodKey, str]:
        """Return the pods without a charge, with the reason of each."""
        with self._lock:
            return self._state(namespace).waiting

    def set_waiting(self, namespace: str, waiting: dict[PodKey, str]) -> None:
        with self._lock:
            self._state(namespace).waiting = waiting

    def ledgers(self) -> dict[str, Ledger]:
        """Return the ledgers of the last successful reconciles, by namespace."""
        with self._lock:
            return {name: state.ledger for name, state in self._states.items() if state.ledger is not None}

    def lag_s(self, now: float) -> float:
        """Return how long the oldest change has been waiting to be reconciled."""
        with self._lock:
            changed = [state.changed_at for state in self._states.values() if state.changed_at is not None]
        return now - min(changed) if changed else 0.0


class InitialReconcile:
    """The namespaces that have not been reconciled since this process became the leader."""

    def __init__(self, now: float) -> None:
        # Guards both fields. While `_remaining` is None, changes are dropped, because the coming list includes them.
        # So the list has to be made with the lock held: a namespace created in between would be in neither.
        self._lock = threading.Lock()
        self._remaining: set[str] | None = None
        self._leading_since = now

    def reset(self, now: float) -> None:
        """Start over: after a new election everything has to be reconciled."""
        with self._lock:
            self._remaining, self._leading_since = None, now

    def has_begun(self) -> bool:
        with self._lock:
            return self._remaining is not None

    def begin(self, list_namespaces: Callable[[], set[str]]) -> set[str]:
        """Return the namespaces to enqueue: all of them at the first call after a reset, none later."""
        with self._lock:
            if self._remaining is not None:
                return set()
            self._remaining = list_namespaces()
            return set(self._remaining)

    def reconciled(self, namespace: str) -> float | None:
        """Mark a namespace as reconciled; if it is the last one, returns since when this process leads."""
        with self._lock:
            if not self._remaining or namespace not in self._remaining:
                return None
            self._remaining.remove(namespace)
            return None if self._remaining else self._leading_since
