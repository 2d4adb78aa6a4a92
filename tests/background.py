"""Threads that work beside a test until it has seen enough."""

import threading
from typing import Self

END_S = 30.0


class Background:
    """Starts its threads when entered; when left, asks them to end and waits for them."""

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
            thread.join(END_S)
