"""How the cards are: errors that the driver reports, and a look at each from time to time.

A card is sick from an error that counts, or as soon as it does not answer twice in a row, until it has answered and
been quiet for a while. The driver's calls may hang where hardware is broken, so they are made on threads of their own.
"""

import threading
import time
from collections.abc import Callable

import structlog

from nodeplugin.cards import Card, NodeCards
from nodeplugin.nvml import Driver, DriverError
from settings.configuration import HealthSettings

# Reported for every card that the driver cannot name.
ALL = ""
MOST_FAULTS = 2
# How long the driver is listened to at a time, and so how long an end may take.
LISTEN_S = 1.0
# How long a card may take to answer.
HANGS_S = 10.0


class HealthWatcher:
    """Watches over the cards of a fleet, and tells when one falls sick or is well again."""

    def __init__(
        self,
        driver: Driver,
        node_cards: NodeCards,
        settings: HealthSettings,
        on_change: Callable[[], None],
        *,
        rediscover: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver, self._node_cards, self._settings = driver, node_cards, settings
        self._on_change, self._rediscover, self._clock = on_change, rediscover, clock
        # Guards what is known of each card, which two threads learn.
        self._lock = threading.Lock()
        # The card that is being asked, and since when: a driver may never answer.
        self._asking: tuple[str, float] | None = None
        self._errors: dict[str, tuple[int, float]] = {}
        self._silent: dict[str, int] = {}
        self._silence: dict[str, str] = {}
        self.xids: dict[tuple[str, int], int] = {}
        self._ending = threading.Event()
        self.looked_at = clock()
        self._log = structlog.get_logger()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("health-events", self._listen), ("health-polls", self._poll))
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; a thread that hangs in the driver is left behind."""
        self._ending.set()
        for thread in self._threads:
            thread.join(2 * self._settings.poll_s)

    @property
    def alive(self) -> bool:
        """Whether both threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def heard(self, uuid: str, xid: int) -> None:
        """Take note of an error; one that the driver cannot place concerns all cards."""
        with self._lock:
            self.xids[uuid, xid] = self.xids.get((uuid, xid), 0) + 1
        counts = xid not in self._settings.ignored_xids
        self._log.warning("xid", card=uuid or "unknown", xid=xid, counts=counts)
        if not counts:
            return
        for card in self._node_cards.cards():
            if uuid in {ALL, card.uuid, card.parent}:
                with self._lock:
                    self._errors[card.uuid] = xid, self._clock()
        self.judge()

    def look(self) -> None:
        """Look at every card once."""
        for card in self._node_cards.cards():
            self._asking = card.uuid, self._clock()
            self._note(card, self._driver.fault_of(card))
            self._asking = None
        self.looked_at = self._clock()
        self.judge()

    def look_after_the_look(self) -> None:
        """Take a card for sick that has been asked for too long; called by somebody who asks the driver nothing."""
        asking = self._asking
        if asking is None or self._clock() - asking[1] < HANGS_S:
            return
        with self._lock:
            self._silent[asking[0]] = MOST_FAULTS
            self._silence[asking[0]] = f"the driver has not answered for {HANGS_S:.0f} s"
        self.judge()

    def _note(self, card: Card, fault: str) -> None:
        with self._lock:
            self._silent[card.uuid] = self._silent.get(card.uuid, 0) + 1 if fault else 0
            self._silence[card.uuid] = fault

    def judge(self) -> None:
        """Decide for every card how it is, and tell if that is news."""
        is_news = False
        for card in self._node_cards.cards():
            fault = self._fault(card)
            if self._node_cards.fault(card.uuid, fault):
                is_news = True
                self._log.warning("card_is_sick" if fault else "card_is_well", card=card.uuid, cause=fault)
        if is_news:
            self._on_change()

    def _fault(self, card: Card) -> str:
        with self._lock:
            if self._silent.get(card.uuid, 0) >= MOST_FAULTS:
                return self._silence[card.uuid]
            xid, at = self._errors.get(card.uuid, (0, 0.0))
            if xid and self._clock() - at < self._settings.recover_after_s:
                return f"XID {xid}"
            self._errors.pop(card.uuid, None)
        # One that did not answer once keeps its state until it is asked again.
        return self._node_cards.noted(card.uuid) if self._silent.get(card.uuid) else ""

    def _listen(self) -> None:
        listening: tuple[Card, ...] = ()
        while not self._ending.is_set():
            try:
                if listening != (cards := self._node_cards.cards()):
                    self._driver.listen(cards)
                    listening = cards
                if (event := self._driver.wait(min(self._settings.poll_s, LISTEN_S))) is not None:
                    self.heard(event.uuid, event.xid)
            except DriverError as wrong:
                self._log.warning("driver_does_not_report", cause=str(wrong))
                listening = ()
                self._ending.wait(self._settings.poll_s)
            except Exception:  # the outermost frame of the thread: it has to go on
                self._log.exception("health_events_failed")
                listening = ()
                self._ending.wait(self._settings.poll_s)

    def _poll(self) -> None:
        while not self._ending.wait(self._settings.poll_s):
            try:
                self._rediscover()
                self.look()
            except Exception:  # the outermost frame of the thread: it has to go on
                self._log.exception("health_poll_failed")
