"""The memory to decide on a tenant's object grows with its text alone, whatever it consists of.

A decision that takes many times the size of the object ends the process, which has 256 MiB, and with it the decisions
of all tenants.
"""

import gc
import tracemalloc

import pytest

from tests.hostile_objects import REVIEWS, MakeReview
from tests.webhook.reviews import MIB, Caller, caller
from vcuda.namespace_policy import NamespacePolicy

SIZE, FACTOR = MIB, 4
# As many values as are decoded, and copies of a text that is one value.
MAX_OF_VALUES, MAX_COPIES = 20 * MIB, 6


@pytest.fixture(scope="module")
def api() -> Caller:
    return caller("short", policy=NamespacePolicy(pools=("a", "b")))


def peak_bytes(api: Caller, route: str, body: bytes) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        api.send(route, body)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", REVIEWS.values(), ids=REVIEWS.keys())
def test_the_memory_to_decide_is_bounded_whatever_an_object_has_many_of(api: Caller, make: MakeReview) -> None:
    for size in (SIZE, FACTOR * SIZE):
        body = make(size)
        for route in ("mutate", "validate"):
            assert peak_bytes(api, route, body) < MAX_OF_VALUES + MAX_COPIES * len(body)
