"""Group commit: many changes, one write; nobody loses, and nobody waits for ever."""

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.errors import Conflict
from cluster.in_memory import InMemoryCluster
from cluster.objects import CONFIG_MAPS, NAMESPACES
from ledger.committing import LedgerCommitter
from ledger.ledger_store import LedgerStore
from tests.waiting import eventually
from vcuda.amounts import Amounts
from vcuda.decision import Code, Unavailable
from vcuda.dimensions import CORES, PODS
from vcuda.ledger import ChargeRequest, ChargeResult, Ledger, LedgerState, pack_uid, reserve
from vcuda.names import LEDGER_KEY, LEDGER_PREFIX
from vcuda.namespace_policy import Mode
from vcuda.pod_options import PodOptions
from vcuda.quota import parse_quota

SYSTEM, TEAM = "quotient-system", "team"


class Counting(InMemoryCluster):
    """Counts calls, can be slow, and can lose every race."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.writes = self.lose = 0
        self.held = threading.Event()
        self.held.set()
        self.away = False

    def get(self, *arguments: Any, **options: Any) -> Any:
        if self.away:
            raise Unavailable("gone")
        self.reads += 1
        return super().get(*arguments, **options)

    def update(self, *arguments: Any, **options: Any) -> Any:
        assert self.held.wait(10)
        self.writes += 1
        if self.lose:
            self.lose -= 1
            raise Conflict("lost", code=409, reason="Conflict")
        return super().update(*arguments, **options)


@pytest.fixture
def cluster() -> Counting:
    """A cluster with an open ledger for 100 cores."""
    made = Counting()
    for name in (SYSTEM, TEAM):
        made.create(NAMESPACES, {"metadata": {"name": name}})
    ledger = Ledger("uid", LedgerState.OPEN)
    ledger.set_quotas([parse_quota("types: {A100: {cores: 100}}", "team/q")], 1)
    LedgerStore(made, SYSTEM).create(TEAM, ledger)
    return made


@pytest.fixture
def committer(cluster: Counting) -> Iterator[LedgerCommitter]:
    made = LedgerCommitter(LedgerStore(cluster, SYSTEM)).start()
    yield made
    cluster.held.set()
    made.stop()


def asking(cores: int, *, dry_run: bool = False) -> Any:
    key = pack_uid(str(uuid.uuid4()))
    claim = ChargeRequest(key, lambda _: Amounts({CORES: cores, PODS: 1}), PodOptions(models=("A100",)), {}, dry_run)
    return lambda ledger: reserve(ledger, claim, 1, Mode.ENFORCE)


def test_what_comes_while_a_write_is_under_way_is_one_more_write(cluster: Counting, committer: LedgerCommitter) -> None:
    """However many; and a refusal among them hurts nobody else."""
    cluster.held.clear()
    answers: list[ChargeResult | Exception] = []
    committer.submit(TEAM, asking(10), 10, answers.append)
    eventually(lambda: cluster.reads == 1, "the first batch")
    for _ in range(20):
        committer.submit(TEAM, asking(5), 10, answers.append)
    cluster.held.set()
    eventually(lambda: len(answers) == 21, "all answers")
    assert cluster.writes == 2
    assert sum(isinstance(each, ChargeResult) and not each.reasons for each in answers) == 19
    assert LedgerStore(cluster, SYSTEM).read(TEAM).ledger.usage.taken["team/q", "A100", CORES] == 100  # type: ignore[union-attr]
    assert committer.counts.batches == {1: 1, 20: 1}


def test_a_remembered_ledger_saves_the_read_and_never_refuses(cluster: Counting, committer: LedgerCommitter) -> None:
    """What it knows may be old: before it refuses, it reads."""
    assert not committer.apply(TEAM, asking(60), 5).reasons
    reads = cluster.reads
    assert not committer.apply(TEAM, asking(10), 5).reasons
    assert cluster.reads == reads
    ledger_store = LedgerStore(cluster, SYSTEM)
    page = ledger_store.read(TEAM)
    assert page is not None
    freed = page.ledger.copy()
    for key in list(freed.pods()):
        freed.release(key)
    ledger_store.write(page, freed)
    assert not committer.apply(TEAM, asking(100), 5).reasons, "somebody else freed it"
    assert committer.apply(TEAM, asking(1), 5).reasons
    assert not committer.apply(TEAM, asking(0, dry_run=True), 5).reasons


def test_lost_races_are_run_again(cluster: Counting, committer: LedgerCommitter) -> None:
    """Within the time there is; then it is said that it cannot be done now."""
    cluster.lose = 5
    assert not committer.apply(TEAM, asking(10), 5).reasons
    assert committer.counts.conflicts == 5
    cluster.lose = 10**6
    with pytest.raises(Unavailable):
        committer.apply(TEAM, asking(10), 0.5)
    cluster.lose = 0
    assert not committer.apply(TEAM, asking(10), 5).reasons


def test_without_the_cluster_nothing_is_decided(cluster: Counting, committer: LedgerCommitter) -> None:
    """Neither granted nor refused."""
    cluster.away = True
    with pytest.raises(Unavailable, match="cannot be changed now"):
        committer.apply(TEAM, asking(10), 2)


def test_a_ledger_that_is_not_there_is_asked_for_and_waited_for(cluster: Counting, committer: LedgerCommitter) -> None:
    """The controller makes it; if it does not, that is said."""
    verdict = committer.apply("default", asking(10), 0.4)
    assert [reason.code for reason in verdict.reasons] == [Code.LEDGER_NOT_OPEN]
    ledger_store = LedgerStore(cluster, SYSTEM)
    page = ledger_store.read("default")
    assert page is not None
    assert page.ledger.state is LedgerState.REQUESTED
    answers: list[ChargeResult | Exception] = []
    committer.submit("default", asking(10), 10, answers.append)
    ledger_store.write(page, Ledger("uid", LedgerState.OPEN))
    eventually(lambda: bool(answers), "the answer")
    assert isinstance(answers[0], ChargeResult)
    assert not answers[0].reasons


def test_a_ledger_deleted_under_a_batch_is_lost_for_it(cluster: Counting, committer: LedgerCommitter) -> None:
    """What is remembered of it grants nothing."""
    assert not committer.apply(TEAM, asking(10), 5).reasons
    cluster.delete(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM)
    assert committer.apply(TEAM, asking(10), 0.5).reasons[0].code is Code.LEDGER_NOT_OPEN


def test_a_ledger_that_cannot_be_read_grants_nothing(cluster: Counting, committer: LedgerCommitter) -> None:
    """Somebody wrote into it."""
    cluster.patch(CONFIG_MAPS, LEDGER_PREFIX + TEAM, SYSTEM, {"data": {LEDGER_KEY: "{}"}})
    with pytest.raises(Unavailable, match="cannot be read"):
        committer.apply(TEAM, asking(10), 2)


def test_one_that_fails_costs_the_others_nothing(cluster: Counting, committer: LedgerCommitter) -> None:
    """Its fault is its own."""
    cluster.held.clear()
    answers: list[ChargeResult | Exception] = []
    committer.submit(TEAM, asking(1), 10, answers.append)
    eventually(lambda: cluster.reads == 1, "the first batch")

    def broken(_: Ledger) -> ChargeResult:
        raise ZeroDivisionError

    committer.submit(TEAM, broken, 10, answers.append)
    committer.submit(TEAM, asking(1), 10, answers.append)
    cluster.held.set()
    eventually(lambda: len(answers) == 3, "all answers")
    assert [type(each) for each in answers] == [ChargeResult, ZeroDivisionError, ChargeResult]


def test_who_waits_at_the_end_is_told(cluster: Counting, committer: LedgerCommitter) -> None:
    """And who comes later, too."""
    answers: list[ChargeResult | Exception] = []
    committer.submit("default", asking(1), 60, answers.append)
    eventually(lambda: cluster.reads > 0, "the look for the ledger")
    committer.stop()
    eventually(lambda: bool(answers), "the answer")
    assert isinstance(answers[0], Unavailable)
    with pytest.raises(Unavailable):
        committer.submit(TEAM, asking(1), 1, answers.append)


def test_who_read_only_changes_nothing(cluster: Counting, committer: LedgerCommitter) -> None:
    """Whatever the change does; and makes no ledger where there is none."""
    assert not committer.apply(TEAM, asking(10), 5, read_only=True).reasons
    assert committer.apply(TEAM, asking(101), 5, read_only=True).reasons
    assert not committer.apply("default", asking(10), 5, read_only=True).reasons
    assert cluster.writes == 0
    ledger_store = LedgerStore(cluster, SYSTEM)
    assert ledger_store.read("default") is None
    assert len(ledger_store.read(TEAM).ledger) == 0  # type: ignore[union-attr]
