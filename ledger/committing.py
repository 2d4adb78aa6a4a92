"""Group commit: what many want of one namespace's ledger at the same moment becomes one write.

A change is a pure function on a ledger. While one batch of a namespace is being written, the next gathers. Each batch
is applied to a copy of the ledger and written by compare-and-swap; whoever lost reads it anew and applies the same
changes again, as long as their callers can wait. What was read earlier may be used to grant, for the write proves it
true; a refusal, and whatever writes nothing, rests on a ledger read for it.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Overdue
from typing import Protocol

import structlog
from msgspec import Struct

from cluster.errors import ApiError, Conflict, NotFound
from ledger.ledger_store import LedgerStore, StoredLedger
from ledger.workqueue import WorkQueue
from vcuda.decision import Unavailable
from vcuda.ledger import ChargeResult, Ledger, LedgerState, ledger_not_open
from vcuda.quota import Quota

WORKERS = 4
# More losses in a row than replicas would ever cause.
MAX_TRIES = 30
MAX_PAUSE_S = 0.02
# With less than this left, a call is not begun.
MIN_CALL_S = 0.2
# How often to look for a ledger that the controller is about to make.
LOOK_AGAIN_S = 0.05
# What is remembered of ledgers saves a read; namespaces that are quiet do not need it.
MAX_REMEMBERED = 256

LedgerChange = Callable[[Ledger], ChargeResult]
OnResult = Callable[[ChargeResult | Exception], None]


class PendingChange(Struct, frozen=True):
    """One change, and who waits for it until when."""

    change: LedgerChange
    until: float
    done: OnResult
    read_only: bool = False


class CommitCounts:
    """What happened, for the metrics."""

    def __init__(self) -> None:
        self.conflicts = 0
        self.writes = 0
        self.batches: Counter[int] = Counter()


class LedgerWriter(Protocol):
    """Who changes ledgers."""

    def submit(
        self, namespace: str, change: LedgerChange, within_s: float, done: OnResult, *, read_only: bool = False
    ) -> None:
        """Change a ledger some time soon; `done` is called once, on any thread, with what came of it.

        Who only looks changes nothing, whatever `change` does, and does not make a ledger where there is none.
        """
        ...

    def apply(self, namespace: str, change: LedgerChange, within_s: float, *, read_only: bool = False) -> ChargeResult:
        """Change a ledger, and wait for what comes of it."""
        ...


class LedgerCommitter:
    """Changes ledgers for many callers, on threads of its own."""

    def __init__(self, ledger_store: LedgerStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._ledger_store, self._clock = ledger_store, clock
        self.counts = CommitCounts()
        self._turns = WorkQueue(clock)
        # Guards the queues: a waiter is in one, or in the hands of the one thread that serves its namespace.
        self._lock = threading.Lock()
        self._waiting: dict[str, list[PendingChange]] = {}
        self._stopping = False
        self._remembered: dict[str, StoredLedger] = {}
        self._log = structlog.get_logger()
        self._threads = [
            threading.Thread(target=self._run, name=f"cashier-{index}", daemon=True) for index in range(WORKERS)
        ]

    def start(self) -> "LedgerCommitter":
        """Begin."""
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """End; who still waits is told so."""
        with self._lock:
            self._stopping = True
            left = [waiter for waiters in self._waiting.values() for waiter in waiters]
            self._waiting.clear()
        self._turns.stop()
        complete_all(left, Unavailable("this process is ending"))
        for thread in self._threads:
            if thread.is_alive():
                thread.join(10)

    @property
    def alive(self) -> bool:
        """Whether all of its threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(
        self, namespace: str, change: LedgerChange, within_s: float, done: OnResult, *, read_only: bool = False
    ) -> None:
        """Change a ledger some time soon; `done` is called once, on another thread, with what came of it."""
        with self._lock:
            if self._stopping:
                raise Unavailable("this process is ending")
            waiter = PendingChange(change, self._clock() + within_s, done, read_only)
            self._waiting.setdefault(namespace, []).append(waiter)
        self._turns.want(namespace)

    def apply(self, namespace: str, change: LedgerChange, within_s: float, *, read_only: bool = False) -> ChargeResult:
        """Change a ledger, and wait for what comes of it."""
        answer: Future[ChargeResult] = Future()

        def done(outcome: ChargeResult | Exception) -> None:
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        self.submit(namespace, change, within_s, done, read_only=read_only)
        try:
            return answer.result(within_s + 1.0)
        except Overdue:
            raise Unavailable("the ledger could not be written in time") from None

    def _run(self) -> None:
        while (namespace := self._turns.next()) is not None:
            waiters = self._take(namespace)
            try:
                self._commit(namespace, waiters)
            except Exception as broken:  # the outermost frame of the thread
                self._log.exception("commit_failed", namespace=namespace)
                complete_all(waiters, broken)
            finally:
                self._turns.done(namespace)

    def _take(self, namespace: str) -> list[PendingChange]:
        with self._lock:
            return self._waiting.pop(namespace, [])

    def _in_time(self, waiters: list[PendingChange]) -> list[PendingChange]:
        """Tell those who cannot wait any longer; one who is late must not hurry the others."""
        last = self._clock() + MIN_CALL_S
        late = [waiter for waiter in waiters if waiter.until <= last]
        complete_all(late, Unavailable("the ledger of the namespace could not be written in time; try again"))
        return [waiter for waiter in waiters if waiter.until > last]

    def _commit(self, namespace: str, waiters: list[PendingChange]) -> None:
        """Write what is wanted of one ledger."""
        page = self._remembered.pop(namespace, None)
        for tries in range(MAX_TRIES):
            waiters = self._in_time(waiters)
            if not waiters:
                return
            ledger_store = self._ledger_store.bounded(
                max(MIN_CALL_S, min(waiter.until for waiter in waiters) - self._clock())
            )
            try:
                is_fresh = page is None
                page = page or ledger_store.read(namespace)
                if page is None or page.ledger.state is LedgerState.REQUESTED:
                    self._await(namespace, ledger_store, page, waiters)
                    return
                outcomes, ledger = apply_changes(page.ledger, waiters)
                if not is_fresh and (ledger.changes == 0 or any(map(is_refused, outcomes))):
                    page = None
                    continue
                if ledger.changes:
                    page = ledger_store.write(page, ledger)
                    self.counts.writes += 1
            except (Conflict, NotFound):
                self.counts.conflicts += 1
                page = None
                time.sleep(random.uniform(0, MAX_PAUSE_S) * min(tries, 5) / 5)
                continue
            except (ApiError, Unavailable) as broken:
                # Whether it was written is not known. If it was, nobody comes for it, and it expires.
                complete_all(waiters, Unavailable(f"the ledger of the namespace cannot be changed now: {broken}"))
                return
            self.counts.batches[len(waiters)] += 1
            self._remember(namespace, page)
            for waiter, outcome in zip(waiters, outcomes, strict=True):
                waiter.done(outcome)
            return
        complete_all(waiters, Unavailable("too many others write the ledger of this namespace; try again"))

    def _await(
        self, namespace: str, ledger_store: LedgerStore, page: StoredLedger | None, waiters: list[PendingChange]
    ) -> None:
        """Ask for a ledger that is not there, and look again soon; who only looks is answered as if it were empty."""
        looking = [waiter for waiter in waiters if waiter.read_only]
        outcomes, _ = apply_changes(Ledger(namespace, LedgerState.OPEN), looking)
        for waiter, outcome in zip(looking, outcomes, strict=True):
            waiter.done(outcome)
        waiters = [waiter for waiter in waiters if not waiter.read_only]
        if page is None and waiters:
            ledger_store.want(namespace)
        # Who cannot wait until the next look is told what he waited for, rather than nothing.
        last = self._clock() + MIN_CALL_S + 2 * LOOK_AGAIN_S
        for waiter in waiters:
            if waiter.until <= last:
                waiter.done(ChargeResult(reasons=(ledger_not_open(LedgerState.REQUESTED),)))
        waiters = [waiter for waiter in waiters if waiter.until > last]
        with self._lock:
            if not self._stopping:
                self._waiting[namespace] = waiters + self._waiting.get(namespace, [])
                waiters = []
        complete_all(waiters, Unavailable("this process is ending"))
        self._turns.want(namespace, self._clock() + LOOK_AGAIN_S)

    def _remember(self, namespace: str, page: StoredLedger) -> None:
        self._remembered[namespace] = page
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)), None)


class InMemoryLedgers:
    """Ledgers that are kept in this process alone, open from the beginning: for files, and for trying out."""

    def __init__(self, quotas: Callable[[str], Sequence[Quota]] = lambda _: ()) -> None:
        self._quotas = quotas
        # Guards the ledgers: each change is made by itself.
        self._lock = threading.Lock()
        self.ledgers: dict[str, Ledger] = {}

    def ledger(self, namespace: str) -> Ledger:
        """Give the ledger of a namespace."""
        found = self.ledgers.get(namespace)
        if found is None:
            found = self.ledgers[namespace] = Ledger(namespace, LedgerState.OPEN)
            found.set_quotas(self._quotas(namespace), 0)
        return found

    def submit(
        self, namespace: str, change: LedgerChange, within_s: float, done: OnResult, *, read_only: bool = False
    ) -> None:
        """Change a ledger at once."""
        try:
            outcome: ChargeResult | Exception = self.apply(namespace, change, within_s, read_only=read_only)
        except Exception as broken:  # the caller is told, as by a Cashier
            outcome = broken
        done(outcome)

    def apply(
        self,
        namespace: str,
        change: LedgerChange,
        within_s: float,  # noqa: ARG002 - nobody waits
        *,
        read_only: bool = False,
    ) -> ChargeResult:
        """Change a ledger at once, and say what came of it."""
        with self._lock:
            return change(self.ledger(namespace).copy() if read_only else self.ledger(namespace))


def apply_changes(before: Ledger, waiters: list[PendingChange]) -> tuple[list[ChargeResult | Exception], Ledger]:
    """Apply all changes to a copy of a ledger, one after another; one that fails changes nothing."""
    ledger = before.copy()
    outcomes: list[ChargeResult | Exception] = []
    for waiter in waiters:
        try:
            outcomes.append(waiter.change(ledger.copy() if waiter.read_only else ledger))
        except Exception as broken:  # one caller's fault must not cost the others their answers
            outcomes.append(broken)
    return outcomes, ledger


def is_refused(outcome: ChargeResult | Exception) -> bool:
    """Tell whether a change was not made."""
    return isinstance(outcome, Exception) or bool(outcome.reasons)


def complete_all(waiters: list[PendingChange], outcome: Exception) -> None:
    """Give all who wait the same answer."""
    for waiter in waiters:
        waiter.done(outcome)
