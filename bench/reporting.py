"""What all benchmarks share: progress on stderr, the commit that was measured, and the memory of a process."""

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - a program for the terminal


def current_commit() -> str:
    """Return the short hash of the checkout, with "-dirty" if it has uncommitted changes."""
    # The results themselves change with every run and are not part of what is measured.
    changes = git("status", "--porcelain", "--", ".", ":!bench/results")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changes else "")


def git(*arguments: str) -> str:
    command = [str(shutil.which("git")), *arguments]
    return subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, shared pages included."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024
