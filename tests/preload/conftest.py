from collections.abc import Callable
from pathlib import Path

import pytest

from nodeplugin.compiler import run_compiler
from nodeplugin.cuda_header import find_headers
from nodeplugin.fake.building import compile_cuda
from nodeplugin.preload_build import build
from tests.preload.containers import Container

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a build that reads its files from where $QUOTIENT_FOLDER says."""
    folder = tmp_path_factory.mktemp("library")
    build(folder, ["gcc"], ["-DFOLDER_FROM_ENVIRONMENT"])
    return folder


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of driver_shell.c."""
    return compile_program(HERE / "driver_shell.c", tmp_path_factory.mktemp("shell") / "shell")


def compile_program(source: Path, target: Path, *flags: str) -> Path:
    """Compile a C program that uses the driver by the name that programs link."""
    headers, driver = find_headers(), compile_cuda()
    run_compiler(
        "-std=gnu11", "-O1", "-g", "-Wall", "-Werror", "-Wno-deprecated-declarations", "-isystem", str(headers),
        *flags, "-o", str(target), str(source), str(driver), "-Wl,--allow-shlib-undefined", "-lpthread",
    )  # fmt: skip
    return target


@pytest.fixture
def make_container(tmp_path: Path, library: Path, shell: Path) -> Callable[..., Container]:
    """Make a container: Container's arguments after the first three."""

    def make(*limits_mib: float, **more: object) -> Container:
        number = len(list(tmp_path.glob("container-*")))
        folder = tmp_path / f"container-{number}"
        return Container(folder, library, shell, limits_mib or (1024,), **more)  # type: ignore[arg-type]

    return make


@pytest.fixture
def container(make_container: Callable[..., Container]) -> Container:
    """A container with 1 GiB of a card of 8 GiB."""
    return make_container()
