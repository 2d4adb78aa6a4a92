"""How long to wait before trying again: exponential backoff with jitter.

Loops that run in many processes take their delays from here, so that they grow alike and so that replicas which failed
at the same moment (an API server restarted, say) do not all come back at the same moment. The certificate controller
has a fixed delay: only the leader runs it.
"""

import random

from msgspec import Struct

# Above this the delay is at its maximum in any sensible configuration, and the power of two stays a small number.
MAX_DOUBLINGS = 30


class Backoff(Struct, frozen=True):
    """Delays that double from `first_s` up to `max_s`, each multiplied by a random factor between `jitter`'s bounds."""

    first_s: float
    max_s: float
    jitter: tuple[float, float] = (0.5, 1.0)

    def __post_init__(self) -> None:
        if not 0 < self.first_s <= self.max_s:
            raise ValueError(f"backoff needs 0 < first_s <= max_s, got {self.first_s} and {self.max_s}")
        if not 0 <= self.jitter[0] <= self.jitter[1]:
            raise ValueError(f"backoff needs 0 <= low <= high for its jitter, got {self.jitter}")

    def delay_s(self, failures: int) -> float:
        """Return the seconds to wait after this many consecutive failures; the first failure waits `first_s`."""
        doublings = min(max(failures - 1, 0), MAX_DOUBLINGS)
        return jittered(min(self.first_s * 2**doublings, self.max_s), *self.jitter)


def jittered(seconds: float, low: float = 0.8, high: float = 1.0) -> float:
    """Return an interval multiplied by a random factor, for periodic work that replicas should not do in step."""
    return seconds * random.uniform(low, high)
