"""Isolation states on the wire, and which limits each of them enforces."""

import msgspec
import pytest

from vcuda.inventory import Gpu, decode_inventory, encode_inventory
from vcuda.isolation import Isolation


@pytest.mark.parametrize(
    ("isolation", "memory", "compute"),
    [
        (Isolation.NONE, False, False),
        (Isolation.PRELOAD, True, True),
        (Isolation.MPS, True, True),
        (Isolation.DRIVER, True, False),
        (Isolation.EXCLUSIVE, True, True),
    ],
)
def test_what_each_isolation_enforces(isolation: Isolation, *, memory: bool, compute: bool) -> None:
    """The driver limits memory only."""
    assert (isolation.limits_memory, isolation.limits_compute) == (memory, compute)


def gpu(isolation: Isolation) -> Gpu:
    return Gpu(uuid="GPU-0", index=0, model="A100", memory_mib=40960, healthy=True, isolation=isolation)


@pytest.mark.parametrize("isolation", Isolation)
def test_isolation_survives_the_inventory(isolation: Isolation) -> None:
    """As its plain value; "none" is the default and omitted."""
    text = encode_inventory((gpu(isolation),))
    published = msgspec.json.decode(text)["gpus"][0].get("isolation")
    assert published == (None if isolation is Isolation.NONE else isolation.value)
    assert decode_inventory(text)[0].isolation is isolation


def test_an_unknown_isolation_is_read_as_none() -> None:
    """A newer node plugin may publish one: its inventory stays readable, and nothing is promised."""
    text = encode_inventory((gpu(Isolation.MPS),)).replace('"mps"', '"partition"')
    assert decode_inventory(text)[0].isolation is Isolation.NONE
