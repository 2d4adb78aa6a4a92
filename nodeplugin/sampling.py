"""Measures on demand what containers use of their cards.

A driver call can block for as long as hardware is broken. So each card is measured on a thread of its own, and the
usage of one that does not answer is unknown. Conditions and allocations are those of the moment in which they are read.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import structlog
from msgspec import Struct

from nodeplugin.cards import Card, CardCondition, NodeCards
from nodeplugin.cgroups import process_owner
from nodeplugin.checkpoint import PodAllocation
from nodeplugin.isolation_ladder import CardLadder
from nodeplugin.nvml import Driver, GpuProcess, MeasuredUsage
from nodeplugin.parallel_calls import ParallelCalls
from nodeplugin.pods import BoundPod, PodsByUid
from vcuda.isolation import NO_ISOLATION, Isolation
from vcuda.placement_annotation import GpuSlice
from vcuda.request import Role

# A sample this young is returned again: a scrape and a page load at the same time need one measurement.
MAX_AGE_S = 1.0
# How long a measurement waits for cards: well below the 10 s after which Prometheus gives up a scrape by default.
WAIT_S = 3.0


class CardSample(Struct, frozen=True):
    """A card: its condition, what is used of it, and what is allocated to pods."""

    card: Card
    condition: CardCondition
    usage: MeasuredUsage
    allocated_cores: int
    allocated_mib: int
    ladder: CardLadder = CardLadder()


class ContainerSample(Struct, frozen=True):
    """A container on one of its cards: the allocated slice, what enforces it, and its processes on that card.

    `is_measured` is false if the driver does not list the processes, or one of the pod cannot be attributed yet.
    """

    pod: BoundPod
    container: str
    card: Card
    allocated: GpuSlice
    processes: tuple[GpuProcess, ...]
    isolation: Isolation = NO_ISOLATION
    is_measured: bool = True

    @property
    def used_mib(self) -> int:
        """The memory of its processes, as far as it is known."""
        return sum(each.memory_mib or 0 for each in self.processes)

    @property
    def measured_mib(self) -> int | None:
        """The memory of its processes; None unless that of all of them is known."""
        is_known = self.is_measured and all(each.memory_mib is not None for each in self.processes)
        return self.used_mib if is_known else None

    @property
    def utilization(self) -> int | None:
        """In percent of the card."""
        # The driver samples each process separately, so the sum may exceed 100.
        return min(100, sum(each.utilization for each in self.processes)) if self.is_measured else None


class Sample(Struct, frozen=True):
    """All measurements of one moment."""

    cards: tuple[CardSample, ...] = ()
    containers: tuple[ContainerSample, ...] = ()
    # Processes on a card that belong to no container to which that card is allocated.
    foreign_processes: tuple[tuple[Card, GpuProcess], ...] = ()


class Sampler:
    """Takes samples on demand, one at a time. Thread-safe."""

    def __init__(
        self,
        driver: Driver,
        node_cards: NodeCards,
        pods: Callable[[], PodsByUid],
        allocations: Callable[[], Mapping[str, PodAllocation]],
        proc: Path = Path("/proc"),
    ) -> None:
        self._driver, self._node_cards, self._proc = driver, node_cards, proc
        self._pods, self._allocations = pods, allocations
        # Guards the two fields below, also while cards are measured: readers at the same time need one measurement.
        # Other threads make the calls, so it is held for WAIT_S at most.
        self._measuring = threading.Lock()
        self._usages: dict[str, MeasuredUsage] = {}
        self._measured_at = -MAX_AGE_S
        self._calls: ParallelCalls[MeasuredUsage] = ParallelCalls("usage")
        self._log = structlog.get_logger()

    def sample(self) -> Sample:
        """Return a sample whose measurements are at most MAX_AGE_S old; a card without an answer has none."""
        cards = self._node_cards.cards()
        with self._measuring:
            if time.monotonic() - self._measured_at >= MAX_AGE_S or any(
                card.uuid not in self._usages for card in cards
            ):
                self._usages = self._measure(cards)
                self._measured_at = time.monotonic()
            usages = [(card, self._usages[card.uuid]) for card in cards]
        return build_sample(usages, self._node_cards, self._pods(), self._allocations(), self._proc)

    def _measure(self, cards: Iterable[Card]) -> dict[str, MeasuredUsage]:
        usages = {card.uuid: MeasuredUsage() for card in cards}
        calls = {card.uuid: partial(self._driver.usage, card) for card in cards}
        for uuid, answer in self._calls.gather(calls, WAIT_S, WAIT_S).items():
            if error := answer.exception():
                self._log.error("measurement_failed", card=uuid, error=repr(error))
            else:
                usages[uuid] = answer.result()
        return usages


def build_sample(
    usages: list[tuple[Card, MeasuredUsage]],
    node_cards: NodeCards,
    pods: PodsByUid,
    allocations: Mapping[str, PodAllocation],
    proc: Path,
) -> Sample:
    """Attribute every process to its container, and add what is allocated."""
    cards: list[CardSample] = []
    containers: list[ContainerSample] = []
    foreign: list[tuple[Card, GpuProcess]] = []
    for card, usage in usages:
        by_container: dict[tuple[str, str], list[GpuProcess]] = {}
        # Pods with a process here whose container is not in their status yet.
        unattributed: set[str] = set()
        for process in usage.processes or ():
            owner = process_owner(process.pid, pods, proc)
            name = pods[owner.uid].container_ids.get(owner.container_id) if owner and owner.uid in pods else None
            if owner is None or name is None or card.uuid not in allocated_uuids(allocations, owner.uid, name):
                foreign.append((card, process))
                if owner is not None and name is None:
                    unattributed.add(owner.uid)
            else:
                by_container.setdefault((owner.uid, name), []).append(process)
        used = [each.usage[card.uuid] for each in allocations.values() if card.uuid in each.usage]
        cards.append(
            CardSample(
                card,
                node_cards.condition(card.uuid),
                usage,
                sum(cores for cores, _ in used),
                sum(mib for _, mib in used),
                node_cards.ladder_of(card),
            )
        )
        containers += [
            ContainerSample(
                pods[uid],
                name,
                card,
                each,
                tuple(by_container.get((uid, name), ())),
                allocation.isolation_of(name),
                is_measured=usage.processes is not None and uid not in unattributed,
            )
            for uid, allocation in allocations.items()
            for name, slices in allocation.placed.items()
            for each in slices
            if each.uuid == card.uuid and uid in pods and not is_finished_init_container(pods[uid], name)
        ]
    return Sample(tuple(cards), tuple(containers), tuple(foreign))


def is_finished_init_container(pod: BoundPod, container: str) -> bool:
    """Return whether an init container has completed, and its slice is used by the pod's app containers."""
    apps = {each.name for each in pod.request.containers if each.role is Role.APP}
    is_init = any(each.name == container and each.role is Role.INIT for each in pod.request.containers)
    # Kubernetes starts app containers only after all init containers have completed.
    return is_init and bool(apps & set(pod.container_ids.values()))


def allocated_uuids(allocations: Mapping[str, PodAllocation], uid: str, container: str) -> list[str]:
    """Return the uuids of the cards allocated to a container."""
    allocation = allocations.get(uid)
    return allocation.cards_of(container) if allocation else []
