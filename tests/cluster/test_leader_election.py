"""Leader election: never two at once by their own clocks, and soon another when one is gone."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cluster.in_memory import InMemoryCluster
from cluster.interface import Cluster
from cluster.leader_election import ElectionTimings, LeaderElector
from cluster.objects import LEASES
from tests.waiting import eventually
from vcuda.decision import Unavailable

BRISK = ElectionTimings(lease_s=12, renew_s=8, retry_s=0.1)
TERMS = ElectionTimings()


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Cuttable(InMemoryCluster):
    """A cluster that can be out of reach for one of its users only."""

    def __init__(self, other: InMemoryCluster) -> None:
        self._other, self.cut = other, False
        self.before_call: Callable[[], None] = lambda: None

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in ("get", "create", "update"):
            own["before_call"]()
            if own["cut"]:
                raise Unavailable("out of reach")
            return getattr(own["_other"], name)
        return object.__getattribute__(self, name)


def elector(
    cluster: Cluster, identity: str, clock: Callable[[], float], told: list[str] | None = None
) -> LeaderElector:
    """Make an elector that a test drives step by step."""
    heard = told if told is not None else []
    return LeaderElector(
        cluster,
        "leader",
        "default",
        identity,
        terms=TERMS,
        clock=clock,
        on_start=lambda: heard.append(f"{identity} leads"),
        on_stop=lambda: heard.append(f"{identity} stops"),
    )


def test_the_first_leads_and_the_others_wait() -> None:
    """Whoever creates the lease has it."""
    memory, clock = InMemoryCluster(), Clock()
    told: list[str] = []
    a, b = elector(memory, "a", clock, told), elector(memory, "b", clock, told)
    a.step()
    b.step()
    assert (a.leading, b.leading) == (True, False)
    assert told == ["a leads"]
    spec = memory.get(LEASES, "leader", "default").spec
    assert (spec.holder_identity, spec.lease_duration_seconds, spec.lease_transitions) == ("a", 15, 0)


def test_a_leader_that_renews_stays() -> None:
    """However long the others wait."""
    memory, clock = InMemoryCluster(), Clock()
    a, b = elector(memory, "a", clock), elector(memory, "b", clock)
    for _ in range(50):
        a.step()
        b.step()
        clock.now += 2
        assert (a.leading, b.leading) == (True, False)


def test_a_leader_that_cannot_renew_stops_before_another_starts() -> None:
    """Between 10 s and 15 s after its last renewal nobody leads."""
    memory, clock = InMemoryCluster(), Clock()
    reach = Cuttable(memory)
    told: list[str] = []
    a, b = elector(reach, "a", clock, told), elector(memory, "b", clock, told)
    a.step()
    b.step()
    reach.cut = True
    for _ in range(12):
        clock.now += 2
        a.step()
        b.step()
        assert not (a.leading and b.leading)
    assert told == ["a leads", "a stops", "b leads"]
    assert memory.get(LEASES, "leader", "default").spec.lease_transitions == 1


def test_a_slow_renewal_counts_from_before_the_call() -> None:
    """Others may have seen it the moment the call began."""
    memory, clock = InMemoryCluster(), Clock()
    slow = Cuttable(memory)
    a = elector(slow, "a", clock)
    slow.before_call = lambda: setattr(clock, "now", clock.now + 4)
    a.step()
    began = 1000.0
    clock.now = began + TERMS.renew_s
    assert not a.leading
    clock.now -= 0.001
    assert a.leading


def test_a_paused_leader_knows_by_the_clock_alone() -> None:
    """Stopped and continued, it does not believe itself leader even before its first step."""
    memory, clock = InMemoryCluster(), Clock()
    a, b = elector(memory, "a", clock), elector(memory, "b", clock)
    a.step()
    b.step()
    clock.now += 16
    b.step()
    assert (a.leading, b.leading) == (False, True)
    a.step()
    assert (a.leading, b.leading) == (False, True)


def test_a_term_that_had_run_out_begins_anew() -> None:
    """Another may have led meanwhile: whoever leads again has to be told so, even if nobody noticed the pause."""
    cluster, now, told = InMemoryCluster(), Clock(), []  # type: ignore[var-annotated]
    paused, other = elector(cluster, "a", now, told), elector(cluster, "b", now, told)
    paused.step()
    other.step()
    now.now += TERMS.lease_s + 1
    other.step()
    other._release()
    paused.step()
    assert paused.leading
    assert told == ["a leads", "b leads", "b stops", "a stops", "a leads"]


def test_the_clocks_of_others_do_not_matter() -> None:
    """Times written in the lease are for people: a holder whose clock is years off is left in peace."""
    memory, clock = InMemoryCluster(), Clock()
    a, b = elector(memory, "a", clock), elector(memory, "b", clock)
    a.step()
    memory.patch(LEASES, "leader", "default", {"spec": {"renewTime": "2001-01-01T00:00:00.000000Z"}})
    b.step()
    clock.now += 14
    b.step()
    assert not b.leading
    clock.now += 2
    b.step()
    assert b.leading


def test_of_two_that_reach_for_a_free_lease_one_gets_it() -> None:
    """Both saw it free; compare-and-swap decides."""
    memory, clock = InMemoryCluster(), Clock()
    first = elector(memory, "gone", clock)
    first.step()
    a, b = elector(memory, "a", clock), elector(memory, "b", clock)
    a.step()
    b.step()
    clock.now += 16
    a.step()
    b.step()
    assert [a.leading, b.leading] == [True, False]


def test_a_deleted_lease_is_not_taken_while_its_holder_may_still_lead() -> None:
    """Whoever saw it held waits as long as if it were still there."""
    memory, clock = InMemoryCluster(), Clock()
    a, b = elector(memory, "a", clock), elector(memory, "b", clock)
    a.step()
    b.step()
    memory.delete(LEASES, "leader", "default")
    b.step()
    assert (a.leading, b.leading) == (True, False)
    clock.now += TERMS.lease_s + 0.1
    b.step()
    assert (a.leading, b.leading) == (False, True)


def test_the_holder_of_a_deleted_lease_makes_it_again() -> None:
    """And goes on leading."""
    memory, clock = InMemoryCluster(), Clock()
    a = elector(memory, "a", clock)
    a.step()
    memory.delete(LEASES, "leader", "default")
    a.step()
    assert a.leading
    assert memory.get(LEASES, "leader", "default").spec.holder_identity == "a"


def test_a_callback_that_raises_costs_nobody_the_lease() -> None:
    """It is logged, and the election goes on."""
    memory, clock = InMemoryCluster(), Clock()

    def broken() -> None:
        raise RuntimeError("a fault in a callback")

    a = LeaderElector(memory, "leader", "default", "a", terms=TERMS, clock=clock, on_start=broken, on_stop=broken)
    a.step()
    assert a.leading
    clock.now += TERMS.renew_s
    a.step()
    assert a.leading


def test_after_stop_nobody_believes_to_lead() -> None:
    """Even if the call that would have renewed is still under way."""
    memory = InMemoryCluster()
    slow = Cuttable(memory)
    entered, go_on = threading.Event(), threading.Event()
    told: list[str] = []

    def hang() -> None:
        entered.set()
        go_on.wait(20)

    a = LeaderElector(slow, "leader", "default", "a", terms=BRISK, on_start=lambda: told.append("leads"))
    slow.before_call = hang
    a.start()
    assert entered.wait(20)
    a.stop(timeout_s=0.05)
    assert not a.leading
    go_on.set()
    eventually(lambda: not a.alive, "the thread to end")
    assert (a.leading, told) == (False, [])


@pytest.mark.parametrize("terms", [(10, 10, 2), (15, 2, 2), (15, 10, 0), (5, 10, 2)])
def test_terms_that_could_give_two_leaders_are_refused(terms: tuple[float, float, float]) -> None:
    """Lease longer than renewal, renewal longer than retry."""
    with pytest.raises(ValueError, match="lease > renew > retry"):
        ElectionTimings(*terms)


def test_a_leader_that_ends_hands_over_at_once(cluster: Cluster, namespace: str) -> None:
    """It releases the lease, so nobody waits for it to run out. With real threads and real time."""
    told: list[str] = []
    electors = [
        LeaderElector(
            cluster,
            "leader",
            namespace,
            identity,
            terms=BRISK,
            on_start=lambda who=identity: told.append(f"{who} leads"),  # type: ignore[misc]
            on_stop=lambda who=identity: told.append(f"{who} stops"),  # type: ignore[misc]
        )
        for identity in ("a", "b")
    ]
    for each in electors:
        each.start()
    eventually(lambda: any(each.leading for each in electors), "a leader")
    leader = next(each for each in electors if each.leading)
    other = next(each for each in electors if each is not leader)
    assert not other.leading
    leader.stop()
    assert cluster.get(LEASES, "leader", namespace).spec.holder_identity in (None, "", other.identity)
    eventually(lambda: other.leading, "the other to lead")
    other.stop()
    assert told == [
        f"{leader.identity} leads",
        f"{leader.identity} stops",
        f"{other.identity} leads",
        f"{other.identity} stops",
    ]
    assert not leader.alive
    assert not other.alive
