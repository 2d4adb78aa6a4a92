"""When cards become unhealthy and recover, with a simulated clock and driver."""

import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from nodeplugin import fake, health
from nodeplugin.cards import MISSING, Card, NodeCards
from nodeplugin.health import HealthWatcher
from nodeplugin.nvml import CardCheck, Driver, DriverError, XidEvent, load_bindings
from nodeplugin.pending_resets import PendingResets
from settings.configuration import HealthSettings
from tests.nodeplugin.builders import card, mig_part
from tests.waiting import eventually
from vcuda.xids import RESET_XIDS, describe_xid

RECOVER_S = 60.0
COUNTING, IGNORED, NEEDS_RESET = 94, 31, 79
CONTAINED = "XID 94: contained ECC error"
LOST = "driver error: GPU is lost"


class ScriptedDriver(Driver):
    """A driver whose check results and XID events the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = True
        self.resets: dict[str, bool] = {}
        self.faults: dict[str, str] = {}
        self.reports: list[XidEvent | DriverError | ValueError] = []
        self.subscribed: tuple[Card, ...] = ()

    def check_card(self, card: Card) -> CardCheck:
        fault = self.faults.get(card.uuid, "")
        return CardCheck(fault, is_away=fault == LOST)

    def needs_reset(self, card: Card) -> bool | None:
        return self.resets.get(card.uuid)

    def subscribe(self, cards: object) -> None:
        assert isinstance(cards, tuple)
        self.subscribed = cards

    def wait_for_xid(self, timeout_s: float) -> XidEvent | None:  # noqa: ARG002 - it never waits
        if not self.reports:
            return None
        report = self.reports.pop(0)
        if isinstance(report, XidEvent):
            return report
        raise report


class WatchedCards:
    """Cards with a health watcher. `changes` counts its notifications."""

    def __init__(self, *cards: Card, known: tuple[Card, ...] = (), folder: Path | None = None, boot: str = "b") -> None:
        self.now, self.changes = 1000.0, 0
        self.driver = ScriptedDriver()
        self.node_cards = NodeCards(known)
        self.node_cards.update(cards)
        settings = HealthSettings(poll_s=0.01, recover_after_s=RECOVER_S, ignored_xids=(IGNORED, 13))
        self._folder = folder or Path(tempfile.mkdtemp(prefix="quotient-test-"))
        self.watcher = HealthWatcher(
            self.driver,
            self.node_cards,
            settings,
            self._count_change,
            resets=PendingResets(self._folder, boot),
            clock=lambda: self.now,
        )

    def report(self, uuid: str, xid: int, gpu_instance: int = -1, compute_instance: int = -1) -> None:
        self.watcher.record_xid(XidEvent(uuid, xid, gpu_instance, compute_instance))

    def _count_change(self) -> None:
        self.changes += 1

    def faults(self) -> list[str]:
        """The fault of each card, in the order of their indexes."""
        return [self.node_cards.condition(each.uuid).fault for each in self.node_cards.cards()]

    def poll_after(self, seconds: float) -> None:
        self.now += seconds
        self.watcher.poll()


@pytest.fixture
def watched() -> WatchedCards:
    """Two healthy cards."""
    return WatchedCards(card(0), card(1))


def test_an_xid_that_is_not_ignored_makes_its_card_unhealthy(watched: WatchedCards) -> None:
    """And no other card."""
    watched.report("GPU-1", COUNTING)
    assert watched.faults() == ["", CONTAINED]
    assert watched.changes == 1


def test_an_ignored_xid_is_only_counted(watched: WatchedCards) -> None:
    """Applications cause some XIDs on intact cards."""
    watched.report("GPU-0", IGNORED)
    watched.report("GPU-0", IGNORED)
    assert watched.faults() == ["", ""]
    assert watched.changes == 0
    assert watched.watcher.xids == {("GPU-0", IGNORED): 2}


def test_every_xid_is_counted_by_card_and_number(watched: WatchedCards) -> None:
    """Those that make a card unhealthy as well, and those of no particular card."""
    for uuid, xid in (("GPU-0", COUNTING), ("GPU-1", COUNTING), ("GPU-0", 48), ("GPU-0", COUNTING), ("", 62)):
        watched.report(uuid, xid)
    assert watched.watcher.xids == {("GPU-0", 94): 2, ("GPU-1", 94): 1, ("GPU-0", 48): 1, ("", 62): 1}


def test_an_xid_of_no_particular_card_makes_all_cards_unhealthy(watched: WatchedCards) -> None:
    """It may be any of them."""
    watched.report("", COUNTING)
    assert watched.faults() == [CONTAINED, CONTAINED]
    assert watched.changes == 1


def test_an_xid_of_an_unknown_card_has_no_effect(watched: WatchedCards) -> None:
    """The card may have been removed since."""
    watched.report("GPU-9", COUNTING)
    assert watched.faults() == ["", ""]


def test_an_xid_of_a_card_makes_all_its_mig_devices_unhealthy() -> None:
    """The driver reports XIDs for the card, and containers hold its MIG devices."""
    watched = WatchedCards(mig_part(1), mig_part(2), mig_part(3, parent=1))
    watched.report("GPU-0", COUNTING)
    assert watched.faults() == [CONTAINED, CONTAINED, ""]


def test_a_card_recovers_some_time_after_its_last_xid(watched: WatchedCards) -> None:
    """Every further XID restarts that time."""
    watched.report("GPU-0", COUNTING)
    watched.poll_after(RECOVER_S - 1)
    assert watched.faults() == [CONTAINED, ""]
    watched.report("GPU-0", 63)
    watched.poll_after(RECOVER_S - 1)
    assert watched.faults() == [describe_xid(63), ""]
    watched.poll_after(1)
    assert watched.faults() == ["", ""]


def test_only_changes_are_notified(watched: WatchedCards) -> None:
    """Each notification makes the kubelet read the device list."""
    watched.watcher.poll()
    assert watched.changes == 0
    for _ in range(3):
        watched.report("GPU-0", COUNTING)
        watched.watcher.poll()
    assert watched.changes == 1
    watched.poll_after(RECOVER_S)
    watched.watcher.poll()
    assert watched.changes == 2


def test_a_card_that_fails_two_checks_in_a_row_is_unhealthy(watched: WatchedCards) -> None:
    """A single failure may be transient."""
    watched.driver.faults["GPU-0"] = LOST
    watched.watcher.poll()
    assert watched.faults() == ["", ""]
    watched.watcher.poll()
    assert watched.faults() == [LOST, ""]
    assert watched.changes == 1


def test_failed_checks_that_are_not_in_a_row_do_not_count(watched: WatchedCards) -> None:
    for fault in (LOST, "", LOST, "", LOST):
        watched.driver.faults["GPU-0"] = fault
        watched.watcher.poll()
    assert watched.faults() == ["", ""]
    assert watched.changes == 0


def test_a_card_recovers_with_its_first_successful_check(watched: WatchedCards) -> None:
    """After a reset, for example."""
    watched.driver.faults["GPU-0"] = LOST
    watched.watcher.poll()
    watched.watcher.poll()
    watched.driver.faults.clear()
    watched.watcher.poll()
    assert watched.faults() == ["", ""]
    assert watched.changes == 2


def test_a_successful_check_does_not_cancel_a_recent_xid(watched: WatchedCards) -> None:
    """A card may respond and still be broken."""
    watched.report("GPU-0", COUNTING)
    watched.driver.faults["GPU-0"] = LOST
    watched.watcher.poll()
    assert watched.faults() == [CONTAINED, ""]
    watched.watcher.poll()
    assert watched.faults() == [LOST, ""]
    watched.driver.faults.clear()
    watched.watcher.poll()
    assert watched.faults() == [CONTAINED, ""]
    watched.poll_after(RECOVER_S)
    assert watched.faults() == ["", ""]


def test_a_single_failed_check_leaves_an_unhealthy_card_unhealthy(watched: WatchedCards) -> None:
    """The XID has expired, but a failed check is no evidence of recovery: the next check decides."""
    watched.report("GPU-0", COUNTING)
    watched.driver.faults["GPU-0"] = LOST
    watched.poll_after(RECOVER_S)
    assert watched.faults() == [CONTAINED, ""]
    watched.driver.faults.clear()
    watched.watcher.poll()
    assert watched.faults() == ["", ""]


def test_the_time_of_the_last_poll_is_recorded(watched: WatchedCards) -> None:
    """The metric of its age shows a watcher that is blocked."""
    watched.poll_after(5)
    assert watched.watcher.last_poll_at == 1005.0


def test_a_card_that_is_missing_at_start_stays_unhealthy_until_it_is_listed() -> None:
    watched = WatchedCards(card(0), known=(card(0), card(1)))
    watched.driver.faults["GPU-1"] = "driver error: Not Found"
    assert watched.faults() == ["", MISSING]
    watched.watcher.poll()
    assert watched.faults() == ["", MISSING]
    watched.watcher.poll()
    assert watched.faults() == ["", "driver error: Not Found"]
    watched.driver.faults.clear()
    watched.node_cards.update([card(0), card(1)])
    watched.watcher.poll()
    assert watched.faults() == ["", ""]


def test_an_xid_of_another_card_does_not_change_a_missing_card() -> None:
    watched = WatchedCards(card(0), known=(card(0), card(1)))
    watched.report("GPU-0", COUNTING)
    assert watched.faults() == [CONTAINED, MISSING]


@pytest.mark.parametrize(
    ("before", "after"),
    [(mig_part(1), mig_part(2)), (card(0), mig_part(1))],
    ids=["a MIG device that was created again", "a card that was put into MIG mode"],
)
def test_a_card_that_is_no_longer_listed_stays_unhealthy_though_its_checks_succeed(before: Card, after: Card) -> None:
    """Otherwise the same memory would be offered twice: as what it was, and as what it is now."""
    watched = WatchedCards(before)
    watched.node_cards.update([after])
    watched.watcher.poll()
    assert watched.node_cards.condition(before.uuid).fault == MISSING


@pytest.fixture
def started(watched: WatchedCards) -> Iterator[WatchedCards]:
    """Two cards with a running watcher."""
    watched.watcher.start()
    yield watched
    watched.watcher.stop()


def test_a_running_watcher_handles_events_and_polls(started: WatchedCards) -> None:
    """It subscribes to all cards, and continues after any exception of the driver."""
    started.driver.reports += [DriverError("gone"), ValueError("a bug"), XidEvent("GPU-1", COUNTING)]
    started.driver.faults["GPU-0"] = LOST
    eventually(lambda: started.faults() == [LOST, CONTAINED], "both cards to be unhealthy")
    assert [each.uuid for each in started.driver.subscribed] == ["GPU-0", "GPU-1"]
    assert started.watcher.alive


def test_cards_that_the_driver_lists_late_are_watched(tmp_path: Path) -> None:
    """A restarted plugin has the same cards before, and a driver that is open may take long to list them."""
    described = {"uuid": "GPU-0", "product": "NVIDIA A100"}
    driver = Driver(fake.install(tmp_path, {"cards": [described]}), load_bindings()).open()
    watcher = HealthWatcher(
        driver,
        NodeCards([card(0)]),
        HealthSettings(poll_s=0.01),
        lambda: None,
        resets=PendingResets(tmp_path, ""),
    )
    may_list = threading.Event()
    subscribe = driver.subscribe

    def subscribe_and_tell(cards: Sequence[Card]) -> None:
        subscribe(cards)
        may_list.set()

    driver.subscribe = subscribe_and_tell  # type: ignore[method-assign]
    watcher.start()
    assert may_list.wait(20)
    driver.read_cards(driver.count_cards())
    eventually(lambda: driver._subscribed, "the card to be subscribed")
    fake.describe(tmp_path, {"cards": [described], "events": [{"card": 0, "xid": COUNTING}]})
    eventually(lambda: watcher.xids == {("GPU-0", COUNTING): 1}, "the XID to be counted")
    watcher.stop()
    driver.close()


def test_stopping_a_watcher_ends_both_threads(watched: WatchedCards) -> None:
    watched.watcher.start()
    assert watched.watcher.alive
    watched.watcher.stop()
    eventually(lambda: not any(thread.is_alive() for thread in watched.watcher._threads), "both threads to end")


def test_a_card_whose_check_hangs_is_unhealthy_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the check returns at last, the card has recovered."""
    monkeypatch.setattr(health, "ROUND_S", 0.05)
    watched = WatchedCards(card(0), card(1), card(2))
    may_return = threading.Event()
    checked: list[str] = []

    def check(each: Card) -> CardCheck:
        checked.append(each.uuid)
        if each.uuid == "GPU-1":
            assert may_return.wait(30)
        return CardCheck(LOST if each.uuid == "GPU-2" else "")

    monkeypatch.setattr(watched.driver, "check_card", check)
    for _ in range(2):
        watched.poll_after(5)
    assert sorted(checked) == ["GPU-0", "GPU-0", "GPU-1", "GPU-2", "GPU-2"]
    watched.watcher.detect_hang()
    assert watched.faults() == ["", "", LOST]
    watched.now += 6
    watched.watcher.detect_hang()
    assert watched.faults() == ["", "no answer from the driver for 10 s", LOST]
    may_return.set()
    eventually(lambda: not watched.watcher._running, "the check to return")
    watched.watcher.poll()
    assert watched.faults() == ["", "", LOST]


@pytest.mark.parametrize(
    ("instances", "unhealthy"),
    [((-1, -1), [True, True, True]), ((7, -1), [True, True, False]), ((7, 1), [False, True, False])],
    ids=["the card", "a GPU instance", "a compute instance"],
)
def test_an_xid_of_a_slice_leaves_the_other_slices_alone(instances: tuple[int, int], unhealthy: list[bool]) -> None:
    at = ((7, 0), (7, 1), (8, 0))
    parts = [replace(mig_part(n), index=n, gpu_instance=gi, compute_instance=ci) for n, (gi, ci) in enumerate(at)]
    watched = WatchedCards(*parts)
    watched.report("GPU-0", COUNTING, *instances)
    assert [bool(fault) for fault in watched.faults()] == unhealthy


@pytest.mark.parametrize("xid", sorted(RESET_XIDS))
def test_an_xid_that_needs_a_reset_does_not_pass_with_time(xid: int, watched: WatchedCards) -> None:
    """However well the card answers."""
    watched.report("GPU-0", xid)
    watched.poll_after(100 * RECOVER_S)
    assert watched.faults() == [f"{describe_xid(xid)}; reset the card (nvidia-smi --gpu-reset) or reboot the node", ""]


def test_a_card_recovers_when_the_driver_wants_no_reset_any_longer(watched: WatchedCards) -> None:
    watched.driver.resets["GPU-0"] = True
    watched.report("GPU-0", NEEDS_RESET)
    watched.poll_after(10 * RECOVER_S)
    assert watched.faults()[0]
    watched.driver.resets["GPU-0"] = False
    watched.poll_after(RECOVER_S)
    assert watched.faults() == ["", ""]


def test_without_the_drivers_word_a_card_recovers_that_was_away(watched: WatchedCards) -> None:
    """As it is while it is reset."""
    watched.report("GPU-0", NEEDS_RESET)
    watched.driver.faults["GPU-0"] = LOST
    watched.poll_after(RECOVER_S)
    watched.poll_after(RECOVER_S)
    assert watched.faults() == [LOST, ""]
    watched.driver.faults.clear()
    watched.poll_after(RECOVER_S)
    assert watched.faults() == ["", ""]


def test_a_check_that_fails_otherwise_is_no_reset(watched: WatchedCards) -> None:
    """A driver that is busy times out for a card, or lists none at all."""
    watched.report("GPU-0", NEEDS_RESET)
    watched.driver.faults["GPU-0"] = "driver error: Timeout"
    watched.poll_after(RECOVER_S)
    watched.driver.faults.clear()
    watched.node_cards.mark_missing()
    watched.poll_after(RECOVER_S)
    watched.node_cards.update([card(0), card(1)])
    watched.poll_after(RECOVER_S)
    assert "reset" in watched.faults()[0]


def test_a_slice_that_was_created_again_needs_no_reset() -> None:
    """The reset destroyed it, and it has the uuid that it had before."""
    watched = WatchedCards(mig_part(1), mig_part(2))
    watched.report("GPU-0", NEEDS_RESET)
    watched.node_cards.update([mig_part(2)])
    watched.node_cards.forget(["MIG-1"])
    watched.watcher.forget(["MIG-1"])
    watched.node_cards.update([mig_part(1), mig_part(2)])
    watched.poll_after(1)
    assert [bool(each) for each in watched.faults()] == [False, True]


def test_a_needed_reset_outlasts_the_plugin_and_not_the_boot(tmp_path: Path) -> None:
    WatchedCards(card(0), folder=tmp_path).report("GPU-0", NEEDS_RESET)
    restarted = WatchedCards(card(0), folder=tmp_path)
    restarted.poll_after(RECOVER_S)
    assert "reset" in restarted.faults()[0]
    rebooted = WatchedCards(card(0), folder=tmp_path, boot="another")
    rebooted.poll_after(RECOVER_S)
    assert rebooted.faults() == [""]


def test_an_xid_of_no_particular_card_needs_no_reset_of_all(watched: WatchedCards) -> None:
    """One error that cannot be attributed must not take the node out of service until a reboot."""
    watched.report("", NEEDS_RESET)
    assert all(watched.faults())
    watched.poll_after(RECOVER_S)
    assert watched.faults() == ["", ""]
