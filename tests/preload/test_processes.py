import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeplugin import preload_build, share_files
from tests.preload.containers import CONTEXT_MIB, LIMIT_MIB, NO_DEVICE, Container, Program, mib
from tests.waiting import eventually


def test_a_child_begins_with_nothing(container: Container) -> None:
    """A forked child has a slot of its own, and neither its calls nor its end change what its parent is charged."""
    with container.start() as program:
        program.ok(f"alloc a {mib(100)}")
        program.send(f"fork free a , create b {mib(50)} device 0 , total 0")
        answers = [program.hear() for _ in range(4)]
        # The fake driver refuses calls of a child, as the real one does; what matters is the parent's charge.
        assert answers[-1] == ["0"]
        assert container.accounted() == mib(CONTEXT_MIB + 100)
        program.ok("free a")
        assert container.accounted() == mib(CONTEXT_MIB)


def test_a_child_of_a_process_without_gpus_is_limited(container: Container) -> None:
    """A child that is the first to use the GPU is charged, and gives back at its end."""
    with container.start(context=False) as program:
        calls = f"init , primary 0 , alloc a {mib(900)} , alloc b {mib(900)}"
        program.send(f"fork {calls}")
        assert [program.hear() for _ in range(5)] == [["0"], ["0"], ["0"], ["2"], ["0"]]
        eventually(lambda: container.accounted() == 0, "the child's memory to be given back")


def test_a_child_that_lives_on_does_not_keep_what_its_parent_had(container: Container) -> None:
    """A process that is killed gives back everything, although a child that was forked from it lives."""
    with container.start() as program:
        program.ok(f"alloc a {mib(100)}")
        child = int(program.ok("linger")[0])
        try:
            program.kill()
            eventually(lambda: container.accounted() == 0, "the parent's memory to be given back")
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_process_keeps_its_charge_without_its_files(container: Container) -> None:
    """A program that closes all of its files is charged as before."""
    with container.start() as program:
        program.ok(f"alloc a {mib(100)}")
        program.ok("close-all")
        assert container.accounted() == mib(CONTEXT_MIB + 100)
        with container.start() as other:
            other.refused(f"alloc b {mib(LIMIT_MIB - 100 - 2 * CONTEXT_MIB) + 1}")
            other.ok(f"alloc b {mib(LIMIT_MIB - 100 - 2 * CONTEXT_MIB)}")


def test_a_program_that_another_replaces_gives_back_everything(container: Container) -> None:
    """After an exec the process has nothing, as its contexts have gone."""
    with container.start() as program:
        program.ok(f"alloc a {mib(100)}")
        program.send("exec", "init", "primary 0")
        assert [program.hear() for _ in range(2)] == [["0"], ["0"]]
        assert container.accounted() == mib(CONTEXT_MIB)


def test_a_program_that_is_started_by_vfork_changes_nothing(container: Container) -> None:
    """The child of vfork, which runs in its parent's memory, leaves the parent's charge as it is."""
    with container.start() as program:
        program.ok("vfork")
        assert container.accounted() == mib(CONTEXT_MIB)
        program.ok(f"alloc a {mib(100)}")
        assert container.accounted() == mib(CONTEXT_MIB + 100)


def test_a_process_that_is_killed_gives_back_everything(container: Container) -> None:
    """The memory of a killed process is free for others at once."""
    with container.start() as program, container.start() as other:
        program.ok(f"alloc a {mib(LIMIT_MIB - 2 * CONTEXT_MIB)}")
        other.refused("alloc b 1")
        program.kill()
        other.ok(f"alloc b {mib(LIMIT_MIB - CONTEXT_MIB)}")


@pytest.mark.parametrize("change", ["chroot", "user"])
def test_a_process_that_gives_up_its_root_or_its_rights_stays_limited(
    container: Container, tmp_path: Path, change: str
) -> None:
    """After chroot, or without root's rights, a process allocates within the limit, and no more."""
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(folder.stat().st_mode | 0o111) if folder != Path("/") else None
    with container.start() as program:
        program.ok(f"{change} {tmp_path}")
        program.ok(f"alloc a {mib(100)}")
        assert container.accounted() == mib(CONTEXT_MIB + 100)
        program.refused(f"alloc b {mib(LIMIT_MIB - 100 - CONTEXT_MIB) + 1}")
        program.ok("free a")
        assert container.accounted() == mib(CONTEXT_MIB)


@pytest.mark.parametrize("kinds", [["--pid", "--fork"], ["--user", "--map-root-user"]], ids=["pid", "user"])
def test_namespaces_of_their_own_do_not_confuse_processes(container: Container, kinds: list[str]) -> None:
    """Processes whose ids are equal in their own PID namespaces, or that are other users, share one limit."""
    wrapper = container.folder / "shell"
    wrapper.write_text(f"#!/bin/sh\nexec unshare --kill-child {' '.join(kinds)} {container.shell}\n")
    if "--user" in kinds:
        wrapper.write_text(f"#!/bin/sh\nexec unshare {' '.join(kinds)} {container.shell}\n")
    wrapper.chmod(0o755)
    container.shell = wrapper
    with container.start() as one, container.start() as other:
        one.ok(f"alloc a {mib(500)}")
        other.refused(f"alloc a {mib(LIMIT_MIB - 500 - 2 * CONTEXT_MIB) + 1}")
        other.ok(f"alloc a {mib(LIMIT_MIB - 500 - 2 * CONTEXT_MIB)}")
        assert container.accounted() == mib(LIMIT_MIB)


def test_a_process_more_than_there_are_slots_gets_no_memory(
    make_container: Callable[..., Container], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all slots are taken, one more process cannot allocate, and says so; it can when one has ended."""
    few, sources, slots = tmp_path / "few", tmp_path / "preload", 4
    shutil.copytree(preload_build.SOURCES, sources)
    usage = sources / "usage.c"
    loop = "for (unsigned slot = 0; slot < MAX_SLOTS; slot++) {\n        if (lock_bytes"
    assert usage.read_text().count(loop) == 1
    usage.write_text(usage.read_text().replace(loop, loop.replace("MAX_SLOTS", str(slots))))
    monkeypatch.setattr(preload_build, "SOURCES", sources)
    preload_build.build(few, ["gcc"], ["-DFOLDER_FROM_ENVIRONMENT"])
    container = make_container()
    container.build = few
    running = [container.start() for _ in range(slots)]
    late = container.start(context=False)
    late.ok("init")
    late.refused("primary 0")
    running.pop().kill()
    with container.start():
        pass
    for each in running:
        each.kill()
    assert "more than 1024 processes" in late.end()


def broken(container: Container, how: str) -> None:
    limits = container.files / share_files.LIMITS_FILE
    content = limits.read_bytes()
    if how == "missing":
        limits.unlink()
    elif how == "short":
        limits.write_bytes(content[:100])
    elif how == "empty":
        limits.write_bytes(b"")
    elif how == "of another format":
        limits.write_bytes(b"\0" * len(content))
    elif how == "of another version":
        limits.write_bytes(content[:4] + b"\x63\0\0\0" + content[8:])
    else:
        usage = container.usage
        usage.unlink() if how == "without usage" else usage.write_bytes(b"\0" * 100)


@pytest.mark.parametrize("how", ["missing", "short", "empty", "of another format", "of another version"])
def test_without_limits_nothing_can_be_allocated(container: Container, how: str) -> None:
    """A limits file that cannot be used means no GPU at all, and one message says why."""
    broken(container, how)
    with container.start(context=False) as program:
        assert program.result("init") == NO_DEVICE
        assert program.result("create a 2097152 device 0") == NO_DEVICE
        assert program.result("primary 0") == NO_DEVICE
        assert program.end().count("no GPU memory can be allocated") == 1


@pytest.mark.parametrize("how", ["without usage", "short usage"])
def test_without_the_usage_file_nothing_can_be_allocated(container: Container, how: str) -> None:
    """A process that cannot account what it allocates is refused, and one message says why."""
    broken(container, how)
    with container.start(context=False) as program:
        program.ok("init")
        program.refused("create a 2097152 device 0")
        program.refused("create a 2097152 device 0")
        errors = program.end()
        assert errors.count("no GPU memory can be allocated") == 1


def test_a_program_without_gpus_opens_nothing(container: Container) -> None:
    """A program that makes no call of CUDA does not open the driver, nor the container's files."""
    done = subprocess.run(
        ["strace", "-f", "-e", "trace=openat,open", "/bin/true"] if shutil.which("strace") else ["/bin/true"],
        env=container.environment() | {"LD_DEBUG": "files"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "libcuda.so.550" not in done.stderr
    assert "gpu-limits" not in done.stderr
    assert str(container.build / "libcuda.so.1") in done.stderr


def test_a_program_that_exits_in_the_middle_of_others_is_forgotten(container: Container) -> None:
    """A process that ends without freeing anything, in whatever way, is charged no longer."""
    for ending in ("exit", "abort"):
        program = Program(container, container.environment())
        program.ok("init")
        program.ok("primary 0")
        program.ok(f"alloc a {mib(100)}")
        program.send(ending)
        program.end()
        eventually(lambda: container.accounted() == 0, f"the end by {ending}")
