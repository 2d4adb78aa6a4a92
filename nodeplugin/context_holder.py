"""Holds a CUDA context on one card until its standard input is closed: `context_sizes.py` measures what it takes.

A process of its own, because a context cannot be taken out of one, and the driver may end it.
"""

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

UUID_BYTES = 16


OUT_OF_MEMORY_FIRST = "1000"


def be_ended_first() -> None:
    """Have the kernel end this process rather than the plugin, if their memory does not suffice."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OUT_OF_MEMORY_FIRST)


def hold(library: str, wanted: str) -> int:
    """Return CUDA's error, 0 after the context was held."""
    be_ended_first()
    driver = ctypes.CDLL(library)
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if error := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return int(error)
    expected = bytes.fromhex(wanted.partition("-")[2].replace("-", ""))
    for index in range(count.value):
        found = ctypes.create_string_buffer(UUID_BYTES)
        if error := driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetUuid(found, device):
            return int(error)
        if found.raw == expected:
            if error := driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
                return int(error)
            print("held", flush=True)  # noqa: T201 - for the process that measures
            sys.stdin.read()
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(hold(*sys.argv[1:]))
