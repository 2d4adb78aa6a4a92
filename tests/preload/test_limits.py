import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.preload.containers import CONTEXT_MIB, LIMIT_MIB, MIB, OUT_OF_MEMORY, UUIDS, Container, mib

# A call that allocates so many bytes, and the one that frees it.
WAYS = {
    "memory by address": ("alloc a {bytes}", "free a"),
    "memory of the first version": ("alloc1 a {bytes}", "free a"),
    "managed memory": ("managed a {bytes}", "free a"),
    "rows": ("pitch a 512 {rows}", "free a"),
    "an array": ("array2 a 1024 {kib4}", "array-free a"),
    "physical memory": ("create a {bytes} device 0", "release a"),
    "external memory": ("external a {bytes}", "external-free a"),
    "a pool": ("async a {bytes}", "async-free a"),
    "a graph": ("graph a -{mib}", "graph-free a"),
}


def filled(call: str, size: int) -> str:
    return call.format(bytes=size, rows=size // 512, kib4=size // 4096, mib=size // MIB)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_limit_can_be_filled_and_not_passed(container: Container, way: tuple[str, str]) -> None:
    """All that is left of a limit can be allocated at once; a block more is refused with the driver's own code."""
    left = mib(LIMIT_MIB - CONTEXT_MIB)
    allocate, free = way
    last = "launch a" if allocate.startswith("graph") else ""
    with container.start() as program, container.observe() as observer:
        too_much = filled(allocate, left + 2 * MIB)
        if last:
            program.ok(too_much)
            program.refused(last)
            program.ok(free)
        else:
            program.refused(too_much)
        for _ in range(2):
            program.ok(filled(allocate, left))
            if last:
                program.ok(last)
            assert container.accounted() == observer.real() == mib(LIMIT_MIB)
            program.refused("alloc b 1")
            program.refused("create b 2097152 device 0")
            program.refused("async b 1")
            assert program.free_and_total() == (0, mib(LIMIT_MIB))
            program.ok(free)
            program.ok("graph-trim 0")
            program.ok("sync")
        program.ok("info")
        assert observer.real() <= container.accounted()


def test_small_allocations_fill_the_limit(container: Container) -> None:
    """Small allocations are refused when the last block is full, not when the last block is begun."""
    container.limit(CONTEXT_MIB + 8)
    with container.start() as program, container.observe() as observer:
        assert program.call("burst 10000 65536") == [str(OUT_OF_MEMORY), str(8 * MIB // 65536)]
        assert observer.real() == container.accounted() == mib(CONTEXT_MIB + 8)
        program.ok("free last")
        program.ok("alloc a 65536")
        program.refused("alloc b 65536")


def test_what_is_used_beyond_the_limit_is_no_free_memory(container: Container) -> None:
    """Where more is in use than a lowered limit allows, nothing is free: the difference is not negative."""
    with container.start() as program:
        program.ok(f"alloc a {mib(500)}")
        container.limit(256)
        assert program.free_and_total() == (0, mib(256))
        program.refused("alloc b 1")


def test_the_residual_is_taken_from_what_is_free(container: Container) -> None:
    """Memory that only NVML sees is used memory, and cannot be allocated again."""
    container.limit(1024, residual_mib=100)
    with container.start() as program:
        left = mib(1024 - 100 - CONTEXT_MIB)
        assert program.free_and_total() == (left, mib(1024))
        program.refused(f"alloc a {left + 1}")
        program.ok(f"alloc a {left}")


def test_every_process_is_told_the_same(container: Container) -> None:
    """CUDA says in each process what the container has left, also in one that has allocated nothing."""
    with container.start() as one, container.start() as other:
        one.ok(f"alloc a {mib(100)}")
        expected = (mib(LIMIT_MIB - 100 - 2 * CONTEXT_MIB), mib(LIMIT_MIB))
        assert one.free_and_total() == other.free_and_total() == expected
        assert int(other.ok("total 0")[0]) == mib(LIMIT_MIB)
        other.refused(f"alloc a {expected[0] + 1}")
        one.kill()
        assert other.free_and_total()[0] == mib(LIMIT_MIB - CONTEXT_MIB)
        other.ok(f"alloc a {mib(LIMIT_MIB - CONTEXT_MIB)}")


NVML = """
import pynvml
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
for version in (None, pynvml.nvmlMemory_v2):
    found = pynvml.nvmlDeviceGetMemoryInfo(device, version)
    print(found.total, found.free, found.used)
"""


def test_nvml_says_the_same_as_cuda(container: Container) -> None:
    """Both versions of NVML's memory information show the container's share, in a process without CUDA."""
    with container.start() as program:
        program.ok(f"alloc a {mib(100)}")
        done = subprocess.run(
            [sys.executable, "-c", NVML], env=container.environment(), capture_output=True, text=True, check=True
        )
        left, total = program.free_and_total()
        assert done.stdout.split() == [str(each) for each in (total, left, total - left) * 2]


def test_each_gpu_has_its_own_limit_whatever_its_index(make_container: Callable[..., Container]) -> None:
    """A card is known by its UUID: CUDA_VISIBLE_DEVICES changes the index of a device, not its limit."""
    container = make_container(512, 1024)
    visible = f"{UUIDS[1]},{UUIDS[0]}"
    with container.start(context=False, CUDA_VISIBLE_DEVICES=visible) as program:
        program.ok("init")
        assert [int(program.ok(f"total {device}")[0]) for device in range(2)] == [mib(1024), mib(512)]
        program.ok(f"create a {mib(1024)} device 0")
        program.refused("create b 2097152 device 0")
        program.ok(f"create c {mib(512)} device 1")
        program.refused("create d 2097152 device 1")
        assert (container.accounted(0), container.accounted(1)) == (mib(512), mib(1024))


def test_a_gpu_that_is_not_the_containers_gives_no_memory(make_container: Callable[..., Container]) -> None:
    """A device whose UUID is not in the limits is limited to nothing."""
    container = make_container(512, gpus=2)
    with container.start() as program:
        program.refused("create a 2097152 device 1")


def test_a_context_needs_room_as_well(container: Container) -> None:
    """A context is charged before it is created, and a green one with its primary: without room there is none."""
    container.limit(CONTEXT_MIB * 1.5)
    with container.start() as program, container.observe() as observer:
        program.refused("context c 0")
        program.ok("green g")
        assert observer.real() == container.accounted() == mib(CONTEXT_MIB)
        with container.start(context=False) as other:
            other.ok("init")
            other.refused("green g")
        assert observer.real() == container.accounted() == mib(CONTEXT_MIB)


def test_a_graph_that_is_launched_again_needs_no_more_memory(container: Container) -> None:
    """A graph keeps its memory between launches: it is not reserved again where there is no room for that."""
    with container.start() as program, container.observe() as observer:
        program.ok("graph a 600")
        for _ in range(3):
            program.ok("launch a")
            assert observer.real() == container.accounted() == mib(CONTEXT_MIB + 600)


def test_a_pool_gives_unused_memory_to_other_allocations_of_the_pools(container: Container) -> None:
    """Near the limit, the memory that one pool keeps unused makes room for another pool."""
    with container.start() as program, container.observe() as observer:
        program.ok("default-pool p 0")
        program.ok("keep p")
        program.ok(f"async a {mib(640)}")
        program.ok("async-free a")
        program.ok("pool q device 0")
        program.ok(f"from-pool b {mib(640)} q")
        assert observer.real() <= container.accounted() <= mib(LIMIT_MIB)
