"""The rules of turns for odd schedules; tests/ledger/test_write_turns.py simulates processes that follow them."""

from hypothesis import given
from hypothesis import strategies as st

from vcuda.write_schedule import (
    BUSY_MS,
    FORGET_MS,
    MAX_TURN_MS,
    MAX_WRITERS,
    MIN_TURN_MS,
    PAUSE_MS,
    Turn,
    WriteSchedule,
)

NAMES = st.sampled_from([f"writer-{number}" for number in range(2 * MAX_WRITERS)])
TIMES = st.integers(0, 20_000) | st.integers(-(10**12), 10**12)
TURNS = st.builds(Turn, TIMES, st.integers(MIN_TURN_MS, MAX_TURN_MS), st.integers(0, MAX_TURN_MS))
SCHEDULES = st.builds(WriteSchedule, st.dictionaries(NAMES, TURNS, max_size=MAX_WRITERS), st.integers(0, 2 * BUSY_MS))
DIFFERENCES = st.dictionaries(NAMES, st.integers(-1000, 1000) | TIMES)


@given(SCHEDULES, NAMES, TIMES, DIFFERENCES)
def test_a_turn_comes_within_two_circles(
    schedule: WriteSchedule, writer: str, now_ms: int, ahead_ms: dict[str, int]
) -> None:
    start_ms = schedule.next_start_ms(writer, now_ms, ahead_ms)
    assert now_ms <= start_ms <= now_ms + 2 * sum(each.length_ms for each in schedule.writers.values()) + PAUSE_MS


@given(SCHEDULES, NAMES, TIMES, DIFFERENCES)
def test_a_start_that_is_due_stays_due(
    schedule: WriteSchedule, writer: str, now_ms: int, ahead_ms: dict[str, int]
) -> None:
    """A process that wakes when it was told to is not told to wait again."""
    start_ms = schedule.next_start_ms(writer, now_ms, ahead_ms)
    assert schedule.next_start_ms(writer, start_ms, ahead_ms) == start_ms or start_ms == now_ms


@given(SCHEDULES, NAMES, TIMES)
def test_a_process_that_has_not_written_lately_does_not_wait(schedule: WriteSchedule, writer: str, now_ms: int) -> None:
    if writer not in schedule.writers:
        assert schedule.next_start_ms(writer, now_ms, {}) == now_ms


@given(SCHEDULES, NAMES, TURNS, DIFFERENCES)
def test_a_schedule_stays_small_and_has_the_process_that_wrote(
    schedule: WriteSchedule, writer: str, turn: Turn, ahead_ms: dict[str, int]
) -> None:
    after = schedule.after_write(writer, turn, ahead_ms)
    assert after.writers[writer] == turn
    assert len(after.writers) <= MAX_WRITERS


def test_a_process_that_stopped_is_forgotten() -> None:
    schedule = WriteSchedule().after_write("a", Turn(1000, 20, 15), {}).after_write("b", Turn(2000, 20, 15), {})
    assert set(schedule.after_write("b", Turn(1000 + FORGET_MS, 20, 15), {}).writers) == {"b"}


def test_the_only_writer_leaves_a_turn_free() -> None:
    """Otherwise another one, which has to read first, would never be able to write for the first time."""
    schedule = WriteSchedule().after_write("a", Turn(1000, 20, 15), {})
    assert not schedule.has_others("a")
    assert schedule.next_start_ms("a", 1005, {}) == 1020
    assert schedule.next_start_ms("a", 1300, {}) == 1300
    assert schedule.next_start_ms("b", 1005, {}) == 1005


def test_writers_without_a_pause_leave_one_after_a_second() -> None:
    """It ends with the first write, or with its time."""
    schedule, now_ms = WriteSchedule(), 0
    while schedule.busy_ms < BUSY_MS:
        schedule, now_ms = schedule.after_write("a", Turn(now_ms, 20, 15), {}), now_ms + 20
    assert schedule.next_start_ms("a", now_ms, {}) == now_ms + PAUSE_MS
    assert schedule.after_write("b", Turn(now_ms + 5, 20, 15), {}).busy_ms == 0
    assert schedule.after_write("a", Turn(now_ms + PAUSE_MS, 20, 15), {}).busy_ms == 0
