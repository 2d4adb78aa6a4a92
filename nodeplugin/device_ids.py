"""Which device ids are offered to the kubelet.

Ids are anonymous tokens: which card a container got is its placement's business, and an id says nothing about it. So a
sick card takes out the ids that its containers hold, and of the free ones as many as it has units left. Ids that are
held stay offered whatever happens to the numbers, or the kubelet would refuse their pods after a restart.
"""

from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum

from msgspec import Struct

from nodeplugin.cards import Card, CardCondition
from vcuda.names import Names
from vcuda.vocabulary import CORES_PER_CARD

# The kubelet takes messages of 4 MiB. A device costs its id, the word for its health and a few bytes around them.
MOST_BYTES = 4 * 2**20
BYTES_AROUND = 8 + len("Unhealthy")


class Resource(StrEnum):
    """The two resources of a GPU container."""

    CORE = "core"
    MEMORY = "memory"

    @property
    def other(self) -> "Resource":
        """The one beside it."""
        return Resource.MEMORY if self is Resource.CORE else Resource.CORE

    def name_in(self, names: Names) -> str:
        """Name it as pods do."""
        return names.core if self is Resource.CORE else names.memory

    def units_of(self, card: Card, unit_mib: int) -> int:
        """Count what a card offers of it."""
        return CORES_PER_CARD if self is Resource.CORE else card.units(unit_mib)


class CardDevices(Struct, frozen=True):
    """A card's part in an offer: its units, how it is, and the ids that its containers hold."""

    units: int
    condition: CardCondition
    held: frozenset[str] = frozenset()


def offered_devices(resource: Resource, stocks: Iterable[CardDevices]) -> dict[str, bool]:
    """Give all ids that are offered, and whether each is healthy."""
    healthy: dict[str, bool] = {}
    sick: dict[str, bool] = {}
    usable = total = 0
    for stock in stocks:
        total += stock.units
        if stock.condition.healthy:
            healthy |= dict.fromkeys(stock.held, True)
            # A cordoned card keeps what its containers hold, and offers nothing beyond.
            usable += min(len(stock.held), stock.units) if stock.condition.cordon else stock.units
        else:
            sick |= dict.fromkeys(stock.held, False)
    fresh = unheld(resource, healthy.keys() | sick.keys())
    # An id that containers on a sick card and on a well one hold, by a fault of the kubelet's, is the well one's.
    offered = sick | healthy
    for _ in range(usable - len(healthy)):
        offered[next(fresh)] = True
    for _ in range(total - len(offered)):
        offered[next(fresh)] = False
    return offered


def unheld(resource: Resource, held: Collection[str]) -> Iterator[str]:
    """Give ids that nobody holds, always the same first."""
    number = 0
    while True:
        if (made := f"{resource}-{number}") not in held:
            yield made
        number += 1


def listed_size(cards: Iterable[Card], unit_mib: int) -> tuple[int, int]:
    """Count the devices of a list, and its bytes at the most."""
    units = sum(card.units(unit_mib) for card in cards)
    return units, units * (BYTES_AROUND + len(f"{Resource.MEMORY}-{units}"))


def too_many(cards: Iterable[Card], unit_mib: int) -> str:
    """Say why a list of devices would be longer than the kubelet takes; nothing if it is not."""
    found = list(cards)
    units, size = listed_size(found, unit_mib)
    if size <= MOST_BYTES:
        return ""
    least = -(-unit_mib * size // MOST_BYTES)
    while listed_size(found, least)[1] > MOST_BYTES:
        least += 1
    return (
        f"memoryUnitMiB: {unit_mib}: this node's cards would be {units} devices, some {size // 2**20} MiB, and the "
        f"kubelet takes 4 MiB at the most; write a unit of at least {least} MiB"
    )
