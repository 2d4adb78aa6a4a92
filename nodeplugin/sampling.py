"""What containers really use of their cards, measured when somebody looks.

The driver may hang; so it is asked on a thread of its own, and whoever looks then sees what was measured last.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
from msgspec import Struct

from nodeplugin.cards import Card, CardCondition, NodeCards
from nodeplugin.cgroups import place_of
from nodeplugin.checkpoint import PodAllocation
from nodeplugin.nvml import Driver, GpuProcess, MeasuredUsage
from nodeplugin.pods import BoundPod, PodsByUid
from vcuda.placement_annotation import GpuSlice
from vcuda.request import Role

FRESH_S = 1.0
WAIT_S = 3.0


class CardSample(Struct, frozen=True):
    """A card, how it is, what it does, and what pods hold of it."""

    card: Card
    condition: CardCondition
    usage: MeasuredUsage
    cores_held: int
    held_mib: int


class ContainerSample(Struct, frozen=True):
    """A container on one of its cards: what it was given, and the processes it has there."""

    pod: BoundPod
    container: str
    card: Card
    given: GpuSlice
    processes: tuple[GpuProcess, ...]

    @property
    def used_mib(self) -> int:
        """The memory it has."""
        return sum(each.memory_mib for each in self.processes)

    @property
    def utilization(self) -> int:
        """Its part of the card's time, in percent."""
        return min(100, sum(each.utilization for each in self.processes))


class Sample(Struct, frozen=True):
    """All of it at one moment."""

    at: float = 0.0
    cards: tuple[CardSample, ...] = ()
    containers: tuple[ContainerSample, ...] = ()
    # Processes on cards that belong to no container with a part of that card.
    strangers: tuple[tuple[Card, GpuProcess], ...] = ()


class Sampler:
    """Measures on demand."""

    def __init__(
        self,
        driver: Driver,
        node_cards: NodeCards,
        known: Callable[[], PodsByUid],
        holds: Callable[[], Mapping[str, PodAllocation]],
        proc: Path = Path("/proc"),
    ) -> None:
        self._driver, self._node_cards, self._known, self._holds, self._proc = driver, node_cards, known, holds, proc
        # Guards the last sample, and wakes those who wait for the next.
        self._done = threading.Condition()
        self._last = Sample()
        self._is_measuring = False
        self._log = structlog.get_logger()

    def sample(self) -> Sample:
        """Give a sample of this moment, or the last one if the driver takes too long."""
        with self._done:
            if self._last.cards and time.monotonic() - self._last.at < FRESH_S:
                return self._last
            if not self._is_measuring:
                self._is_measuring = True
                threading.Thread(target=self._measure, name="sampler", daemon=True).start()
            before = self._last
            self._done.wait_for(lambda: self._last is not before, WAIT_S)
            return self._last

    def _measure(self) -> None:
        try:
            usages = [(card, self._driver.usage(card)) for card in self._node_cards.cards()]
            made = put_together(usages, self._node_cards, self._known(), self._holds(), self._proc)
        except Exception:  # the outermost frame of the thread
            self._log.exception("not_measured")
            made = None
        with self._done:
            self._is_measuring = False
            if made is not None:
                self._last = made
            self._done.notify_all()


def put_together(
    usages: list[tuple[Card, MeasuredUsage]],
    node_cards: NodeCards,
    known: PodsByUid,
    holds: Mapping[str, PodAllocation],
    proc: Path,
) -> Sample:
    """Find the container of every process, and what each was given."""
    cards: list[CardSample] = []
    containers: list[ContainerSample] = []
    strangers: list[tuple[Card, GpuProcess]] = []
    for card, usage in usages:
        by_container: dict[tuple[str, str], list[GpuProcess]] = {}
        for process in usage.processes:
            place = place_of(process.pid, known, proc)
            name = known[place.uid].container_ids.get(place.container_id) if place and place.uid in known else None
            if place is None or name is None or card.uuid not in cards_of(holds, place.uid, name):
                strangers.append((card, process))
            else:
                by_container.setdefault((place.uid, name), []).append(process)
        held = [hold.usage[card.uuid] for hold in holds.values() if card.uuid in hold.usage]
        cards.append(
            CardSample(
                card,
                node_cards.condition(card.uuid),
                usage,
                sum(cores for cores, _ in held),
                sum(mib for _, mib in held),
            )
        )
        for uid, hold in holds.items():
            for name, slices in hold.placed.items():
                for given in slices:
                    if given.uuid == card.uuid and uid in known and not has_passed(known[uid], name):
                        processes = tuple(by_container.get((uid, name), ()))
                        containers.append(ContainerSample(known[uid], name, card, given, processes))
    return Sample(time.monotonic(), tuple(cards), tuple(containers), tuple(strangers))


def has_passed(pod: BoundPod, container: str) -> bool:
    """Tell whether a container is an init container whose turn is over: what it had is others' now."""
    apps = {each.name for each in pod.request.containers if each.role is Role.APP}
    is_init = any(each.name == container and each.role is Role.INIT for each in pod.request.containers)
    return is_init and bool(apps & set(pod.container_ids.values()))


def cards_of(holds: Mapping[str, PodAllocation], uid: str, container: str) -> list[str]:
    """Name the cards of a container."""
    hold = holds.get(uid)
    return hold.cards_of(container) if hold else []
