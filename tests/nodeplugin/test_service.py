"""Which cards of the previous run may be missing after a start."""

from nodeplugin.checkpoint import AllocationCheckpoint, PodAllocation
from nodeplugin.service import previous_cards
from tests.nodeplugin.builders import card


def test_a_card_that_disappears_while_the_machine_runs_is_missing() -> None:
    checkpoint = AllocationCheckpoint({}, (card(0), card(1)), "boot-1")
    assert previous_cards(checkpoint, "boot-1") == (card(0), card(1))


def test_a_card_that_disappears_with_a_reboot_is_missing_only_while_a_pod_holds_it() -> None:
    """Otherwise it was removed from the machine."""
    allocation = PodAllocation(uid="u", namespace="team", name="train", placed={}, usage={"GPU-1": (50, 1024)})
    checkpoint = AllocationCheckpoint({"u": allocation}, (card(0), card(1)), "boot-1")
    assert previous_cards(checkpoint, "boot-2") == (card(1),)
