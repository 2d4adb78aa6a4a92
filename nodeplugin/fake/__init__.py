"""A driver for machines without GPUs: a C library that answers as NVML does, from a file.

The node plugin does not know the difference: it loads the library as it would load the real one.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from nodeplugin.nvml import LIBRARY

DESCRIPTION = "gpus.yaml"
FLAGS = ("-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}")


class NoAliasDumper(yaml.SafeDumper):
    """Writes everything out, also what stands twice: the library knows no aliases."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        """Never."""
        return True


class NoCompiler(Exception):  # noqa: N818 - a lack of this machine's
    """Nothing here compiles C."""


def compiler() -> list[str]:
    """Find a C compiler: the machine's own, or zig's from PyPI."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    if subprocess.run([sys.executable, "-c", "import ziglang"], capture_output=True, check=False).returncode == 0:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise NoCompiler("no C compiler here: install gcc, or `pip install ziglang`")


def library() -> Path:
    """Give the compiled library; it is made once for each version of its source."""
    source = resources.files(__name__).joinpath("nvml.c").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quotient" / "fake-driver"
    target = cache / hashlib.sha256(source).hexdigest()[:16] / LIBRARY
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        file, made = Path(scratch) / "nvml.c", Path(scratch) / LIBRARY
        file.write_bytes(source)
        command = [*compiler(), *FLAGS, "-o", str(made), str(file), "-lpthread", "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own source
        if done.returncode:
            raise NoCompiler(f"{' '.join(command)} failed: {done.stderr.strip()}")
        made.replace(target)
    return target


def install(folder: Path, description: Mapping[str, Any] | str) -> Path:
    """Put the driver into a folder, with the cards that are described; gives the library."""
    folder.mkdir(parents=True, exist_ok=True)
    describe(folder, description)
    target = folder / LIBRARY
    if not target.exists():
        shutil.copy(library(), target)
    return target


def describe(folder: Path, description: Mapping[str, Any] | str) -> None:
    """Change what the driver says, at once as a whole."""
    described = yaml.safe_load(description) if isinstance(description, str) else dict(description)
    text = yaml.dump(described, Dumper=NoAliasDumper, sort_keys=False)
    scratch = folder / f"{DESCRIPTION}.new"
    scratch.write_text(text)
    scratch.replace(folder / DESCRIPTION)
