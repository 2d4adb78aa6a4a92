"""Group commit: changes to one namespace's ledger that arrive together become one write.

A change is a function on a ledger. While one batch of a namespace is written, the next one collects. A batch is
applied to a copy of the ledger, which is then written by compare-and-swap. After a conflict the ledger is read again,
and the same changes are applied to it, until their deadlines. Processes that write the same ledger take turns; while
this one waits for its turn, the batch grows, and no worker is held up.

A cached ledger may grant: the compare-and-swap validates it. Refusals need a fresh read, and so do batches that write
nothing, because no write would validate them.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import structlog
from msgspec import Struct

from cluster.backoff import jittered
from cluster.errors import ApiError, Conflict, NotFound
from ledger.ledger_store import LedgerStore, StoredLedger
from ledger.workqueue import WorkQueue
from ledger.write_turns import WriteTurns
from vcuda.decision import Unavailable
from vcuda.ledger import MAX_STORED_BYTES, ChargeResult, Ledger, LedgerState, ledger_not_open
from vcuda.recent import keep_recent

WORKERS = 4
# The longest delay after a conflict, beside the wait for the turn: others that lost to the same writer should not read
# and write at the same moment again.
CONFLICT_DELAY_S = 0.01
# For the name of this process among those that write a ledger. Two of one name would have conflicts.
WRITER_BYTES = 3
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
        self._turns = WriteTurns(secrets.token_hex(WRITER_BYTES))
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
            batch = self._pending.setdefault(namespace, [])
            batch.append(PendingChange(change, self._clock() + timeout_s, on_result, read_only))
            is_first = len(batch) == 1
        # A batch that has begun is queued already, perhaps until this process's turn.
        if is_first:
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
        """Apply a batch, write the ledger, and complete every change; or queue the batch again."""
        batch = self._reject_expired(batch)
        if not batch:
            return
        if (delay_s := self._turns.delay_s(namespace)) > 0:
            self._requeue(namespace, batch, delay_s)
            return
        began_ms = self._turns.clock_ms()
        try:
            results = self._apply(namespace, batch, began_ms)
        except (Conflict, NotFound):
            self.counts.conflicts += 1
            self._turns.record_attempt(began_ms)
            self._requeue(namespace, batch, jittered(CONFLICT_DELAY_S, 0.0))
        except (ApiError, Unavailable) as error:
            # The write may have taken effect. Then it leaves reservations without pods, which expire.
            complete_all(batch, Unavailable(f"the ledger of this namespace cannot be changed now: {error}"))
        else:
            for pending, result in zip(batch, results, strict=False):
                pending.on_result(result)

    def _apply(self, namespace: str, batch: list[PendingChange], began_ms: int) -> list[ChargeResult | Exception]:
        """Apply a batch and write the ledger; returns the results, or none if the batch was queued again."""
        remaining_s = min(pending.deadline for pending in batch) - self._clock()
        store = self._store.bounded(max(MIN_CALL_S, remaining_s))
        cached = self._take_cached(namespace)
        stored = cached or store.read(namespace)
        if stored is None or stored.ledger.state is LedgerState.REQUESTED:
            self._wait_for_ledger(namespace, store, stored, batch)
            return []
        self._turns.observe(namespace, stored.ledger.schedule)
        if (delay_s := self._turns.delay_s(namespace)) > 0:
            self._requeue(namespace, batch, delay_s)
            return []
        results, ledger = apply_changes(stored.ledger, batch)
        if cached is not None and (ledger.changes == 0 or any(map(is_refused, results))):
            self._requeue(namespace, batch)  # the ledger is no longer cached, and is read then
            return []
        # A ledger that is full refuses pods, and newer quotas may not fit into it.
        is_full = ledger.size() > MAX_STORED_BYTES and all(map(is_refused, results))
        if ledger.changes and not is_full:
            ledger.schedule = self._turns.schedule_after_write(stored.ledger.schedule, began_ms)
            stored = store.write(stored, ledger)
            self.counts.writes += 1
            self._turns.record_attempt(began_ms)
            self._turns.observe(namespace, ledger.schedule)
        self._put_cached(namespace, stored)
        self.counts.batches[len(batch)] += 1
        return results

    def _requeue(self, namespace: str, batch: list[PendingChange], delay_s: float = 0.0) -> None:
        """Put a batch before the changes that have arrived since, and queue its namespace."""
        with self._lock:
            is_stopping = self._stopping
            if not is_stopping:
                self._pending[namespace] = batch + self._pending.get(namespace, [])
        if is_stopping:
            complete_all(batch, Unavailable(SHUTTING_DOWN))
        else:
            self._queue.add_after(namespace, delay_s)

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
        self._requeue(namespace, [pending for pending in writers if pending.deadline > earliest], LEDGER_POLL_S)

    def _take_cached(self, namespace: str) -> StoredLedger | None:
        with self._lock:
            return self._cache.pop(namespace, None)

    def _put_cached(self, namespace: str, stored: StoredLedger) -> None:
        # A ledger that others write as well has to be read before the next write in any case.
        if stored.ledger.schedule.has_others(self._turns.writer):
            return
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
