"""Which device IDs are offered to the kubelet.

IDs are anonymous tokens: the pod's placement says which card a container got, its IDs do not. An unhealthy card
therefore takes out the IDs that its containers use, and as many free IDs as it has units left. IDs in use stay on
offer even if the number of units shrinks, because after a restart the kubelet rejects pods with unknown IDs.
"""

from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum

from msgspec import Struct

from nodeplugin.cards import Card, CardCondition
from vcuda.names import Names
from vcuda.vocabulary import CORES_PER_CARD

# The kubelet accepts gRPC messages of up to 4 MiB. A device takes its ID, its health and 8 bytes of encoding.
MAX_LIST_BYTES = 4 * 2**20
OVERHEAD_BYTES = 8 + len("Unhealthy")


class Resource(StrEnum):
    """The two resources of a GPU container."""

    CORE = "core"
    MEMORY = "memory"

    @property
    def other(self) -> "Resource":
        return Resource.MEMORY if self is Resource.CORE else Resource.CORE

    def name_in(self, names: Names) -> str:
        """Return the extended resource's name, as it appears in pods."""
        return names.core if self is Resource.CORE else names.memory

    def units_of(self, card: Card, unit_mib: int) -> int:
        return CORES_PER_CARD if self is Resource.CORE else card.units(unit_mib)


class CardDevices(Struct, frozen=True):
    """What one card contributes to a resource: its units, its condition, and the IDs its containers use."""

    units: int
    condition: CardCondition
    in_use: frozenset[str] = frozenset()


def offered_devices(resource: Resource, cards: Iterable[CardDevices]) -> dict[str, bool]:
    """Return all IDs to offer, and whether each is healthy."""
    healthy: dict[str, bool] = {}
    unhealthy: dict[str, bool] = {}
    usable = total = 0
    for card in cards:
        total += card.units
        if card.condition.healthy:
            healthy |= dict.fromkeys(card.in_use, True)
            # A cordoned card keeps its running containers and offers nothing more.
            usable += min(len(card.in_use), card.units) if card.condition.cordon else card.units
        else:
            unhealthy |= dict.fromkeys(card.in_use, False)
    free = free_ids(resource, healthy.keys() | unhealthy.keys())
    # The kubelet can assign one ID twice (it drops reservations of calls in flight when another agent lists pod
    # resources). If the two containers are on different cards, the ID follows the healthy one.
    offered = unhealthy | healthy
    for _ in range(usable - len(healthy)):
        offered[next(free)] = True
    for _ in range(total - len(offered)):
        offered[next(free)] = False
    return offered


def free_ids(resource: Resource, in_use: Collection[str]) -> Iterator[str]:
    """Yield IDs that are not in use, lowest number first, without end."""
    number = 0
    while True:
        if (device_id := f"{resource}-{number}") not in in_use:
            yield device_id
        number += 1


def device_list_size(cards: Iterable[Card], unit_mib: int) -> tuple[int, int]:
    """Return the number of memory devices, and an upper bound of their list's size in bytes."""
    units = sum(card.units(unit_mib) for card in cards)
    return units, units * (OVERHEAD_BYTES + len(f"{Resource.MEMORY}-{units}"))


def device_list_problem(cards: Iterable[Card], unit_mib: int) -> str:
    """Say why the kubelet would not accept the list of memory devices; empty if it would."""
    all_cards = list(cards)
    units, size = device_list_size(all_cards, unit_mib)
    if size <= MAX_LIST_BYTES:
        return ""
    # Close to the smallest unit that fits; rounding per card and shorter IDs need the loop.
    least = -(-unit_mib * size // MAX_LIST_BYTES)
    while device_list_size(all_cards, least)[1] > MAX_LIST_BYTES:
        least += 1
    return (
        f"memoryUnitMiB: {unit_mib}: too small for this node: its GPUs would be {units} devices, a list of about "
        f"{size // 2**20} MiB, and the kubelet accepts at most 4 MiB; set memoryUnitMiB to at least {least}"
    )
