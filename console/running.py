"""How a component's process runs: until a signal ends it."""

import signal
import threading
from typing import Protocol


class Process(Protocol):
    """A component's process; `run` returns after `ending` was set."""

    ending: threading.Event

    def run(self) -> None: ...


def run_until_signalled(service: Process) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.ending.set())
    service.run()
