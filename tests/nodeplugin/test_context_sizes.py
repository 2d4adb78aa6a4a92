"""What a context takes, measured by a program that holds one."""

import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from nodeplugin import fake
from nodeplugin.cards import Card
from nodeplugin.context_sizes import ContextMeasurement, ContextSizes, measure_context
from nodeplugin.nvml import Driver, load_bindings
from nodeplugin.share_files import DEFAULT_CONTEXT_MIB
from tests.nodeplugin.builders import card
from tests.waiting import eventually

MODEL, DRIVER = card(0).product, "550.54.15"
UUIDS = [f"GPU-00000000-0000-0000-0000-{index:012d}" for index in range(2)]


def test_a_size_is_remembered_for_each_model_and_driver(tmp_path: Path) -> None:
    """Across restarts; what cannot be read counts as never measured."""
    sizes = ContextSizes(tmp_path)
    assert sizes.get(MODEL, DRIVER) == DEFAULT_CONTEXT_MIB
    sizes.put(MODEL, DRIVER, 410)
    again = ContextSizes(tmp_path)
    assert (again.get(MODEL, DRIVER), again.get(MODEL, "580.1")) == (410, DEFAULT_CONTEXT_MIB)
    assert (again.was_attempted(MODEL, DRIVER), again.was_attempted(MODEL, "580.1")) == (True, False)


@pytest.mark.parametrize("content", ["[1]", "{", '{"NVIDIA A100-SXM4-40GB 550.54.15": 3}', '{"a": null}'])
def test_what_no_context_takes_is_not_believed(tmp_path: Path, content: str) -> None:
    """Nor what cannot be read."""
    (tmp_path / "measured-contexts.json").write_text(content)
    assert ContextSizes(tmp_path).get(MODEL, DRIVER) == DEFAULT_CONTEXT_MIB


def installed(folder: Path, *contexts_mib: int) -> tuple[Path, Driver]:
    """Install a fake driver of which each card takes so much for a context."""
    described = [
        {"uuid": uuid, "memoryMiB": 8192, "contextMiB": mib} for uuid, mib in zip(UUIDS, contexts_mib, strict=False)
    ]
    library = fake.install_cuda(folder, {"driver": DRIVER, "cards": described})
    driver = Driver(folder / "libnvidia-ml.so.1", load_bindings()).open()
    driver.read_cards(driver.count_cards())
    return library, driver


def memory_of(driver: Driver, of: Card, pid: int) -> int | None:
    return next((each.memory_mib for each in driver.usage(of).processes or () if each.pid == pid), None)


def test_a_context_is_measured_on_the_card_that_is_meant(tmp_path: Path) -> None:
    """From outside, as NVML shows the process; nothing of it is left."""
    library, driver = installed(tmp_path, 210, 340)
    cards = [card(index, uuid=uuid) for index, uuid in enumerate(UUIDS)]
    measured = [measure_context(library, each, lambda of, pid: memory_of(driver, of, pid)) for each in cards]
    assert measured == [210, 340]
    eventually(lambda: not any(driver.usage(each).processes for each in cards), "the programs to be gone")


def test_a_context_that_cannot_be_created_has_no_size(tmp_path: Path) -> None:
    """As on a card that is full; or of a library that is none, or a card that the driver does not have."""
    library, _ = installed(tmp_path, 9000)
    full, foreign = card(0, uuid=UUIDS[0]), card(0, uuid="GPU-9")
    assert measure_context(library, full, lambda *_: 1) is None
    assert measure_context(library, foreign, lambda *_: 1) is None
    assert measure_context(tmp_path / "missing.so", full, lambda *_: 1) is None


class Measured:
    """Records which cards are measured."""

    def __init__(self, answer: int | None = 200) -> None:
        self.cards: list[str] = []
        self._answer, self._lock = answer, threading.Lock()

    def __call__(self, of: Card) -> int | None:
        with self._lock:
            self.cards.append(of.uuid)
        return self._answer


def test_each_model_is_measured_once(tmp_path: Path) -> None:
    """On a card that is free, as soon as there is one; not what is known."""
    t4, l4 = replace(card(2), product="Tesla T4"), replace(card(3), product="NVIDIA L4")
    cards, busy = [card(0), card(1), t4, l4], {card(0).uuid, l4.uuid}
    sizes, measured = ContextSizes(tmp_path), Measured()
    sizes.put(t4.product, DRIVER, 110)
    measurement = ContextMeasurement(sizes, lambda: cards, lambda: DRIVER, measured, lambda each: each.uuid not in busy)
    measurement.start()
    eventually(lambda: sizes.get(MODEL, DRIVER) == 200, "the measurement")
    measurement.start()
    assert measured.cards == ["GPU-1"]
    busy.clear()
    measurement.start()
    eventually(lambda: sizes.get(l4.product, DRIVER) == 200, "the card to be free")
    assert sizes.get(t4.product, DRIVER) == 110


@pytest.mark.parametrize("answer", [None, 3, 100_000])
def test_what_cannot_be_measured_is_not_tried_again(tmp_path: Path, answer: int | None) -> None:
    """Also after a restart: the attempt may have been what ended the plugin."""
    measured = Measured(answer)
    for _ in range(3):
        sizes = ContextSizes(tmp_path)
        ContextMeasurement(sizes, lambda: [card(0)], lambda: DRIVER, measured, lambda _: True).start()
        eventually(lambda: measured.cards == ["GPU-0"], "the attempt")
        assert sizes.get(MODEL, DRIVER) == DEFAULT_CONTEXT_MIB


def test_nothing_is_measured_without_a_driver(tmp_path: Path) -> None:
    measured = Measured()
    ContextMeasurement(ContextSizes(tmp_path), lambda: [card(0)], lambda: "", measured, lambda _: True).start()
    assert measured.cards == []
