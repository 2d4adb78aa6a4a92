"""A fake driver for machines without GPUs: C libraries that implement NVML and the CUDA driver API from a YAML file.

The node plugin loads NVML like the real one, so that tests, benchmarks and `quotient local` run its code unchanged.
Programs that use CUDA share simulated devices (device_state.h). `gpus.yaml` documents what the file may contain.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nodeplugin.fake.building import compile_cuda, compile_nvml
from nodeplugin.nvml import LIBRARY

DESCRIPTION = "gpus.yaml"
R510, R615 = 510, 615
# As nvml.c has it.
DEFAULT_VERSION = "550.54.15"


class NoAliasDumper(yaml.SafeDumper):
    """Writes repeated values in full: the library's small parser does not know YAML's anchors and aliases."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002
        return True


def install(folder: Path, description: Mapping[str, Any] | str) -> Path:
    """Install the library and its description, a mapping or YAML text, into a folder; returns the library's path."""
    folder.mkdir(parents=True, exist_ok=True)
    describe(folder, description)
    target = folder / LIBRARY
    if not target.exists():
        shutil.copy(compile_nvml(*branch_definitions(folder)), target)
    return target


def install_cuda(folder: Path, description: Mapping[str, Any] | str) -> Path:
    """Install both libraries, and links as a driver's installation has them; returns libcuda.so.1 in the folder."""
    install(folder, description)
    target = folder / f"libcuda.so.{driver_version(folder)}"
    if not target.exists():
        shutil.copy(compile_cuda(), target)
    versioned_nvml = f"libnvidia-ml.so.{driver_version(folder)}"
    for name, named in (("libcuda.so.1", target.name), ("libcuda.so", target.name), (versioned_nvml, LIBRARY)):
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(named)
    return folder / "libcuda.so.1"


def driver_version(folder: Path) -> str:
    described = yaml.safe_load((folder / DESCRIPTION).read_text()) or {}
    return str(described.get("driver") or DEFAULT_VERSION)


def branch_definitions(folder: Path) -> tuple[str, ...]:
    """Return what selects the functions that a driver of the described version has."""
    major = driver_version(folder).partition(".")[0]
    branch = int(major) if major.isdecimal() else R510
    return (*(("-DR470",) if branch < R510 else ()), *(("-DR615",) if branch >= R615 else ()))


def describe(folder: Path, description: Mapping[str, Any] | str) -> None:
    """Replace the description, which takes effect with the next call of the library."""
    described = yaml.safe_load(description) if isinstance(description, str) else dict(description)
    text = yaml.dump(described, Dumper=NoAliasDumper, sort_keys=False)
    # Renamed into place: the library must never read half a file.
    scratch = folder / f"{DESCRIPTION}.new"
    scratch.write_text(text)
    scratch.replace(folder / DESCRIPTION)
