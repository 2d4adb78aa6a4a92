"""What the preloaded library is told of what NVML shows."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from nodeplugin import memory_feedback
from nodeplugin.memory_feedback import SAMPLES, MemoryFeedback, Observation, residual_bytes
from nodeplugin.nvml import GpuProcess
from nodeplugin.sampling import ContainerSample, Sample
from nodeplugin.share_files import AccountedUsage, CardLimits, read_limits, write_limits
from tests.nodeplugin.builders import bound, card
from vcuda.isolation import Isolation, Rung
from vcuda.memory_units import MIB
from vcuda.placement_annotation import GpuSlice

LIMITS = [CardLimits("GPU-0", 1024 * MIB, 300 * MIB, 50, 50)]


def observed(*pairs: tuple[int, int]) -> list[Observation]:
    """Observations of MiB that NVML shows and MiB that are accounted."""
    return [Observation(measured, accounted * MIB) for measured, accounted in pairs]


RESIDUALS: dict[str, tuple[Sequence[tuple[int, int]], int]] = {
    "nothing beyond what is accounted": ([(500, 500)] * 4, 0),
    "modules": ([(540, 500)] * 4, 40),
    "less than is accounted, as before the first use": ([(400, 500)] * 4, 0),
    "a program has just freed memory, which NVML still shows": ([(540, 500), (540, 100), (140, 100), (140, 100)], 40),
    "no observation yet": ([], 0),
}


@pytest.mark.parametrize(("pairs", "expected_mib"), RESIDUALS.values(), ids=RESIDUALS)
def test_the_residual_is_the_least_of_the_last_samples(pairs: Sequence[tuple[int, int]], expected_mib: int) -> None:
    assert residual_bytes(observed(*pairs)) == expected_mib * MIB


def sample_of(used_mib: int, rung: Rung = Rung.PRELOAD) -> ContainerSample:
    """Return a container of one process that uses so much."""
    process = GpuProcess(pid=7, memory_mib=used_mib, utilization=0)
    allocated = GpuSlice("GPU-0", 50, 1024)
    return ContainerSample(bound("train"), "a", card(0), allocated, (process,), Isolation(rung))


def feedback_of(tmp_path: Path, sample: ContainerSample) -> MemoryFeedback:
    folder = tmp_path / "t1"
    folder.mkdir()
    write_limits(folder, LIMITS, "550.54.15", "")
    return MemoryFeedback(
        tmp_path,
        lambda token: tmp_path / token / "account",
        lambda: Sample(containers=(sample,)),
        lambda _: "t1",
        lambda _: 120,
    )


def account(monkeypatch: pytest.MonkeyPatch, accounted_mib: int) -> None:
    usage = AccountedUsage((accounted_mib * MIB,), (1,))
    monkeypatch.setattr(memory_feedback, "read_usage", lambda *_: usage)


def test_a_library_is_told_of_context_and_residual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few samples; its other limits stay as they are."""
    account(monkeypatch, 800)
    feedback = feedback_of(tmp_path, sample_of(620))
    for _ in range(SAMPLES - 1):
        feedback.step()
        assert read_limits(tmp_path / "t1") == LIMITS
    feedback.step()
    assert read_limits(tmp_path / "t1") == [replace(LIMITS[0], context_bytes=120 * MIB)]
    account(monkeypatch, 500)
    for _ in range(SAMPLES):
        feedback.step()
    assert read_limits(tmp_path / "t1")[0].residual_bytes == 120 * MIB
    assert feedback.residual(sample_of(620)) == 120 * MIB


def test_containers_that_have_no_library_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    account(monkeypatch, 800)
    feedback = feedback_of(tmp_path, sample_of(620, Rung.DRIVER))
    for _ in range(SAMPLES):
        feedback.step()
    assert feedback.residual(sample_of(620)) is None
    assert read_limits(tmp_path / "t1") == LIMITS


def test_what_nvml_does_not_show_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in virtual machines where it has no memory of processes."""
    account(monkeypatch, 800)
    unknown = replace(sample_of(0), processes=(GpuProcess(pid=7, memory_mib=None, utilization=0),))
    feedback = feedback_of(tmp_path, unknown)
    for _ in range(SAMPLES):
        feedback.step()
    assert read_limits(tmp_path / "t1") == LIMITS
