"""Compiles the library that limits GPU memory in containers, and the one that has NVML say the same.

Both have the names of the driver's own libraries: a program that opens one by its name gets what is loaded already.
They run in any container whose glibc is 2.17 or newer: zig compiles against that, gcc against the machine's own. Only
the standard library is imported: this also runs while Quotient is being installed.
"""

import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nodeplugin.compiler import NoCompiler, run_command
from nodeplugin.cuda_header import NVML_HEADER, NVML_PACKAGE, find_headers
from nodeplugin.preload_source import generate, generate_nvml

SOURCES = Path(__file__).with_name("preload")
CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
OLDEST_GLIBC = "2.17"
FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared")
# Bound to itself: programs that look up the driver's functions have variables of the same names.
LINKING = ("-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now", "-ldl")
# Used by both libraries.
COMMON = ("loading.c", "limits.c", "process.c", "usage.c", "forwarding.S")
ONLY_CUDA = (
    "array_sizes.c",
    "blocks.c",
    "charging.c",
    "contexts.c",
    "graphs.c",
    "ipc.c",
    "memory.c",
    "pools.c",
    "records.c",
    "reporting.c",
    "resolving.c",
    "virtual_memory.c",
)


@dataclass(frozen=True)
class Library:
    """One library: its sources, the real one's name, and what to answer where that is missing or lacks a function."""

    name: str
    sources: Sequence[str]
    no_library: str
    not_exported: str


LIBRARIES = (
    Library(CUDA, (*COMMON, *ONLY_CUDA), "100", "801"),  # CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NOT_SUPPORTED
    Library(NVML, (*COMMON, "nvml/nvml_memory.c"), "12", "13"),  # NVML_ERROR_LIBRARY_, NVML_ERROR_FUNCTION_NOT_FOUND
)


def zig_command(machine: str) -> list[str]:
    """Return the compiler for the oldest glibc; raises NoCompiler if it is not installed."""
    if subprocess.run([sys.executable, "-c", "import ziglang"], capture_output=True, check=False).returncode:
        raise NoCompiler("zig not found: run `pip install ziglang`")
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{OLDEST_GLIBC}"]


def build(target: Path, compiler: Sequence[str] | None = None, flags: Sequence[str] = ()) -> list[str]:
    """Compile both libraries into a folder, and return their names; raises NoCompiler if that is not possible here."""
    command = list(compiler or zig_command(platform.machine()))
    cuda, nvml = find_headers(), find_headers(NVML_PACKAGE, NVML_HEADER)
    generated = {CUDA: generate(cuda, SOURCES), NVML: generate_nvml(nvml, SOURCES / "nvml")}
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        for library in LIBRARIES:
            folder = Path(scratch) / library.name
            folder.mkdir()
            for name, content in generated[library.name].items():
                (folder / name).write_text(content)
            compiled = folder / "compiled"
            run_command(
                *command,
                *FLAGS,
                *flags,
                *definitions(library),
                f"-I{folder}",
                "-isystem",
                str(cuda),
                "-isystem",
                str(nvml),
                f"-Wl,-soname,{library.name}",
                *(str(SOURCES / each) for each in library.sources),
                *LINKING,
                "-o",
                str(compiled),
            )
            # Renamed: a running process may have the old file mapped.
            compiled.replace(target / library.name)
    return [library.name for library in LIBRARIES]


def definitions(library: Library) -> tuple[str, ...]:
    real = library.name.removesuffix(".1")
    return f'-DLIBRARY="{real}"', f"-DNO_LIBRARY={library.no_library}", f"-DNOT_EXPORTED={library.not_exported}"
