import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeplugin.compiler import run_command
from nodeplugin.cuda_header import find_headers
from nodeplugin.preload_build import LIBRARIES, SOURCES, definitions
from nodeplugin.preload_source import generate
from tests.preload.conftest import HERE
from tests.preload.containers import CONTEXT_MIB, Container, mib

SANITIZERS = {
    "thread": ("-fsanitize=thread",),
    "address and undefined": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}
# The fake driver's own memory is not what is looked at.
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}


def build_program(folder: Path, flags: tuple[str, ...]) -> Path:
    """Compile the library's sources into a program of threads."""
    cuda = LIBRARIES[0]
    for name, content in generate(find_headers(), SOURCES).items():
        (folder / name).write_text(content)
    sources = (str(SOURCES / each) for each in cuda.sources)
    run_command(
        "gcc", "-std=gnu11", "-O1", "-g", "-fPIE", "-Wno-tsan", "-Wno-deprecated-declarations", "-fvisibility=hidden",
        *flags, "-DFOLDER_FROM_ENVIRONMENT", *definitions(cuda), f"-I{folder}",
        "-isystem", str(find_headers()), "-o", str(folder / "threads"), str(HERE / "threads.c"), *sources,
        "-ldl", "-lpthread",
    )  # fmt: skip
    return folder / "threads"


def run_threads(container: Container, program: Path, rounds: int) -> None:
    environment = container.environment(is_limited=False) | OPTIONS
    with subprocess.Popen(
        [program, str(rounds)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout
        # What a sanitizer finds, it writes to stderr, and ends the program.
        assert running.stdout.readline() == "done\n"
        assert container.accounted() == mib(CONTEXT_MIB)
        running.communicate("\n")
    assert running.returncode == 0


@pytest.mark.parametrize("flags", SANITIZERS.values(), ids=SANITIZERS)
def test_threads_neither_race_nor_leave_anything_charged(
    make_container: Callable[..., Container], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Eight threads do everything at once: no sanitizer finds anything, and then only the context is charged."""
    run_threads(make_container(2048), build_program(tmp_path, flags), 150)


def test_threads_at_the_limit_get_along(make_container: Callable[..., Container], tmp_path: Path) -> None:
    """The same where the limit leaves room for half of them."""
    run_threads(make_container(CONTEXT_MIB * 4), build_program(tmp_path, SANITIZERS["thread"]), 100)


@pytest.mark.long
@pytest.mark.parametrize("flags", SANITIZERS.values(), ids=SANITIZERS)
def test_threads_run_for_long(make_container: Callable[..., Container], tmp_path: Path, flags: tuple[str, ...]) -> None:
    """The same for a longer time."""
    run_threads(make_container(2048), build_program(tmp_path, flags), 2_000)
