"""What the quota controller remembers between reconciles: nothing that happens during a reconcile is lost."""

from controller.accounting import MOVE_S
from controller.namespace_state import FirstSeen, InitialReconcile, NamespaceStates
from vcuda.ledger import Ledger, Reservation
from vcuda.quota_usage import RESERVATION_S

TEAM = "team"


def test_a_change_during_a_reconcile_still_counts_as_lag() -> None:
    """From the start of that reconcile: it may or may not have been covered."""
    states = NamespaceStates()
    states.record_change(TEAM, now=10, min_interval_s=0)
    changes = states.reconcile_started(TEAM, now=12)
    states.record_change(TEAM, now=13, min_interval_s=0)
    states.reconciled(TEAM, Ledger(), changes)
    assert states.lag_s(now=15) == 3
    states.reconciled(TEAM, Ledger(), states.reconcile_started(TEAM, now=16))
    assert states.lag_s(now=17) == 0


def test_a_pod_deleted_during_a_reconcile_is_left_for_the_next() -> None:
    states = NamespaceStates()
    states.pod_deleted(TEAM, "first")
    taken = states.deleted_pods(TEAM)
    states.pod_deleted(TEAM, "second")
    states.pods_freed(TEAM, taken)
    assert states.deleted_pods(TEAM) == {"second"}


def test_the_next_reconcile_waits_for_the_minimum_interval() -> None:
    states = NamespaceStates()
    assert states.record_change(TEAM, now=10, min_interval_s=1) < 0, "there was none yet"
    states.reconcile_started(TEAM, now=10)
    assert states.record_change(TEAM, now=10.25, min_interval_s=1) == 0.75


def test_the_cached_ledger_is_used_unless_it_is_older_than_the_last_write_or_quota_is_to_be_freed() -> None:
    states = NamespaceStates()
    assert states.may_use_cached_ledger(TEAM, "7")
    states.ledger_written(TEAM, "8")
    assert not states.may_use_cached_ledger(TEAM, "7")
    assert states.may_use_cached_ledger(TEAM, "8")
    states.pod_deleted(TEAM, "pod")
    assert not states.may_use_cached_ledger(TEAM, "8")


def test_a_reservation_keeps_the_time_at_which_it_was_first_seen() -> None:
    """A reservation that is gone from the ledger is forgotten."""
    states = NamespaceStates()
    old, new, again = Reservation("old", 7), Reservation("new", 7), Reservation("moved", 8, is_move=True)
    states.reservations_seen(TEAM, [old, Reservation("moved", 7, is_move=True)], now=1, at_start=True)
    seen = states.reservations_seen(TEAM, [old, new, again], now=2)
    assert seen == {
        old: FirstSeen(1, at_start=True),
        new: FirstSeen(2, at_start=False),
        again: FirstSeen(2, at_start=False),
    }
    assert states.due_times(TEAM) == [1 + RESERVATION_S, 2 + RESERVATION_S, 2 + MOVE_S]
    assert states.reservations_seen(TEAM, [], now=3) == {}
    assert states.due_times(TEAM) == []


def test_a_closed_ledger_opens_one_reservation_lifetime_later() -> None:
    """Counted from when this process first saw it closed, if another one closed it."""
    states = NamespaceStates()
    assert states.ledger_opens_at(TEAM, now=5) == 5 + RESERVATION_S
    assert states.ledger_opens_at(TEAM, now=20) == 5 + RESERVATION_S
    assert states.due_times(TEAM) == [5 + RESERVATION_S]
    states.ledger_opened(TEAM)
    assert states.due_times(TEAM) == []


def test_failures_count_up_to_the_next_success() -> None:
    states = NamespaceStates()
    assert [states.failed(TEAM), states.failed(TEAM)] == [1, 2]
    states.reconciled(TEAM, Ledger(), changes=0)
    assert states.failed(TEAM) == 1


def test_all_namespaces_are_enqueued_once_after_each_election() -> None:
    """The last one reports since when this process leads."""
    initial = InitialReconcile(now=1)
    assert not initial.has_begun()
    assert initial.begin(lambda: {"a", "b"}) == {"a", "b"}
    assert initial.has_begun()
    assert initial.begin(lambda: {"c"}) == set()
    assert [initial.reconciled(name) for name in ("a", "a", "other", "b", "b")] == [None, None, None, 1, None]
    initial.reset(now=2)
    assert initial.begin(lambda: {"a"}) == {"a"}
    assert initial.reconciled("a") == 2
