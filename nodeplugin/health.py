"""Decides which cards are healthy, from the XID errors that the driver reports and from periodic checks.

A card becomes unhealthy by an XID that is not ignored, or by failing two checks in a row. It recovers once checks
succeed and `health.recoverAfterS` have passed since its last XID. Driver calls can block where hardware is broken, so
they run on threads that nothing else waits for.
"""

import threading
import time
from collections.abc import Callable

import structlog

from nodeplugin.cards import Card, NodeCards
from nodeplugin.nvml import Driver, DriverError
from settings.configuration import HealthSettings
from vcuda.xids import describe_xid

# The uuid of an XID that the driver cannot attribute to a card: any of them may be broken.
ALL_CARDS = ""
# Failed checks in a row that make a card unhealthy: a single one may be transient.
FAILURE_THRESHOLD = 2
# How long one wait for XID events blocks, and so how long stopping may take.
EVENT_WAIT_S = 1.0
# When a check that has not returned counts as failed. Far above what a working driver takes: a slow one must not count.
HANG_TIMEOUT_S = 10.0


class HealthWatcher:
    """Watches all cards of the node on two threads, one for XID events and one for checks.

    Calls `on_change` when a card becomes unhealthy or recovers, or its reason changes. `rediscover` runs before each
    round of checks, on the same thread, so that only one thread lists cards.
    """

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
        # Guards the four dicts below, which both threads and `detect_hang` change.
        self._lock = threading.Lock()
        # The last XID of each card that counts, and when it was reported.
        self._last_xids: dict[str, tuple[int, float]] = {}
        # Checks that failed in a row, and the error of the last one.
        self._failed_checks: dict[str, int] = {}
        self._check_errors: dict[str, str] = {}
        # How often each XID was reported, ignored ones included, for the metrics.
        self.xids: dict[tuple[str, int], int] = {}
        # The card whose check runs now, and since when. Assigned as a whole, so it is read without the lock.
        self._running_check: tuple[str, float] | None = None
        self._stopping = threading.Event()
        self.last_poll_at = clock()
        self._log = structlog.get_logger()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("health-events", self._event_loop), ("health-polls", self._poll_loop))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop both threads; one that is blocked in the driver is abandoned."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(2 * self._settings.poll_s)

    @property
    def alive(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def record_xid(self, uuid: str, xid: int) -> None:
        """Count an XID; one that is not ignored makes its card unhealthy, or all cards if `uuid` is ALL_CARDS."""
        with self._lock:
            self.xids[uuid, xid] = self.xids.get((uuid, xid), 0) + 1
        is_ignored = xid in self._settings.ignored_xids
        self._log.warning("xid_reported", card=uuid or "unknown", xid=xid, ignored=is_ignored)
        if is_ignored:
            return
        for card in self._node_cards.cards():
            # The driver reports XIDs for the physical card, and containers hold its MIG devices.
            if uuid in {ALL_CARDS, card.uuid, card.parent}:
                with self._lock:
                    self._last_xids[card.uuid] = xid, self._clock()
        self.evaluate()

    def poll(self) -> None:
        """Check every card once."""
        for card in self._node_cards.cards():
            self._running_check = card.uuid, self._clock()
            self._record_check(card, self._driver.check_card(card))
            self._running_check = None
        self.last_poll_at = self._clock()
        self.evaluate()

    def detect_hang(self) -> None:
        """Make a card unhealthy whose check has not returned in time.

        Must be called from a thread that makes no driver calls: the polling thread is the one that is blocked.
        """
        check = self._running_check
        if check is None or self._clock() - check[1] < HANG_TIMEOUT_S:
            return
        with self._lock:
            self._failed_checks[check[0]] = FAILURE_THRESHOLD
            self._check_errors[check[0]] = f"no answer from the driver for {HANG_TIMEOUT_S:.0f} s"
        self.evaluate()

    def _record_check(self, card: Card, error: str) -> None:
        with self._lock:
            self._failed_checks[card.uuid] = self._failed_checks.get(card.uuid, 0) + 1 if error else 0
            self._check_errors[card.uuid] = error

    def evaluate(self) -> None:
        """Recompute the fault of every card, and report changes."""
        has_changed = False
        for card in self._node_cards.cards():
            fault = self._current_fault(card)
            if self._node_cards.set_fault(card.uuid, fault):
                has_changed = True
                self._log.warning("card_unhealthy" if fault else "card_recovered", card=card.uuid, reason=fault)
        if has_changed:
            self._on_change()

    def _current_fault(self, card: Card) -> str:
        with self._lock:
            failed_checks = self._failed_checks.get(card.uuid, 0)
            if failed_checks >= FAILURE_THRESHOLD:
                return self._check_errors[card.uuid]
            xid, at = self._last_xids.get(card.uuid, (0, 0.0))
            if xid and self._clock() - at < self._settings.recover_after_s:
                return describe_xid(xid)
            self._last_xids.pop(card.uuid, None)
        # One failed check is no evidence either way: the card stays healthy or unhealthy until the next check.
        return self._node_cards.stored_fault(card.uuid) if failed_checks else ""

    def _event_loop(self) -> None:
        subscribed: tuple[Card, ...] = ()
        while not self._stopping.is_set():
            try:
                if subscribed != (cards := self._node_cards.cards()):
                    self._driver.subscribe(cards)
                    subscribed = cards
                event = self._driver.wait_for_xid(min(self._settings.poll_s, EVENT_WAIT_S))
                if event is not None:
                    self.record_xid(event.uuid, event.xid)
            except DriverError as error:
                self._log.warning("xid_events_unavailable", error=str(error))
                subscribed = ()
                self._stopping.wait(self._settings.poll_s)
            except Exception:  # the outermost frame of the thread, which must not end
                self._log.exception("health_events_failed")
                subscribed = ()
                self._stopping.wait(self._settings.poll_s)

    def _poll_loop(self) -> None:
        while not self._stopping.wait(self._settings.poll_s):
            try:
                self._rediscover()
                self.poll()
            except Exception:  # the outermost frame of the thread, which must not end
                self._log.exception("health_poll_failed")
