import fcntl
import os
import termios
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nodeplugin.share_files import FLOCK
from tests.preload.containers import CONTEXT_MIB, FABRIC, FD, LIMIT_MIB, Container, Observer, Program, mib
from tests.waiting import eventually

SIZE = mib(100)
GATE_BYTE, OFD_SETLK = 0, 37


@dataclass
class Pair:
    """Two processes of a container, and what they have accounted besides their contexts."""

    container: Container
    exporter: Program
    importer: Program
    observer: Observer
    socket: Path

    def accounted(self, contexts: int = 2) -> int:
        return self.container.accounted() - contexts * mib(CONTEXT_MIB)

    def real(self, contexts: int = 2) -> int:
        return self.observer.real() - contexts * mib(CONTEXT_MIB)

    def send(self, name: str = "f") -> None:
        """Send the exporter's file to the importer, which has it as `f`."""
        self.exporter.ok(f"send {name} {self.socket}")
        self.importer.ok("receive f")


@pytest.fixture
def pair(container: Container, tmp_path: Path) -> Iterator[Pair]:
    # A socket's path must be short.
    socket = Path("/tmp") / f"quotient-{os.getpid()}-{tmp_path.name[-8:]}"
    with ExitStack() as stack:
        exporter, importer = (stack.enter_context(container.start()) for _ in range(2))
        importer.ok(f"listen {socket}")
        yield Pair(container, exporter, importer, stack.enter_context(container.observe()), socket)
    socket.unlink()


def test_memory_of_an_ipc_handle_counts_once(pair: Pair) -> None:
    """What two processes have open by a legacy IPC handle is charged once, however often it is opened."""
    pair.exporter.ok(f"alloc a {SIZE}")
    (handle,) = pair.exporter.ok("ipc-get a")
    assert pair.exporter.ok("ipc-get a") == [handle]
    pair.importer.ok(f"ipc-open b {handle}")
    pair.importer.ok(f"ipc-open c {handle}")
    assert pair.accounted() == pair.real() == SIZE
    pair.importer.ok("ipc-close b")
    pair.exporter.ok("free a")
    assert pair.accounted() == SIZE
    pair.importer.ok("ipc-close c")
    assert pair.accounted() == pair.real() == 0


def test_shared_memory_is_charged_until_its_last_importer_closes_it(pair: Pair) -> None:
    """The exporter may release its memory, or be killed: the importer is charged then."""
    pair.exporter.ok(f"create a {SIZE} device 0 {FD}")
    pair.exporter.ok("export f a")
    pair.send()
    pair.importer.ok("import b f")
    pair.importer.ok("close f")
    pair.importer.ok(f"map m b {SIZE}")
    assert pair.accounted() == pair.real() == SIZE
    pair.exporter.kill()
    eventually(lambda: pair.accounted(1) == SIZE, "the exporter's lock to go")
    pair.importer.ok("release b")
    assert pair.accounted(1) == pair.real(1) == SIZE
    pair.importer.refused(f"alloc x {mib(LIMIT_MIB - CONTEXT_MIB) - SIZE + 1}")
    pair.importer.ok(f"unmap m {SIZE}")
    assert pair.accounted(1) == pair.real(1) == 0


def test_an_importer_that_is_killed_leaves_the_exporter_charged(pair: Pair) -> None:
    """Of what is shared, a process that ends gives back only its part."""
    pair.exporter.ok(f"create a {SIZE} device 0 {FD}")
    pair.exporter.ok("export f a")
    pair.send()
    pair.importer.ok("import b f")
    pair.importer.kill()
    eventually(lambda: pair.accounted(1) == SIZE, "the importer's lock to go")
    pair.exporter.ok("release a")
    assert pair.accounted(1) == 0


@pytest.mark.parametrize("releases_first", ["a", "b"])
def test_a_process_that_imports_its_own_memory_holds_it_twice(pair: Pair, releases_first: str) -> None:
    """Two handles of one process are one charge, which is given back with the second."""
    pair.exporter.ok(f"create a {SIZE} device 0 {FD}")
    pair.exporter.ok("export f a")
    pair.exporter.ok("import b f")
    pair.exporter.ok(f"release {releases_first}")
    assert pair.accounted() == pair.real() == SIZE
    pair.exporter.ok(f"release {'b' if releases_first == 'a' else 'a'}")
    pair.exporter.ok("close f")
    assert pair.accounted() == pair.real() == 0


def test_the_same_memory_imported_twice_counts_once(pair: Pair) -> None:
    """Each export of the same memory has a file of its own; all of them lead to one charge."""
    pair.exporter.ok(f"create a {SIZE} device 0 {FD}")
    for _ in range(3):
        pair.exporter.ok("export f a")
        pair.send()
        pair.importer.ok("import b f")
    assert pair.accounted() == pair.real() == SIZE
    pair.exporter.ok("release a")
    pair.importer.ok("release b")
    pair.importer.ok("release b")
    assert pair.accounted() == pair.real() == SIZE
    pair.importer.ok("release b")
    assert pair.accounted() == pair.real() == 0


def test_fabric_handles_lead_to_one_charge(pair: Pair) -> None:
    """A fabric handle is known by its bytes."""
    pair.exporter.ok(f"create a {SIZE} device 0 {FABRIC}")
    (handle,) = pair.exporter.ok("export-fabric a")
    pair.importer.ok(f"import-fabric b {handle}")
    assert pair.accounted() == pair.real() == SIZE
    pair.exporter.ok("release a")
    assert pair.accounted() == pair.real() == SIZE
    pair.importer.ok("release b")
    assert pair.accounted() == pair.real() == 0


def test_a_file_that_is_open_for_longer_than_its_memory_was_held_is_no_other_memory(pair: Pair) -> None:
    """A file whose memory was given up leads to no entry, also when another memory has that entry now."""
    pair.exporter.ok(f"create a {SIZE} device 0 {FD}")
    pair.exporter.ok("export f a")
    pair.exporter.ok("release a")
    pair.exporter.ok(f"create c {SIZE} device 0 {FD}")
    pair.exporter.ok("export g c")
    pair.send("f")
    pair.importer.ok("import b f")
    pair.importer.ok(f"map m b {SIZE}")
    assert pair.accounted() == 2 * SIZE
    assert pair.real() <= 2 * SIZE


def test_what_another_container_exports_is_charged_here_as_well(pair: Pair, container: Container) -> None:
    """Memory of another container has no entry here: it is charged when it is mapped, by what is mapped."""
    with container.start(is_limited=False) as other:
        other.ok(f"create a {SIZE} device 0 {FD}")
        other.ok("export f a")
        other.ok(f"send f {pair.socket}")
        pair.importer.ok("receive f")
        pair.importer.ok("import b f")
        assert pair.accounted() == 0
        pair.importer.ok(f"map m b {SIZE}")
        pair.importer.ok(f"map n b {SIZE}")
        assert pair.accounted() == SIZE
        for call in ("release b", f"unmap m {SIZE}", f"unmap n {SIZE}"):
            assert pair.accounted() == SIZE
            pair.importer.ok(call)
        assert pair.accounted() == 0
        other.ok(f"alloc d {SIZE}")
        (handle,) = other.ok("ipc-get d")
        pair.importer.ok(f"ipc-open e {handle}")
        assert pair.accounted() == SIZE
        pair.importer.ok("ipc-close e")
        assert pair.accounted() == 0


@contextmanager
def closed_gate(container: Container) -> Iterator[None]:
    """Hold what processes need that begin to share memory."""
    with container.usage.open("r+b") as file:
        fcntl.fcntl(file, OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, GATE_BYTE, 1, 0))
        yield


def waits_at_gate(program: Program, container: Container) -> bool:
    """Whether it has the account open, which it has only there."""
    files = Path(f"/proc/{program.pid}/fd")
    return any(os.path.realpath(each) == str(container.usage) for each in files.iterdir())


def has_read_its_calls(program: Program) -> bool:
    """Whether its first thread waits, for a lock or for calls, and none is left to be read."""
    unread = int.from_bytes(fcntl.ioctl(program.input, termios.FIONREAD, bytes(4)), "little")
    return not unread and Path(f"/proc/{program.pid}/stat").read_text().split()[2] == "S"


def test_tiles_that_are_mapped_during_an_export_are_counted(container: Container) -> None:
    """Memory is charged as long as a sparse array may have it, also if another thread shared it at that time."""
    with container.start() as program:
        program.ok(f"create h {SIZE} device 0 {FD}")
        with closed_gate(container):
            program.ok("begin-export h")
            eventually(lambda: waits_at_gate(program, container))
            program.send("tile h")
            eventually(lambda: has_read_its_calls(program))
        assert program.hear() == ["0"]
        program.ok("end-export")
        program.ok("release h")
        assert container.accounted() == mib(CONTEXT_MIB) + SIZE
