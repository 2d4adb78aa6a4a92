"""Lets the dynamic linker of containers find the driver's libraries by its cache, with a hook of the OCI runtime.

`LD_LIBRARY_PATH` would do, but replaces the one of the image. A hook can be given by CDI only. It needs two static
programs on the host: `update_ldcache.c` and ldconfig. Where they cannot be had, the variable is set.
"""

import os
from pathlib import Path
from typing import Any

import structlog

from nodeplugin.runtime_hooks import describe_hook, own_program, read_static, write_program

HOOK, LDCONFIG = "update-ldcache", "ldconfig"
# Of the plugin's own image, or of the host; Ubuntu's ldconfig is a script beside the real one.
LDCONFIG_PLACES = ("sbin/ldconfig.real", "sbin/ldconfig", "usr/sbin/ldconfig", "usr/bin/ldconfig")
# The hook's own limit of CPU time is 10 s.
HOOK_TIMEOUT_S = 30


class LibraryCache:
    """Installs the hook in a folder that has the same path on the host; `host` is where the host's root is seen."""

    def __init__(self, folder: Path, host: Path) -> None:
        self.folder, self._host = folder, host
        self._log = structlog.get_logger()

    def install(self) -> None:
        """Copy the programs to the host, where the runtime starts them; safe to call again."""
        programs = {HOOK: read_static(own_program(HOOK)), LDCONFIG: self._find_ldconfig()}
        if None in programs.values():
            missing = [name for name, content in programs.items() if content is None]
            self._log.warning(
                "library_cache_hook_missing",
                missing=missing,
                effect="LD_LIBRARY_PATH is set in containers, which replaces the one of their image",
            )
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, content in programs.items():
                write_program(self.folder / name, content or b"")
        except OSError as error:
            self._log.warning("library_cache_hook_not_installed", folder=str(self.folder), error=str(error))

    def _find_ldconfig(self) -> bytes | None:
        places = (root / each for root in (Path("/"), self._host) for each in LDCONFIG_PLACES)
        return next((content for each in places if (content := read_static(each)) is not None), None)

    def hook(self, libraries: str) -> dict[str, Any] | None:
        """Return the hook as CDI describes it; None if the host cannot run it, as on a mount with noexec."""
        hook, ldconfig = self.folder / HOOK, self.folder / LDCONFIG
        if not all(os.access(each, os.X_OK) for each in (hook, ldconfig)):
            return None
        arguments = [str(ldconfig), libraries]
        return describe_hook("createContainer", hook, arguments, HOOK_TIMEOUT_S)
