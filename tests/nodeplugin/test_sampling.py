"""What is measured of cards of which one hangs, and how old it may be."""

import threading
from pathlib import Path

import pytest

from nodeplugin import sampling
from nodeplugin.cards import Card, NodeCards
from nodeplugin.checkpoint import PodAllocation
from nodeplugin.metrics import Metrics
from nodeplugin.nvml import Driver, MeasuredUsage
from nodeplugin.sampling import Sampler
from tests.nodeplugin.builders import app, bound, card
from tests.waiting import eventually
from vcuda.placement_annotation import GpuSlice

UID = "uid-train"
ALLOCATION = PodAllocation(
    uid=UID,
    namespace="team",
    name="train",
    placed={"a": (GpuSlice("GPU-0", 50, 1024), GpuSlice("GPU-1", 50, 1024))},
    usage={"GPU-0": (50, 1024), "GPU-1": (50, 1024)},
)


class HangingDriver(Driver):
    """A driver that answers for GPU-1 only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = threading.Event()
        self.measured: list[str] = []

    def usage(self, card: Card) -> MeasuredUsage:
        self.measured.append(card.uuid)
        if card.uuid == "GPU-1":
            assert self.may_answer.wait(60)
        return MeasuredUsage(utilization=10, used_mib=100, processes=())


class Sampled:
    """Two cards with a sampler, of which GPU-1 hangs."""

    def __init__(self, folder: Path) -> None:
        self.driver, self.node_cards = HangingDriver(), NodeCards()
        self.node_cards.update([card(0), card(1)])
        pods = {UID: bound("train", app("a"))}
        self.sampler = Sampler(self.driver, self.node_cards, lambda: pods, lambda: {UID: ALLOCATION}, folder)

    def series(self) -> dict[tuple[str, str], float]:
        """The values of each card, by metric and uuid."""
        metrics = Metrics("n1", self.sampler.sample, dict, dict)
        return {
            (each.name, each.labels["uuid"]): each.value
            for family in metrics.collect()
            for each in family.samples
            if "uuid" in each.labels
        }


@pytest.fixture
def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sampled:
    monkeypatch.setattr(sampling, "WAIT_S", 1.0)
    return Sampled(tmp_path)


def test_a_card_that_hangs_is_unhealthy_and_of_unknown_usage(sampled: Sampled) -> None:
    """The other card has values, and its own containers none that would claim to be measured."""
    sampled.node_cards.set_fault("GPU-1", "no answer from the driver for 10 s")
    values = sampled.series()
    used = [
        "quotient_gpu_utilization_ratio",
        "quotient_gpu_memory_used_bytes",
        "quotient_gpu_foreign_processes",
        "quotient_container_memory_used_bytes",
        "quotient_container_utilization_ratio",
    ]
    assert [values["quotient_gpu_healthy", f"GPU-{index}"] for index in range(2)] == [1, 0]
    assert [name for name in used if (name, "GPU-0") not in values] == []
    assert [name for name in used if (name, "GPU-1") in values] == []
    assert values["quotient_gpu_cores_allocated", "GPU-1"] == 50
    assert values["quotient_container_cores", "GPU-1"] == 50
    names = {
        each.name for family in Metrics("n", sampled.sampler.sample, dict, dict).collect() for each in family.samples
    }
    assert "container_request_gpu_memory" in names
    sampled.driver.may_answer.set()


def test_a_total_of_which_a_part_is_unknown_is_omitted(sampled: Sampled) -> None:
    """A container with a card that hangs uses more than what is known."""
    samples = {
        each.labels["gpu_memory"]
        for family in Metrics("n1", sampled.sampler.sample, dict, dict).collect()
        for each in family.samples
        if each.name == "container_gpu_memory_total"
    }
    assert samples == {"gpu0"}
    sampled.driver.may_answer.set()


def test_a_condition_that_changed_since_the_measurement_is_shown(sampled: Sampled) -> None:
    """The measurement itself may be used for a second."""
    sampled.driver.may_answer.set()
    assert sampled.series()["quotient_gpu_healthy", "GPU-1"] == 1
    sampled.node_cards.set_fault("GPU-1", "XID 79")
    assert sampled.series()["quotient_gpu_healthy", "GPU-1"] == 0
    assert sorted(sampled.driver.measured) == ["GPU-0", "GPU-1"]


def test_a_card_that_answers_again_is_measured_again(sampled: Sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second call is made beside one that hangs."""
    monkeypatch.setattr(sampling, "MAX_AGE_S", 0.0)
    for _ in range(3):
        assert [each.usage.used_mib for each in sampled.sampler.sample().cards] == [100, None]
    assert sampled.driver.measured.count("GPU-1") == 1
    sampled.driver.may_answer.set()
    eventually(lambda: sampled.sampler.sample().cards[1].usage.used_mib == 100, "the card to be measured")
