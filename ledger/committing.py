"""Group commit: changes to one namespace's ledger that arrive together become one write.

A change is a function on a ledger. While one batch of a namespace is written, the next one collects. A batch is
applied to a copy of the ledger, which is then written by compare-and-swap. After a conflict the ledger is read again,
and the same changes are applied to it, until their deadlines.

A cached ledger may grant: the compare-and-swap validates it. Refusals need a fresh read, and so do batches that write
nothing, because no write would validate them.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import structlog
from msgspec import Struct

from cluster.backoff import Backoff
from cluster.errors import ApiError, Conflict, NotFound
from ledger.ledger_store import LedgerStore, StoredLedger
from ledger.workqueue import WorkQueue
from vcuda.decision import Unavailable
from vcuda.ledger import MAX_STORED_BYTES, ChargeResult, Ledger, LedgerState, ledger_not_open
from vcuda.recent import keep_recent

WORKERS = 4
# More conflicts in a row than the other replicas and the controller can cause.
MAX_ATTEMPTS = 30
# Delays after a conflict: random, to spread replicas, and short beside a request's deadline.
CONFLICT_BACKOFF = Backoff(first_s=0.004, max_s=0.02, jitter=(0.0, 1.0))
# A call to the API server with less time than this is not started: it would most likely end in a timeout.
MIN_CALL_S = 0.2
# How often a batch looks for a ledger that it requested from the controller.
LEDGER_POLL_S = 0.05
# A cached ledger saves one read per batch. Only busy namespaces gain from it, and a document has up to 900 kB.
MAX_CACHED = 256
SHUTTING_DOWN = "this process is shutting down; retry the request"

LedgerChange = Callable[[Ledger], ChargeResult]
OnResult = Callable[[ChargeResult | Exception], None]


class PendingChange(Struct, frozen=True):
    """One caller's change. `deadline` is on the committer's clock; `on_result` is called exactly once."""

    change: LedgerChange
    deadline: float
    on_result: OnResult
    read_only: bool = False


class CommitCounts:
    """Counters for the metrics; `batches` counts commits by the number of changes in them."""

    def __init__(self) -> None:
        self.conflicts = 0
        self.writes = 0
        self.batches: Counter[int] = Counter()


class LedgerWriter(Protocol):
    """Applies changes to the ledgers of namespaces."""

    def submit(
        self, namespace: str, change: LedgerChange, timeout_s: float, on_result: OnResult, *, read_only: bool = False
    ) -> None:
        """Apply a change without blocking; `on_result` is called once, on any thread.

        With `read_only` nothing is written, whatever `change` does, and a missing ledger counts as empty.
        """
        ...

    def apply(self, namespace: str, change: LedgerChange, timeout_s: float, *, read_only: bool = False) -> ChargeResult:
        """Apply a change and wait for its result; raises Unavailable if that takes longer than `timeout_s`."""
        ...


class LedgerCommitter:
    """Commits changes to ledgers on threads of its own; callers may submit from any thread."""

    def __init__(self, store: LedgerStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self.counts = CommitCounts()
        self._queue = WorkQueue(clock)
        # Guards the three fields below. A change is either in `_pending` or with the one worker that has its namespace,
        # and `_pending` stays empty once `_stopping` is set: so each change is completed exactly once.
        self._lock = threading.Lock()
        self._pending: dict[str, list[PendingChange]] = {}
        self._stopping = False
        self._cache: dict[str, StoredLedger] = {}
        self._log = structlog.get_logger()
        self._threads = [
            threading.Thread(target=self._run, name=f"ledger-committer-{index}", daemon=True)
            for index in range(WORKERS)
        ]

    def start(self) -> "LedgerCommitter":
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Finish the batches that are being written; changes that wait for a batch get Unavailable."""
        with self._lock:
            self._stopping = True
            pending = [change for changes in self._pending.values() for change in changes]
            self._pending.clear()
        self._queue.shut_down()
        complete_all(pending, Unavailable(SHUTTING_DOWN))
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10)

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def submit(
        self, namespace: str, change: LedgerChange, timeout_s: float, on_result: OnResult, *, read_only: bool = False
    ) -> None:
        """See LedgerWriter; raises Unavailable after `stop`."""
        with self._lock:
            if self._stopping:
                raise Unavailable(SHUTTING_DOWN)
            pending = PendingChange(change, self._clock() + timeout_s, on_result, read_only)
            self._pending.setdefault(namespace, []).append(pending)
        self._queue.add(namespace)

    def apply(self, namespace: str, change: LedgerChange, timeout_s: float, *, read_only: bool = False) -> ChargeResult:
        """See LedgerWriter."""
        future: Future[ChargeResult] = Future()

        def on_result(result: ChargeResult | Exception) -> None:
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.submit(namespace, change, timeout_s, on_result, read_only=read_only)
        try:
            # A worker answers at the deadline; the extra second is for one that hangs in a call.
            return future.result(timeout_s + 1.0)
        except TimeoutError:
            raise Unavailable("the ledger could not be written in time; retry the request") from None

    def _run(self) -> None:
        while (namespace := self._queue.get()) is not None:
            batch = self._take_batch(namespace)
            try:
                self._commit(namespace, batch)
            except Exception as error:  # the outermost frame of the thread
                self._log.exception("commit_crashed", namespace=namespace)
                complete_all(batch, error)
            finally:
                self._queue.done(namespace)

    def _take_batch(self, namespace: str) -> list[PendingChange]:
        with self._lock:
            return self._pending.pop(namespace, [])

    def _reject_expired(self, batch: list[PendingChange]) -> list[PendingChange]:
        """Complete the changes whose deadline leaves no time for a call, and return the others.

        Otherwise one late caller would shorten the timeout of the whole batch.
        """
        earliest = self._clock() + MIN_CALL_S
        expired = [pending for pending in batch if pending.deadline <= earliest]
        complete_all(expired, Unavailable("the ledger of this namespace could not be written in time; retry"))
        return [pending for pending in batch if pending.deadline > earliest]

    def _commit(self, namespace: str, batch: list[PendingChange]) -> None:
        """Apply a batch, write the ledger, and complete every change."""
        cached = self._take_cached(namespace)
        for attempt in range(MAX_ATTEMPTS):
            batch = self._reject_expired(batch)
            if not batch:
                return
            remaining_s = min(pending.deadline for pending in batch) - self._clock()
            store = self._store.bounded(max(MIN_CALL_S, remaining_s))
            try:
                stored = cached or store.read(namespace)
                if stored is None or stored.ledger.state is LedgerState.REQUESTED:
                    self._wait_for_ledger(namespace, store, stored, batch)
                    return
                results, ledger = apply_changes(stored.ledger, batch)
                if cached is not None and (ledger.changes == 0 or any(map(is_refused, results))):
                    cached = None
                    continue
                # A ledger that is full refuses pods, and newer quotas may not fit into it.
                is_full = ledger.size() > MAX_STORED_BYTES and all(map(is_refused, results))
                if ledger.changes and not is_full:
                    stored = store.write(stored, ledger)
                    self.counts.writes += 1
            except (Conflict, NotFound):
                self.counts.conflicts += 1
                cached = None
                if attempt:  # a first conflict is usually with a single writer, which is done by now
                    time.sleep(CONFLICT_BACKOFF.delay_s(attempt))
                continue
            except (ApiError, Unavailable) as error:
                # The write may have taken effect. Then it leaves reservations without pods, which expire.
                complete_all(batch, Unavailable(f"the ledger of this namespace cannot be changed now: {error}"))
                return
            self.counts.batches[len(batch)] += 1
            self._put_cached(namespace, stored)
            for pending, result in zip(batch, results, strict=True):
                pending.on_result(result)
            return
        complete_all(batch, Unavailable("too many conflicting writes to the ledger of this namespace; retry"))

    def _wait_for_ledger(
        self, namespace: str, store: LedgerStore, stored: StoredLedger | None, batch: list[PendingChange]
    ) -> None:
        """Request a ledger that does not exist, and queue the batch again; read-only changes see an empty ledger."""
        readers = [pending for pending in batch if pending.read_only]
        results, _ = apply_changes(Ledger(namespace, LedgerState.OPEN), readers)
        for pending, result in zip(readers, results, strict=True):
            pending.on_result(result)
        writers = [pending for pending in batch if not pending.read_only]
        if stored is None and writers:
            store.request(namespace)
        # A change that would expire before the next poll is refused now: the reason says more than a timeout.
        earliest = self._clock() + MIN_CALL_S + 2 * LEDGER_POLL_S
        for pending in writers:
            if pending.deadline <= earliest:
                pending.on_result(ChargeResult(reasons=(ledger_not_open(LedgerState.REQUESTED),)))
        waiting = [pending for pending in writers if pending.deadline > earliest]
        with self._lock:
            if not self._stopping:
                self._pending[namespace] = waiting + self._pending.get(namespace, [])
                waiting = []
        complete_all(waiting, Unavailable(SHUTTING_DOWN))
        self._queue.add_after(namespace, LEDGER_POLL_S)

    def _take_cached(self, namespace: str) -> StoredLedger | None:
        with self._lock:
            return self._cache.pop(namespace, None)

    def _put_cached(self, namespace: str, stored: StoredLedger) -> None:
        with self._lock:
            keep_recent(self._cache, namespace, stored, MAX_CACHED)


def apply_changes(before: Ledger, batch: list[PendingChange]) -> tuple[list[ChargeResult | Exception], Ledger]:
    """Apply all changes in order to a copy of a ledger; returns the result of each, and the changed copy."""
    ledger = before.copy()
    results: list[ChargeResult | Exception] = []
    for pending in batch:
        try:
            results.append(pending.change(ledger.copy() if pending.read_only else ledger))
        except Exception as error:  # one caller's fault must not cost the others their results
            results.append(error)
    return results, ledger


def is_refused(result: ChargeResult | Exception) -> bool:
    return isinstance(result, Exception) or bool(result.reasons)


def complete_all(batch: list[PendingChange], error: Exception) -> None:
    for pending in batch:
        pending.on_result(error)
