import random
from collections.abc import Iterator

import pytest

from tests.preload.containers import LIMIT_MIB, MIB, OUT_OF_MEMORY, Container, Program, mib

# How to allocate under a name, and the calls that give it back.
KINDS = {
    "alloc {name} {small}": ["free {name}"],
    "alloc {name} {large}": ["free {name}"],
    "managed {name} {large}": ["free {name}"],
    "pitch {name} 1000 {rows}": ["free {name}"],
    "array2 {name} 1024 {rows}": ["array-free {name}"],
    "create {name} {blocks} device 0": ["release {name}"],
    "async {name} {small}": ["async-free {name}"],
    "async {name} {large}": ["free {name}", "async-free {name}"],
    "external {name} {blocks}": ["external-free {name}"],
    "context {name} 0": ["context-free {name}"],
    "green {name}": ["green-free {name}"],
}
OTHERS = ("sync", "info", "trim p", "graph-trim 0", "graph g 10 -20", "launch g", "upload g", "retain r m")


def steps(random_: random.Random, number: int) -> Iterator[str]:
    """Yield calls that allocate and free, each name once."""
    held: dict[str, list[str]] = {}
    yield "default-pool p 0"
    yield "graph g 10 -20"
    for step in range(number):
        choice = random_.random()
        if choice < 0.45:
            kind = random_.choice(list(KINDS))
            name = f"n{step}"
            sizes = {"small": random_.randint(1, MIB), "large": random_.randint(MIB, 40 * MIB)}
            sizes |= {"rows": random_.randint(1, 9000), "blocks": random_.randint(1, 20) * 2 * MIB}
            held[name] = KINDS[kind]
            yield kind.format(name=name, **sizes)
        elif choice < 0.85 and held:
            name = random_.choice(list(held))
            yield random_.choice(held.pop(name)).format(name=name)
        else:
            yield random_.choice(OTHERS)


def run(container: Container, seed: int, number: int) -> None:
    lines = list(steps(random.Random(seed), number))
    with container.start() as program, container.observe() as observer:
        # What was refused is not there to be freed.
        missing: set[str] = set()
        for at, line in enumerate(lines):
            name = line.split()[1] if " " in line else ""
            if name in missing:
                continue
            result = call_with_context(program, line)
            if result:
                missing.add(name)
            real, accounted = observer.real(), container.accounted()
            assert real <= accounted, (seed, at, line)
            assert real <= mib(LIMIT_MIB), (seed, at, line)
            assert result in {0, OUT_OF_MEMORY, 1, 400}, (seed, at, line, result)


def call_with_context(program: Program, line: str) -> int:
    """Make a call with the primary context, which others are created beside, or with the last green one."""
    result = program.result(line)
    if line.startswith("green ") and not result:
        program.ok(line.replace("green", "green-current"))
    if line.startswith(("context", "green-free")):
        program.ok("primary 0")
        program.ok("primary-release 0")
    return result


@pytest.mark.parametrize("seed", range(3))
def test_no_more_is_allocated_than_is_accounted(container: Container, seed: int) -> None:
    """After each step of a random program, the device has no more allocated for it than is accounted, nor the limit."""
    run(container, seed, 250)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 140))
def test_no_more_is_allocated_than_is_accounted_in_long_programs(container: Container, seed: int) -> None:
    """The same for many and longer programs."""
    run(container, seed, 1000)
