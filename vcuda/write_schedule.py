"""When each of several processes may write one ledger.

Of the writers that read one version of a ledger and write at the same moment, all but one get a conflict. So a ledger
has a schedule, which every process reads alike: the process that has not written for longest may write first, each of
the others one turn later, and so on in a circle. Only efficiency depends on that, and on the clocks of nodes: the
compare-and-swap decides.
"""

from msgspec import Struct

# A process that has not written for this long has no turn.
FORGET_MS = 10_000
# More than the replicas of webhook and scheduler that write one ledger within that time.
MAX_WRITERS = 16
# Bounds of a turn, which is as long as most reads and writes of a ledger take.
MIN_TURN_MS, MAX_TURN_MS = 10.0, 100.0
# The part of a turn in which a write may start: one that starts later would end in the turn of the next writer.
START_PART = 0.5
# How much the measurement of one writer changes the length of turns. If that changed much from one version to the next,
# the turns of processes that know different versions would overlap.
SMOOTHING = 0.1


class WriteSchedule(Struct, frozen=True, rename="camel", omit_defaults=True):
    """When processes began their last write, in milliseconds since the epoch, and how long a turn is from now on."""

    writers: dict[str, int] = {}
    turn_ms: float = 0.0

    def after_write(self, writer: str, began_ms: int, took_ms: float) -> "WriteSchedule":
        """Return the schedule after a write; `took_ms` is what most writes of this process take."""
        known = self.writers.items()
        writers = {each: at_ms for each, at_ms in known if began_ms - at_ms < FORGET_MS} | {writer: began_ms}
        recent = sorted(writers, key=writers.__getitem__)[-MAX_WRITERS:]
        turn_ms = self.turn_ms + SMOOTHING * (took_ms - self.turn_ms) if self.turn_ms else took_ms
        turn_ms = round(min(max(turn_ms, MIN_TURN_MS), MAX_TURN_MS), 1)
        return WriteSchedule({each: writers[each] for each in recent}, turn_ms)

    def has_others(self, writer: str) -> bool:
        return len(self.writers) > (writer in self.writers)

    def next_start_ms(self, writer: str, now_ms: int) -> int:
        """Return when this process may start to write, from now on.

        The only writer leaves a turn free after each write, so that another one can write for the first time.
        """
        last_ms = max(self.writers.values(), default=0)
        # A writer without a turn has to try. So does one whose clock is behind: it would wait for that difference.
        if writer not in self.writers or last_ms > now_ms:
            return now_ms
        before = sum(at_ms < self.writers[writer] for at_ms in self.writers.values())
        first_ms = last_ms + int((before + 1) * self.turn_ms)
        if before == 0:
            return max(
                now_ms, first_ms
            )  # even late: as the turns move with every write, it could be late again and again
        circle_ms = int(len(self.writers) * self.turn_ms)
        missed = -((first_ms + int(START_PART * self.turn_ms) - now_ms) // circle_ms)
        return max(now_ms, first_ms + max(0, missed) * circle_ms)
