"""The cards of this node, as the driver lists them, and the condition of each.

A card is healthy, unhealthy, cordoned or missing. Unhealthy and missing cards leave the node's capacity; a cordoned
card keeps its containers and takes no new ones.
"""

import threading
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct, field

from nodeplugin.isolation_ladder import CardLadder
from vcuda.gpu_model import parse_model
from vcuda.inventory import Gpu
from vcuda.isolation import NO_ISOLATION, Isolation

UNKNOWN_MODEL = "unknown"
MISSING = "missing: the driver no longer lists it"
NOTHING_UNREADABLE: Mapping[int, str] = {}
NO_DRIVER = "missing: the driver does not list any card"


class Card(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One card, or one MIG device of a card; then `parent` is the card's uuid, and the instance ids identify the part.

    `minor` is the number of the device node /dev/nvidia<minor>, which is not the index. `memory_mib` is 0 if the driver
    does not report it. Stored in the allocation checkpoint.
    """

    uuid: str
    index: int
    minor: int
    product: str
    memory_mib: int = field(name="memoryMiB", default=0)
    capability: str = ""
    numa: int | None = None
    bus_id: str = ""
    links: dict[str, str] = {}
    parent: str = ""
    gpu_instance: int = -1
    compute_instance: int = -1

    @property
    def model(self) -> str:
        """The product name without its brand, as quotas use it."""
        try:
            return parse_model(self.product).name
        except ValueError:
            return UNKNOWN_MODEL

    @property
    def is_mig(self) -> bool:
        return bool(self.parent)

    def units(self, unit_mib: int) -> int:
        """Count the memory units that the card offers."""
        # A whole card is requested with one memory unit, so a card of unknown memory must offer one to be usable.
        return self.memory_mib // unit_mib or 1


class CardCondition(Struct, frozen=True):
    """Why a card is unhealthy (`fault`) and why it is cordoned (`cordon`); empty texts if it is not."""

    fault: str = ""
    cordon: str = ""

    @property
    def healthy(self) -> bool:
        return not self.fault

    @property
    def unschedulable_reason(self) -> str:
        """Why the card takes no new containers; empty if it does."""
        return self.fault or self.cordon


def inventory_entry(card: Card, condition: CardCondition, isolation: Isolation) -> Gpu:
    return Gpu(
        uuid=card.uuid,
        index=card.index,
        model=card.model,
        memory_mib=card.memory_mib,
        healthy=condition.healthy,
        isolation=isolation,
        numa=card.numa,
        links=card.links,
        minor=card.minor,
        capability=card.capability,
        cordoned=bool(condition.cordon),
        reason=condition.unschedulable_reason,
    )


class NodeCards:
    """All cards of this node and the condition of each. Thread-safe.

    Cards are never removed implicitly: one that the driver no longer lists stays here as missing, and so unhealthy,
    until the driver lists it again or `forget` removes it.
    """

    def __init__(
        self, known: Iterable[Card] = (), ladder_of: Callable[[Card], CardLadder] = lambda _: CardLadder()
    ) -> None:
        """`known` are the cards of the last run, which count as present until the driver has been asked.

        `ladder_of` returns what enforces shares of a card now.
        """
        self.ladder_of = ladder_of
        # Guards the four collections below: a condition is computed from three of them.
        self._lock = threading.Lock()
        self._cards = {card.uuid: card for card in known}
        # Kept apart from faults: a card that was put into MIG mode is no longer listed but still answers health checks,
        # and a successful check must not make it allocatable beside its own MIG devices. Only `update` clears it.
        # Why each card is absent, by uuid.
        self._absent: dict[str, str] = {}
        self._faults: dict[str, str] = {}
        self._cordons: dict[str, str] = {}

    def update(self, listed: Iterable[Card], unreadable: Mapping[int, str] = NOTHING_UNREADABLE) -> None:
        """Store the cards that the driver lists now.

        All other known cards become missing, except at an index that could not be read: there they are only unhealthy,
        for the reason given.
        """
        with self._lock:
            cards = {card.uuid: card for card in listed}
            self._absent = {
                uuid: unreadable.get(card.index, MISSING) for uuid, card in self._cards.items() if uuid not in cards
            }
            self._cards |= cards

    def mark_missing(self) -> bool:
        """Make all cards missing, because the driver does not list any; returns whether this is a change."""
        with self._lock:
            before, self._absent = self._absent, dict.fromkeys(self._cards, NO_DRIVER)
            return before != self._absent

    def missing(self) -> set[str]:
        """Return the uuids of known cards that are not in the driver's list; none while it gives no list."""
        with self._lock:
            return {uuid for uuid, reason in self._absent.items() if reason == MISSING}

    def forget(self, uuids: Iterable[str]) -> None:
        """Remove cards that no longer exist; uuids that are not known are skipped."""
        with self._lock:
            for uuid in uuids:
                self._cards.pop(uuid, None)
                self._faults.pop(uuid, None)
                self._absent.pop(uuid, None)

    def set_fault(self, uuid: str, fault: str) -> bool:
        """Store why a card is unhealthy, or that it is healthy (""); returns whether this is a change."""
        with self._lock:
            before = self._faults.get(uuid, "")
            if fault:
                self._faults[uuid] = fault
            else:
                self._faults.pop(uuid, None)
            return before != fault

    def stored_fault(self, uuid: str) -> str:
        """Return what `set_fault` stored last. Unlike `condition`, this ignores that a card is missing."""
        with self._lock:
            return self._faults.get(uuid, "")

    def set_cordons(self, reasons: Mapping[str, str]) -> bool:
        """Replace all cordons, by uuid with the reason of each; returns whether this is a change."""
        with self._lock:
            before, self._cordons = self._cordons, dict(reasons)
            return before != self._cordons

    def cards(self) -> tuple[Card, ...]:
        """Return all cards, missing ones included, ordered by index."""
        with self._lock:
            return tuple(sorted(self._cards.values(), key=lambda card: (card.index, card.uuid)))

    def get(self, uuid: str) -> Card | None:
        with self._lock:
            return self._cards.get(uuid)

    def condition(self, uuid: str) -> CardCondition:
        with self._lock:
            fault = self._faults.get(uuid, "") or self._absent.get(uuid, "")
            return CardCondition(fault, self._cordons.get(uuid, ""))

    def isolation(self, uuid: str) -> Isolation:
        """Return what enforces shares of a card now; nothing of an unknown one."""
        card = self.get(uuid)
        return NO_ISOLATION if card is None else self.ladder_of(card).isolation

    def gpus(self) -> tuple[Gpu, ...]:
        """Return all cards as the node's inventory publishes them."""
        return tuple(
            inventory_entry(card, self.condition(card.uuid), self.ladder_of(card).isolation) for card in self.cards()
        )
