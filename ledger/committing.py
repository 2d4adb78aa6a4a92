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
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Protocol

import structlog
from msgspec import Struct

from cluster.backoff import jittered
from cluster.errors import ApiError, Conflict, NotFound
from ledger.ledger_store import LedgerStore, StoredLedger
from ledger.workqueue import WorkQueue
from ledger.write_turns import WriteTurns, wall_clock_ms
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
# A change with less time than this does not wait for the turn: it has to be read, written, and perhaps written again.
OUT_OF_TURN_S = 3 * MIN_CALL_S
# How often a batch looks for a ledger that it requested from the controller.
LEDGER_POLL_S = 0.05
# A cached ledger saves one read per batch. Only busy namespaces gain from it, and a document has up to 900 kB.
MAX_CACHED = 256
SHUTTING_DOWN = "this process is shutting down; retry the request"
NOT_IN_TIME = "the ledger of this namespace could not be written in time; retry"

LedgerChange = Callable[[Ledger], ChargeResult]
Result = ChargeResult | Exception
OnResult = Callable[[Result], None]


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

    def __init__(
        self,
        store: LedgerStore,
        clock: Callable[[], float] = time.monotonic,
        wall_clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._store, self._clock = store, clock
        self._turns = WriteTurns(secrets.token_hex(WRITER_BYTES), wall_clock_ms)
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
        for each, result in all_failed(pending, SHUTTING_DOWN):
            complete(each, result)
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
        self._queue.add_after(namespace, 0.0 if is_first else max(0.0, timeout_s - OUT_OF_TURN_S))

    def apply(self, namespace: str, change: LedgerChange, timeout_s: float, *, read_only: bool = False) -> ChargeResult:
        """See LedgerWriter."""
        future: Future[ChargeResult] = Future()

        def on_result(result: Result) -> None:
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
            self.commit_pending(namespace)
            self._queue.done(namespace)

    def commit_pending(self, namespace: str) -> bool:
        """Commit the changes of a namespace that are pending; returns whether there were any."""
        batch = self._take_batch(namespace)
        try:
            completed = self._commit(namespace, batch)
        except Exception as error:  # the outermost frame of the thread
            self._log.exception("commit_crashed", namespace=namespace)
            completed = [(pending, error) for pending in batch]
        for pending, result in completed:
            complete(pending, result)
        return bool(batch)

    def _take_batch(self, namespace: str) -> list[PendingChange]:
        with self._lock:
            return self._pending.pop(namespace, [])

    def _commit(self, namespace: str, batch: list[PendingChange]) -> list[tuple[PendingChange, Result]]:
        """Apply a batch and write the ledger; returns the changes that are completed. All others are queued again."""
        expired, batch = self._split_off_expired(batch)
        if not batch:
            return expired
        if (delay_s := self._turn_delay_s(namespace, batch)) > 0:
            return expired + self._requeue(namespace, batch, delay_s)
        began_ms = self._turns.clock_ms()
        try:
            return expired + self._apply(namespace, batch, began_ms)
        except (Conflict, NotFound):
            self.counts.conflicts += 1
            self._turns.record_attempt(began_ms)
            return expired + self._requeue(namespace, batch, jittered(CONFLICT_DELAY_S, 0.0))
        except (ApiError, Unavailable) as error:
            # The write may have taken effect. Then it leaves reservations without pods, which expire.
            return expired + all_failed(batch, f"the ledger of this namespace cannot be changed now: {error}")

    def _apply(self, namespace: str, batch: list[PendingChange], began_ms: int) -> list[tuple[PendingChange, Result]]:
        cached = self._take_cached(namespace)
        stored = cached or self._store_for(batch).read(namespace)
        if stored is None or stored.ledger.state is LedgerState.REQUESTED:
            return self._wait_for_ledger(namespace, stored, batch)
        self._turns.observe(namespace, stored.ledger.schedule)
        expired, batch = self._split_off_expired(batch)  # the read may have taken long
        if not batch:
            return expired
        if (delay_s := self._turn_delay_s(namespace, batch)) > 0:
            return expired + self._requeue(namespace, batch, delay_s)
        results, ledger = apply_changes(stored.ledger, batch)
        if cached is not None and (ledger.changes == 0 or any(map(is_refused, results))):
            return expired + self._requeue(namespace, batch)  # the ledger is no longer cached, and is read then
        # A ledger that is full refuses pods, and newer quotas may not fit into it.
        is_full = ledger.size() > MAX_STORED_BYTES and all(map(is_refused, results))
        if ledger.changes and not is_full:
            ledger.schedule = self._turns.schedule_after_write(stored.ledger.schedule, began_ms)
            stored = self._store_for(batch).write(stored, ledger)
            self.counts.writes += 1
            self._turns.record_attempt(began_ms)
            self._turns.observe(namespace, ledger.schedule)
        self._put_cached(namespace, stored)
        self.counts.batches[len(batch)] += 1
        return expired + list(zip(batch, results, strict=True))

    def _split_off_expired(
        self, batch: list[PendingChange]
    ) -> tuple[list[tuple[PendingChange, Result]], list[PendingChange]]:
        """Return the changes for which it is too late, as failed, and the others."""
        earliest = self._clock() + MIN_CALL_S
        expired = all_failed((pending for pending in batch if pending.deadline <= earliest), NOT_IN_TIME)
        return expired, [pending for pending in batch if pending.deadline > earliest]

    def _turn_delay_s(self, namespace: str, batch: list[PendingChange]) -> float:
        """Return how long to wait for the turn. No change fails for that: where it came too late, it is not awaited."""
        latest_s = min(pending.deadline for pending in batch) - OUT_OF_TURN_S - self._clock()
        return min(self._turns.delay_s(namespace), latest_s)

    def _store_for(self, batch: list[PendingChange]) -> LedgerStore:
        """Return the store for one call; raises Unavailable.

        It may take until the last deadline: one late caller must not shorten the timeout of the whole batch.
        """
        remaining_s = max(pending.deadline for pending in batch) - self._clock()
        if remaining_s < MIN_CALL_S:
            raise Unavailable(NOT_IN_TIME)
        return self._store.bounded(remaining_s)

    def _requeue(
        self, namespace: str, batch: list[PendingChange], delay_s: float = 0.0
    ) -> list[tuple[PendingChange, Result]]:
        """Put a batch before the changes that have arrived since; returns those that cannot be queued any longer."""
        with self._lock:
            is_stopping = self._stopping
            if not is_stopping:
                self._pending[namespace] = batch + self._pending.get(namespace, [])
        if is_stopping:
            return all_failed(batch, SHUTTING_DOWN)
        self._queue.add_after(namespace, delay_s)
        return []

    def _wait_for_ledger(
        self, namespace: str, stored: StoredLedger | None, batch: list[PendingChange]
    ) -> list[tuple[PendingChange, Result]]:
        """Request a ledger that does not exist, and queue the batch again; read-only changes see an empty ledger."""
        readers = [pending for pending in batch if pending.read_only]
        writers = [pending for pending in batch if not pending.read_only]
        if stored is None and writers:
            self._store_for(batch).request(namespace)
        results, _ = apply_changes(Ledger(namespace, LedgerState.OPEN), readers)
        # A change that would expire before the next poll is refused now: the reason says more than a timeout.
        earliest = self._clock() + MIN_CALL_S + 2 * LEDGER_POLL_S
        refused = ChargeResult(reasons=(ledger_not_open(LedgerState.REQUESTED),))
        late = [(pending, refused) for pending in writers if pending.deadline <= earliest]
        waiting = [pending for pending in writers if pending.deadline > earliest]
        return [*zip(readers, results, strict=True), *late, *self._requeue(namespace, waiting, LEDGER_POLL_S)]

    def _take_cached(self, namespace: str) -> StoredLedger | None:
        with self._lock:
            return self._cache.pop(namespace, None)

    def _put_cached(self, namespace: str, stored: StoredLedger) -> None:
        # A ledger that others write as well has to be read before the next write in any case.
        if stored.ledger.schedule.has_others(self._turns.writer):
            return
        with self._lock:
            keep_recent(self._cache, namespace, stored, MAX_CACHED)


def apply_changes(before: Ledger, batch: list[PendingChange]) -> tuple[list[Result], Ledger]:
    """Apply all changes in order to a copy of a ledger; returns the result of each, and the changed copy."""
    ledger = before.copy()
    results: list[Result] = []
    for pending in batch:
        try:
            results.append(pending.change(ledger.copy() if pending.read_only else ledger))
        except Exception as error:  # one caller's fault must not cost the others their results
            results.append(error)
    return results, ledger


def is_refused(result: Result) -> bool:
    return isinstance(result, Exception) or bool(result.reasons)


def all_failed(batch: Iterable[PendingChange], message: str) -> list[tuple[PendingChange, Result]]:
    return [(pending, Unavailable(message)) for pending in batch]


def complete(pending: PendingChange, result: Result) -> None:
    try:
        pending.on_result(result)
    except Exception:  # the outermost frame of a caller's code: the others must get their results
        structlog.get_logger().exception("result_not_delivered")
