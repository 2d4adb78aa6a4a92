"""Finds a C compiler. Only the standard library is imported: this also runs while Quotient is being installed."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path


class NoCompiler(Exception):  # noqa: N818 - a requirement that this machine does not meet
    """A library cannot be compiled on this machine; the message names the remedy."""


def find_compiler() -> list[str]:
    """Return the command of a C compiler: $CC, the machine's own, or zig's from PyPI; raises NoCompiler."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    if subprocess.run([sys.executable, "-c", "import ziglang"], capture_output=True, check=False).returncode == 0:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NoCompiler("no C compiler found: install gcc, or run `pip install ziglang`")


def static_flags() -> tuple[str, ...]:
    """Return the flags for a program that runs on every machine, whatever C library it has."""
    # zig links glibc dynamically only.
    target = ("-target", f"{platform.machine()}-linux-musl") if "ziglang" in find_compiler() else ()
    return ("-static", *target)


def run_compiler(*arguments: str) -> str:
    """Run the compiler and return its output; raises NoCompiler with its messages if it fails."""
    return run_command(*find_compiler(), *arguments)


def run_command(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own source
    if done.returncode:
        raise NoCompiler(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def preprocess(header: Path, *definitions: str) -> str:
    return run_compiler("-E", "-P", *definitions, str(header))
