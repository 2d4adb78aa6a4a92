import random
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.preload.conftest import HERE, compile_program
from tests.preload.containers import CONTEXT_MIB, Container, mib
from tests.waiting import eventually

PROCESSES = 50


@pytest.fixture(scope="module")
def hammer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(HERE / "hammer.c", tmp_path_factory.mktemp("hammer") / "hammer")


@pytest.fixture(scope="module")
def stepper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program(HERE / "stepper.c", tmp_path_factory.mktemp("stepper") / "stepper")


def start(container: Container, program: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program, *map(str, arguments)],
        env=container.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def start_together(container: Container, hammer: Path, *arguments: object) -> list[subprocess.Popen[str]]:
    """Start all processes; they allocate once all of them have a context."""
    running = [start(container, hammer, seed, *arguments) for seed in range(PROCESSES)]
    for each in running:
        assert each.stdout
        assert each.stdout.readline() == "ready\n"
    for each in running:
        assert each.stdin
        each.stdin.write("\n")
        each.stdin.flush()
    return running


def results(running: list[subprocess.Popen[str]]) -> list[int]:
    for each in running:
        each.communicate()
    return [each.returncode for each in running]


def hammer_limit(container: Container, hammer: Path, limit_mib: int, rounds: int) -> int:
    """Let many processes pass the limit together; returns the most that the device had allocated at a time."""
    container.limit(limit_mib)
    looks: list[int] = []
    with container.observe() as observer:
        running = start_together(container, hammer, rounds)
        waiting = threading.Thread(target=wait_until_done, args=(running,), name="waiting")
        waiting.start()
        while waiting.is_alive():
            looks.append(observer.real())
        looks.append(observer.real())
    assert results(running) == [0] * PROCESSES
    eventually(lambda: container.accounted() == 0)
    return max(looks)


def wait_until_done(running: list[subprocess.Popen[str]]) -> None:
    for each in running:
        assert each.stdout
        each.stdout.readline()


def test_many_processes_never_pass_the_limit(container: Container, hammer: Path) -> None:
    """Fifty processes that want three times the limit never have a byte more than it, and all end."""
    limit_mib = PROCESSES * (CONTEXT_MIB + 40)
    most = hammer_limit(container, hammer, limit_mib, 200)
    assert mib(limit_mib) * 0.9 < most <= mib(limit_mib)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_processes_never_pass_the_limit_for_long(container: Container, hammer: Path) -> None:
    """The same for a longer time."""
    limit_mib = PROCESSES * (CONTEXT_MIB + 40)
    assert hammer_limit(container, hammer, limit_mib, 5_000) <= mib(limit_mib)


def test_what_fits_for_sure_is_never_refused(container: Container, hammer: Path) -> None:
    """Fifty processes whose budgets together are the limit are never refused, however they meet."""
    budget_mib = 40
    container.limit(PROCESSES * (CONTEXT_MIB + budget_mib))
    running = start_together(container, hammer, 150, budget_mib)
    assert results(running) == [0] * PROCESSES


def kill_at_random(make_container: Callable[..., Container], hammer: Path, kills: int) -> None:
    container, random_ = make_container(1024), random.Random(kills)
    with container.start() as living, container.observe() as observer:
        living.ok(f"alloc a {mib(100)}")
        for number in range(0, kills, 4):
            running = [start(container, hammer, number + each, 1_000_000) for each in range(4)]
            # Some are killed while they start.
            if random_.random() < 0.8:
                assert running[0].stdout
                running[0].stdout.readline()
                for each in running:
                    assert each.stdin
                    each.stdin.write("\n")
                    each.stdin.flush()
            # Not a wait for a condition: the moment is what is random.
            time.sleep(random_.random() / 100)
            for each in running:
                each.kill()
            for each in running:
                each.communicate()
            assert observer.real() <= mib(1024)
        eventually(lambda: container.accounted() == mib(CONTEXT_MIB + 100))
        assert observer.real() == mib(CONTEXT_MIB + 100)
        living.ok(f"alloc b {mib(1024 - 100 - CONTEXT_MIB)}")


def test_killed_processes_leave_the_sum_of_the_living(make_container: Callable[..., Container], hammer: Path) -> None:
    """After hundreds of kills at random moments exactly the memory of the living is charged, and the rest is free."""
    kill_at_random(make_container, hammer, 240)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_killed_processes_leave_the_sum_of_the_living_for_long(
    make_container: Callable[..., Container], hammer: Path
) -> None:
    """The same for 10,000 kills."""
    kill_at_random(make_container, hammer, 10_000)


def kill_within(container: Container, stepper: Path, samples: int) -> None:
    """Kill an allocation and a free after so many different numbers of instructions."""
    every = int(start(container, stepper, 10_000_000).communicate()[0])
    assert every > 1000
    rest = mib(1024 - CONTEXT_MIB)
    with container.start() as bystander:
        for number in range(samples):
            after = every * number // samples
            assert int(start(container, stepper, after).communicate()[0]) == after
            assert container.accounted() == mib(CONTEXT_MIB), after
            bystander.ok(f"alloc a {rest}")
            bystander.ok("free a")


def test_a_process_killed_after_any_instruction_leaves_nothing(container: Container, stepper: Path) -> None:
    """However far a process got in an allocation or a free, its death gives back all of it, and no lock is held."""
    kill_within(container, stepper, 60)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_process_killed_after_each_instruction_leaves_nothing(container: Container, stepper: Path) -> None:
    """The same for many more instructions."""
    kill_within(container, stepper, 3_000)
