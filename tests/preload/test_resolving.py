import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from nodeplugin import preload_build, preload_source
from nodeplugin.compiler import run_compiler
from nodeplugin.cuda_header import find_headers, read_functions
from nodeplugin.preload_source import hooked_names
from tests.preload.conftest import HERE
from tests.preload.containers import CONTEXT_MIB, UUIDS, Container, mib

# The real runtimes, and the version of CUDA of the drivers they came with.
RUNTIMES = {
    "nvidia-cuda-runtime-cu11": ("libcudart.so.11.0", 11080),
    "nvidia-cuda-runtime-cu12": ("libcudart.so.12", 12090),
    "nvidia-cuda-runtime": ("libcudart.so.13", 13050),
}
# Runs until the runtime finds that the driver is a fake one: all names are resolved before.
USE_RUNTIME = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).cudaFree(None)"


def runtime(package: str) -> Path:
    files = importlib.metadata.files(package) or []
    return next(Path(str(each.locate())) for each in files if each.name == RUNTIMES[package][0])


@pytest.fixture(scope="module")
def log_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("log") / "liblog.so"
    source = str(HERE / "resolution_log.c")
    run_compiler("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), source, "-ldl")
    return library


def resolutions(
    container: Container, log_library: Path, package: str, *, is_limited: bool
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return what a real runtime gets for each name, version and stream: the result, the function and its library."""
    log = container.folder / f"log-{is_limited}"
    environment = container.environment(RESOLUTION_LOG=str(log))
    own = container.build if is_limited else container.driver
    environment["LD_PRELOAD"] = f"{log_library}:{own / 'libcuda.so.1'}"
    subprocess.run([sys.executable, "-c", USE_RUNTIME, str(runtime(package))], env=environment, check=True)
    lines = [line.split() for line in log.read_text().splitlines()]
    return {tuple(line[:3]): tuple(line[3:]) for line in lines}


@pytest.mark.parametrize("package", RUNTIMES)
def test_a_real_runtime_gets_the_hook_of_the_driver_s_own_answer(
    make_container: Callable[..., Container], log_library: Path, package: str
) -> None:
    """Each name leads to the function that the driver alone gives, in its version and stream: ours if it is hooked."""
    container = make_container(description={"cuda": RUNTIMES[package][1]})
    limited = resolutions(container, log_library, package, is_limited=True)
    plain = resolutions(container, log_library, package, is_limited=False)
    hooked = hooked_names(preload_build.SOURCES)
    assert limited.keys() == plain.keys()
    assert len(limited) > 300
    ours = 0
    for asked, (result, name, file) in limited.items():
        assert (result, name) == plain[asked][:2], asked
        is_ours = file == str(container.build / "libcuda.so.1")
        # What is hooked in one version is hooked in all.
        assert is_ours == (name in hooked), (asked, name, file)
        ours += is_ours
    assert ours > 30


ALL_ANSWERS = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
class Info(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]
libc, reference = ctypes.CDLL(None), ctypes.byref
VERSIONS = (2000, 3020, 4000, 6050, 7000, 9000, 10000, 11000, 11020, 11030, 11040, 11080, 12000, 12050, 12080, 12090)
for symbol in sys.argv[1].split(","):
    for version in (*VERSIONS, 13000, 13010, 13050, 14000):
        for flags in (0, 1, 2):
            found, status, info, wide = ctypes.c_void_p(), ctypes.c_int(), Info(), ctypes.c_ulonglong(flags)
            result = cuda.cuGetProcAddress_v2(symbol.encode(), reference(found), version, wide, reference(status))
            if found.value:
                libc.dladdr(found, reference(info))
            print(symbol, version, flags, result, status.value, info.name, info.file)
"""  # noqa: E501 - of the program


def answers(container: Container, symbols: Iterable[str], *, is_limited: bool) -> list[list[str]]:
    """Return what is answered for each name in each version and stream, and the library that it is in."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_ANSWERS, ",".join(symbols)],
        env=container.environment(is_limited=is_limited), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.rsplit(" ", 1) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("knows_addresses", [True, False])
def test_every_version_of_every_hook_is_resolved(
    make_container: Callable[..., Container], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, knows_addresses: bool
) -> None:
    """In all versions and streams, cuGetProcAddress answers as the driver does, with the hook of that function.

    Also where the driver's answers are other addresses than those that it exports: then by name, version and stream.
    """
    container = make_container(description={"cuda": 13050})
    hooked = hooked_names(preload_build.SOURCES)
    bases = sorted({each.base for each in read_functions(find_headers()) if each.name in hooked})
    if not knows_addresses:
        sources = tmp_path / "preload"
        shutil.copytree(preload_build.SOURCES, sources)
        resolving = sources / "resolving.c"
        comparison = "driver_functions[TABLE[row].function] == address"
        assert resolving.read_text().count(comparison) == 1
        resolving.write_text(resolving.read_text().replace(comparison, "!address"))
        monkeypatch.setattr(preload_build, "SOURCES", sources)
        container.build = tmp_path / "by-name"
        preload_build.build(container.build, ["gcc"], ["-DFOLDER_FROM_ENVIRONMENT"])
    symbols = ["", *bases] if knows_addresses else bases
    limited, plain = (answers(container, symbols, is_limited=each) for each in (True, False))
    assert [each[0] for each in limited] == [each[0] for each in plain]
    for line, file in limited:
        name = line.split("b'")[-1].rstrip("'") if "b'" in line else ""
        assert (str(container.build) in file) == (name in hooked), (line, file)


def test_a_function_that_is_newer_than_the_library_cannot_be_had(
    make_container: Callable[..., Container], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver's newer version of a hooked function is refused: the program must not get it past the limit."""
    generate = preload_source.generate

    def older(headers: Path, sources: Path) -> dict[str, str]:
        made = generate(headers, sources)
        lines = made["resolutions.h"].splitlines()
        kept = [line for line in lines if not ('"cuCtxCreate"' in line and "12050" in line)]
        assert len(kept) == len(lines) - 1
        text = "\n".join(kept) + "\n"
        return made | {
            "resolutions.h": text.replace("#define HEADER_VERSION 13", "#define HEADER_VERSION 12000 + 0 * 13")
        }

    monkeypatch.setattr(preload_build, "generate", older)
    preload_build.build(tmp_path / "older", ["gcc"], ["-DFOLDER_FROM_ENVIRONMENT"])
    container = make_container(description={"cuda": 13050})
    container.build = tmp_path / "older"
    done = subprocess.run(
        [sys.executable, "-c", ALL_ANSWERS, "cuCtxCreate"], env=container.environment(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    answers = {tuple(line.split()[1:3]): line.split()[3:] for line in done.stdout.splitlines()}
    assert answers["12000", "0"][2] == "b'cuCtxCreate_v3'"
    assert answers["13000", "0"][:2] == ["500", "2"]
    assert "is newer than this library" in done.stderr


WAYS = {
    "by the bare name": "ctypes.CDLL('libcuda.so.1')",
    "by the name without a version": "ctypes.CDLL('libcuda.so.1', mode=ctypes.RTLD_GLOBAL)",
    "with RTLD_DEEPBIND": "ctypes.CDLL('libcuda.so.1', mode=os.RTLD_DEEPBIND | os.RTLD_NOW)",
    "in the program itself": "ctypes.CDLL(None)",
}
ALLOCATE = """
import ctypes, os
cuda = {way}
context, memory = ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
print(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t({bytes})))
"""


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_driver_is_limited_however_it_is_opened(container: Container, way: str) -> None:
    """A program that opens the driver by its name, as NCCL is by ctypes, gets the library."""
    for size, expected in ((mib(1024 - CONTEXT_MIB), "0"), (mib(1024 - CONTEXT_MIB) + 1, "2")):
        program = ALLOCATE.format(way=way, bytes=size)
        done = subprocess.run(
            [sys.executable, "-c", program], env=container.environment(), capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


def test_an_absolute_path_escapes(container: Container) -> None:
    """What opens the driver's own file is not limited: only the driver's own limit, or MPS, holds it."""
    way = f"ctypes.CDLL('{container.driver / 'libcuda.so.550.54.15'}')"
    program = ALLOCATE.format(way=way, bytes=mib(1024))
    done = subprocess.run(
        [sys.executable, "-c", program], env=container.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0"


BINDINGS = """
from cuda.bindings import driver
def ok(result):
    assert result[0] == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]
ok(driver.cuInit(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
print(*ok(driver.cuMemGetInfo()), int(driver.cuMemAlloc(1 << 30)[0]))
"""


def test_nvidias_bindings_for_python_are_limited(container: Container) -> None:
    """cuda.bindings resolves each function by cuGetProcAddress, and gets the hooks."""
    done = subprocess.run(
        [sys.executable, "-c", BINDINGS], env=container.environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(mib(1024 - CONTEXT_MIB)), str(mib(1024)), "2"]


def test_tables_of_the_driver_are_passed_through(container: Container) -> None:
    """CuGetExportTable, by which NVIDIA's own libraries prove the driver, is the driver's."""
    program = """
import ctypes
cuda, real = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL({real!r})
answers = []
for library in (cuda, real):
    table = ctypes.c_void_p()
    answers.append((library.cuGetExportTable(ctypes.byref(table), b"0123456789abcdef"), table.value))
print(answers[0] == answers[1])
"""
    done = subprocess.run(
        [sys.executable, "-c", program.format(real=str(container.driver / "libcuda.so.550.54.15"))],
        env=container.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "True"
    assert UUIDS
