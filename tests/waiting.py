"""Waiting for a condition instead of sleeping."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], what: str = "", timeout_s: float = 20.0) -> None:
    """Wait until a condition is true; the assertion names `what` was waited for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what or condition}"
        time.sleep(0.01)
