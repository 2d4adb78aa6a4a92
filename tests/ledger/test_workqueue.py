"""Whose turn it is."""

import threading

from ledger.workqueue import WorkQueue
from tests.waiting import eventually


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_keys_come_in_the_order_in_which_they_are_due() -> None:
    """And sooner wishes count."""
    clock = Clock()
    turns = WorkQueue(clock)
    turns.want("late", 5)
    turns.want("soon", 2)
    turns.want("late", 1)
    turns.want("late", 9)
    clock.now = 10
    assert [turns.next(), turns.next()] == ["late", "soon"]
    assert turns.waiting() == 2


def test_a_key_is_served_by_one_at_a_time_and_again_if_it_was_wanted_meanwhile() -> None:
    """Nothing that happened during a turn is forgotten."""
    turns = WorkQueue()
    turns.want("a")
    assert turns.next() == "a"
    turns.want("a")
    turns.want("b")
    assert turns.next() == "b"
    turns.done("b")
    turns.done("a")
    assert turns.next() == "a"
    turns.done("a")
    assert turns.waiting() == 0


def test_who_waits_is_woken() -> None:
    """By a wish, by time, or by the end."""
    turns, taken = WorkQueue(), list[str | None]()

    def work() -> None:
        while (key := turns.next()) is not None:
            taken.append(key)
            turns.done(key)
        taken.append(None)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    turns.want("now")
    turns.want("a little later", turns._clock() + 0.05)
    eventually(lambda: taken == ["now", "a little later"], "both turns")
    turns.stop()
    eventually(lambda: taken[-1] is None, "the end")
    worker.join(5)
