"""Processes that write one ledger take turns: a simulation on a virtual clock, and the rules for odd cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.write_schedule import FORGET_MS, MAX_TURN_MS, MAX_WRITERS, MIN_TURN_MS, WriteSchedule

WRITE_MS = 20
NAMES = st.sampled_from([f"writer-{number}" for number in range(2 * MAX_WRITERS)])
TIMES = st.integers(0, 20_000)
SCHEDULES = st.builds(
    WriteSchedule, st.dictionaries(NAMES, TIMES, max_size=MAX_WRITERS), st.floats(MIN_TURN_MS, MAX_TURN_MS)
)


def simulate(writers: int, duration_ms: int, clock_differences_ms: tuple[int, ...] = ()) -> tuple[list[int], int]:
    """Let processes that always have something to write do so by turns; returns the writes of each, and the conflicts.

    A process sees other processes' writes only when its own turn begins, as one that reads a ledger before it writes.
    """
    stored, version = WriteSchedule(), 0
    known = [stored] * writers
    # For each process that is writing: the version it read, and when its write arrives.
    writing: dict[int, tuple[int, int]] = {}
    writes, conflicts = [0] * writers, 0
    for now_ms in range(duration_ms):
        for number in range(writers):
            clock_ms = now_ms + (clock_differences_ms[number] if clock_differences_ms else 0)
            if number in writing:
                read_version, arrives = writing[number]
                if now_ms < arrives:
                    continue
                del writing[number]
                if read_version != version:
                    conflicts += 1
                    continue
                stored = stored.after_write(f"{number}", clock_ms - WRITE_MS, 2 * WRITE_MS)
                known[number], version = stored, version + 1
                writes[number] += 1
            elif known[number].next_start_ms(f"{number}", clock_ms) <= clock_ms:
                known[number] = stored
                if stored.next_start_ms(f"{number}", clock_ms) <= clock_ms:
                    writing[number] = (version, now_ms + WRITE_MS)
    return writes, conflicts


@pytest.mark.parametrize("writers", [1, 2, 3, 5])
def test_writers_without_pause_have_no_conflicts_but_their_first_ones(writers: int) -> None:
    """And each writes as often as the others."""
    writes, conflicts = simulate(writers, 20_000)
    assert conflicts < writers**2
    assert simulate(writers, 40_000)[1] == conflicts
    assert max(writes) - min(writes) <= writers
    assert sum(writes) > 20_000 / (3 * WRITE_MS)


def test_clocks_that_differ_by_half_a_turn_cost_conflicts_and_keep_nobody_out() -> None:
    writes, conflicts = simulate(3, 20_000, (0, -10, 15))
    assert min(writes) > max(writes) / 3
    assert conflicts < sum(writes)


def test_clocks_that_differ_by_minutes_keep_nobody_out() -> None:
    writes, _ = simulate(2, 20_000, (0, 300_000))
    assert min(writes) > 0


@given(SCHEDULES, NAMES, TIMES)
def test_a_turn_comes_within_one_circle(schedule: WriteSchedule, writer: str, now_ms: int) -> None:
    start_ms = schedule.next_start_ms(writer, now_ms)
    assert now_ms <= start_ms <= now_ms + (len(schedule.writers) + 1) * schedule.turn_ms


@given(SCHEDULES, NAMES, TIMES)
def test_a_start_that_is_due_stays_due(schedule: WriteSchedule, writer: str, now_ms: int) -> None:
    """A process that wakes when it was told to is not told to wait again."""
    start_ms = schedule.next_start_ms(writer, now_ms)
    assert schedule.next_start_ms(writer, start_ms) == start_ms


@given(SCHEDULES, NAMES, TIMES)
def test_a_process_that_has_not_written_lately_does_not_wait(schedule: WriteSchedule, writer: str, now_ms: int) -> None:
    if writer not in schedule.writers:
        assert schedule.next_start_ms(writer, now_ms) == now_ms


@given(SCHEDULES, NAMES, TIMES, st.floats(0, 10_000))
def test_a_schedule_stays_small_and_forgets_who_stopped(
    schedule: WriteSchedule, writer: str, now_ms: int, took_ms: float
) -> None:
    after = schedule.after_write(writer, now_ms, took_ms)
    assert writer in after.writers or len(after.writers) == MAX_WRITERS
    assert len(after.writers) <= MAX_WRITERS
    assert all(now_ms - at_ms < FORGET_MS for at_ms in after.writers.values())
    assert MIN_TURN_MS <= after.turn_ms <= MAX_TURN_MS


def test_the_only_writer_leaves_a_turn_free() -> None:
    """Otherwise another one, which has to read first, would never be able to write for the first time."""
    schedule = WriteSchedule().after_write("a", 1000, 20)
    assert not schedule.has_others("a")
    assert schedule.next_start_ms("a", 1005) == 1020
    assert schedule.next_start_ms("a", 1300) == 1300
    assert schedule.next_start_ms("b", 1005) == 1005
