"""Finds the cards of this node, on a thread of its own: a driver can take minutes, or never answer.

The plugin serves the cards of the last run meanwhile, as the kubelet and running pods know them. If the driver fails or
does not even say how many cards there are, they count as missing; a single card that does not answer is unhealthy.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet

import structlog

from nodeplugin.cards import Card, NodeCards
from nodeplugin.device_ids import device_list_problem
from nodeplugin.host_driver import HostDriver
from nodeplugin.nvml import Driver, DriverError

# How often cards are listed again: more often while the driver is unavailable or a card is missing.
REDISCOVER_S = 30.0
REDISCOVER_SOON_S = 5.0
# How long the first registration waits for the first list. A working driver lists 16 cards in a second.
FIRST_LIST_S = 2.0
# Without an answer for this long, the cards of the last run are not offered any longer.
HANG_TIMEOUT_S = 30.0


class CannotServe(Exception):  # noqa: N818 - a problem of the configuration or the node, not of this process
    """The plugin cannot serve this node with this configuration; the message says why."""


class CardDiscovery:
    """Lists the cards at the start and periodically, and keeps `node_cards` up to date.

    `on_version` is called when the driver's version changes, `on_change` after each list, `on_forget` with the uuids of
    cards that no longer exist, and `on_failure` if the plugin cannot serve.
    """

    def __init__(
        self,
        driver: Driver,
        host_driver: HostDriver,
        node_cards: NodeCards,
        unit_mib: int,
        *,
        cards_in_use: Callable[[], AbstractSet[str]],
        on_version: Callable[[], None],
        on_change: Callable[[], None],
        on_forget: Callable[[AbstractSet[str]], None],
        on_failure: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver, self._host_driver, self._node_cards = driver, host_driver, node_cards
        self._unit_mib, self._cards_in_use, self._clock = unit_mib, cards_in_use, clock
        self._on_version, self._on_change, self._on_failure = on_version, on_change, on_failure
        self._on_forget = on_forget
        # Empty once the driver is open: readiness shows it.
        self.error = "the NVIDIA driver is not loaded yet"
        self.version = ""
        # Indexes whose card could not be read the last time.
        self._unreadable: Mapping[int, str] = {}
        # Inode and modification time of the driver library that this process has loaded.
        self._library: tuple[int, int] | None = None
        # Since when the driver is being asked for more than single cards; None while it is not.
        self._asked_at: float | None = None
        self._has_listed = threading.Event()
        self._stopping = threading.Event()
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def start(self) -> None:
        """Start to list; returns after the first list, or after FIRST_LIST_S without one."""
        self._thread.start()
        self._has_listed.wait(FIRST_LIST_S)

    def stop(self) -> None:
        """Stop the thread; one that is blocked in the driver is abandoned."""
        self._stopping.set()
        self._thread.join(1.0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def problem(self) -> str:
        """Return why the cards are not known; empty if they are."""
        asked_at = self._asked_at
        silent_s = self._clock() - asked_at if asked_at is not None else 0.0
        return f"no answer from the NVIDIA driver for {silent_s:.0f} s" if silent_s > HANG_TIMEOUT_S else self.error

    def detect_hang(self) -> None:
        """Make the cards of the last run missing if the driver does not answer; for a thread that does not ask it."""
        asked_at = self._asked_at
        is_hanging = asked_at is not None and self._clock() - asked_at > HANG_TIMEOUT_S
        if is_hanging and not self._has_listed.is_set() and self._node_cards.mark_missing():
            self._log.error("driver_unavailable", error=self.problem())
            self._on_change()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._asked_at = self._clock()
                self.list_cards()
            except CannotServe as error:
                # Ends the process, on the main thread.
                self._log.error("cannot_serve", error=str(error))
                self._on_failure(str(error))
                return
            except Exception:  # the outermost frame of the thread, which must not end
                self._log.exception("discovery_failed")
            finally:
                self._asked_at = None
                self._has_listed.set()
            self._on_change()
            is_incomplete = bool(self.error or self._unreadable or self._node_cards.missing())
            self._stopping.wait(REDISCOVER_SOON_S if is_incomplete else REDISCOVER_S)

    def list_cards(self) -> None:
        """List the cards; without a driver, those that are known stay as they are once there was a list."""
        try:
            self._check_library()
            if self.error:
                self._driver.open()
            version, count = self._driver.version(), self._driver.count_cards()
            # From here on the driver answers, if not for every card.
            self._asked_at = None
            listed = self._driver.read_cards(count)
        except DriverError as error:
            if str(error) != self.error:
                self._log.error("driver_unavailable", error=str(error))
            self.error = str(error)
            if not self._has_listed.is_set():
                self._node_cards.mark_missing()
            return
        self.error = ""
        if version != self.version:
            self.version = version
            self._on_version()
        cards, self._unreadable = listed.cards, listed.unreadable
        if problem := device_list_problem(cards, self._unit_mib):
            raise CannotServe(problem)
        before = self._node_cards.cards()
        self._node_cards.update(cards, listed.unreadable)
        self._forget_repartitioned(cards)
        if before != self._node_cards.cards():
            self._log.info("cards_discovered", cards=[f"{card.index}: {card.product}" for card in cards])

    def _check_library(self) -> None:
        """Locate the driver's library; raises CannotServe if it was replaced, which takes a new process to load."""
        self._host_driver.locate()
        library = self._host_driver.find_library()
        identity = (library.stat().st_ino, library.stat().st_mtime_ns) if library else None
        # A library that is gone is not an error yet: an upgrade removes the old one first.
        if self._library is not None and identity not in {None, self._library}:
            raise CannotServe("the NVIDIA driver library was replaced: restart the node plugin to load the new one")
        self._library = identity or self._library
        self._driver.library = library

    def _forget_repartitioned(self, cards: Iterable[Card]) -> None:
        """Forget cards that were put into MIG mode, and MIG devices that were removed, once no pod holds them.

        Other missing cards are broken and stay listed as unhealthy.
        """
        present = {card.uuid for card in cards} | {card.parent for card in cards}
        missing = self._node_cards.missing() - self._cards_in_use()
        removed = {
            card.uuid
            for card in self._node_cards.cards()
            if card.uuid in missing and {card.uuid, card.parent} & present - {""}
        }
        if removed:
            self._node_cards.forget(removed)
            self._on_forget(removed)
