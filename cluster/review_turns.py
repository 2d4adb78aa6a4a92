"""Decides which bearer tokens are reviewed when: few at once, and few of each client that are refused.

Where more tokens of a client arrive than may be reviewed, one of them waits, and each newcomer takes its place with the
chance that all of them have had the same: a client behind the same address as a flood of bad tokens gets its turn.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from random import SystemRandom

from cluster.bounded_cache import BoundedCache
from vcuda.decision import Unavailable

# How many refusals a client may have at once, and then again with time.
REFUSALS, REFUSALS_PER_S = 10, 1.0
# How many reviews may be in progress, of all clients and of each, and how long another one waits for its turn.
MAX_REVIEWS, MAX_REVIEWS_OF_CLIENT, REVIEW_WAIT_S = 4, 2, 1.0


# Unpredictable: a client must not choose the moment at which its token is drawn.
RANDOM = SystemRandom()


class TooManyRefusals(Exception):  # noqa: N818 - the client's mistake
    """A client has sent too many tokens that were refused."""


class Waiting:
    """The token of a client that waits for its turn; `arrivals` counts all that have wanted it."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = arrivals


class ReviewTurns:
    """Gives turns to clients, which are named by any text. Thread-safe."""

    def __init__(self, clock: Callable[[], float], wait_s: float, random: Callable[[], float] = RANDOM.random) -> None:
        self._clock, self._wait_s, self._random = clock, wait_s, random
        # Guards the fields below; notified when a turn ends, or a token loses its place.
        self._changed = threading.Condition()
        # How many more refusals each client may have. One that is not cached any more has all of them again.
        self._refusals_left: BoundedCache[float] = BoundedCache(REFUSALS / REFUSALS_PER_S)
        self._in_progress: Counter[str] = Counter()
        # At most one for each client: those that wait hold a thread each.
        self._waiting: dict[str, Waiting] = {}

    def begin(self, client: str) -> None:
        """Wait for a turn; raises TooManyRefusals, or Unavailable if too many reviews are in progress."""
        with self._changed:
            if client in self._waiting or not self._may_begin(client):
                self._wait(client)
            self._waiting.pop(client, None)
            self._in_progress[client] += 1
            # Taken back if the token is accepted: others must not begin meanwhile as if nothing had been refused.
            self._spend(client, 1)

    def end(self, client: str, *, is_refused: bool) -> None:
        with self._changed:
            self._in_progress -= Counter([client])
            if not is_refused:
                self._spend(client, -1)
            self._changed.notify_all()

    def _wait(self, client: str) -> None:
        before = self._waiting.get(client)
        arrivals = before.arrivals + 1 if before is not None else 1
        if before is not None:
            before.arrivals = arrivals
            if not is_drawn(arrivals, self._random()):
                raise self._refusal(client)
        place = self._waiting[client] = Waiting(arrivals)
        self._changed.notify_all()
        deadline = time.monotonic() + self._wait_s
        while not self._may_begin(client):
            remaining_s = deadline - time.monotonic()
            if remaining_s > 0:
                refill_s = max(0.01, (1 - self._left(client)) / REFUSALS_PER_S)
                self._changed.wait(min(remaining_s, refill_s))
            if self._waiting.get(client) is not place:
                raise self._refusal(client)
            if remaining_s <= 0:
                del self._waiting[client]
                raise self._refusal(client)

    def _refusal(self, client: str) -> Exception:
        if self._left(client) < 1:
            return TooManyRefusals("too many tokens of this client were refused")
        return Unavailable("too many tokens are being reviewed")

    def _may_begin(self, client: str) -> bool:
        return (
            self._left(client) >= 1
            and self._in_progress[client] < MAX_REVIEWS_OF_CLIENT
            and self._in_progress.total() < MAX_REVIEWS
        )

    def _left(self, client: str) -> float:
        now = self._clock()
        stored_at, left = self._refusals_left.get(client, now) or (now, float(REFUSALS))
        return min(REFUSALS, left + (now - stored_at) * REFUSALS_PER_S)

    def _spend(self, client: str, count: int) -> None:
        self._refusals_left.put(client, self._left(client) - count, self._clock())


def is_drawn(arrivals: int, random: float) -> bool:
    """Whether the last of several arrivals gets the place of those before, by a random number from 0 up to 1.

    With 1 in `arrivals` for each that comes, all of them have the same chance in the end.
    """
    return random * arrivals < 1
