import re
import subprocess
from pathlib import Path

import pytest

from nodeplugin import preload_build, preload_source, share_files
from nodeplugin.compiler import NoCompiler, run_compiler
from nodeplugin.cuda_header import Function, find_headers, read_functions
from nodeplugin.preload_build import CUDA, NVML, SOURCES, build, zig_command
from nodeplugin.preload_source import UNDECLARED

NEEDED = re.compile(r"\(NEEDED\).*\[(.*)\]")
GLIBC = re.compile(r"GLIBC_2\.(\d+)")


def readelf(*arguments: object) -> str:
    return subprocess.run(["readelf", "-W", *map(str, arguments)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", ["cuMemAllocSomehow", "cuMemAllocAsync_v7", "cuNewPoolCreate", "cuCtxCreate_v9"])
def test_a_new_function_that_may_allocate_stops_the_build(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A function of a newer cuda.h that may allocate has to be hooked, or exempt with a reason."""
    known = read_functions(find_headers())
    monkeypatch.setattr(preload_source, "read_functions", lambda _: [*known, Function(name, "void")])
    with pytest.raises(NoCompiler, match=f"neither hooked nor exempt.*{name}"):
        preload_source.generate(find_headers(), SOURCES)


def test_a_hook_of_no_function_stops_the_build(tmp_path: Path) -> None:
    """A hook whose name the driver does not have would never be called."""
    (tmp_path / "wrong.c").write_text("HOOK(cuMemAllocWrong)(void) {}\n")
    with pytest.raises(NoCompiler, match="no function of the driver: cuMemAllocWrong"):
        preload_source.check([], preload_source.hooked_names(tmp_path), [])


LAYOUT = """
#include <stddef.h>
#include <stdio.h>
#include "formats.h"
int main(void) {
    printf("%zu %zu %zu ", sizeof(struct limits_file), sizeof(struct card_limits), offsetof(struct limits_file, cards));
    printf("%zu %zu ", offsetof(struct limits_file, sequence), offsetof(struct limits_file, updated_ns));
    printf("%zu %zu ", offsetof(struct limits_file, driver_version), offsetof(struct limits_file, driver_folder));
    printf("%zu %zu %zu ",
           offsetof(struct card_limits, memory_bytes), offsetof(struct card_limits, context_bytes),
           offsetof(struct card_limits, core_limit));
    printf("%zu %zu %zu %zu ", sizeof(struct usage_file), sizeof(struct shared_memory), sizeof(struct usage_slot),
           offsetof(struct usage_file, slots));
    printf("%zu %zu %zu ", offsetof(struct usage_file, shared), offsetof(struct usage_slot, cards),
           offsetof(struct shared_memory, holders));
    printf("%d %d %d %d %#x %#x\\n", MAX_CARDS, MAX_SLOTS, MAX_SHARED, FORMAT_VERSION, LIMITS_MAGIC, USAGE_MAGIC);
}
"""


def test_python_and_c_have_the_same_layouts(tmp_path: Path) -> None:
    """The files that the plugin writes are laid out as the library reads them."""
    (tmp_path / "layout.c").write_text(LAYOUT)
    run_compiler(f"-I{SOURCES}", "-o", str(tmp_path / "layout"), str(tmp_path / "layout.c"))
    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout.split()
    header = share_files.LIMITS_HEADER.size
    limits = [share_files.LIMITS_BYTES, share_files.CARD_LIMITS.size, header, 8, 16, 24, 56, 64, 72, 92]
    usage = [
        share_files.USAGE_BYTES, share_files.SHARED_MEMORY.size, share_files.SLOT.size, share_files.SLOTS_OFFSET,
        share_files.USAGE_HEADER.size, 8, 80,
    ]  # fmt: skip
    constants = [share_files.MAX_CARDS, share_files.MAX_SLOTS, share_files.MAX_SHARED, share_files.VERSION]
    magic = [hex(share_files.LIMITS_MAGIC), hex(share_files.USAGE_MAGIC)]
    assert printed == [*map(str, [*limits, *usage, *constants]), *magic]


@pytest.mark.parametrize("name", [CUDA, NVML])
def test_programs_see_the_driver_s_functions_only(name: str, library: Path) -> None:
    """Nothing but functions of the driver is exported, all of them, and nothing but the C library is needed."""
    path = library / name
    symbols = [
        line.split() for line in readelf("--dyn-syms", path).splitlines() if " GLOBAL " in line or " WEAK " in line
    ]
    exported = {line[7].partition("@")[0] for line in symbols if line[6] != "UND"}
    prefix = "cu(?:dbg)?" if name == CUDA else "nvml"
    assert [each for each in exported if not re.match(rf"{prefix}[A-Z]", each)] == []
    assert set(NEEDED.findall(readelf("-d", path))) <= {"libc.so.6", "libdl.so.2"}
    if name == CUDA:
        assert {each.name for each in read_functions(find_headers())} <= exported


def test_functions_that_no_header_declares_are_exported(library: Path) -> None:
    """A program that a real driver's library loads finds all its names: those of debuggers, profilers and EGL, too."""
    functions = re.findall(r" FUNC +GLOBAL +DEFAULT +\d+ (\w+)", readelf("--dyn-syms", library / CUDA))
    assert set(UNDECLARED) <= set(functions)


def test_an_undefined_name_stops_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is missing in the library is found when it is built, not in a program."""
    monkeypatch.setattr(preload_build, "ONLY_CUDA", ())
    libraries = (preload_build.Library(CUDA, preload_build.COMMON[:1], "100", "801"),)
    monkeypatch.setattr(preload_build, "LIBRARIES", libraries)
    with pytest.raises(NoCompiler, match="undefined"):
        build(tmp_path, ["gcc"])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_containers_with_an_old_c_library_can_load_it(tmp_path: Path, machine: str) -> None:
    """Built as for release, the library needs no newer glibc than 2.17, on both kinds of processors."""
    build(tmp_path, zig_command(machine))
    for library in (CUDA, NVML):
        versions = [int(each) for each in GLIBC.findall(readelf("-V", tmp_path / library))]
        assert versions
        assert max(versions) <= 17
        assert set(NEEDED.findall(readelf("-d", tmp_path / library))) <= {"libc.so.6", "libdl.so.2"}
        assert "Type:                              DYN" in readelf("-h", tmp_path / library)


def test_forwarding_on_aarch64_orders_what_the_driver_loads(tmp_path: Path) -> None:
    """Each forwarded function acquires the driver's address: a plain load would let later ones see older values."""
    build(tmp_path, zig_command("aarch64"))
    acquire, plain = bytes.fromhex("10fedfc8"), bytes.fromhex("100240f9")
    for library in (CUDA, NVML):
        content = (tmp_path / library).read_bytes()
        assert content.count(acquire) > 100
        assert plain not in content


def test_a_release_reads_no_environment(tmp_path: Path) -> None:
    """Where the library finds its files is no choice of the program's."""
    build(tmp_path, ["gcc"])
    for library in (CUDA, NVML):
        assert b"QUOTIENT_FOLDER" not in (tmp_path / library).read_bytes()
        assert "getenv" not in readelf("--dyn-syms", tmp_path / library)
