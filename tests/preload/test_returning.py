from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preload.containers import CONTEXT_MIB, FD, Container, Program, mib

LIMIT_MIB = 2 * CONTEXT_MIB + 1000


@pytest.fixture
def pair(container: Container) -> Iterator[tuple[Program, Program]]:
    """Two programs with a context each, which have 1,000 MiB together."""
    container.limit(LIMIT_MIB)
    with container.start() as one, container.start() as other:
        yield one, other


NEXT = {
    "memory by address": f"alloc b {mib(500)}",
    "physical memory": f"create b {mib(500)} device 0",
    "an array": "array2 b 16384 16000",
    "another context": "context b 0",
    "a small allocation": "alloc b 100",
}


@pytest.mark.parametrize("call", NEXT.values(), ids=NEXT)
def test_what_a_pool_has_freed_can_be_had_otherwise(pair: tuple[Program, Program], call: str) -> None:
    """By the same process, without its asking: the driver has taken it back, or does so when it is trimmed."""
    one, _ = pair
    one.ok(f"async a {mib(960)}")
    one.ok("async-free a")
    assert one.result(call) == 0


def test_what_a_pool_keeps_unused_gives_way(pair: tuple[Program, Program]) -> None:
    """As when the driver itself has no memory left."""
    one, _ = pair
    for call in ("default-pool p 0", "keep p", f"async a {mib(960)}", "async-free a", "sync"):
        one.ok(call)
    one.ok(f"alloc b {mib(900)}")


@pytest.mark.parametrize("wait", ["sync", "sync-stream s"])
def test_others_have_what_a_pool_has_given_back(pair: tuple[Program, Program], wait: str) -> None:
    """As soon as the program has waited for its stream."""
    one, other = pair
    for call in ("stream s", f"async a {mib(960)} s", "async-free a s"):
        one.ok(call)
    other.refused(f"alloc b {mib(500)}")
    one.ok(wait)
    other.ok(f"alloc b {mib(500)}")


def test_a_pool_that_is_destroyed_counts_while_its_memory_is_in_use(container: Container) -> None:
    """The driver keeps it as long; a program could destroy one after the other otherwise."""
    container.limit(CONTEXT_MIB + 1000)
    with container.start() as program, container.observe() as observer:
        for call in ("pool p device 0", f"from-pool a {mib(800)} p", "pool-free p"):
            program.ok(call)
        assert container.accounted() == observer.real()
        program.refused(f"alloc b {mib(500)}")
        for call in ("async-free a", "sync"):
            program.ok(call)
        assert container.accounted() == observer.real() == mib(CONTEXT_MIB)
        program.ok(f"alloc b {mib(900)}")


def test_nothing_is_said_of_a_limit_that_refused_nothing(container: Container) -> None:
    """Also where room had to be made, and a gap in a block to be found."""
    container.limit(CONTEXT_MIB + 40)
    with container.start() as program:
        for call in (f"async a {mib(30)}", "async-free a", f"alloc b {mib(38)}", "alloc c 100", "alloc d 100"):
            program.ok(call)
        assert "limit" not in program.end()


def test_what_is_left_while_descriptors_are_scarce_is_given_back_later(container: Container) -> None:
    """The file is opened for each change of what processes share."""
    with container.start() as program:
        program.ok(f"alloc a {mib(100)}")
        program.ok("ipc-get a")
        program.ok("descriptors 3")
        program.ok("free a")
        assert container.accounted() == mib(CONTEXT_MIB + 100)
        program.ok("descriptors 1024")
        program.ok(f"alloc b {mib(2)}")
        program.ok("ipc-get b")
        assert container.accounted() == mib(CONTEXT_MIB + 2)


def test_many_shared_allocations_count_once(container: Container, tmp_path: Path) -> None:
    """As many as the ranks of a large job share."""
    container.limit(4000)
    with container.start() as exporter, container.start() as importer:
        importer.ok(f"listen {tmp_path}/s")
        for number in range(600):
            exporter.ok(f"create h{number % 100} {mib(2)} device 0 {FD}")
            exporter.ok(f"export f h{number % 100}")
            exporter.ok(f"send f {tmp_path}/s")
            exporter.ok("close f")
            importer.ok("receive f")
            importer.ok(f"import i{number % 100} f")
            importer.ok("close f")
        assert container.accounted() == mib(2 * CONTEXT_MIB + 1200)
