"""Generates what the library in containers needs to know of the driver, and checks that no function is missed.

The names of hooks are read from the library's own sources: each is defined by the macro HOOK. A function of cuda.h
whose name suggests that it allocates, frees or reports memory has to be hooked or named below, with a reason; otherwise
the build fails. So a newer cuda.h cannot bring a way around unnoticed.

Only the standard library is imported: this also runs while Quotient is being installed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from nodeplugin.compiler import NoCompiler
from nodeplugin.cuda_header import Function, Resolution, read_functions, read_nvml_names, read_resolutions, read_version

HOOK = re.compile(r"^HOOK\w*\((\w+)\)", re.MULTILINE)
OTHER_HEADERS = ("cudaGL.h", "cudaEGL.h", "cudaVDPAU.h", "cudaProfilerTypedefs.h")
OTHER_NAMES = (
    re.compile(r"CUresult\s+CUDAAPI\s+(cu\w+)\s*\("),
    re.compile(r"^\s*#\s*define\s+(cu\w+)\s+cu\w+\s*$", re.MULTILINE),
    re.compile(r"^\s*#\s*define\s+cu\w+\s+(cu\w+)\s*$", re.MULTILINE),
    re.compile(r"\*PFN_(cuProfiler\w+?)_v\d+\)"),
)
# Functions that drivers export and no header declares, those of debuggers among them. Variables of the debugger's
# interface, such as cudbgIpcFlag, cannot be forwarded.
UNDECLARED = (
    "cudbgGetAPI",
    "cudbgGetAPIVersion",
    "cudbgApiInit",
    "cudbgApiAttach",
    "cudbgApiDetach",
    "cudbgMain",
    "cudbgReportDriverApiError",
    "cudbgReportDriverInternalError",
    "cuMemGetAttribute",
    "cuMemGetAttribute_v2",
    "cuEGLApiInit",
)
PER_THREAD_NAME = re.compile(r"__CUDA_API_(PT[DS][SZ])\((cu\w+)\)")

# Names of functions that may change how much memory of a device is allocated, or say how much there is.
SUSPECT = re.compile(
    r"Alloc|Create|Import|Export|Open|Close|Retain|Instantiate|Upload|Load|Register|Map|Pool|Reset|Free|Release|Destroy"
    r"|GetInfo|TotalMem|GetMem|GraphLaunch|GraphMem|Multicast|GreenCtx|ExecUpdate|GetProcAddress|Attach|Detach|GraphAdd"
)
HOST = "host memory"
SMALL = "no memory of a device but what NVML shows afterwards as the residual"
READS = "reads or sets an attribute"
ADDRESSES = "addresses without memory behind them"
OF_EXISTING = "refers to memory that is counted already"
CODE = "code and variables of a module: counted as the residual"
NODES = "a part of a graph: what it allocates is counted at the launch"
# The reason why a suspect is not hooked, by its name or the beginning of its name.
EXEMPT: Mapping[str, str] = {
    "cuDeviceGetMemPool": READS,
    "cuDeviceSetMemPool": READS,
    "cuDeviceGetDefaultMemPool": READS,
    "cuMemGetDefaultMemPool": READS,
    "cuMemGetMemPool": READS,
    "cuMemSetMemPool": READS,
    "cuMemPoolSetAttribute": READS,
    "cuMemPoolGetAttribute": READS,
    "cuMemPoolSetAccess": READS,
    "cuMemPoolGetAccess": READS,
    "cuMemGetAllocation": READS,
    "cuMemGetAccess": READS,
    "cuMemGetAddressRange": READS,
    "cuMemGetHandleForAddressRange": OF_EXISTING,
    "cuCtxResetPersistingL2Cache": READS,
    "cuModuleGetLoadingMode": READS,
    "cuFuncIsLoaded": READS,
    "cuStreamGetCaptureInfo": READS,
    "cuGetExportTable": "passed through: tables of the driver for NVIDIA's own libraries",
    "cuModuleLoad": CODE,
    "cuLibraryLoad": CODE,
    "cuFuncLoad": CODE,
    "cuLinkCreate": HOST,
    "cuLinkDestroy": HOST,
    "cuMemAllocHost": HOST,
    "cuMemFreeHost": HOST,
    "cuMemHostAlloc": HOST,
    "cuMemHostRegister": HOST,
    "cuMemHostUnregister": HOST,
    "cuMemAddressFree": ADDRESSES,
    "cuMemPoolExport": OF_EXISTING,
    "cuMemPoolImport": "memory of the exporter's pool, which is counted there",
    "cuMulticast": OF_EXISTING,
    "cuLogicalEndpoint": OF_EXISTING,
    "cuIpcOpenEventHandle": SMALL,
    "cuStreamCreate": SMALL,
    "cuStreamDestroy": SMALL,
    "cuStreamUpdateCaptureDependencies": NODES,
    "cuEventCreate": SMALL,
    "cuEventDestroy": SMALL,
    "cuExternalMemoryGetMapped": OF_EXISTING,
    "cuImportExternalSemaphore": SMALL,
    "cuDestroyExternalSemaphore": SMALL,
    "cuDeviceRegisterAsyncNotification": READS,
    "cuDeviceUnregisterAsyncNotification": READS,
    "cuGraphCreate": NODES,
    "cuGraphAdd": NODES,
    "cuGraphMem": NODES,
    "cuGraphExecMem": NODES,
    "cuGraphDestroyNode": NODES,
    "cuGraphDestroy": NODES,
    "cuGraphRetainUserObject": HOST,
    "cuGraphReleaseUserObject": HOST,
    "cuUserObject": HOST,
    "cuGraphConditionalHandleCreate": NODES,
    "cuDeviceGetGraphMemAttribute": READS,
    "cuDeviceSetGraphMemAttribute": READS,
    "cuTexRef": OF_EXISTING,
    "cuTexObject": OF_EXISTING,
    "cuSurfObject": OF_EXISTING,
    "cuTensorMap": OF_EXISTING,
    "cuGraphics": "buffers of graphics APIs, which the container's capabilities do not include",
    "cuCoredump": READS,
    "cuLogs": READS,
    "cuCtxFromGreenCtx": READS,
    "cuGreenCtxGetDevResource": READS,
    "cuGreenCtxGetId": READS,
    "cuGreenCtxRecordEvent": READS,
    "cuGreenCtxWaitEvent": READS,
    "cuGreenCtxStreamCreate": SMALL,
    "cuStreamGetGreenCtx": READS,
    "cuStreamAttachMemAsync": OF_EXISTING,
    "cuCtxAttach": OF_EXISTING,
    "cuArrayGetMemoryRequirements": READS,
    "cuMipmappedArrayGetMemoryRequirements": READS,
}


def generate(headers: Path, sources: Path) -> dict[str, str]:
    """Return the generated files of the CUDA library by name; raises NoCompiler if it misses a function."""
    functions, hooked = read_functions(headers), hooked_names(sources)
    names = list(dict.fromkeys([*(each.name for each in functions), *other_names(headers), *UNDECLARED]))
    check(functions, hooked, names)
    resolutions = resolutions_header(functions, hooked, list(read_resolutions(headers)), read_version(headers))
    return name_headers(names, hooked) | {"resolutions.h": resolutions}


def generate_nvml(headers: Path, sources: Path) -> dict[str, str]:
    return name_headers(read_nvml_names(headers), hooked_names(sources))


def name_headers(names: Sequence[str], hooked: set[str]) -> dict[str, str]:
    """Return the names of all functions, and which of them are only forwarded to the real library."""
    forwarded = [f"forward {name}, {index}" for index, name in enumerate(names) if name not in hooked]
    return {
        "names.h": f"#define FUNCTIONS(X) \\\n{continued(f'X({name})' for name in names)}\n",
        "forwarded.h": "\n".join([".macro FORWARDED", *forwarded, ".endm", ""]),
    }


def hooked_names(sources: Path) -> set[str]:
    found: set[str] = set()
    for file in sorted(sources.glob("*.c")):
        found.update(HOOK.findall(file.read_text()))
    return found


def check(functions: Sequence[Function], hooked: Iterable[str], names: Iterable[str]) -> None:
    missed = [
        each.name
        for each in functions
        if SUSPECT.search(each.name) and each.name not in hooked and not is_exempt(each.name)
    ]
    if missed:
        raise NoCompiler(f"neither hooked nor exempt in {Path(__file__).name}: {', '.join(missed)}")
    if unknown := sorted(set(hooked) - set(names)):
        raise NoCompiler(f"hooked, but no function of the driver: {', '.join(unknown)}")


def is_exempt(name: str) -> bool:
    return any(name.startswith(beginning) for beginning in EXEMPT)


def other_names(headers: Path) -> Iterator[str]:
    """Yield the exported names of the headers for graphics APIs, which cannot be compiled without those APIs."""
    for header in OTHER_HEADERS:
        text = (headers / header).read_text()
        for pattern in OTHER_NAMES:
            yield from pattern.findall(text)
        for stream, name in PER_THREAD_NAME.findall(text):
            yield from (name, f"{name}_{stream.lower()}")


def resolutions_header(
    functions: Sequence[Function], hooked: set[str], resolutions: Sequence[Resolution], version: int
) -> str:
    """Return which hook stands for which answer of cuGetProcAddress, by name, default stream and version."""
    rows: list[tuple[str, int, str, str]] = []
    for base in sorted({each.base for each in functions if each.name in hooked}):
        rows += resolve(
            base, [each for each in functions if each.base == base], [each for each in resolutions if each.base == base]
        )
    entries = (
        f'{{"{base}", {since}, {int(bool(variant))}, FUNCTION_{name}, {name if name in hooked else "NULL"}}},'
        for base, since, variant, name in rows
    )
    return f"#define HEADER_VERSION {version}\n#define RESOLUTIONS \\\n{continued(entries)}\n"


def resolve(
    base: str, functions: Sequence[Function], resolutions: Sequence[Resolution]
) -> Iterator[tuple[str, int, str, str]]:
    """Pair the versions of a name with its exported functions: both ascend, for each default stream apart."""
    for variant, group in groupby(
        sorted(resolutions, key=lambda each: (each.variant, each.version)), lambda each: each.variant
    ):
        versions = [each.version for each in group]
        names = sorted((each.name for each in functions if each.variant == variant), key=suffix)
        if len(versions) != len(names):
            raise NoCompiler(f"{base}{variant}: versions {versions} and functions {names} do not pair")
        yield from ((base, since, variant, name) for since, name in zip(versions, names, strict=True))


def suffix(name: str) -> int:
    found = re.search(r"_v(\d+)(?:_pt[sd][sz])?$", name)
    return int(found[1]) if found else 1


def continued(each: Iterable[str]) -> str:
    return " \\\n".join(f"    {one}" for one in each)
