"""Many pods at once: none gets the GPU, memory or limits of another."""

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
# Two hundred pods keep two CPU cores busy for minutes.
MANY_PODS_S = 400.0


class ExpectedPod(Struct, frozen=True):
    """A pod, and the card and memory units that each of its containers is to get."""

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


def expected_pods(count: int, cores: int) -> list[ExpectedPod]:
    """Describe pods with equal cores, whose memory and cards vary; every second one has two containers.

    Containers are spread evenly over the cards, so that all fit.
    """
    numbers = itertools.count()

    def part() -> tuple[int, int]:
        number = next(numbers)
        return number % CARDS, 1 + number % 3

    return [
        ExpectedPod(f"pod-{number}", cores, tuple(part() for _ in range(1 + number % 2))) for number in range(count)
    ]


class ShortPods(Background):
    """Creates pods that end at once, so that the kubelet frees device IDs while it assigns others."""

    def __init__(self, node: GpuNode) -> None:
        super().__init__()
        self._node = node
        self.ended = 0
        self._threads = [threading.Thread(target=self._run, name="short-pods", daemon=True)]

    def _run(self) -> None:
        number = 0
        while not self._ending.is_set():
            number += 1
            name = f"short-{number}"
            pod = self._node.create(name, container("c0", 1, 1, "true"), restartPolicy="Never")
            self._node.bind(pod, placement(c0=[(uuid(number % CARDS), 1, UNIT_MIB)]))
            self._node.wait_phase(name, "Succeeded", MANY_PODS_S)
            self._node.delete(name)
            self.ended += 1


def check(node: GpuNode, expected: ExpectedPod) -> None:
    """Every container sees its own card and limits, and nothing else."""
    for number, (card, units) in enumerate(expected.parts):
        seen = node.seen(expected.name, f"c{number}")
        minor = CARDS - 1 - card
        assert seen.devices.keys() - CONTROL == {f"/dev/nvidia{minor}"}, expected
        assert seen.devices[f"/dev/nvidia{minor}"] == f"195, {minor}"
        assert seen.visible == uuid(card), expected
        assert seen.limits is not None
        limits = seen.limits
        assert (limits.pod, limits.container, limits.cores, limits.memory_mib) == (
            expected.name,
            f"c{number}",
            expected.cores,
            units * UNIT_MIB,
        )
        assert not seen.writable


def run_many(node: GpuNode, count: int, cores: int) -> int:
    """Create pods at once and bind them in another order, while others end; returns how many ended."""
    pods = expected_pods(count, cores)
    with ShortPods(node) as short_pods, ThreadPoolExecutor(8) as pool:
        containers = [
            [container(f"c{part}", cores, units) for part, (_, units) in enumerate(each.parts)] for each in pods
        ]
        created = list(pool.map(lambda pair: node.create(pair[0].name, *pair[1]), zip(pods, containers, strict=True)))
        order = sorted(range(count), key=lambda number: number * 7 % count)
        list(pool.map(lambda number: node.bind(created[number], pods[number].placed()), order))
        for each in pods:
            node.wait_phase(each.name, "Running", MANY_PODS_S)
    for each in pods:
        check(node, each)
    assert all(node.placed(each.name) == each.placed() for each in pods), "a placement was rewritten"
    return short_pods.ended


def test_twenty_pods_at_once_each_get_their_own_cards(node: GpuNode) -> None:
    """Equal cores, different memory and cards, created at once while others end."""
    assert run_many(node, 20, 10) > 0


@pytest.mark.long
def test_two_hundred_pods_at_once_each_get_their_own_cards(
    node: GpuNode, record_property: pytest.FixtureRequest
) -> None:
    """The same, with two hundred."""
    ended = run_many(node, 200, 1)
    record_property("pods_ended_during_the_run", ended)  # type: ignore[operator]
    assert ended > 0
