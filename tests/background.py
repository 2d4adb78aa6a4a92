"""Threads that run in the background of a test."""

import threading
from typing import Self

JOIN_S = 30.0


class Background:
    """A context with threads: subclasses fill `_threads`, which run until `_ending` is set at the context's end."""

    def __init__(self) -> None:
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(JOIN_S)
