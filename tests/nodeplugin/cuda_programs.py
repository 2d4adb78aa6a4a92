"""Programs on the fake CUDA driver: in Python with NVIDIA's bindings, or in C."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from nodeplugin import fake
from nodeplugin.compiler import run_compiler
from nodeplugin.cuda_header import find_headers

UUIDS = [f"GPU-{index:08d}-1111-2222-3333-444444444444" for index in range(4)]
CONTEXT_MIB, MEMORY_MIB = 100, 2048
# Names that every program has: `ok` returns the values of a call that must succeed, `failed` the code of one that must
# not, `tell` sends a line to the test and `hear` waits for one, `device` makes the primary context current.
PREAMBLE = """
import ctypes, os, sys
from cuda.bindings import driver as cu
MIB = 1 << 20
FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
def ok(result):
    assert result[0] == 0, result[0]
    return result[1] if len(result) == 2 else result[1:] or None
def failed(result):
    assert result[0] != 0, "it succeeded"
    return result[0].name
def tell(*values):
    print(*values, flush=True)
def hear():
    return sys.stdin.readline().strip()
def device(ordinal=0):
    ok(cu.cuInit(0))
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(ordinal))))
def free_mib():
    return ok(cu.cuMemGetInfo())[0] / MIB
def property_of(kind=cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, handles=0, ordinal=0):
    made = cu.CUmemAllocationProp()
    made.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type, made.location.id = kind, ordinal
    made.requestedHandleTypes = cu.CUmemAllocationHandleType(handles)
    return made
def function(name, image=b"x"):
    return ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(image)), name.encode()))
def launch(name, stream=0):
    ok(cu.cuLaunchKernel(function(name), 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))
"""


def gpu(index: int = 0, **changes: Any) -> dict[str, Any]:
    card = {"uuid": UUIDS[index], "product": "Fake", "memoryMiB": MEMORY_MIB, "contextMiB": CONTEXT_MIB, "lagMs": 0}
    return card | changes


class Program:
    """A running program; leaving its block kills it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid = process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.process.communicate()[1]
        return line

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def child(self) -> int:
        """The pid of its only child."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Machine:
    """A folder with both fake libraries, for programs."""

    def __init__(self, folder: Path, *cards: Mapping[str, Any], **others: Any) -> None:
        self.folder = folder
        self.library = fake.install_cuda(folder, {"cards": list(cards) or [gpu()], **others})

    def start(self, body: str, *arguments: str, within: tuple[str, ...] = (), **environment: str) -> Program:
        """Start a Python program; the preamble's names are defined."""
        return self._start([*within, *python(body, *arguments)], environment)

    def run(self, body: str, *arguments: str, **environment: str) -> list[str]:
        """Run a Python program to its end; returns the lines that it told."""
        return finish(self._start(python(body, *arguments), environment))

    def run_c(self, source: str, **environment: str) -> list[str]:
        """Compile and run a C program; `OK(call)` ends it if a call fails."""
        program = self.folder / "program"
        (self.folder / "program.c").write_text(C_PREAMBLE + textwrap.dedent(source))
        headers = ("-D_GNU_SOURCE", "-isystem", str(find_headers()), "-L", str(self.folder))
        # By its name alone, as programs link libcuda.
        run_compiler(
            *headers, str(self.folder / "program.c"), "-o", str(program), "-l:libcuda.so.1", "-lpthread", "-ldl"
        )
        return finish(self._start([str(program)], environment))

    def _start(self, command: list[str], environment: Mapping[str, str]) -> Program:
        others = {name: value for name, value in os.environ.items() if not name.startswith(("QUOTIENT_", "CUDA_"))}
        return Program(
            subprocess.Popen(
                command,
                env=others | {"LD_LIBRARY_PATH": str(self.folder), **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )


def python(body: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PREAMBLE + textwrap.dedent(body), *arguments]


def finish(program: Program) -> list[str]:
    output, errors = program.process.communicate(timeout=60)
    assert program.process.returncode == 0, errors
    return output.splitlines()


C_PREAMBLE = """
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#define MIB (1UL << 20)
#define OK(call) do { int code = call; if (code) { fprintf(stderr, "%s: %d\\n", #call, code); exit(1); } } while (0)
"""
