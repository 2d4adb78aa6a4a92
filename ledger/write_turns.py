"""The turns of this process to write ledgers that other processes write as well (`vcuda/write_schedule.py`)."""

import threading
import time
from collections.abc import Callable

from msgspec import Struct

from vcuda.recent import keep_recent
from vcuda.write_schedule import MAX_TURN_MS, MIN_TURN_MS, Turn, WriteSchedule

# How much a new measurement of the time that a write takes counts. A turn is longer than the mean by some deviations,
# which most writes do not exceed, and by a part of it, because clocks and threads are never exact.
SMOOTHING = 0.1
DEVIATIONS, MARGIN = 2, 0.5
# What is assumed before the first measurement: rather long, because processes that start at once are slow at first.
FIRST_MS = 40.0
# For how many namespaces the schedule is remembered, and for how many processes their clocks.
MAX_SCHEDULES, MAX_CLOCKS = 1024, 256


class SeenSchedule(Struct, frozen=True):
    """A schedule, and when this process last read or wrote it."""

    schedule: WriteSchedule
    at_ms: int


class ClockDifference(Struct, frozen=True):
    """By how much the clock of another process is ahead of this one's: at least and at most."""

    least_ms: int
    most_ms: int

    def narrowed(self, least_ms: int, most_ms: int) -> "ClockDifference":
        """Return the difference with another observation; that one alone if the clock was set since."""
        least_ms, most_ms = max(self.least_ms, least_ms), min(self.most_ms, most_ms)
        return ClockDifference(least_ms, most_ms) if least_ms <= most_ms else ClockDifference(least_ms, least_ms)

    @property
    def assumed_ms(self) -> int:
        """The smallest difference that explains what was seen: clocks of nodes are synchronized as a rule."""
        return min(max(0, self.least_ms), self.most_ms)


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class WriteTurns:
    """The schedules that `writer` has seen by namespace, how long its writes take, and how others' clocks differ."""

    def __init__(self, writer: str, clock_ms: Callable[[], int] = wall_clock_ms) -> None:
        self.writer, self.clock_ms = writer, clock_ms
        # Guards the fields below; mean and deviation belong to the same measurements.
        self._lock = threading.Lock()
        self._seen: dict[str, SeenSchedule] = {}
        self._clocks: dict[str, ClockDifference] = {}
        self._mean_ms, self._deviation_ms = FIRST_MS, 0.0
        self._has_measured = False

    def delay_s(self, namespace: str) -> float:
        """Return how long to wait for the turn; 0 for a ledger that this process has not seen yet."""
        now_ms = self.clock_ms()
        with self._lock:
            seen = self._seen.get(namespace)
            return (seen.schedule.next_start_ms(self.writer, now_ms, self._ahead_ms()) - now_ms) / 1000 if seen else 0.0

    def observe(self, namespace: str, schedule: WriteSchedule) -> None:
        """Remember the schedule of a ledger that was just read or written, and learn of others' clocks from it."""
        now_ms = self.clock_ms()
        with self._lock:
            if (before := self._seen.get(namespace)) is not None:
                for writer, turn in schedule.writers.items():
                    if writer != self.writer and before.schedule.writers.get(writer) != turn:
                        self._learn_clock(writer, turn, before.at_ms, now_ms)
            keep_recent(self._seen, namespace, SeenSchedule(schedule, now_ms), MAX_SCHEDULES)

    def record_attempt(self, began_ms: int) -> None:
        """Measure an attempt to write, whether it succeeded or not."""
        with self._lock:
            took_ms = self.clock_ms() - began_ms
            if not self._has_measured:
                self._mean_ms, self._has_measured = float(took_ms), True
            difference_ms = took_ms - self._mean_ms
            self._mean_ms += SMOOTHING * difference_ms
            self._deviation_ms += SMOOTHING * (abs(difference_ms) - self._deviation_ms)

    def schedule_after_write(self, schedule: WriteSchedule, began_ms: int) -> WriteSchedule:
        """Return a ledger's schedule with a write of this process."""
        with self._lock:
            length_ms = self._mean_ms + max(DEVIATIONS * self._deviation_ms, MARGIN * self._mean_ms)
            turn = Turn(began_ms, round(min(max(length_ms, MIN_TURN_MS), MAX_TURN_MS)), round(self._mean_ms))
            return schedule.after_write(self.writer, turn, self._ahead_ms())

    def _learn_clock(self, writer: str, turn: Turn, before_ms: int, now_ms: int) -> None:
        """Learn from a write that arrived between two looks at the ledger."""
        arrived_ms = turn.at_ms + turn.takes_ms
        least_ms, most_ms = arrived_ms - now_ms, arrived_ms - before_ms
        known = self._clocks.get(writer, ClockDifference(least_ms, most_ms))
        keep_recent(self._clocks, writer, known.narrowed(least_ms, most_ms), MAX_CLOCKS)

    def _ahead_ms(self) -> dict[str, int]:
        return {writer: difference.assumed_ms for writer, difference in self._clocks.items()}
