"""Rungs of isolation: their order, their form on the wire, and the form of older releases."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.inventory import Gpu, decode_inventory, encode_inventory
from vcuda.isolation import NO_ISOLATION, Isolation, Rung, parse_isolation

RUNG = st.sampled_from(list(Rung))
ISOLATION = st.builds(Isolation, RUNG, RUNG)


@given(one=ISOLATION, other=ISOLATION)
def test_the_strongest_of_two_is_the_least_that_is_as_strong_as_both(one: Isolation, other: Isolation) -> None:
    strongest = one.strongest(other)
    assert strongest == other.strongest(one)
    assert strongest.is_at_least(one)
    assert strongest.is_at_least(other)
    assert strongest.memory in (one.memory, other.memory)
    assert strongest.compute in (one.compute, other.compute)


@given(one=ISOLATION, other=ISOLATION)
def test_an_isolation_is_compared_in_each_dimension(one: Isolation, other: Isolation) -> None:
    """A stronger memory does not make up for a weaker compute."""
    expected = one.memory.is_at_least(other.memory) and one.compute.is_at_least(other.compute)
    assert one.is_at_least(other) is expected
    assert one.is_at_least(NO_ISOLATION)


def test_rungs_are_ordered_by_strength() -> None:
    strengths = {rung.value: rung.strength for rung in Rung}
    assert sorted(strengths, key=strengths.__getitem__) == ["none", "preload", "mps", "driver", "exclusive"]


def test_only_an_isolation_with_a_rung_is_true() -> None:
    assert [bool(each) for each in (NO_ISOLATION, Isolation(Rung.MPS), Isolation(compute=Rung.MPS))] == [
        False,
        True,
        True,
    ]


@given(isolation=ISOLATION)
def test_the_text_of_an_isolation_is_read_back(isolation: Isolation) -> None:
    """The node plugin stores it in the kubelet's checkpoint."""
    assert parse_isolation(str(isolation)) == isolation


@pytest.mark.parametrize("text", ["", "none", "mps", "memory", "memory=later,disk=mps", "=,="])
def test_what_is_not_known_of_a_stored_text_is_none(text: str) -> None:
    assert parse_isolation(text) == NO_ISOLATION


def inventory_with(isolation: object) -> str:
    """An inventory of one GPU as a node plugin could publish it."""
    gpu = {"uuid": "GPU-0", "index": 0, "model": "A100", "memoryMiB": 40960, "healthy": True, "isolation": isolation}
    return msgspec.json.encode({"v": 1, "gpus": [gpu]}).decode()


PUBLISHED = {
    "both rungs": ({"memory": "driver", "compute": "mps"}, Isolation(Rung.DRIVER, Rung.MPS)),
    "memory alone": ({"memory": "preload"}, Isolation(Rung.PRELOAD)),
    "a rung of a later release": ({"memory": "partition", "compute": "mps"}, Isolation(compute=Rung.MPS)),
    "the older form, of both": ("mps", Isolation(Rung.MPS, Rung.MPS)),
    "the older form, a library": ("preload", Isolation(Rung.PRELOAD, Rung.PRELOAD)),
    "the older form, of memory alone": ("driver", Isolation(Rung.DRIVER)),
    "the older form, a word of a later release": ("partition", NO_ISOLATION),
    "the older form, nothing": ("none", NO_ISOLATION),
}


@pytest.mark.parametrize(("published", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_isolation_is_read(published: object, expected: Isolation) -> None:
    (gpu,) = decode_inventory(inventory_with(published))
    assert gpu.isolation == expected


@pytest.mark.parametrize("published", [3, ["mps"], {"memory": 3}, None], ids=["number", "list", "no text", "null"])
def test_an_isolation_of_another_type_makes_the_inventory_invalid(published: object) -> None:
    with pytest.raises(ValueError, match="isolation"):
        decode_inventory(inventory_with(published))


@given(isolation=ISOLATION)
def test_an_isolation_is_published_as_an_object(isolation: Isolation) -> None:
    """Older schedulers cannot read it, so that of nothing is left out."""
    gpu = Gpu(
        uuid="GPU-0",
        index=0,
        model="A100",
        memory_mib=40960,
        healthy=True,
        isolation=isolation or NO_ISOLATION,
    )
    text = encode_inventory((gpu,))
    expected = {"memory": isolation.memory.value, "compute": isolation.compute.value} if isolation else None
    assert msgspec.json.decode(text)["gpus"][0].get("isolation") == expected
    assert decode_inventory(text) == (gpu,)
