"""Compiles the fake libraries into the user's cache, once per version of their sources.

What cuda.h declares is read at that time (`nodeplugin.cuda_header`): every function of the driver API is exported, and
the C sources implement those that they define as `do_` and the exported name. The compiler checks both against cuda.h.
"""

import hashlib
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from nodeplugin.compiler import preprocess, run_compiler
from nodeplugin.cuda_header import (
    ALL_VERSIONS,
    HEADER,
    Function,
    find_headers,
    read_functions,
    read_resolutions,
    read_version,
)
from nodeplugin.nvml import LIBRARY

CUDA_LIBRARY = "libcuda.so.1"
SHARED_SOURCES = ("description.c", "device_state.c")
# Our own functions stay invisible: a program's function of the same name must not replace them.
EXPORTS = "{ global: nvml[A-Z]*; cu[A-Z]*; local: *; };\n"
FLAGS = ("-std=gnu11", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations")
# Bound to itself: a preloaded library must not get the calls that the driver makes within itself.
CUDA_FLAGS = ("-Wl,-Bsymbolic", "-Wno-unused-parameter", *(each for each in ALL_VERSIONS))
IMPLEMENTED = re.compile(r"^CUresult do_(cu\w+)\(", re.MULTILINE)
LAST_NAME = re.compile(r"(\w+)(?:\[\w*\])?$")
ERROR_CODE = re.compile(r"\b(CUDA_(?:SUCCESS|ERROR_\w+))\s*=\s*(\d+)")
VERSION_SUFFIX = re.compile(r"_v(\d+)(?:_pt[sd][sz])?$")
# The interoperation with graphics: no header of theirs compiles without the headers of OpenGL, EGL or VDPAU.
GRAPHICS_TYPEDEFS = ("cudaGLTypedefs.h", "cudaEGLTypedefs.h", "cudaVDPAUTypedefs.h")
GRAPHICS_TYPEDEF = re.compile(r"\(CUDAAPI \*PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)")
WINDOWS_ONLY = "cuWGL"
# They answer before cuInit and after fork.
ALWAYS_CALLABLE = frozenset({
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetExportTable",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
})  # fmt: skip


def compile_nvml(*definitions: str) -> Path:
    """Return the fake NVML from the cache."""
    sources = read_sources(("nvml.c", *SHARED_SOURCES))
    return compile_cached(LIBRARY, sources, (*definitions, "-Wno-unused-parameter"))


def compile_cuda() -> Path:
    """Return the fake CUDA driver from the cache; raises NoCompiler without a compiler or without cuda.h."""
    folder = find_headers()
    names = (each.name for each in resources.files("nodeplugin.fake").iterdir() if each.name.startswith("cuda_"))
    sources = read_sources((*(each for each in sorted(names) if each.endswith((".c", ".h"))), *SHARED_SOURCES))
    flags = (*CUDA_FLAGS, "-isystem", str(folder))
    # The key of the cache needs no run of the preprocessor: the version stands for what the header declares.
    key = f"{read_version(folder)} {resources.files('nodeplugin.fake').joinpath('building.py').read_text()}"
    return compile_cached(CUDA_LIBRARY, sources, flags, key=key, generated_from=folder)


def read_sources(names: Iterable[str]) -> dict[str, str]:
    """Read C files of this package, with the headers of the shared ones."""
    files = resources.files("nodeplugin.fake")
    headers = (each.replace(".c", ".h") for each in SHARED_SOURCES)
    return {name: files.joinpath(name).read_text() for name in (*names, *headers)}


def compile_cached(
    library: str, sources: dict[str, str], flags: Sequence[str], *, key: str = "", generated_from: Path | None = None
) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quotient" / "fake-driver"
    digest = hashlib.sha256(repr((sources, flags, FLAGS, key)).encode()).hexdigest()[:16]
    target = cache / digest / library
    if target.exists():
        return target
    if generated_from:
        sources = sources | generate(generated_from, sources.values())
    target.parent.mkdir(parents=True, exist_ok=True)
    # On the file system of the target, so that the rename is atomic: test processes compile at the same time.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        for name, content in (sources | {"exports.map": EXPORTS}).items():
            (Path(scratch) / name).write_text(content)
        compiled, files = Path(scratch) / library, (f"{scratch}/{name}" for name in sources if name.endswith(".c"))
        linking = (f"-Wl,-soname,{library}", f"-Wl,--version-script={scratch}/exports.map")
        run_compiler(*FLAGS, *flags, *linking, "-o", str(compiled), *files, "-lpthread", "-ldl")
        compiled.replace(target)
    return target


def generate(folder: Path, sources: Iterable[str]) -> dict[str, str]:
    """Return the C files that follow from cuda.h and from what the sources implement."""
    functions = read_functions(folder)
    implemented = {name for source in sources for name in IMPLEMENTED.findall(source)}
    return {
        "cuda_functions.h": "".join(declarations(functions)),
        "cuda_entries.c": "".join(entries(functions, implemented)),
        "cuda_graphics_entries.c": "".join(graphics_entries(folder)),
        "cuda_tables.c": "".join(tables(folder, functions)),
    }


def declarations(functions: Sequence[Function]) -> Iterator[str]:
    """Declare an implementation of each function, with the types of cuda.h."""
    for each in functions:
        yield f"__typeof__({each.name}) do_{each.name};\n"


def entries(functions: Sequence[Function], implemented: set[str]) -> Iterator[str]:
    """Define what is exported: a function that checks and locks, and calls the implementation.

    A function with a thread's own default stream is the plain one, called with a mark. One without an implementation
    is not supported.
    """
    yield '#include "cuda_driver.h"\n'
    for number, each in enumerate(functions):
        base = each.name.removesuffix(each.variant) if each.variant else each.name
        target = next((name for name in (each.name, base) if name in implemented), "")
        arguments = ", ".join(parameter_names(each.parameters))
        call = f"do_{target}({arguments})" if target else "CUDA_ERROR_NOT_SUPPORTED"
        always, own_stream = int(each.name in ALWAYS_CALLABLE), int(each.variant != "" and target == base)
        yield (
            f"CUresult CUDAAPI {each.name}({each.parameters}) {{\n"
            f"    CUresult outcome = enter({number}, {always}, {own_stream});\n"
            f"    if (!outcome) outcome = {call};\n"
            "    return leave(outcome);\n}\n"
        )


def parameter_names(parameters: str) -> list[str]:
    if parameters in {"void", ""}:
        return []
    found = (LAST_NAME.search(each.strip()) for each in parameters.split(","))
    return [each[1] for each in found if each]


def graphics_entries(folder: Path) -> Iterator[str]:
    names = {
        exported_name(base, order, variant)
        for header in GRAPHICS_TYPEDEFS
        for (base, variant), versions in typedefs(folder / header).items()
        for order, _ in enumerate(versions)
    }
    yield '#include "cuda_driver.h"\n'
    for name in sorted(names):
        yield f"CUresult CUDAAPI {name}(void);\nCUresult CUDAAPI {name}(void) {{ return CUDA_ERROR_NOT_SUPPORTED; }}\n"


def typedefs(header: Path) -> dict[tuple[str, str], list[int]]:
    found = defaultdict(list)
    for base, version, variant in GRAPHICS_TYPEDEF.findall(header.read_text()):
        if not base.startswith(WINDOWS_ONLY):
            found[base, variant].append(int(version))
    return {key: sorted(versions) for key, versions in found.items()}


def exported_name(base: str, order: int, variant: str) -> str:
    return f"{base}{f'_v{order + 1}' if order else ''}{variant}"


def tables(folder: Path, functions: Sequence[Function]) -> Iterator[str]:
    """Define the tables of names, of error codes and of what cuGetProcAddress returns."""
    yield '#include "cuda_driver.h"\n'
    yield f"const int function_count = {len(functions)};\nconst char *const function_names[] = {{\n"
    yield from (f'    "{each.name}",\n' for each in functions)
    yield "};\nconst struct error_name error_names[] = {\n"
    codes = {int(code): name for name, code in ERROR_CODE.findall(preprocess(folder / HEADER, *ALL_VERSIONS))}
    yield from (f'    {{{code}, "{name}"}},\n' for code, name in sorted(codes.items()))
    yield "    {0, 0}};\nconst struct resolution resolutions[] = {\n"
    yield from resolutions(folder, functions)
    yield "    {0, 0, 0, 0}};\n"


def resolutions(folder: Path, functions: Sequence[Function]) -> Iterator[str]:
    """List since which version of CUDA which function answers to a name; a later version has a higher suffix."""
    exported = defaultdict(list)
    for each in functions:
        exported[each.base, each.variant].append(each.name)
    versions = defaultdict(set)
    for one in read_resolutions(folder):
        versions[one.base, one.variant].add(one.version)
    for (base, variant), names in exported.items():
        pairs = zip(sorted(versions[base, variant]), sorted(names, key=version_suffix), strict=True)
        for version, name in pairs:
            yield f'    {{"{base}", {version}, {int(variant != "")}, (void *){name}}},\n'


def version_suffix(name: str) -> int:
    found = VERSION_SUFFIX.search(name)
    return int(found[1]) if found else 1
