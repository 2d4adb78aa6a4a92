"""Compiles the C sources when Quotient is installed or a wheel is built; hatchling calls this.

Where there is no C compiler they are left out. What the library of vcuda does is then done in Python, some hundred
times slower: good enough for the command line, not for a scheduler. And without the hook of the node plugin, containers
find the driver by an environment variable.
"""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES, LIBRARY = ("vcuda/fill_kernel.c", "vcuda/names_kernel.c"), "vcuda/libvcuda.so"
# Without contraction: the same sums on processors with and without fused multiply-add.
HOOK_SOURCE, HOOK = "nodeplugin/update_ldcache.c", "nodeplugin/update-ldcache"
HOOK_FLAGS = ("-std=gnu11", "-Os", "-s", "-Wall", "-Wextra", "-Werror")
FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")


class KernelHook(BuildHookInterface[Any]):
    """Adds what is compiled to the wheel; for an editable installation it is written into the checkout."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        sys.path.insert(0, self.root)
        from nodeplugin.compiler import static_flags  # noqa: PLC0415 - from the folder that is built

        self._compile(LIBRARY, "placement will be slow", build_data, *FLAGS, *SOURCES)
        self._compile(
            HOOK, "LD_LIBRARY_PATH is set in containers", build_data, *HOOK_FLAGS, *static_flags(), HOOK_SOURCE
        )

    def _compile(self, target: str, otherwise: str, build_data: dict[str, Any], *arguments: str) -> None:
        """Compile one file; names of sources are relative to the folder that is built."""
        from nodeplugin.compiler import NoCompiler, run_compiler  # noqa: PLC0415

        root = Path(self.root)
        partial = root / f"{target}.{os.getpid()}"
        try:
            run_compiler(*(str(root / each) if each.endswith(".c") else each for each in arguments), "-o", str(partial))
        except NoCompiler as error:
            self.app.display_warning(f"{target} is not compiled, {otherwise}: {error}")
            return
        # Renamed: a running process may have the old file mapped.
        partial.replace(root / target)
        build_data["artifacts"].append(target)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
