"""Which rungs of isolation a card offers, and why not the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeplugin.isolation_ladder import CANDIDATES, CardLadder, LadderFacts, applied_isolation, card_ladder
from nodeplugin.isolation_ladder import RungNotOffered as NotOffered
from nodeplugin.isolation_ladder import group_not_offered as grouped
from tests.nodeplugin.builders import CARD_MIB
from vcuda.isolation import COMPUTE, EXCLUSIVE, MEMORY, NO_ISOLATION, Isolation, Rung
from vcuda.placement_annotation import GpuSlice

TOO_OLD, NOT_THERE = "the driver is 580, limits need 615", "no preload libraries are installed on this node"
BY_LIBRARY = Isolation(Rung.PRELOAD)


def facts(*, setting: str = "auto", injection: str = "cdi", driver: str = "", preload: str = "") -> LadderFacts:
    """The facts of a node that offers every rung that this release has."""
    return LadderFacts(
        setting=setting,  # type: ignore[arg-type]
        injection=injection,  # type: ignore[arg-type]
        driver_problem=driver,
        preload_problem=preload,
    )


OFFERED = {
    "the strongest of each dimension": (facts(), False, Isolation(Rung.DRIVER)),
    "the library alone": (facts(driver=TOO_OLD), False, BY_LIBRARY),
    "the driver alone": (facts(preload=NOT_THERE), False, Isolation(Rung.DRIVER)),
    "nothing": (facts(driver=TOO_OLD, preload=NOT_THERE), False, NO_ISOLATION),
    "no limits of the driver natively": (facts(injection="native"), False, BY_LIBRARY),
    "no limits of the driver by NVIDIA's runtime": (facts(injection="nvidia-runtime"), False, BY_LIBRARY),
    "of a MIG device the memory": (facts(), True, Isolation(Rung.PRELOAD)),
    "configured: nothing": (facts(setting="none"), False, NO_ISOLATION),
    "configured: the library": (facts(setting="preload"), False, BY_LIBRARY),
    "configured: the driver": (facts(setting="driver"), False, Isolation(Rung.DRIVER)),
    "configured: a driver that is too old": (facts(setting="driver", driver=TOO_OLD), False, NO_ISOLATION),
    "configured: a library that is not there": (facts(setting="preload", preload=NOT_THERE), False, NO_ISOLATION),
}


@pytest.mark.parametrize(("node", "is_mig", "expected"), OFFERED.values(), ids=OFFERED)
def test_a_card_offers_the_strongest_rung_that_is_available(
    node: LadderFacts, *, is_mig: bool, expected: Isolation
) -> None:
    """One that the configuration names is never replaced by another."""
    assert card_ladder(node, is_mig=is_mig).isolation == expected


REASONS = {
    "MPS": (facts(), False, MEMORY, Rung.MPS, "this release does not run MPS"),
    "the driver's own": (facts(driver=TOO_OLD), False, MEMORY, Rung.DRIVER, TOO_OLD),
    "the library's own": (facts(preload=NOT_THERE), False, MEMORY, Rung.PRELOAD, NOT_THERE),
    "no hook": (
        facts(injection="native"),
        False,
        MEMORY,
        Rung.DRIVER,
        "needs nodePlugin.injection cdi, and it is native",
    ),
    "MIG memory": (facts(), True, MEMORY, Rung.DRIVER, "the driver has no memory limits for MIG devices"),
    "compute": (facts(), False, COMPUTE, Rung.PRELOAD, "the library of this release limits memory only"),
    "the configuration": (facts(setting="driver"), False, COMPUTE, Rung.PRELOAD, "nodePlugin.isolation is driver"),
}


@pytest.mark.parametrize(("node", "is_mig", "dimension", "rung", "reason"), REASONS.values(), ids=REASONS)
def test_a_rung_that_is_not_offered_has_a_reason(
    node: LadderFacts, *, is_mig: bool, dimension: str, rung: Rung, reason: str
) -> None:
    assert NotOffered(dimension, rung, reason) in card_ladder(node, is_mig=is_mig).not_offered


@given(
    node=st.builds(
        facts,
        setting=st.sampled_from(["auto", "none", "preload", "driver"]),
        injection=st.sampled_from(["native", "cdi", "nvidia-runtime"]),
        driver=st.sampled_from(["", TOO_OLD]),
        preload=st.sampled_from(["", NOT_THERE]),
    ),
    is_mig=st.booleans(),
)
def test_what_is_published_is_stronger_than_anything_else_on_offer(node: LadderFacts, *, is_mig: bool) -> None:
    """Every candidate is published, weaker than what is, or not offered with a reason."""
    ladder = card_ladder(node, is_mig=is_mig)
    refused = {(each.dimension, each.rung) for each in ladder.not_offered}
    for dimension, published in ((MEMORY, ladder.isolation.memory), (COMPUTE, ladder.isolation.compute)):
        assert (dimension, published) not in refused
        for rung in CANDIDATES[dimension]:
            assert (dimension, rung) in refused or published.is_at_least(rung)


def test_reasons_are_grouped_by_cards() -> None:
    """MIG devices of a card have its index."""
    whole, mig = (card_ladder(facts(setting="none"), is_mig=is_mig) for is_mig in (False, True))
    assert set(map(tuple, grouped([(0, whole), (1, mig), (1, mig)]).values())) == {(0, 1)}
    assert grouped([(0, CardLadder())]) == {}


def test_a_container_has_what_its_card_offers_and_whole_cards_are_exclusive() -> None:
    offers = {"GPU-0": BY_LIBRARY, "GPU-1": NO_ISOLATION}.__getitem__
    assert applied_isolation((GpuSlice("GPU-0", 50, 1024),), offers) == BY_LIBRARY
    assert applied_isolation((GpuSlice("GPU-1", 99, 1024),), offers) == NO_ISOLATION
    whole = tuple(GpuSlice(uuid, 100, CARD_MIB) for uuid in ("GPU-0", "GPU-1"))
    assert applied_isolation(whole, offers) == EXCLUSIVE
    assert applied_isolation((), offers) == NO_ISOLATION, "a container that was adopted without its cards"
