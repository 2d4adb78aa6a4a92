"""The catalogue: which GPU models a cluster has, their memory, and their node pools.

The controller writes it from the nodes. Webhook replicas read it to charge quotas, and need not watch nodes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from vcuda.decoding import decoder_for
from vcuda.gpu_model import is_model, tokenize

VERSION = 1
MIB_PER_GIB = 1024
# The memory in the name of a product, such as A100-SXM4-40GB.
SIZE = re.compile(r"([0-9]{1,4})gb", re.ASCII | re.IGNORECASE)


class CardModel(Struct, frozen=True, order=True, rename="camel", omit_defaults=True):
    """A kind of GPU that some node of a pool has. `pool` is empty for nodes without one."""

    model: str
    memory_mib: int = msgspec.field(name="memoryMiB")
    pool: str = ""


class CatalogueDocument(Struct, frozen=True):
    v: int = VERSION
    cards: tuple[CardModel, ...] = ()


def encode_catalogue(cards: Iterable[CardModel]) -> str:
    """Encode a catalogue; equal cards give equal text, so that an unchanged one is not written again."""
    return msgspec.json.encode(CatalogueDocument(VERSION, tuple(sorted(set(cards))))).decode()


def decode_catalogue(text: str) -> tuple[CardModel, ...]:
    """Read a catalogue; raises a ValueError that says what is wrong with it."""
    document = decoder_for(CatalogueDocument).decode(text)
    if document.v != VERSION:
        raise ValueError(f"catalogue version {document.v} is not supported, expected {VERSION}")
    # One model with an invalid name must not hide all others.
    return tuple(card for card in document.cards if is_model(card.model))


def card_sizes_mib(cards: Iterable[CardModel], pools: Sequence[str] | None) -> Mapping[str, int]:
    """Return the memory of the largest GPU of each model in these pools; None means all pools."""
    largest: dict[str, int] = {}
    for card in cards:
        if (pools is None or card.pool in pools) and is_model(card.model):
            largest[card.model] = max(card.memory_mib, largest.get(card.model, 0))
    return largest


def memory_in_name_mib(model: str) -> int:
    """Return the memory in a model's name, such as A100-SXM4-40GB; 0 if there is none. Of a MIG device, its own."""
    # From the end: A100-SXM4-40GB-MIG-1g.5gb is a slice of 5 GB.
    for word in reversed(tokenize(model)):
        if size := SIZE.fullmatch(word.rpartition(".")[2]):
            return int(size[1]) * MIB_PER_GIB
    return 0
