"""The work queue: order, one worker per key, and requeueing."""

import threading

from ledger.workqueue import WorkQueue
from tests.waiting import eventually


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_keys_come_in_the_order_in_which_they_are_due() -> None:
    """A key that is added again counts once, at the earliest of its times."""
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add_after("late", 5)
    queue.add_after("soon", 2)
    queue.add_after("late", 1)
    queue.add_after("late", 9)
    clock.now = 10
    assert [queue.get(), queue.get()] == ["late", "soon"]
    assert queue.pending() == 2


def test_a_key_has_one_worker_at_a_time_and_is_requeued_if_added_while_processed() -> None:
    """No change that happens during processing is lost."""
    queue = WorkQueue()
    queue.add("a")
    assert queue.get() == "a"
    queue.add("a")
    queue.add("b")
    assert queue.get() == "b"
    queue.done("b")
    queue.done("a")
    assert queue.get() == "a"
    queue.done("a")
    assert queue.pending() == 0


def test_a_blocked_worker_wakes_for_a_key_a_due_time_and_shutdown() -> None:
    queue, taken = WorkQueue(), list[str | None]()

    def work() -> None:
        while (key := queue.get()) is not None:
            taken.append(key)
            queue.done(key)
        taken.append(None)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    queue.add("now")
    queue.add_after("a little later", 0.05)
    eventually(lambda: taken == ["now", "a little later"], "both keys")
    queue.shut_down()
    eventually(lambda: taken[-1] is None, "the shutdown")
    worker.join(5)
