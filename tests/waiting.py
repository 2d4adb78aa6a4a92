"""Waiting for a condition instead of sleeping."""

import time
from collections.abc import Callable


def eventually(
    condition: Callable[[], object],
    what: str = "",
    timeout_s: float = 20.0,
    state: Callable[[], str] = str,
) -> None:
    """Wait until a condition is true; the assertion names `what` was waited for, and the state it found instead."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what or condition}\n{state()}".rstrip()
        time.sleep(0.01)
