"""Which cards a cluster has, in as few words as charging a quota needs: models, their memory, their pools.

The controller writes it, from the nodes; whoever charges reads it, and needs to know no nodes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from vcuda.decoding import decoder_for
from vcuda.gpu_model import is_model, tokenize

VERSION = 1
MIB_PER_GIB = 1024
# As products are named after their memory: A100-SXM4-40GB.
SIZE = re.compile(r"([0-9]{1,4})gb", re.ASCII | re.IGNORECASE)


class CardModel(Struct, frozen=True, order=True, rename="camel", omit_defaults=True):
    """A kind of card that some node of a pool has; nodes outside pools are in the pool without a name."""

    model: str
    memory_mib: int = msgspec.field(name="memoryMiB")
    pool: str = ""


class CatalogueDocument(Struct, frozen=True):
    """All kinds of cards, as they are written down."""

    v: int = VERSION
    cards: tuple[CardModel, ...] = ()


def encode_catalogue(cards: Iterable[CardModel]) -> str:
    """Write a catalogue, the same for the same cards."""
    return msgspec.json.encode(CatalogueDocument(VERSION, tuple(sorted(set(cards))))).decode()


def decode_catalogue(text: str) -> tuple[CardModel, ...]:
    """Read a catalogue; a ValueError says what is wrong with it."""
    found = decoder_for(CatalogueDocument).decode(text)
    if found.v != VERSION:
        raise ValueError(f"catalogue version {found.v} is not known here, {VERSION} is")
    # One card that cannot be read must not hide all others.
    return tuple(card for card in found.cards if is_model(card.model))


def card_sizes_mib(cards: Iterable[CardModel], pools: Sequence[str] | None) -> Mapping[str, int]:
    """Give the largest card of each model in these pools; None means in all."""
    largest: dict[str, int] = {}
    for card in cards:
        if (pools is None or card.pool in pools) and is_model(card.model):
            largest[card.model] = max(card.memory_mib, largest.get(card.model, 0))
    return largest


def memory_in_name_mib(model: str) -> int:
    """Read a card's memory from its name, as in A100-SXM4-40GB; 0 if the name does not say. Of a slice, the slice's."""
    for word in reversed(tokenize(model)):
        if found := SIZE.fullmatch(word.rpartition(".")[2]):
            return int(found[1]) * MIB_PER_GIB
    return 0
