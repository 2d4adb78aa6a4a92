"""The node plugin's own decisions: when to retry, and which cards of the previous run may be missing."""

from nodeplugin.checkpoint import AllocationCheckpoint, PodAllocation
from nodeplugin.service import RECONCILE_S, previous_cards, retry_delay_s
from tests.nodeplugin.builders import card


def test_retries_back_off_up_to_the_normal_interval() -> None:
    """However long a process of a deleted pod keeps running: after 85 minutes it is the 1024th retry."""
    assert [retry_delay_s(retries) for retries in (0, 1, 2, 3, 4)] == [0.5, 1.0, 2.0, 4.0, RECONCILE_S]
    assert retry_delay_s(100_000) == RECONCILE_S


def test_a_card_that_disappears_while_the_machine_runs_is_missing() -> None:
    checkpoint = AllocationCheckpoint({}, (card(0), card(1)), "boot-1")
    assert previous_cards(checkpoint, "boot-1") == (card(0), card(1))


def test_a_card_that_disappears_with_a_reboot_is_missing_only_while_a_pod_holds_it() -> None:
    """Otherwise it was removed from the machine."""
    allocation = PodAllocation(uid="u", namespace="team", name="train", placed={}, usage={"GPU-1": (50, 1024)})
    checkpoint = AllocationCheckpoint({"u": allocation}, (card(0), card(1)), "boot-1")
    assert previous_cards(checkpoint, "boot-2") == (card(1),)
