"""Compiles the C sources when Quotient is installed or a wheel is built; hatchling calls this.

Where there is no C compiler they are left out. What the library of vcuda does is then done in Python, some hundred
times slower: good enough for the command line, not for a scheduler. Without the node plugin's hooks, containers find
the driver by an environment variable, and the driver's own memory limit is not offered. What containers preload needs
zig and NVIDIA's headers, which are packages of PyPI.
"""

import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES, LIBRARY = ("vcuda/fill_kernel.c", "vcuda/names_kernel.c"), "vcuda/libvcuda.so"
# Without contraction: the same sums on processors with and without fused multiply-add.
# Static programs that container runtimes start on the host, and what containers do without them.
HOOKS = {
    "nodeplugin/update-ldcache": ("nodeplugin/update_ldcache.c", "LD_LIBRARY_PATH is set in containers"),
    "nodeplugin/apply-memory-limit": ("nodeplugin/apply_memory_limit.c", "the driver's memory limit is not offered"),
    "nodeplugin/merge-preload": ("nodeplugin/merge_preload.c", "what images preload themselves is replaced"),
}
PRELOAD_LIBRARIES = "nodeplugin/preload-libraries"
HOOK_LIBRARY = "nodeplugin/oci_state.c"
HOOK_FLAGS = ("-std=gnu11", "-Os", "-s", "-Wall", "-Wextra", "-Werror")
FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")


class KernelHook(BuildHookInterface[Any]):
    """Adds what is compiled to the wheel; for an editable installation it is written into the checkout."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's signature
        sys.path.insert(0, self.root)
        from nodeplugin.compiler import static_flags  # noqa: PLC0415 - from the folder that is built

        self._compile(LIBRARY, "placement will be slow", build_data, *FLAGS, *SOURCES)
        for hook, (source, otherwise) in HOOKS.items():
            self._compile(hook, otherwise, build_data, *HOOK_FLAGS, *static_flags(), source, HOOK_LIBRARY)
        self._compile_preload(build_data)

    def _compile_preload(self, build_data: dict[str, Any]) -> None:
        """Compile what containers preload, for this machine's processor."""
        from nodeplugin.compiler import NoCompiler  # noqa: PLC0415
        from nodeplugin.preload_build import build  # noqa: PLC0415

        target = f"{PRELOAD_LIBRARIES}/{platform.machine()}"
        try:
            names = build(Path(self.root) / target)
        except NoCompiler as error:
            self.app.display_warning(f"{target} is not compiled, shares of memory are not limited by it: {error}")
            return
        build_data["artifacts"] += [f"{target}/{name}" for name in names]

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
