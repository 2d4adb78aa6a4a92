"""Tells the library in containers what NVML shows of them: what a context really takes, and what no hook sees.

Both are measured from outside. The size of a context is learned for each model and driver, as the least that a process
was seen to take beyond what it has allocated: the code of its modules can only add to that. What remains, the residual,
counts against the container's memory as well.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec import Struct

from nodeplugin.checkpoint import replace_file
from nodeplugin.sampling import ContainerSample, Sample
from nodeplugin.share_files import (
    DEFAULT_CONTEXT_MIB,
    AccountedUsage,
    CardLimits,
    read_limits,
    read_usage,
    update_limits,
)
from vcuda.isolation import Rung
from vcuda.memory_units import MIB

PERIOD_S = 2.0
STORED = "context-sizes.json"
# NVML lags behind what a process does. Of so many samples the least counts: one that a program has just freed something
# in shows more than there is.
SAMPLES = 4
# A context of less than this does not exist; more than this is not a context alone.
SMALLEST_CONTEXT_MIB, LARGEST_CONTEXT_MIB = 16, 2048


class ContextSizes:
    """What a context takes, by model and driver; kept across restarts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STORED
        self._known: dict[str, int] = {}
        with suppress(OSError, ValueError, AttributeError):
            stored = json.loads(self._path.read_text())
            self._known = {str(key): int(value) for key, value in stored.items()}

    def get(self, model: str, driver: str) -> int:
        return self._known.get(f"{model} {driver}", DEFAULT_CONTEXT_MIB)

    def learn(self, model: str, driver: str, measured_mib: int) -> None:
        """Keep the least that was measured."""
        key = f"{model} {driver}"
        known = self._known.get(key, LARGEST_CONTEXT_MIB + 1)
        if SMALLEST_CONTEXT_MIB <= measured_mib < known:
            self._known[key] = measured_mib
            replace_file(self._path, json.dumps(self._known, sort_keys=True).encode())


class Observation(Struct, frozen=True):
    """A container on one card: what NVML shows, and what its processes have accounted.

    `processes` is 0 unless NVML shows as many as have accounted something.
    """

    measured_mib: int
    accounted_bytes: int
    processes: int


def residual_bytes(observations: Collection[Observation]) -> int:
    """Return what no hook has counted: the least over the last samples, so that what NVML shows late does not count."""
    return max(0, min((each.measured_mib * MIB - each.accounted_bytes for each in observations), default=0))


def context_mib(observations: Collection[Observation], charged_mib: int) -> int | None:
    """Return what the context of a container's only process takes; None if that cannot be told.

    Only where nothing has changed for a while: NVML shows a process that has just ended longer than the library does.
    """
    observation, *others = set(observations)
    if others or observation.processes != 1:
        return None
    return observation.measured_mib - observation.accounted_bytes // MIB + charged_mib


class MemoryFeedback:
    """Updates the limits of preloaded containers on a thread of its own. `token_of` returns a container's token."""

    def __init__(
        self,
        containers: Path,
        sizes: ContextSizes,
        sample: Callable[[], Sample],
        token_of: Callable[[ContainerSample], str],
        driver_version: Callable[[], str],
    ) -> None:
        self._containers, self._sizes = containers, sizes
        self._sample, self._token_of, self._driver_version = sample, token_of, driver_version
        self._observed: dict[tuple[str, str], deque[Observation]] = {}
        # Read by the metrics' thread; replaced as a whole.
        self.residuals: Mapping[tuple[str, str], int] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-feedback", daemon=True)
        self._log = structlog.get_logger()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

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
                self._observe(token, each, seen)
        self._observed = seen
        self.residuals = {key: residual_bytes(observations) for key, observations in seen.items()}

    def _observe(self, token: str, sample: ContainerSample, seen: dict[tuple[str, str], deque[Observation]]) -> None:
        folder = self._containers / token
        limits = read_limits(folder)
        index = next((number for number, card in enumerate(limits) if card.uuid == sample.card.uuid), None)
        accounted = read_usage(folder, len(limits))
        if index is None or accounted is None or (measured_mib := sample.measured_mib) is None:
            return
        observations = self._observed.get((token, sample.card.uuid), deque(maxlen=SAMPLES))
        observations.append(observe(measured_mib, accounted, index, len(sample.processes)))
        seen[token, sample.card.uuid] = observations
        if len(observations) < SAMPLES:
            return
        self._learn(sample, observations, limits[index])
        update_limits(
            folder,
            index,
            self._sizes.get(sample.card.product, self._driver_version()) * MIB,
            residual_bytes(observations),
        )

    def _learn(self, sample: ContainerSample, observations: Collection[Observation], limits: CardLimits) -> None:
        measured = context_mib(observations, limits.context_bytes // MIB)
        if measured is not None:
            self._sizes.learn(sample.card.product, self._driver_version(), measured)


def observe(measured_mib: int, accounted: AccountedUsage, card: int, processes: int) -> Observation:
    is_complete = processes == len(accounted.pids)
    return Observation(measured_mib, accounted.card_bytes[card], processes if is_complete else 0)
