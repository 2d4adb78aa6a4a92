"""Programs that container runtimes start on the host: static ones, so that they run whatever the host has."""

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from nodeplugin.checkpoint import replace_file

# In the header of a 64-bit ELF file: where the program headers begin, and the size and the number of them.
ELF_MAGIC, PROGRAM_HEADERS, INTERPRETER = b"\x7fELF\x02", struct.Struct("<32xQ14xHH"), 3


def own_program(name: str) -> Path:
    """Return where a program of this installation is; there may be none, without a C compiler."""
    return Path(str(resources.files(__package__).joinpath(name)))


def read_static(path: Path) -> bytes | None:
    """Read a program that needs no libraries; None if there is none at this path."""
    with suppress(OSError, struct.error):
        content = path.read_bytes()
        if content.startswith(ELF_MAGIC):
            begin, size, count = PROGRAM_HEADERS.unpack_from(content)
            kinds = [struct.unpack_from("<I", content, begin + size * index)[0] for index in range(count)]
            return None if INTERPRETER in kinds else content
    return None


def write_program(path: Path, content: bytes) -> None:
    """Replace a program, unless it has this content already: a container may be starting with it."""
    with suppress(OSError):
        if path.read_bytes() == content and os.access(path, os.X_OK):
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content, mode=0o755)


def describe_hook(when: str, program: Path, arguments: Sequence[str], timeout_s: int) -> dict[str, Any]:
    """Return a hook as CDI describes it."""
    return {
        "hookName": when,
        "path": str(program),
        "args": [program.name, *arguments],
        # Never empty: the runtime would pass the environment of the container, which is hostile.
        "env": ["PATH=/"],
        "timeout": timeout_s,
    }
