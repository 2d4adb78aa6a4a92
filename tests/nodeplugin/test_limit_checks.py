"""Whether the limits of containers hold, judged from what NVML measures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeplugin.limit_checks import LimitCheck, describe_check, limits_hold
from nodeplugin.nvml import GpuProcess
from nodeplugin.sampling import ContainerSample
from tests.nodeplugin.builders import bound, card
from vcuda.isolation import EXCLUSIVE, NO_ISOLATION, Isolation, Rung
from vcuda.placement_annotation import GpuSlice

PRELOAD = Isolation(Rung.PRELOAD, Rung.PRELOAD)
LIMIT_MIB = 1024


def using(*mib: int | None, isolation: Isolation = PRELOAD, is_measured: bool = True) -> ContainerSample:
    """A container with a limit of 1024 MiB, and a process with each of these amounts."""
    processes = tuple(GpuProcess(pid, used, 10) for pid, used in enumerate(mib, 1))
    share = GpuSlice("GPU-0", 50, LIMIT_MIB)
    return ContainerSample(bound("p"), "a", card(), share, processes, isolation, is_measured)


MEMORY_CHECKS = {
    "no process": (using(), True, 0),
    "exactly the limit": (using(1000, 24), True, 0),
    "a MiB more": (using(1000, 25), False, 1),
    "one process of which the driver reports nothing": (using(10, None), None, None),
    "processes that are not listed": (using(is_measured=False), None, None),
    "nothing enforces it, and it is kept": (using(1024, isolation=NO_ISOLATION), True, 0),
    "nothing enforces it, and it is exceeded": (using(2000, isolation=NO_ISOLATION), False, 976),
    "nothing enforces it, and nothing is known": (using(None, isolation=NO_ISOLATION), None, None),
    "a whole card": (using(9000, isolation=EXCLUSIVE), True, 0),
    "a whole card of which nothing is known": (using(None, isolation=EXCLUSIVE), True, 0),
}


@pytest.mark.parametrize(("sample", "holds", "over_mib"), MEMORY_CHECKS.values(), ids=MEMORY_CHECKS)
def test_memory_holds_if_the_processes_use_no_more(
    sample: ContainerSample, *, holds: bool | None, over_mib: int | None
) -> None:
    """Never if a number is missing."""
    assert limits_hold(sample).memory == LimitCheck(sample.isolation.memory, holds, over_mib)


@given(used=st.integers(0, 4096), allowance=st.integers(0, 2048))
def test_an_allowance_is_added_to_the_limit(used: int, allowance: int) -> None:
    check = limits_hold(using(used), allowance).memory
    assert check.holds is (used <= LIMIT_MIB + allowance)
    assert check.over_mib == max(0, used - LIMIT_MIB - allowance)


@pytest.mark.parametrize("isolation", [NO_ISOLATION, PRELOAD, Isolation(compute=Rung.MPS), EXCLUSIVE], ids=str)
def test_whether_compute_holds_is_only_known_of_whole_cards(isolation: Isolation) -> None:
    check = limits_hold(using(10, isolation=isolation)).compute
    assert check == LimitCheck(isolation.compute, True if isolation is EXCLUSIVE else None)


DESCRIBED = {
    "preload: holds": LimitCheck(Rung.PRELOAD, holds=True, over_mib=0),
    "preload: broken, exceeded by 5 MiB": LimitCheck(Rung.PRELOAD, holds=False, over_mib=5),
    "driver: unknown": LimitCheck(Rung.DRIVER),
    "exclusive: holds": LimitCheck(Rung.EXCLUSIVE, holds=True, over_mib=0),
    "not enforced": LimitCheck(Rung.NONE, holds=True, over_mib=0),
    "not enforced, exceeded by 5 MiB": LimitCheck(Rung.NONE, holds=False, over_mib=5),
}


@pytest.mark.parametrize(("text", "check"), DESCRIBED.items(), ids=DESCRIBED)
def test_a_check_is_described_in_words(text: str, check: LimitCheck) -> None:
    assert describe_check(check) == text
