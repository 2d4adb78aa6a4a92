"""Many pods at once: not one of them gets another's GPU, memory or limits."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec import Struct

from tests.background import Background
from tests.node.driver import uuid
from tests.node.node import CONTROL, GpuNode, container, placement
from vcuda.placement_annotation import GpuSlice

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

CARDS, UNIT_MIB = 4, 256
# Two hundred pods keep two cores busy for minutes.
CROWD_S = 400.0


class Wanted(Struct, frozen=True):
    """A pod and what each of its containers is to get: a card and units of memory."""

    name: str
    cores: int
    parts: tuple[tuple[int, int], ...]

    def placed(self) -> dict[str, tuple[GpuSlice, ...]]:
        return placement(
            **{
                f"c{number}": [(uuid(card), self.cores, units * UNIT_MIB)]
                for number, (card, units) in enumerate(self.parts)
            }
        )


def wanted_pods(count: int, cores: int) -> list[Wanted]:
    """Describe pods of equal cores, with other memory and cards than their neighbours; every other has two containers.

    Containers are dealt out evenly, so that all cards have room for theirs.
    """
    dealt = itertools.count()

    def part() -> tuple[int, int]:
        number = next(dealt)
        return number % CARDS, 1 + number % 3

    return [Wanted(f"pod-{number}", cores, tuple(part() for _ in range(1 + number % 2))) for number in range(count)]


class Passing(Background):
    """Pods that come and end all the time, so that the kubelet frees ids while it gives others away."""

    def __init__(self, node: GpuNode) -> None:
        super().__init__()
        self._node = node
        self.ended = 0
        self._threads = [threading.Thread(target=self._run, name="passing", daemon=True)]

    def _run(self) -> None:
        number = 0
        while not self._ending.is_set():
            number += 1
            name = f"passing-{number}"
            pod = self._node.create(name, container("c0", 1, 1, "true"), restartPolicy="Never")
            self._node.bind(pod, placement(c0=[(uuid(number % CARDS), 1, UNIT_MIB)]))
            self._node.wait_phase(name, "Succeeded", CROWD_S)
            self._node.delete(name)
            self.ended += 1


def check(node: GpuNode, wanted: Wanted) -> None:
    """Every container sees its own card and limits, and nothing else."""
    for number, (card, units) in enumerate(wanted.parts):
        seen = node.seen(wanted.name, f"c{number}")
        minor = CARDS - 1 - card
        assert seen.devices.keys() - CONTROL == {f"/dev/nvidia{minor}"}, wanted
        assert seen.devices[f"/dev/nvidia{minor}"] == f"195, {minor}"
        assert seen.visible == uuid(card), wanted
        assert seen.limits is not None
        found = seen.limits
        assert (found.pod, found.container, found.cores, found.memory_mib) == (
            wanted.name,
            f"c{number}",
            wanted.cores,
            units * UNIT_MIB,
        )
        assert not seen.writable


def crowd(node: GpuNode, count: int, cores: int) -> int:
    """Make pods at once and bind them in another order, while others end; tells how many did."""
    everyone = wanted_pods(count, cores)
    with Passing(node) as passing, ThreadPoolExecutor(8) as pool:
        scripts = [
            [container(f"c{part}", cores, units) for part, (_, units) in enumerate(each.parts)] for each in everyone
        ]
        made = list(pool.map(lambda pair: node.create(pair[0].name, *pair[1]), zip(everyone, scripts, strict=True)))
        order = sorted(range(count), key=lambda number: number * 7 % count)
        list(pool.map(lambda number: node.bind(made[number], everyone[number].placed()), order))
        for each in everyone:
            node.wait_phase(each.name, "Running", CROWD_S)
    for each in everyone:
        check(node, each)
    assert all(node.placed(each.name) == each.placed() for each in everyone), "a placement was rewritten"
    return passing.ended


def test_twenty_pods_at_once_each_get_their_own(node: GpuNode) -> None:
    """Equal cores, other memory and cards, made at once while others end: every container sees what it was given."""
    assert crowd(node, 20, 10) > 0


@pytest.mark.long
def test_two_hundred_pods_at_once_each_get_their_own(node: GpuNode, record_property: pytest.FixtureRequest) -> None:
    """The same with two hundred."""
    ended = crowd(node, 200, 1)
    record_property("pods_ended_meanwhile", ended)  # type: ignore[operator]
    assert ended > 0
