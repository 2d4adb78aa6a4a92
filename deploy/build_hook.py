"""Compiles the C sources of vcuda when Quotient is installed or a wheel is built; hatchling calls this.

Where there is no C compiler the library is left out, and the same is done in Python, some hundred times slower: good
enough for the command line, not for a scheduler.
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES, LIBRARY = ("vcuda/fill_kernel.c", "vcuda/names_kernel.c"), "vcuda/libvcuda.so"
# Without contraction: the same sums on processors with and without fused multiply-add.
FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")


class KernelHook(BuildHookInterface[Any]):
    """Adds the library to the wheel; for an editable installation it is written into the checkout."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        sys.path.insert(0, self.root)
        from nodeplugin.compiler import NoCompiler, run_compiler  # noqa: PLC0415 - from the folder that is built

        root = Path(self.root)
        partial = root / f"{LIBRARY}.{os.getpid()}"
        try:
            run_compiler(*FLAGS, "-o", str(partial), *(str(root / source) for source in SOURCES))
        except NoCompiler as error:
            self.app.display_warning(f"{LIBRARY} is not compiled, placement will be slow: {error}")
            return
        # Renamed: a running process may have the old file mapped.
        partial.replace(root / LIBRARY)
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
