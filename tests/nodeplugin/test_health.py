"""How cards fall sick and become well again, with a clock and a driver that do as they are told."""

from collections.abc import Iterator

import pytest

from nodeplugin.cards import MISSING, Card, NodeCards
from nodeplugin.health import HealthWatcher
from nodeplugin.nvml import Driver, DriverError, XidEvent
from settings.configuration import HealthSettings
from tests.nodeplugin.builders import card, mig_part
from tests.waiting import eventually

RECOVER_S = 60.0
COUNTING, IGNORED = 79, 31
LOST = "the driver says: GPU is lost"


class Told(Driver):
    """A driver that says what it was told to say."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: dict[str, str] = {}
        self.reports: list[XidEvent | DriverError | ValueError] = []
        self.heeded: tuple[Card, ...] = ()

    def fault_of(self, card: Card) -> str:
        return self.faults.get(card.uuid, "")

    def listen(self, cards: object) -> None:
        assert isinstance(cards, tuple)
        self.heeded = cards

    def wait(self, timeout_s: float) -> XidEvent | None:  # noqa: ARG002 - it never waits
        if not self.reports:
            return None
        report = self.reports.pop(0)
        if isinstance(report, XidEvent):
            return report
        raise report


class Ward:
    """A fleet that is watched over. `news` counts how often something was told."""

    def __init__(self, *cards: Card, known: tuple[Card, ...] = ()) -> None:
        self.now, self.news = 1000.0, 0
        self.driver = Told()
        self.node_cards = NodeCards(known)
        self.node_cards.found(cards)
        settings = HealthSettings(poll_s=0.01, recover_after_s=RECOVER_S, ignored_xids=(IGNORED, 13))
        self.watch = HealthWatcher(self.driver, self.node_cards, settings, self._told, clock=lambda: self.now)

    def _told(self) -> None:
        self.news += 1

    def faults(self) -> list[str]:
        """What is wrong with each card, in their order."""
        return [self.node_cards.condition(each.uuid).fault for each in self.node_cards.cards()]

    def pass_by(self, seconds: float) -> None:
        """Let time go by, and look again."""
        self.now += seconds
        self.watch.look()


@pytest.fixture
def ward() -> Ward:
    """Two cards that are well."""
    return Ward(card(0), card(1))


def test_an_error_that_counts_makes_its_card_sick(ward: Ward) -> None:
    """And no other."""
    ward.watch.heard("GPU-1", COUNTING)
    assert ward.faults() == ["", "XID 79"]
    assert ward.news == 1


def test_an_error_that_is_ignored_is_only_counted(ward: Ward) -> None:
    """Programs cause some by themselves."""
    ward.watch.heard("GPU-0", IGNORED)
    ward.watch.heard("GPU-0", IGNORED)
    assert ward.faults() == ["", ""]
    assert ward.news == 0
    assert ward.watch.xids == {("GPU-0", IGNORED): 2}


def test_every_error_is_counted_by_card_and_number(ward: Ward) -> None:
    """Those that make a card sick as well, and those of no card."""
    for uuid, xid in (("GPU-0", COUNTING), ("GPU-1", COUNTING), ("GPU-0", 48), ("GPU-0", COUNTING), ("", 62)):
        ward.watch.heard(uuid, xid)
    assert ward.watch.xids == {("GPU-0", 79): 2, ("GPU-1", 79): 1, ("GPU-0", 48): 1, ("", 62): 1}


def test_an_error_that_the_driver_cannot_place_concerns_all_cards(ward: Ward) -> None:
    """Nobody knows which of them is well."""
    ward.watch.heard("", COUNTING)
    assert ward.faults() == ["XID 79", "XID 79"]
    assert ward.news == 1


def test_an_error_of_a_card_that_is_not_here_concerns_none(ward: Ward) -> None:
    """It may have been removed since."""
    ward.watch.heard("GPU-9", COUNTING)
    assert ward.faults() == ["", ""]


def test_an_error_of_a_card_concerns_all_its_parts() -> None:
    """Errors are reported for the card, and containers have its parts."""
    ward = Ward(mig_part(1), mig_part(2), mig_part(3, parent=1))
    ward.watch.heard("GPU-0", COUNTING)
    assert ward.faults() == ["XID 79", "XID 79", ""]


def test_a_card_is_well_again_after_a_quiet_while(ward: Ward) -> None:
    """Not a moment earlier, and every new error begins the time anew."""
    ward.watch.heard("GPU-0", COUNTING)
    ward.pass_by(RECOVER_S - 1)
    assert ward.faults() == ["XID 79", ""]
    ward.watch.heard("GPU-0", 48)
    ward.pass_by(RECOVER_S - 1)
    assert ward.faults() == ["XID 48", ""]
    ward.pass_by(1)
    assert ward.faults() == ["", ""]


def test_only_news_are_told(ward: Ward) -> None:
    """The kubelet need not hear every few seconds that nothing has changed."""
    ward.watch.look()
    assert ward.news == 0
    for _ in range(3):
        ward.watch.heard("GPU-0", COUNTING)
        ward.watch.look()
    assert ward.news == 1
    ward.pass_by(RECOVER_S)
    ward.watch.look()
    assert ward.news == 2


def test_a_card_that_does_not_answer_twice_is_sick(ward: Ward) -> None:
    """Once may be chance."""
    ward.driver.faults["GPU-0"] = LOST
    ward.watch.look()
    assert ward.faults() == ["", ""]
    ward.watch.look()
    assert ward.faults() == [LOST, ""]
    assert ward.news == 1


def test_a_card_that_answers_in_between_is_well(ward: Ward) -> None:
    """Twice means twice in a row."""
    for fault in (LOST, "", LOST, "", LOST):
        ward.driver.faults["GPU-0"] = fault
        ward.watch.look()
    assert ward.faults() == ["", ""]
    assert ward.news == 0


def test_a_card_that_answers_again_is_well_again(ward: Ward) -> None:
    """After a reset, for example."""
    ward.driver.faults["GPU-0"] = LOST
    ward.watch.look()
    ward.watch.look()
    ward.driver.faults.clear()
    ward.watch.look()
    assert ward.faults() == ["", ""]
    assert ward.news == 2


def test_a_card_that_answers_is_sick_as_long_as_its_error_is_fresh(ward: Ward) -> None:
    """An answer alone does not prove much."""
    ward.watch.heard("GPU-0", COUNTING)
    ward.driver.faults["GPU-0"] = LOST
    ward.watch.look()
    assert ward.faults() == ["XID 79", ""]
    ward.watch.look()
    assert ward.faults() == [LOST, ""]
    ward.driver.faults.clear()
    ward.watch.look()
    assert ward.faults() == ["XID 79", ""]
    ward.pass_by(RECOVER_S)
    assert ward.faults() == ["", ""]


def test_a_card_that_falls_silent_once_keeps_its_state(ward: Ward) -> None:
    """The error's time is over, but it did not answer: it stays as it was until it is asked again."""
    ward.watch.heard("GPU-0", COUNTING)
    ward.driver.faults["GPU-0"] = LOST
    ward.pass_by(RECOVER_S)
    assert ward.faults() == ["XID 79", ""]
    ward.driver.faults.clear()
    ward.watch.look()
    assert ward.faults() == ["", ""]


def test_the_time_of_the_last_look_is_known(ward: Ward) -> None:
    """Whoever watches the watch can see that it hangs."""
    ward.pass_by(5)
    assert ward.watch.looked_at == 1005.0


def test_a_card_that_is_missing_at_the_start_stays_sick() -> None:
    """The driver does not know it, however often it is asked, until it is there again."""
    ward = Ward(card(0), known=(card(0), card(1)))
    ward.driver.faults["GPU-1"] = "the driver says: Not Found"
    assert ward.faults() == ["", MISSING]
    ward.watch.look()
    assert ward.faults() == ["", MISSING]
    ward.watch.look()
    assert ward.faults() == ["", "the driver says: Not Found"]
    ward.driver.faults.clear()
    ward.node_cards.found([card(0), card(1)])
    ward.watch.look()
    assert ward.faults() == ["", ""]


def test_a_missing_card_stays_sick_when_another_reports_an_error() -> None:
    """What happens to one card says nothing of another."""
    ward = Ward(card(0), known=(card(0), card(1)))
    ward.watch.heard("GPU-0", COUNTING)
    assert ward.faults() == ["XID 79", MISSING]


@pytest.mark.parametrize(
    ("before", "after"),
    [(mig_part(1), mig_part(2)), (card(0), mig_part(1))],
    ids=["a part that was made anew", "a card that was divided"],
)
def test_a_card_that_is_not_listed_any_more_stays_sick_though_its_hardware_answers(before: Card, after: Card) -> None:
    """Or the same memory would be offered twice: as what it was, and as what it is now."""
    ward = Ward(before)
    ward.node_cards.found([after])
    ward.watch.look()
    assert ward.node_cards.condition(before.uuid).fault == MISSING


@pytest.fixture
def started(ward: Ward) -> Iterator[Ward]:
    """Two cards with a watch that runs."""
    ward.watch.start()
    yield ward
    ward.watch.stop()


def test_a_watch_hears_and_looks_by_itself(started: Ward) -> None:
    """It listens to all cards, and goes on after whatever the driver fails with."""
    started.driver.reports += [DriverError("gone"), ValueError("a fault of ours"), XidEvent("GPU-1", COUNTING)]
    started.driver.faults["GPU-0"] = LOST
    eventually(lambda: started.faults() == [LOST, "XID 79"], "both cards to be sick")
    assert [each.uuid for each in started.driver.heeded] == ["GPU-0", "GPU-1"]
    assert started.watch.alive


def test_a_watch_ends_when_it_is_told(ward: Ward) -> None:
    """Both of its threads."""
    ward.watch.start()
    assert ward.watch.alive
    ward.watch.stop()
    eventually(lambda: not any(thread.is_alive() for thread in ward.watch._threads), "both threads to end")


def test_a_driver_that_does_not_answer_makes_the_card_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call hangs, and somebody else notices; when it returns at last, the card is well."""
    ward = Ward(card(0), card(1))

    def hang(asked: Card) -> str:
        if asked.uuid == "GPU-1":
            ward.now += 5
            ward.watch.look_after_the_look()
            assert ward.faults() == ["", ""]
            ward.now += 6
            ward.watch.look_after_the_look()
            assert ward.faults() == ["", "the driver has not answered for 10 s"]
        return ""

    monkeypatch.setattr(ward.driver, "fault_of", hang)
    ward.watch.look()
    assert ward.faults() == ["", ""]
