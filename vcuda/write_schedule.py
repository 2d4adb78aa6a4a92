"""When each of several processes may write one ledger.

Of the writers that read one version of a ledger and write at the same moment, all but one get a conflict. So a ledger
has a schedule, which every process reads alike: the process that has not written for longest may write first, each of
the others after the turns of those before it, and so on in a circle. Only efficiency depends on that: the
compare-and-swap decides.
"""

from collections.abc import Mapping

from msgspec import Struct

# A process that has not written for this long has no turn.
FORGET_MS = 10_000
# More than the replicas of webhook and scheduler that write one ledger within that time.
MAX_WRITERS = 16
# Bounds of a turn's length.
MIN_TURN_MS, MAX_TURN_MS = 10, 1000
# The part of its turn in which a process may start to write: what starts later would end in the turn of the next one.
START_PART = 0.5
# The same for the process whose turn is first after a write.
FIRST_PART = 2
# A process without a turn, as the controller or one that has just started, needs a time without writes that is longer
# than its own read and write. After BUSY_MS with shorter ones, all others leave it one.
BUSY_MS, PAUSE_MS = 1000, 150


class Turn(Struct, frozen=True, array_like=True):
    """When a process began its last write, on its own clock, how long its turns are, and how long its writes take."""

    at_ms: int
    length_ms: int
    takes_ms: int


class WriteSchedule(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The last turn of each process, and for how long there was no pause.

    Clocks of nodes differ: methods take by how much the clock of each other process is ahead, as far as it is known.
    """

    writers: dict[str, Turn] = {}
    busy_ms: int = 0

    def after_write(self, writer: str, turn: Turn, ahead_ms: Mapping[str, int]) -> "WriteSchedule":
        """Return the schedule after a write of this process, whose turn that was."""
        now_ms = turn.at_ms
        others = {each: turn for each, turn in self.writers.items() if each != writer}
        recent = sorted(
            (each for each, turn in others.items() if now_ms - corrected_ms(each, turn, ahead_ms) < FORGET_MS),
            key=lambda each: corrected_ms(each, others[each], ahead_ms),
        )[1 - MAX_WRITERS :]
        idle_ms = now_ms - self._last_ms(now_ms, ahead_ms)
        # The pause is over with the first write, of whichever process.
        busy_ms = 0 if idle_ms >= PAUSE_MS or self.busy_ms >= BUSY_MS else self.busy_ms + max(0, idle_ms)
        return WriteSchedule({each: others[each] for each in recent} | {writer: turn}, busy_ms)

    def has_others(self, writer: str) -> bool:
        return len(self.writers) > (writer in self.writers)

    def next_start_ms(self, writer: str, now_ms: int, ahead_ms: Mapping[str, int]) -> int:
        """Return when this process may start to write, from now on.

        The only writer leaves a turn free after each write, so that another one can write for the first time.
        """
        own = self.writers.get(writer)
        last_ms = self._last_ms(now_ms, ahead_ms)
        # A writer without a turn has to try. So does one that knows nothing of the last one's clock.
        if own is None or last_ms > now_ms:
            return now_ms
        order = sorted(self.writers, key=lambda each: corrected_ms(each, self.writers[each], ahead_ms))
        lengths_ms = [self.writers[each].length_ms for each in order]
        position = order.index(writer)
        pause_ms = PAUSE_MS if self.busy_ms >= BUSY_MS else 0
        first_ms = last_ms + lengths_ms[-1] + pause_ms + sum(lengths_ms[:position])
        circle_ms = sum(lengths_ms)
        if position == 0 and now_ms < first_ms + FIRST_PART * own.length_ms:
            # Late, but as the turns move with every write, it could be late again and again. If it is later, there were
            # no writes for a while: then others are as likely to begin one at this moment.
            return max(now_ms, first_ms)
        missed = -((first_ms + int(START_PART * own.length_ms) - now_ms) // circle_ms)
        return max(now_ms, first_ms + max(0, missed) * circle_ms)

    def _last_ms(self, now_ms: int, ahead_ms: Mapping[str, int]) -> int:
        """Return when the last write began; long ago if there was none."""
        times_ms = (corrected_ms(each, turn, ahead_ms) for each, turn in self.writers.items())
        return max(times_ms, default=now_ms - FORGET_MS)


def corrected_ms(writer: str, turn: Turn, ahead_ms: Mapping[str, int]) -> int:
    return turn.at_ms - ahead_ms.get(writer, 0)
