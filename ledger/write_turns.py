"""The turns of this process to write ledgers that other processes write as well (`vcuda/write_schedule.py`)."""

import threading
import time
from collections.abc import Callable

from vcuda.recent import keep_recent
from vcuda.write_schedule import WriteSchedule

# How much a new measurement of the time that a write takes counts, and how many deviations above the mean most stay.
SMOOTHING = 0.1
DEVIATIONS = 2
# What is assumed before the first measurement: rather long, because processes that start at once are slow at first.
FIRST_MS = 40.0
# For how many namespaces the schedule is remembered.
MAX_SCHEDULES = 1024


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class WriteTurns:
    """The schedules that `writer` has seen, by namespace, and how long its own writes take."""

    def __init__(self, writer: str, clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        self.writer, self.clock_ms = writer, clock_ms
        # Guards the fields below; mean and deviation belong to the same measurements.
        self._lock = threading.Lock()
        self._schedules: dict[str, WriteSchedule] = {}
        self._mean_ms, self._deviation_ms = FIRST_MS, 0.0

    def delay_s(self, namespace: str) -> float:
        """Return how long to wait for the turn; 0 for a ledger that this process has not seen yet."""
        with self._lock:
            schedule = self._schedules.get(namespace, WriteSchedule())
        now_ms = self.clock_ms()
        return (schedule.next_start_ms(self.writer, now_ms) - now_ms) / 1000

    def observe(self, namespace: str, schedule: WriteSchedule) -> None:
        """Remember the schedule of a ledger that was read or written."""
        with self._lock:
            keep_recent(self._schedules, namespace, schedule, MAX_SCHEDULES)

    def record_attempt(self, began_ms: int) -> None:
        """Measure an attempt to write, whether it succeeded or not."""
        with self._lock:
            difference_ms = self.clock_ms() - began_ms - self._mean_ms
            self._mean_ms += SMOOTHING * difference_ms
            self._deviation_ms += SMOOTHING * (abs(difference_ms) - self._deviation_ms)

    def schedule_after_write(self, schedule: WriteSchedule, began_ms: int) -> WriteSchedule:
        """Return a ledger's schedule with a write of this process."""
        with self._lock:
            took_ms = self._mean_ms + DEVIATIONS * self._deviation_ms
        return schedule.after_write(self.writer, began_ms, took_ms)
