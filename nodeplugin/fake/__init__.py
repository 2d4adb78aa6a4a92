"""A fake driver for machines without GPUs: a C library that implements NVML from a YAML file.

The node plugin loads it like the real one, so that tests, benchmarks and `quotient local` run its code unchanged.
`gpus.yaml` documents what the file may contain.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from nodeplugin.compiler import run_compiler
from nodeplugin.nvml import LIBRARY

DESCRIPTION = "gpus.yaml"
R510, R615 = 510, 615
FLAGS = ("-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}")


class NoAliasDumper(yaml.SafeDumper):
    """Writes repeated values in full: the library's small parser does not know YAML's anchors and aliases."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def compile_library(*definitions: str) -> Path:
    """Return the compiled library from the user's cache; compiles it once per version of its source."""
    source = resources.files(__name__).joinpath("nvml.c").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quotient" / "fake-driver"
    target = cache / hashlib.sha256(source + repr(definitions).encode()).hexdigest()[:16] / LIBRARY
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # On the file system of the target, so that the rename is atomic: test processes compile at the same time.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        file, compiled = Path(scratch) / "nvml.c", Path(scratch) / LIBRARY
        file.write_bytes(source)
        run_compiler(*FLAGS, *definitions, "-o", str(compiled), str(file), "-lpthread", "-ldl")
        compiled.replace(target)
    return target


def install(folder: Path, description: Mapping[str, Any] | str) -> Path:
    """Install the library and its description, a mapping or YAML text, into a folder; returns the library's path."""
    folder.mkdir(parents=True, exist_ok=True)
    describe(folder, description)
    target = folder / LIBRARY
    if not target.exists():
        shutil.copy(compile_library(*branch_definitions(folder)), target)
    return target


def branch_definitions(folder: Path) -> tuple[str, ...]:
    """Return what selects the functions that a driver of the described version has."""
    version = str((yaml.safe_load((folder / DESCRIPTION).read_text()) or {}).get("driver", ""))
    branch = int(major) if (major := version.partition(".")[0]).isdecimal() else R510
    return (*(("-DR470",) if branch < R510 else ()), *(("-DR615",) if branch >= R615 else ()))


def describe(folder: Path, description: Mapping[str, Any] | str) -> None:
    """Replace the description, which takes effect with the next call of the library."""
    described = yaml.safe_load(description) if isinstance(description, str) else dict(description)
    text = yaml.dump(described, Dumper=NoAliasDumper, sort_keys=False)
    # Renamed into place: the library must never read half a file.
    scratch = folder / f"{DESCRIPTION}.new"
    scratch.write_text(text)
    scratch.replace(folder / DESCRIPTION)
