"""Programs that allocate in the order of calls in which well-known frameworks do, by the driver API."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.preload.containers import CONTEXT_MIB, FD, MIB, Container, mib

SEGMENT = 20 * MIB


def test_pytorch_s_expandable_segments(container: Container) -> None:
    """One range of addresses grows by segments until the limit, is trimmed from its end, and grows again."""
    segments = (1024 - CONTEXT_MIB) * MIB // SEGMENT
    with container.start() as program, container.observe() as observer:
        program.ok(f"reserve range {9 * 1024 * MIB // 8}")
        for number in range(segments):
            program.ok(f"create h{number} {SEGMENT} device 0")
            program.ok(f"map-at range {number * SEGMENT} {SEGMENT} h{number}")
        program.refused(f"create more {SEGMENT} device 0")
        assert observer.real() == container.accounted() == mib(CONTEXT_MIB) + segments * SEGMENT
        # It unmaps and releases what is unused, and asks again.
        for number in (7, 8):
            program.ok("reserve other 2097152")
            program.ok(f"release h{number}")
        program.refused(f"create more {SEGMENT} device 0")
        assert observer.real() == container.accounted()


def test_vllm_with_two_ranks(make_container: Callable[..., Container]) -> None:
    """Each of two processes has a GPU and maps the other's buffers by file and by IPC: each buffer is charged once."""
    container = make_container(1024, 1024)
    socket = Path("/tmp") / f"quotient-vllm-{os.getpid()}"
    with ExitStack() as stack:
        first, second = (stack.enter_context(container.start(context=False)) for _ in range(2))
        for card, each in enumerate((first, second)):
            each.ok("init")
            each.ok(f"primary {card}")
            each.ok(f"alloc weights {mib(600)}")
        second.ok(f"listen {socket}")
        stack.callback(socket.unlink)
        first.ok(f"create buffer {mib(16)} device 0 {FD}")
        first.ok("export file buffer")
        first.ok(f"send file {socket}")
        second.ok("receive file")
        second.ok("import peer file")
        second.ok(f"map mapped peer {mib(16)}")
        (handle,) = first.ok("ipc-get weights")
        second.ok(f"ipc-open weights-of-first {handle}")
        # NCCL's host buffers, and those without a current device.
        second.ok(f"create bounce {mib(64)} host 0")
        second.ok(f"create bounce2 {mib(64)} numa 0")
        assert container.accounted(0) == mib(600 + 16 + CONTEXT_MIB)
        assert container.accounted(1) == mib(600 + CONTEXT_MIB)
        with container.observe(0) as observer:
            assert observer.real() == container.accounted(0)


def test_llama_cpp_s_pool_of_virtual_memory(container: Container) -> None:
    """A pool reserves addresses once, and maps handles that it releases at once; it is unmapped as a whole."""
    with container.start() as program:
        program.ok("segments pool 200")
        assert container.accounted() == mib(CONTEXT_MIB + 400)
        program.refused(f"alloc a {mib(1024 - CONTEXT_MIB - 400) + 1}")
        program.ok(f"unmap pool {200 * 2 * MIB}")
        assert container.accounted() == mib(CONTEXT_MIB)


def test_tensorflow_s_one_allocation(container: Container) -> None:
    """Of what is said to be free, all can be allocated at once."""
    with container.start() as program:
        free, _ = program.free_and_total()
        program.ok(f"alloc a {free}")
        assert program.free_and_total()[0] == 0


def test_jax_preallocates_three_quarters(container: Container) -> None:
    """Two processes that each take three quarters of what is free get along; the second is told what the first left."""
    with container.start() as first:
        free, _ = first.free_and_total()
        first.ok(f"alloc a {free * 3 // 4}")
        with container.start() as second:
            left, _ = second.free_and_total()
            assert left == in_blocks(free - free * 3 // 4 - mib(CONTEXT_MIB))
            second.ok(f"alloc a {left * 3 // 4}")


def in_blocks(size: int) -> int:
    """Round down to the driver's blocks."""
    return size // (2 * MIB) * 2 * MIB


def test_graphs_of_a_server_are_captured_near_the_limit(container: Container) -> None:
    """Graphs that were captured one after another, of which each reuses the memory, run near the limit."""
    with container.start() as program, container.observe() as observer:
        program.ok(f"alloc weights {mib(700)}")
        for number in range(8):
            program.ok(f"graph g{number} -200")
            program.ok(f"launch g{number}")
        assert observer.real() <= container.accounted() <= mib(1024)
        program.ok("launch g7")
