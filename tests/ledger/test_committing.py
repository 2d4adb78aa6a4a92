"""Group commit: many changes, one write; every change gets exactly one result before its deadline."""

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest

from cluster.errors import Conflict
from cluster.in_memory import InMemoryCluster
from cluster.objects import CONFIG_MAPS, NAMESPACES
from ledger.committing import LedgerCommitter, PendingChange, Result
from ledger.ledger_store import LedgerStore
from ledger.write_turns import wall_clock_ms
from tests.waiting import eventually
from vcuda.amounts import Amounts
from vcuda.decision import Code, Reason, Unavailable
from vcuda.dimensions import CORES, PODS
from vcuda.ledger import ChargeRequest, ChargeResult, Ledger, LedgerState, pack_uid, reserve
from vcuda.names import LEDGER_KEY, LEDGER_PREFIX
from vcuda.namespace_policy import Mode
from vcuda.pod_options import PodOptions
from vcuda.quota import parse_quota
from vcuda.write_schedule import Turn

SYSTEM, TEAM = "quotient-system", "team"


class FaultyCluster(InMemoryCluster):
    """Counts calls, can block writes, fail reads, and answer writes with conflicts."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.writes = self.conflicts = 0
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_down = False

    def get(self, *arguments: Any, **options: Any) -> Any:
        if self.is_down:
            raise Unavailable("gone")
        self.reads += 1
        return super().get(*arguments, **options)

    def update(self, *arguments: Any, **options: Any) -> Any:
        assert self.may_write.wait(10)
        self.writes += 1
        if self.conflicts:
            self.conflicts -= 1
            raise Conflict("lost", code=409, reason="Conflict")
        return super().update(*arguments, **options)


@pytest.fixture
def cluster() -> FaultyCluster:
    """A cluster with an open ledger for 100 cores."""
    cluster = FaultyCluster()
    for name in (SYSTEM, TEAM):
        cluster.create(NAMESPACES, {"metadata": {"name": name}})
    ledger = Ledger("uid", LedgerState.OPEN)
    ledger.set_quotas([parse_quota("types: {A100: {cores: 100}}", "team/q")], 1)
    LedgerStore(cluster, SYSTEM).create(TEAM, ledger)
    return cluster


@pytest.fixture
def committer(cluster: FaultyCluster) -> Iterator[LedgerCommitter]:
    committer = LedgerCommitter(LedgerStore(cluster, SYSTEM)).start()
    yield committer
    cluster.may_write.set()
    committer.stop()


def charge(cores: int, *, dry_run: bool = False) -> Any:
    """Return a change that reserves cores for a new pod."""
    key = pack_uid(str(uuid.uuid4()))
    request = ChargeRequest(key, lambda _: Amounts({CORES: cores, PODS: 1}), PodOptions(models=("A100",)), {}, dry_run)
    return lambda ledger: reserve(ledger, request, 1, Mode.ENFORCE)


def test_changes_that_arrive_during_a_write_share_the_next_write(
    cluster: FaultyCluster, committer: LedgerCommitter
) -> None:
    """A refusal among them does not affect the others."""
    cluster.may_write.clear()
    results: list[ChargeResult | Exception] = []
    committer.submit(TEAM, charge(10), 10, results.append)
    eventually(lambda: cluster.reads == 1, "the first batch")
    for _ in range(20):
        committer.submit(TEAM, charge(5), 10, results.append)
    cluster.may_write.set()
    eventually(lambda: len(results) == 21, "all results")
    assert cluster.writes == 2
    assert sum(isinstance(each, ChargeResult) and not each.reasons for each in results) == 19
    assert LedgerStore(cluster, SYSTEM).read(TEAM).ledger.usage.taken["team/q", "A100", CORES] == 100  # type: ignore[union-attr]
    assert committer.counts.batches == {1: 1, 20: 1}


def test_a_cached_ledger_saves_the_read_and_never_refuses(cluster: FaultyCluster, committer: LedgerCommitter) -> None:
    """It may be stale: the committer reads the ledger before it refuses."""
    assert not committer.apply(TEAM, charge(60), 5).reasons
    reads = cluster.reads
    assert not committer.apply(TEAM, charge(10), 5).reasons
    assert cluster.reads == reads
    ledger_store = LedgerStore(cluster, SYSTEM)
    stored = ledger_store.read(TEAM)
    assert stored is not None
    freed = stored.ledger.copy()
    for key in list(freed.pods()):
        freed.release(key)
    ledger_store.write(stored, freed)
    assert not committer.apply(TEAM, charge(100), 5).reasons, "another writer freed it"
    assert committer.apply(TEAM, charge(1), 5).reasons
    assert not committer.apply(TEAM, charge(0, dry_run=True), 5).reasons


def test_a_conflict_is_retried_until_the_deadline(cluster: FaultyCluster, committer: LedgerCommitter) -> None:
    cluster.conflicts = 5
    assert not committer.apply(TEAM, charge(10), 5).reasons
    assert committer.counts.conflicts == 5
    cluster.conflicts = 10**6
    with pytest.raises(Unavailable):
        committer.apply(TEAM, charge(10), 0.5)
    cluster.conflicts = 0
    assert not committer.apply(TEAM, charge(10), 5).reasons


def test_without_the_api_server_nothing_is_granted_or_refused(
    cluster: FaultyCluster, committer: LedgerCommitter
) -> None:
    cluster.is_down = True
    with pytest.raises(Unavailable, match="cannot be changed now"):
        committer.apply(TEAM, charge(10), 2)


def test_a_missing_ledger_is_requested_and_waited_for(cluster: FaultyCluster, committer: LedgerCommitter) -> None:
    """The controller creates it; a change whose deadline comes first is refused with that reason."""
    result = committer.apply("default", charge(10), 0.4)
    assert [reason.code for reason in result.reasons] == [Code.LEDGER_NOT_OPEN]
    ledger_store = LedgerStore(cluster, SYSTEM)
    stored = ledger_store.read("default")
    assert stored is not None
    assert stored.ledger.state is LedgerState.REQUESTED
    results: list[ChargeResult | Exception] = []
    committer.submit("default", charge(10), 10, results.append)
    ledger_store.write(stored, Ledger("uid", LedgerState.OPEN))
    eventually(lambda: bool(results), "the result")
    assert isinstance(results[0], ChargeResult)
    assert not results[0].reasons


def test_the_cache_of_a_deleted_ledger_grants_nothing(cluster: FaultyCluster, committer: LedgerCommitter) -> None:
    assert not committer.apply(TEAM, charge(10), 5).reasons
    cluster.delete(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM)
    assert committer.apply(TEAM, charge(10), 0.5).reasons[0].code is Code.LEDGER_NOT_OPEN


def test_an_invalid_ledger_grants_nothing(cluster: FaultyCluster, committer: LedgerCommitter) -> None:
    cluster.patch(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM, {"data": {LEDGER_KEY: "{}"}})
    with pytest.raises(Unavailable, match="is not valid"):
        committer.apply(TEAM, charge(10), 2)


def test_a_change_that_raises_does_not_affect_the_others(cluster: FaultyCluster, committer: LedgerCommitter) -> None:
    cluster.may_write.clear()
    results: list[ChargeResult | Exception] = []
    committer.submit(TEAM, charge(1), 10, results.append)
    eventually(lambda: cluster.reads == 1, "the first batch")

    def broken(_: Ledger) -> ChargeResult:
        raise ZeroDivisionError

    committer.submit(TEAM, broken, 10, results.append)
    committer.submit(TEAM, charge(1), 10, results.append)
    cluster.may_write.set()
    eventually(lambda: len(results) == 3, "all results")
    assert [type(each) for each in results] == [ChargeResult, ZeroDivisionError, ChargeResult]


def test_stop_completes_waiting_changes_and_rejects_later_ones(
    cluster: FaultyCluster, committer: LedgerCommitter
) -> None:
    results: list[ChargeResult | Exception] = []
    committer.submit("default", charge(1), 60, results.append)
    eventually(lambda: cluster.reads > 0, "the first look for the ledger")
    committer.stop()
    eventually(lambda: bool(results), "the result")
    assert isinstance(results[0], Unavailable)
    with pytest.raises(Unavailable):
        committer.submit(TEAM, charge(1), 1, results.append)


def test_a_read_only_change_writes_nothing(cluster: FaultyCluster, committer: LedgerCommitter) -> None:
    """Whatever the change does; and it requests no ledger where there is none."""
    assert not committer.apply(TEAM, charge(10), 5, read_only=True).reasons
    assert committer.apply(TEAM, charge(101), 5, read_only=True).reasons
    assert not committer.apply("default", charge(10), 5, read_only=True).reasons
    assert cluster.writes == 0
    ledger_store = LedgerStore(cluster, SYSTEM)
    assert ledger_store.read("default") is None
    assert len(ledger_store.read(TEAM).ledger) == 0  # type: ignore[union-attr]


class WindowedCluster(FaultyCluster):
    """Two writers that read the same version meet: each write waits a moment, as on a network."""

    def update(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.003)
        return super().update(*arguments, **options)


def test_no_change_fails_because_other_processes_write_the_same_ledger() -> None:
    """However many conflicts there are: 3 processes with 20 callers each, without a pause, and room for all."""
    cluster = WindowedCluster()
    for name in (SYSTEM, TEAM):
        cluster.create(NAMESPACES, {"metadata": {"name": name}})
    ledger = Ledger("uid", LedgerState.OPEN)
    ledger.set_quotas([parse_quota("types: {A100: {cores: 100000}}", "team/q")], 1)
    LedgerStore(cluster, SYSTEM).create(TEAM, ledger)
    committers = [LedgerCommitter(LedgerStore(cluster, SYSTEM)).start() for _ in range(3)]

    def create_pods(number: int) -> list[Reason]:
        return [each for _ in range(10) for each in committers[number % 3].apply(TEAM, charge(1), 20).reasons]

    try:
        with ThreadPoolExecutor(60) as callers:
            assert [*chain.from_iterable(callers.map(create_pods, range(60)))] == []
    finally:
        for each in committers:
            each.stop()
    assert len(LedgerStore(cluster, SYSTEM).read(TEAM).ledger) == 600  # type: ignore[union-attr]
    assert all(each.counts.writes > 1 for each in committers)


def test_changes_that_wait_for_a_turn_are_completed_together(cluster: FaultyCluster) -> None:
    """A submit neither wakes a batch that waits nor is lost."""
    committer = LedgerCommitter(LedgerStore(cluster, SYSTEM))
    store = LedgerStore(cluster, SYSTEM)
    stored = store.read(TEAM)
    assert stored is not None
    ledger = stored.ledger.copy()
    ledger.schedule = ledger.schedule.after_write(committer._turns.writer, Turn(wall_clock_ms(), 300, 10), {})
    store.write(stored, ledger)
    committer._turns.observe(TEAM, ledger.schedule)
    committer.start()
    results: list[ChargeResult | Exception] = []
    reads = cluster.reads
    for _ in range(50):
        committer.submit(TEAM, charge(1), 10, results.append)
    eventually(lambda: len(results) == 50, "all results")
    committer.stop()
    assert cluster.reads - reads <= 2
    assert committer.counts.writes == 1


def test_a_ledger_that_cannot_be_requested_completes_each_change_once(
    cluster: FaultyCluster, committer: LedgerCommitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that write nothing: a second result would be a second HTTP response, or end the thread."""

    def fail(*_: Any, **__: Any) -> None:
        raise Unavailable("etcd takes no writes")

    monkeypatch.setattr(cluster, "create", fail)
    cluster.may_write.clear()
    results: dict[str, list[Result]] = {"blocker": [], "reader": [], "writer": []}
    committer.submit(TEAM, charge(1), 10, results["blocker"].append)
    committer.submit("default", charge(1), 10, results["reader"].append, read_only=True)
    committer.submit("default", charge(1), 10, results["writer"].append)
    cluster.may_write.set()
    eventually(lambda: all(results.values()), "all results")
    committer.stop()
    assert [len(each) for each in results.values()] == [1, 1, 1]
    assert isinstance(results["writer"][0], Unavailable)


def test_a_caller_that_fails_does_not_end_the_thread(cluster: FaultyCluster, committer: LedgerCommitter) -> None:
    def fail(_: Result) -> None:
        raise ZeroDivisionError

    committer.submit(TEAM, charge(1), 10, fail)
    assert not committer.apply(TEAM, charge(1), 5).reasons
    assert committer.alive


@pytest.mark.parametrize(("deadline_s", "timeouts_s"), [(3.0, [3.0, 1.8]), (1.3, [1.3])])
def test_reading_and_writing_share_one_deadline(
    monkeypatch: pytest.MonkeyPatch, deadline_s: float, timeouts_s: list[float]
) -> None:
    """A write that begins with too little time left would end after its caller has given up."""
    cluster, now, timeouts = InMemoryCluster(), [100.0], list[float]()
    store = LedgerStore(cluster, SYSTEM)
    for name in (SYSTEM, TEAM):
        cluster.create(NAMESPACES, {"metadata": {"name": name}})
    store.create(TEAM, Ledger("uid", LedgerState.OPEN))

    def bounded(timeout_s: float) -> LedgerStore:
        timeouts.append(timeout_s)
        now[0] += 1.2  # as long as each call takes
        return store

    monkeypatch.setattr(store, "bounded", bounded)
    committer = LedgerCommitter(store, lambda: now[0])
    ((_, result),) = committer._commit(TEAM, [PendingChange(charge(1), now[0] + deadline_s, print)])
    assert timeouts == pytest.approx(timeouts_s)
    assert isinstance(result, Unavailable) == (len(timeouts_s) == 1)


def test_a_late_caller_fails_alone(monkeypatch: pytest.MonkeyPatch, cluster: FaultyCluster) -> None:
    """A read that takes a part of its time leaves the others theirs."""
    now, timeouts = [100.0], list[float]()
    store = LedgerStore(cluster, SYSTEM)

    def bounded(timeout_s: float) -> LedgerStore:
        timeouts.append(timeout_s)
        now[0] += 0.15
        return store

    monkeypatch.setattr(store, "bounded", bounded)
    committer = LedgerCommitter(store, lambda: now[0])
    batch = [PendingChange(charge(1), now[0] + left_s, print) for left_s in (0.3, 8, 8, 8)]
    completed = committer._commit(TEAM, batch)
    assert [each.deadline for each, result in completed if isinstance(result, Unavailable)] == [batch[0].deadline]
    assert len(completed) == 4
    assert timeouts == pytest.approx([8.0, 7.85])


@pytest.fixture
def late_turn(cluster: FaultyCluster) -> Iterator[LedgerCommitter]:
    """A committer whose turn to write comes in some seconds."""
    committer = LedgerCommitter(LedgerStore(cluster, SYSTEM))
    store = LedgerStore(cluster, SYSTEM)
    stored = store.read(TEAM)
    assert stored is not None
    ledger = stored.ledger.copy()
    for writer in (committer._turns.writer, "a", "b", "c"):
        ledger.schedule = ledger.schedule.after_write(writer, Turn(wall_clock_ms(), 10_000, 10), {})
    ledger.schedule = ledger.schedule.after_write(committer._turns.writer, Turn(wall_clock_ms(), 10_000, 10), {})
    committer._turns.observe(TEAM, store.write(stored, ledger).ledger.schedule)
    yield committer.start()
    committer.stop()


def test_a_change_for_which_the_turn_comes_too_late_is_written_out_of_turn(late_turn: LedgerCommitter) -> None:
    """And in time: contention alone fails no create."""
    assert late_turn._turns.delay_s(TEAM) > 5
    assert not late_turn.apply(TEAM, charge(1), 1.5).reasons


def test_a_change_with_little_time_does_not_wait_as_long_as_the_one_before(late_turn: LedgerCommitter) -> None:
    results: list[Result] = []
    late_turn.submit(TEAM, charge(1), 60, results.append)
    began = time.monotonic()
    late_turn.submit(TEAM, charge(1), 1.5, results.append)
    eventually(lambda: len(results) == 2, "both results")
    assert time.monotonic() - began < 1.5
    assert [each for each in results if not isinstance(each, ChargeResult) or each.reasons] == []
