"""Tells the library in containers what NVML shows of them beyond what it has counted: the residual.

Code of modules, heaps, and whatever no hook sees: it counts against the container's memory as well. A container can
make its own residual too small, by what it writes as its account, and no other's.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec import Struct

from nodeplugin.sampling import ContainerSample, Sample
from nodeplugin.share_files import AccountedUsage, read_limits, read_usage, update_limits
from vcuda.isolation import Rung
from vcuda.memory_units import MIB

PERIOD_S = 2.0
# NVML lags behind what a process does. Of so many samples the least counts: one that a program has just freed something
# in shows more than there is.
SAMPLES = 4
# CPU time to read one container's account: 0.1 ms, unless its programs make it slow.
SLOW_READ_S, ROUNDS_LEFT_OUT = 0.01, 30
STALE_S = 120.0


class Observation(Struct, frozen=True):
    """A container on one card: what NVML shows, and what its processes have accounted."""

    measured_mib: int
    accounted_bytes: int


def residual_bytes(observations: Collection[Observation]) -> int:
    """Return what no hook has counted: the least over the last samples, so that what NVML shows late does not count."""
    return max(0, min((each.measured_mib * MIB - each.accounted_bytes for each in observations), default=0))


class MemoryFeedback:
    """Updates the limits of preloaded containers on a thread of its own.

    `token_of` returns a container's token, `context_mib` what a context of a card takes.
    """

    def __init__(
        self,
        containers: Path,
        account_of: Callable[[str], Path],
        sample: Callable[[], Sample],
        token_of: Callable[[ContainerSample], str],
        context_mib: Callable[[str], int],
    ) -> None:
        self._containers, self._account_of, self._context_mib = containers, account_of, context_mib
        self._sample, self._token_of = sample, token_of
        self._observed: dict[tuple[str, str], deque[Observation]] = {}
        # Read by the metrics' thread; replaced as a whole.
        self.residuals: Mapping[tuple[str, str], int] = {}
        # By token: for how many rounds a container is not read.
        self._left_out: dict[str, int] = {}
        self.last_step_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-feedback", daemon=True)
        self._log = structlog.get_logger()

    @property
    def alive(self) -> bool:
        """Whether it runs and has lately told all libraries: no read of a container's files may hold it up."""
        return self._thread.is_alive() and time.monotonic() - self.last_step_at < STALE_S

    def residual(self, sample: ContainerSample) -> int | None:
        """Return what no hook has counted of a container on a card, in bytes; None if that is not known."""
        return self.residuals.get((self._token_of(sample), sample.card.uuid))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                self.step()
            except Exception:  # the outermost frame of the thread, which must not end
                self._log.exception("memory_feedback_failed")

    def step(self) -> None:
        """Observe all preloaded containers once, and tell their libraries."""
        seen: dict[tuple[str, str], deque[Observation]] = {}
        for each in self._sample().containers:
            if each.isolation.memory is Rung.PRELOAD and (token := self._token_of(each)):
                # One container's files must not stop the others: its folder may just be removed.
                with suppress(OSError):
                    self._observe(token, each, seen)
        self._observed = seen
        self.residuals = {key: residual_bytes(observations) for key, observations in seen.items()}
        self._left_out = {token: rounds - 1 for token, rounds in self._left_out.items() if rounds > 1}
        self.last_step_at = time.monotonic()

    def _read_account(self, token: str, cards: int) -> AccountedUsage | None:
        """Read a container's account; one that takes long, as with many locks on it, is left out for a while."""
        if token in self._left_out:
            return None
        began = time.thread_time()
        accounted = read_usage(self._account_of(token), cards)
        if time.thread_time() - began > SLOW_READ_S:
            self._left_out[token] = ROUNDS_LEFT_OUT
        return accounted

    def _observe(self, token: str, sample: ContainerSample, seen: dict[tuple[str, str], deque[Observation]]) -> None:
        folder = self._containers / token
        limits = read_limits(folder)
        index = next((number for number, card in enumerate(limits) if card.uuid == sample.card.uuid), None)
        accounted = self._read_account(token, len(limits))
        if index is None or accounted is None or (measured_mib := sample.measured_mib) is None:
            return
        observations = self._observed.get((token, sample.card.uuid), deque(maxlen=SAMPLES))
        observations.append(Observation(measured_mib, accounted.card_bytes[index]))
        seen[token, sample.card.uuid] = observations
        if len(observations) == SAMPLES:
            context_bytes = self._context_mib(sample.card.uuid) * MIB
            update_limits(folder, index, context_bytes, residual_bytes(observations))
