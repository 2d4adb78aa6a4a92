"""The hook of the OCI runtime that has the driver's memory limit set before a container's first program starts.

CDI is the only way to give a hook to a container. The program, `apply_memory_limit.c`, is static and copied to the
host; it asks the plugin on the socket of `memory_limit_server.py`.
"""

import errno
import os
from pathlib import Path
from typing import Any

import structlog

from nodeplugin.runtime_hooks import describe_hook, own_program, read_static, write_program

HOOK, SOCKET = "apply-memory-limit", "memory-limits.sock"
# The hook gives up by itself after 5 s. If the runtime ended it, it would not say why.
HOOK_TIMEOUT_S = 10


class MemoryLimitHook:
    """Installs the hook below the plugin's folder, which has the same path on the host."""

    def __init__(self, folder: Path) -> None:
        self.socket, self._program = folder / SOCKET, folder / "hooks" / HOOK
        self._log = structlog.get_logger()

    def install(self) -> None:
        """Copy the program to the host, where the runtime starts it; safe to call again."""
        content = read_static(own_program(HOOK))
        if content is None:
            self._log.info("memory_limit_hook_missing", effect="the driver's memory limit is not offered")
            return
        try:
            write_program(self._program, content)
        except OSError as error:
            self._log.warning("memory_limit_hook_not_installed", program=str(self._program), error=str(error))

    def is_usable(self) -> bool:
        """Whether the host can run the program: it is there, and not on a mount with noexec."""
        return os.access(self._program, os.X_OK)

    def hook(self, token: str) -> dict[str, Any]:
        """Return the hook as CDI describes it; OSError if the host cannot run it, since the limit is promised."""
        if not self.is_usable():
            raise OSError(errno.ENOEXEC, "the hook that limits memory cannot be run", str(self._program))
        return describe_hook("createRuntime", self._program, [str(self.socket), token], HOOK_TIMEOUT_S)
