"""The cards of this node, as the driver shows them."""

import threading
from collections.abc import Iterable, Mapping

from msgspec import Struct, field

from vcuda.gpu_model import parse_model
from vcuda.inventory import Gpu

UNKNOWN_MODEL = "unknown"
MISSING = "the driver does not show it any more"


class Card(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One card, or one MIG device of a card: then `parent` is the card's uuid, and the instances say which part.

    `minor` is the number of its device node, which is not its index. `memory_mib` is 0 where the driver does not say.
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
        """The product's name without its brand."""
        try:
            return parse_model(self.product).name
        except ValueError:
            return UNKNOWN_MODEL

    @property
    def is_mig(self) -> bool:
        """Whether it is a part of a card."""
        return bool(self.parent)

    def units(self, unit_mib: int) -> int:
        """Count the memory units it offers; one where nobody knows, by which it can be asked for as a whole."""
        return self.memory_mib // unit_mib or 1


class CardCondition(Struct, frozen=True):
    """How a card is: what is wrong with it, if anything, and why it takes no new containers."""

    fault: str = ""
    cordon: str = ""

    @property
    def healthy(self) -> bool:
        """Whether its containers can work."""
        return not self.fault

    @property
    def closed(self) -> str:
        """Why it takes nothing new; empty if it does."""
        return self.fault or self.cordon


def published(card: Card, condition: CardCondition, isolation: str) -> Gpu:
    """Write a card as it is published."""
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
        reason=condition.closed,
    )


class NodeCards:
    """All cards of this node and how each is. Those that were there once and are missing now are sick.

    A card that the driver no longer shows may still answer when it is asked: one that was put into MIG mode does. So
    only a look at all cards tells that it is there again.
    """

    def __init__(self, known: Iterable[Card] = ()) -> None:
        # Guards cards and conditions, which are read together.
        self._lock = threading.Lock()
        self._cards = {card.uuid: card for card in known}
        self._missing = set(self._cards)
        self._faults: dict[str, str] = {}
        self._cordons: dict[str, str] = {}

    def found(self, cards: Iterable[Card]) -> None:
        """Take over what the driver shows now."""
        with self._lock:
            there = {card.uuid: card for card in cards}
            self._missing = set(self._cards.keys() - there.keys())
            self._cards |= there

    def missing(self) -> set[str]:
        """Name the cards that the driver does not show."""
        with self._lock:
            return set(self._missing)

    def forget(self, uuids: Iterable[str]) -> None:
        """Drop cards that are gone for good."""
        with self._lock:
            for uuid in uuids:
                self._cards.pop(uuid, None)
                self._faults.pop(uuid, None)
                self._missing.discard(uuid)

    def fault(self, uuid: str, why: str) -> bool:
        """Note what is wrong with a card, or that nothing is; tells whether that is news."""
        with self._lock:
            before = self._faults.get(uuid, "")
            if why:
                self._faults[uuid] = why
            else:
                self._faults.pop(uuid, None)
            return before != why

    def noted(self, uuid: str) -> str:
        """Say what was last noted to be wrong with a card."""
        with self._lock:
            return self._faults.get(uuid, "")

    def cordon(self, cordons: Mapping[str, str]) -> bool:
        """Note which cards take nothing new, and why; tells whether that is news."""
        with self._lock:
            before, self._cordons = self._cordons, dict(cordons)
            return before != self._cordons

    def cards(self) -> tuple[Card, ...]:
        """Give all cards, in the order of their indexes."""
        with self._lock:
            return tuple(sorted(self._cards.values(), key=lambda card: (card.index, card.uuid)))

    def get(self, uuid: str) -> Card | None:
        """Look a card up."""
        with self._lock:
            return self._cards.get(uuid)

    def condition(self, uuid: str) -> CardCondition:
        """Say how a card is."""
        with self._lock:
            fault = self._faults.get(uuid, "") or (MISSING if uuid in self._missing else "")
            return CardCondition(fault, self._cordons.get(uuid, ""))

    def gpus(self, isolation: str = "none") -> tuple[Gpu, ...]:
        """Give all cards as they are published."""
        return tuple(published(card, self.condition(card.uuid), isolation) for card in self.cards())
