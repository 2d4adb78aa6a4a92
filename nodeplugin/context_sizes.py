"""What a CUDA context takes of a card's memory, measured on this node for each model and driver.

The plugin measures by itself, with a program that does nothing but hold a context: what containers account could be
made up by one tenant to the harm of all others.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import structlog

from nodeplugin.cards import Card
from nodeplugin.checkpoint import replace_file
from nodeplugin.share_files import DEFAULT_CONTEXT_MIB

STORED = "measured-contexts.json"
# No context takes less, and none alone takes more.
SMALLEST_MIB, LARGEST_MIB = 16, 4096
ATTEMPTED = -1
# A driver without persistence mode initializes a card for seconds. NVML shows a process some time later.
START_TIMEOUT_S, SHOWN_TIMEOUT_S, POLL_S = 30.0, 5.0, 0.1
HELD = b"held\n"


class ContextSizes:
    """The sizes that were measured, by model and driver; kept across restarts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STORED
        # In MiB; ATTEMPTED where a measurement has begun and no size came of it.
        self._known: dict[str, int] = {}
        with suppress(OSError, ValueError, AttributeError, TypeError):
            stored = {str(key): int(mib) for key, mib in json.loads(self._path.read_text()).items()}
            self._known = {key: mib for key, mib in stored.items() if mib == ATTEMPTED or is_plausible(mib)}

    def was_attempted(self, product: str, driver: str) -> bool:
        return f"{product} {driver}" in self._known

    def get(self, product: str, driver: str) -> int:
        """Return the size in MiB, or what most contexts stay below if none was measured."""
        known = self._known.get(f"{product} {driver}", ATTEMPTED)
        return DEFAULT_CONTEXT_MIB if known == ATTEMPTED else known

    def put(self, product: str, driver: str, mib: int) -> None:
        self._known = self._known | {f"{product} {driver}": mib}
        replace_file(self._path, json.dumps(self._known, sort_keys=True).encode())


def is_plausible(mib: int) -> bool:
    return SMALLEST_MIB <= mib <= LARGEST_MIB


def measure_context(library: Path, card: Card, memory_of: Callable[[Card, int], int | None]) -> int | None:
    """Return the MiB of a context, None if it cannot be created or NVML does not show it.

    `memory_of` returns what a process uses of a card.
    """
    command = [sys.executable, "-m", "nodeplugin.context_holder", str(library), card.uuid]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    with subprocess.Popen(  # noqa: S603 - our own program, and a path and a uuid of the driver's
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        try:
            if process.stdout is None or not select.select([process.stdout], [], [], START_TIMEOUT_S)[0]:
                return None
            if process.stdout.readline() != HELD:
                return None
            deadline = time.monotonic() + SHOWN_TIMEOUT_S
            while not (mib := memory_of(card, process.pid)) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            return mib or None
        finally:
            process.kill()


class ContextMeasurement:
    """Measures once for each model of this node and its driver, on a thread of its own.

    `is_free` tells whether a card's shares need the size, and no pod holds anything of the card: a context of the
    plugin would take memory from it.
    """

    def __init__(
        self,
        sizes: ContextSizes,
        cards: Callable[[], Iterable[Card]],
        driver_version: Callable[[], str],
        measure: Callable[[Card], int | None],
        is_free: Callable[[Card], bool],
    ) -> None:
        self._sizes, self._cards, self._driver_version = sizes, cards, driver_version
        self._measure, self._is_free = measure, is_free
        self._log = structlog.get_logger()

    def start(self) -> None:
        """Measure what is missing, beside everything else; cheap to call again, as cards may become free."""
        version = self._driver_version()
        missing = {
            card.product: card
            for card in self._cards()
            if version and not self._sizes.was_attempted(card.product, version) and self._is_free(card)
        }
        if missing:
            # Stored before: an attempt that ends the plugin, for want of memory, is not repeated.
            for product in missing:
                self._sizes.put(product, version, ATTEMPTED)
            arguments = (version, tuple(missing.values()))
            threading.Thread(target=self._run, args=arguments, name="context-sizes", daemon=True).start()

    def _run(self, version: str, cards: Iterable[Card]) -> None:
        for card in cards:
            try:
                mib = self._measure(card)
            except Exception:  # the outermost frame of the thread
                self._log.exception("context_not_measured", product=card.product)
                continue
            if mib is None or not is_plausible(mib):
                self._log.warning("context_not_measured", product=card.product, assumed_mib=DEFAULT_CONTEXT_MIB)
            else:
                self._sizes.put(card.product, version, mib)
                self._log.info("context_measured", product=card.product, driver=version, mib=mib)
