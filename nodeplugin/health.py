"""Decides which cards are healthy, from the XID errors that the driver reports and from periodic checks.

A card becomes unhealthy by an XID that is not ignored, or by failing two checks in a row. It recovers once checks
succeed and `health.recoverAfterS` have passed since its last XID; after an XID that needs a reset, once it was reset.
Driver calls can block where hardware is broken, so each card is checked on a thread of its own.
"""

import threading
import time
from collections.abc import Callable, Iterable

import structlog

from nodeplugin.cards import Card, NodeCards
from nodeplugin.nvml import CardCheck, Driver, DriverError, XidEvent
from nodeplugin.pending_resets import PendingResets
from settings.configuration import HealthSettings
from vcuda.xids import RESET_XIDS, describe_xid

# The uuid of an XID that the driver cannot attribute to a card: any of them may be broken.
ALL_CARDS = ""
# Failed checks in a row that make a card unhealthy: a single one may be transient.
FAILURE_THRESHOLD = 2
# How long one wait for XID events blocks, and so how long stopping may take.
EVENT_WAIT_S = 1.0
# When a check that has not returned counts as failed. Far above what a working driver takes: a slow one must not count.
HANG_TIMEOUT_S = 10.0
# How long a round waits for its checks: those of working cards have returned by then.
ROUND_S = 1.0


class HealthWatcher:
    """Watches all cards of the node: XID events on one thread, checks on one thread for each card.

    Calls `on_change` when a card becomes unhealthy or recovers, or its reason changes.
    """

    def __init__(
        self,
        driver: Driver,
        node_cards: NodeCards,
        settings: HealthSettings,
        on_change: Callable[[], None],
        *,
        resets: PendingResets,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver, self._node_cards, self._settings = driver, node_cards, settings
        self._on_change, self._resets, self._clock = on_change, resets, clock
        # Guards the fields below, which all threads change.
        self._lock = threading.Lock()
        # The last XID of each card that counts, and when it was reported.
        self._last_xids: dict[str, tuple[int, float]] = {}
        # Checks that failed in a row, and the error of the last one.
        self._failed_checks: dict[str, int] = {}
        self._check_errors: dict[str, str] = {}
        # How often each XID was reported, ignored ones included, for the metrics.
        self.xids: dict[tuple[str, int], int] = {}
        # Since when the check of a card runs: no second one is started beside one that hangs.
        self._running: dict[str, float] = {}
        # Cards that were away since they needed a reset.
        self._were_away: set[str] = set()
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

    def record_xid(self, event: XidEvent) -> None:
        """Count an XID; one that is not ignored makes its card unhealthy, or all cards if it names none."""
        uuid, xid = event.uuid, event.xid
        with self._lock:
            self.xids[uuid, xid] = self.xids.get((uuid, xid), 0) + 1
        is_ignored = xid in self._settings.ignored_xids
        self._log.warning("xid_reported", card=uuid or "unknown", xid=xid, ignored=is_ignored)
        if is_ignored:
            return
        for card in self._node_cards.cards():
            if concerns(event, card):
                with self._lock:
                    self._last_xids[card.uuid] = xid, self._clock()
                    # Not if any card may be meant: all cards of a node would be lost until a reboot.
                    if xid in RESET_XIDS and uuid != ALL_CARDS:
                        self._resets.put(card.uuid, xid)
                        self._were_away.discard(card.uuid)
        self.evaluate()

    def poll(self) -> None:
        """Check every card once; a card whose last check still runs is left out."""
        checks = []
        for card in self._node_cards.cards():
            with self._lock:
                if card.uuid in self._running:
                    continue
                self._running[card.uuid] = self._clock()
            checks.append(threading.Thread(target=self._check, args=(card,), name=f"check-{card.index}", daemon=True))
            checks[-1].start()
        deadline = time.monotonic() + ROUND_S
        for check in checks:
            check.join(max(0.0, deadline - time.monotonic()))
        self.last_poll_at = self._clock()
        self.evaluate()

    def detect_hang(self) -> None:
        """Make cards unhealthy whose checks have not returned in time."""
        with self._lock:
            hanging = [uuid for uuid, since in self._running.items() if self._clock() - since >= HANG_TIMEOUT_S]
            for uuid in hanging:
                self._failed_checks[uuid] = FAILURE_THRESHOLD
                self._check_errors[uuid] = f"no answer from the driver for {HANG_TIMEOUT_S:.0f} s"
        if hanging:
            self.evaluate()

    def _check(self, card: Card) -> None:
        try:
            check = self._driver.check_card(card)
            asks_for_reset = not check.error and card.uuid in self._resets.xids
            needs_reset = self._driver.needs_reset(card) if asks_for_reset else None
        except Exception:  # the outermost frame of the thread
            self._log.exception("card_check_failed", card=card.uuid)
            check, needs_reset = CardCheck("the check failed: see the log of the node plugin"), None
        with self._lock:
            self._running.pop(card.uuid, None)
        self._record_check(card, check.error)
        self._record_reset(card, check, needs_reset=needs_reset)

    def _record_reset(self, card: Card, check: CardCheck, *, needs_reset: bool | None) -> None:
        with self._lock:
            if card.uuid not in self._resets.xids:
                return
            # Any other error, such as a timeout, is no reset.
            if check.is_away or card.uuid in self._node_cards.missing():
                self._were_away.add(card.uuid)
            elif check.error:
                return
            elif needs_reset is False or (needs_reset is None and card.uuid in self._were_away):
                self._resets.remove(card.uuid)
                self._were_away.discard(card.uuid)

    def forget(self, uuids: Iterable[str]) -> None:
        """Forget all about cards that no longer exist: slices that a reset destroyed come back with the same uuids."""
        with self._lock:
            for uuid in uuids:
                self._resets.remove(uuid)
                self._were_away.discard(uuid)
                self._last_xids.pop(uuid, None)
                self._failed_checks.pop(uuid, None)

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
            if (xid := self._resets.xids.get(card.uuid)) is not None:
                return f"{describe_xid(xid)}; reset the card (nvidia-smi --gpu-reset) or reboot the node"
            xid, at = self._last_xids.get(card.uuid, (0, 0.0))
            if xid and self._clock() - at < self._settings.recover_after_s:
                return describe_xid(xid)
            self._last_xids.pop(card.uuid, None)
        # One failed check is no evidence either way: the card stays healthy or unhealthy until the next check.
        return self._node_cards.stored_fault(card.uuid) if failed_checks else ""

    def _event_loop(self) -> None:
        while not self._stopping.is_set():
            try:
                if not self._driver.is_open:
                    self._stopping.wait(min(self._settings.poll_s, EVENT_WAIT_S))
                    continue
                # Each time: cards of the last run can be subscribed only once the driver has listed them.
                self._driver.subscribe(self._node_cards.cards())
                event = self._driver.wait_for_xid(min(self._settings.poll_s, EVENT_WAIT_S))
                if event is not None:
                    self.record_xid(event)
            except DriverError as error:
                self._log.warning("xid_events_unavailable", error=str(error))
                self._driver.unsubscribe()
                self._stopping.wait(self._settings.poll_s)
            except Exception:  # the outermost frame of the thread, which must not end
                self._log.exception("health_events_failed")
                self._driver.unsubscribe()
                self._stopping.wait(self._settings.poll_s)

    def _poll_loop(self) -> None:
        while not self._stopping.wait(self._settings.poll_s):
            try:
                # Cards of the last run are not judged before the driver has been loaded.
                if self._driver.is_open:
                    self.poll()
                self.detect_hang()
            except Exception:  # the outermost frame of the thread, which must not end
                self._log.exception("health_poll_failed")


def concerns(event: XidEvent, card: Card) -> bool:
    """Whether an XID makes a card unhealthy: the driver reports it for the card, and of slices only if it is of one."""
    if event.uuid in {ALL_CARDS, card.uuid}:
        return True
    if event.uuid != card.parent:
        return False
    return event.gpu_instance in {-1, card.gpu_instance} and event.compute_instance in {-1, card.compute_instance}
