"""Reads the declarations of the CUDA driver API from NVIDIA's cuda.h.

Only the standard library is imported: this also runs while Quotient is being installed. The header is in the package
nvidia-cuda-runtime, which building Quotient needs and running it does not.
"""

import importlib.metadata
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nodeplugin.compiler import NoCompiler, preprocess

PACKAGE, HEADER, TYPEDEFS = "nvidia-cuda-runtime", "cuda.h", "cudaTypedefs.h"
NVML_PACKAGE, NVML_HEADER = "nvidia-nvml-dev", "nvml.h"
# Exported, not declared: nvidia-smi asks for it.
NVML_PRIVATE = "nvmlInternalGetExportTable"
# Every function of every version, those with a per-thread default stream included.
ALL_VERSIONS = ("-D__CUDA_API_VERSION_INTERNAL",)
DECLARATION = re.compile(r"\bCUresult\s+(cu[A-Z]\w*)\s*\(([^;{}]*)\)\s*;")
# PFN_cuMemAllocAsync_v11020_ptsz: the function's name without its version, since when, and for which default stream.
TYPEDEF = re.compile(r"\(CUDAAPI \*PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)\((.*)\);")
VERSION = re.compile(r"^#define\s+CUDA_VERSION\s+(\d+)", re.MULTILINE)
EXPORTED_SUFFIX = re.compile(r"(?:_v\d+)?(?:_pt[sd][sz])?$")
NVML_CALLED = re.compile(r"\b(nvml[A-Z]\w+)\s*\(")
NVML_RENAMED = re.compile(r"^\s*#\s*define\s+(nvml[A-Z]\w+)\s+nvml[A-Z]\w+\s*$", re.MULTILINE)
SPACES = re.compile(r"\s+")


@dataclass(frozen=True)
class Function:
    """An exported function, with its parameters as C declares them."""

    name: str
    parameters: str

    @property
    def base(self) -> str:
        """The name without version and default stream, by which cuGetProcAddress is asked."""
        return EXPORTED_SUFFIX.sub("", self.name)

    @property
    def variant(self) -> str:
        """Which default stream it takes: `_ptsz` or `_ptds` for that of the thread, otherwise empty."""
        return self.name[-5:] if self.name.endswith(("_ptsz", "_ptds")) else ""


@dataclass(frozen=True)
class Resolution:
    """Since which version of CUDA cuGetProcAddress returns which signature for a name."""

    base: str
    version: int
    variant: str
    parameters: str


def find_headers(package: str = PACKAGE, header: str = HEADER) -> Path:
    """Return the folder of cuda.h; raises NoCompiler, naming the package, if there is none."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == header:
            return Path(str(file.locate())).parent
    raise NoCompiler(f"{header} not found: run `pip install {package}`")


def read_functions(folder: Path) -> list[Function]:
    """Return all functions that a driver exports, in the header's order."""
    text = preprocess(folder / HEADER, *ALL_VERSIONS)
    found = dict.fromkeys(
        Function(name, SPACES.sub(" ", parameters).strip()) for name, parameters in DECLARATION.findall(text)
    )
    return [*{each.name: each for each in found}.values()]


def read_resolutions(folder: Path) -> Iterator[Resolution]:
    for base, version, variant, parameters in TYPEDEF.findall((folder / TYPEDEFS).read_text()):
        yield Resolution(base, int(version), variant, SPACES.sub(" ", parameters).strip())


def read_nvml_names(folder: Path) -> list[str]:
    """Return the names of all functions that libnvidia-ml exports, those of older versions included."""
    text = (folder / NVML_HEADER).read_text()
    return list(dict.fromkeys([*NVML_CALLED.findall(text), *NVML_RENAMED.findall(text), NVML_PRIVATE]))


def read_version(folder: Path) -> int:
    """Return the version of CUDA that the header is of, such as 13050."""
    found = VERSION.search((folder / HEADER).read_text())
    if found is None:
        raise NoCompiler(f"{folder / HEADER}: CUDA_VERSION is not defined in it")
    return int(found[1])
