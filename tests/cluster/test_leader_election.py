"""Leader election: never two leaders at once by their own clocks, and soon a new one when the leader is gone."""

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

QUICK = ElectionTimings(lease_s=12, renew_s=8, retry_s=0.1)
TIMINGS = ElectionTimings()


class FakeClock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Disconnectable(InMemoryCluster):
    """A cluster that can be unreachable for one of its users only."""

    def __init__(self, other: InMemoryCluster) -> None:
        self._other, self.disconnected = other, False
        self.before_call: Callable[[], None] = lambda: None

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name in ("get", "create", "update"):
            own["before_call"]()
            if own["disconnected"]:
                raise Unavailable("unreachable")
            return getattr(own["_other"], name)
        return object.__getattribute__(self, name)


def elector(
    cluster: Cluster, identity: str, clock: Callable[[], float], events: list[str] | None = None
) -> LeaderElector:
    """Create an elector that is not started: tests call `step`. Its callbacks append to `events`."""
    calls = events if events is not None else []
    return LeaderElector(
        cluster,
        "leader",
        "default",
        identity,
        timings=TIMINGS,
        clock=clock,
        on_start=lambda: calls.append(f"{identity} leads"),
        on_stop=lambda: calls.append(f"{identity} stops"),
    )


def test_the_replica_that_creates_the_lease_leads() -> None:
    memory, clock = InMemoryCluster(), FakeClock()
    events: list[str] = []
    a, b = elector(memory, "a", clock, events), elector(memory, "b", clock, events)
    a.step()
    b.step()
    assert (a.leading, b.leading) == (True, False)
    assert events == ["a leads"]
    spec = memory.get(LEASES, "leader", "default").spec
    assert (spec.holder_identity, spec.lease_duration_seconds, spec.lease_transitions) == ("a", 15, 0)


def test_a_leader_that_renews_stays_leader() -> None:
    memory, clock = InMemoryCluster(), FakeClock()
    a, b = elector(memory, "a", clock), elector(memory, "b", clock)
    for _ in range(50):
        a.step()
        b.step()
        clock.now += 2
        assert (a.leading, b.leading) == (True, False)


def test_a_leader_that_cannot_renew_stops_before_another_starts() -> None:
    """Between 10 s and 15 s after its last renewal there is no leader."""
    memory, clock = InMemoryCluster(), FakeClock()
    connection = Disconnectable(memory)
    events: list[str] = []
    a, b = elector(connection, "a", clock, events), elector(memory, "b", clock, events)
    a.step()
    b.step()
    connection.disconnected = True
    for _ in range(12):
        clock.now += 2
        a.step()
        b.step()
        assert not (a.leading and b.leading)
    assert events == ["a leads", "a stops", "b leads"]
    assert memory.get(LEASES, "leader", "default").spec.lease_transitions == 1


def test_a_slow_renewal_counts_from_before_the_call() -> None:
    """Other replicas may have seen it the moment the call began."""
    memory, clock = InMemoryCluster(), FakeClock()
    slow = Disconnectable(memory)
    a = elector(slow, "a", clock)
    slow.before_call = lambda: setattr(clock, "now", clock.now + 4)
    a.step()
    began = 1000.0
    clock.now = began + TIMINGS.renew_s
    assert not a.leading
    clock.now -= 0.001
    assert a.leading


def test_a_paused_leader_stops_leading_by_the_clock_alone() -> None:
    """Suspended and resumed, it does not report to lead even before its first step."""
    memory, clock = InMemoryCluster(), FakeClock()
    a, b = elector(memory, "a", clock), elector(memory, "b", clock)
    a.step()
    b.step()
    clock.now += 16
    b.step()
    assert (a.leading, b.leading) == (False, True)
    a.step()
    assert (a.leading, b.leading) == (False, True)


def test_a_renewal_after_the_term_ran_out_begins_a_new_term() -> None:
    """Another replica may have led in between, so both callbacks are called, even if this one never noticed."""
    cluster, now, events = InMemoryCluster(), FakeClock(), []  # type: ignore[var-annotated]
    paused, other = elector(cluster, "a", now, events), elector(cluster, "b", now, events)
    paused.step()
    other.step()
    now.now += TIMINGS.lease_s + 1
    other.step()
    other._release()
    paused.step()
    assert paused.leading
    assert events == ["a leads", "b leads", "b stops", "a stops", "a leads"]


def test_the_clocks_of_other_machines_do_not_matter() -> None:
    """Times in the lease are for people: a holder whose clock is years behind keeps its lease."""
    memory, clock = InMemoryCluster(), FakeClock()
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


def test_of_two_replicas_that_take_over_a_free_lease_one_succeeds() -> None:
    """Both see that it is free; the compare-and-swap decides."""
    memory, clock = InMemoryCluster(), FakeClock()
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
    """A replica that saw its holder waits as long as if the lease still existed."""
    memory, clock = InMemoryCluster(), FakeClock()
    a, b = elector(memory, "a", clock), elector(memory, "b", clock)
    a.step()
    b.step()
    memory.delete(LEASES, "leader", "default")
    b.step()
    assert (a.leading, b.leading) == (True, False)
    clock.now += TIMINGS.lease_s + 0.1
    b.step()
    assert (a.leading, b.leading) == (False, True)


def test_the_holder_of_a_deleted_lease_creates_it_again_and_stays_leader() -> None:
    memory, clock = InMemoryCluster(), FakeClock()
    a = elector(memory, "a", clock)
    a.step()
    memory.delete(LEASES, "leader", "default")
    a.step()
    assert a.leading
    assert memory.get(LEASES, "leader", "default").spec.holder_identity == "a"


def test_a_callback_that_raises_does_not_end_the_election() -> None:
    memory, clock = InMemoryCluster(), FakeClock()

    def fail() -> None:
        raise RuntimeError("a bug in a callback")

    a = LeaderElector(memory, "leader", "default", "a", timings=TIMINGS, clock=clock, on_start=fail, on_stop=fail)
    a.step()
    assert a.leading
    clock.now += TIMINGS.renew_s
    a.step()
    assert a.leading


def test_a_stopped_elector_does_not_lead_even_while_its_renewal_is_under_way() -> None:
    memory = InMemoryCluster()
    slow = Disconnectable(memory)
    entered, resume = threading.Event(), threading.Event()
    events: list[str] = []

    def hang() -> None:
        entered.set()
        resume.wait(20)

    a = LeaderElector(slow, "leader", "default", "a", timings=QUICK, on_start=lambda: events.append("leads"))
    slow.before_call = hang
    a.start()
    assert entered.wait(20)
    a.stop(timeout_s=0.05)
    assert not a.leading
    resume.set()
    eventually(lambda: not a.alive, "the thread to end")
    assert (a.leading, events) == (False, [])


@pytest.mark.parametrize("timings", [(10, 10, 2), (15, 2, 2), (15, 10, 0), (5, 10, 2)])
def test_timings_that_allow_two_leaders_are_rejected(timings: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="lease > renew > retry"):
        ElectionTimings(*timings)


def test_a_leader_that_stops_releases_its_lease(cluster: Cluster, namespace: str) -> None:
    """So that the other replica need not wait until it runs out. With real threads and real time."""
    events: list[str] = []
    electors = [
        LeaderElector(
            cluster,
            "leader",
            namespace,
            identity,
            timings=QUICK,
            on_start=lambda who=identity: events.append(f"{who} leads"),  # type: ignore[misc]
            on_stop=lambda who=identity: events.append(f"{who} stops"),  # type: ignore[misc]
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
    assert events == [
        f"{leader.identity} leads",
        f"{leader.identity} stops",
        f"{other.identity} leads",
        f"{other.identity} stops",
    ]
    assert not leader.alive
    assert not other.alive
