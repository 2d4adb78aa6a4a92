"""Processes that write one ledger, on a virtual clock: few conflicts, and none is kept out."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from ledger.write_turns import WriteTurns
from vcuda.write_schedule import WriteSchedule

NAMESPACE = "team"
# What a create may wait.
DEADLINE_MS = 8000


class Writer:
    """A process that always has something to write, and needs this long to read and write. Its clock may be wrong.

    It reads when its turn begins, and its write arrives `span_ms` later. Without turns it starts again at once, as the
    controller does.
    """

    def __init__(self, span_ms: int, clock_ahead_ms: int, *, starts_ms: int, takes_turns: bool) -> None:
        self.span_ms, self.takes_turns = span_ms, takes_turns
        self.began_ms = self.starts_ms = starts_ms
        self.now_ms, self._ahead_ms = 0, clock_ahead_ms
        self.turns = WriteTurns(f"{id(self)}", lambda: self.now_ms + self._ahead_ms)
        self.writes, self.conflicts = list[int](), 0
        # The schedule that was read, its version, and when the write arrives.
        self.writing: tuple[WriteSchedule, int, int] | None = None

    @property
    def longest_wait_ms(self) -> int:
        times = [self.began_ms, *self.writes, self.now_ms]
        return max(after - before for before, after in pairwise(times))


def simulate(
    spans_ms: Sequence[int],
    clocks_ms: Sequence[int] = (),
    starts_ms: Sequence[int] = (),
    *,
    outsiders: int = 0,
    duration_ms: int = 30_000,
    pause_ms: int = 0,
) -> list[Writer]:
    """Let the processes write; the last `outsiders` of them take no turns.

    `pause_ms` is the mean of the irregular times after which a process has something to write again.
    """
    count = len(spans_ms)
    writers = [
        Writer(span, clock, starts_ms=start, takes_turns=number < count - outsiders)
        for number, (span, clock, start) in enumerate(
            zip(spans_ms, clocks_ms or [0] * count, starts_ms or [0] * count, strict=True)
        )
    ]
    stored, version, chance = WriteSchedule(), 0, random.Random(1)
    for now_ms in range(duration_ms):
        for each in writers:
            each.now_ms = now_ms
            if each.writing is not None:
                read, read_version, arrives_ms = each.writing
                if now_ms < arrives_ms:
                    continue
                each.writing = None
                began_ms = each.turns.clock_ms() - each.span_ms
                each.turns.record_attempt(began_ms)
                if read_version != version:
                    each.conflicts += 1
                    each.starts_ms = max(each.starts_ms, now_ms + (chance.randrange(10) if each.takes_turns else 0))
                    continue
                version += 1
                each.writes.append(now_ms)
                if pause_ms:
                    each.starts_ms = now_ms + int(chance.expovariate(1 / pause_ms))
                if each.takes_turns:
                    stored = each.turns.schedule_after_write(read, began_ms)
                    each.turns.observe(NAMESPACE, stored)
            elif now_ms >= each.starts_ms and (not each.takes_turns or each.turns.delay_s(NAMESPACE) <= 0):
                each.turns.observe(NAMESPACE, stored)
                if not each.takes_turns or each.turns.delay_s(NAMESPACE) <= 0:
                    each.writing = stored, version, now_ms + each.span_ms
    return writers


def conflicts_per_write(writers: Sequence[Writer]) -> float:
    return sum(each.conflicts for each in writers) / sum(len(each.writes) for each in writers)


@pytest.mark.parametrize("spans_ms", [(20,), (20, 20), (20, 20, 20), (5, 20, 40), (20,) * 6, (300, 300, 300)])
def test_one_write_in_ten_has_a_conflict_at_most(spans_ms: Sequence[int]) -> None:
    """However long writes take, and if one process is slower than the others."""
    writers = simulate(spans_ms, duration_ms=60_000)
    assert conflicts_per_write(writers) < 0.1
    assert max(each.longest_wait_ms for each in writers) < DEADLINE_MS / 2


def test_a_ledger_that_is_written_now_and_then_has_few_conflicts() -> None:
    """Nobody waits for the others then, so that two may begin at the same moment."""
    writers = simulate((20, 20, 20), duration_ms=300_000, pause_ms=300)
    assert conflicts_per_write(writers) < 0.07


@pytest.mark.parametrize("ahead_ms", [-20, 20, 50, -500, 500, 60_000, -60_000])
def test_clocks_may_differ(ahead_ms: int) -> None:
    writers = simulate((20, 20, 20), (0, ahead_ms, 0))
    assert conflicts_per_write(writers) < 0.1
    assert max(each.longest_wait_ms for each in writers) < DEADLINE_MS / 2


@pytest.mark.parametrize("span_ms", [5, 20, 40, 60, 90])
def test_a_process_that_starts_beside_a_faster_one_is_not_kept_out(span_ms: int) -> None:
    """That one uses its cached ledger, and leaves less time between its writes than the other needs."""
    writers = simulate((3, span_ms), starts_ms=(0, 5000))
    assert writers[1].longest_wait_ms < DEADLINE_MS / 2
    assert conflicts_per_write(writers) < 0.1


@pytest.mark.parametrize("span_ms", [5, 30, 60])
def test_the_controller_is_not_kept_out(span_ms: int) -> None:
    """It takes no turns: it writes rarely. Room that was freed has to be usable after 2 s."""
    writers = simulate((5, 5, 5, span_ms), outsiders=1)
    assert writers[-1].longest_wait_ms < 3000


def test_a_time_far_in_the_future_does_no_lasting_harm() -> None:
    """Of a process that ran for a moment with a wrong clock, and is gone."""
    writers = simulate((20, 20, 20), (0, 0, 30 * 86_400_000), (0, 0, 0), duration_ms=30_000)
    gone = writers[2]
    assert gone.writes
    assert conflicts_per_write(writers) < 0.1
