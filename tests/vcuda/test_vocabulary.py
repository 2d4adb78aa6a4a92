"""The vocabularies: pods written for any of the ancestors mean here what they meant there."""

import re
from decimal import Decimal
from functools import cached_property
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vcuda.pods import CARDS, CORE, MEMORY, NAMES, container, read
from vcuda.decision import Code
from vcuda.names import Names, names_for
from vcuda.request import ParsedRequest
from vcuda.vocabulary import Share, VocabularyOptions, vocabularies

HAMI = VocabularyOptions(hami=True)
WHOLE_CARDS = VocabularyOptions(nvidia_gpu=True)

READ_AS = {
    "half a card with memory in units": ({CORE: "50", MEMORY: "30"}, Share(50, 30)),
    "memory in bytes, rounded up": ({CORE: "50", MEMORY: "7.4Gi"}, Share(50, 30)),
    "numbers without quotes": ({CORE: 50, MEMORY: 30}, Share(50, 30)),
    "a whole card without memory": ({CORE: "100"}, Share(100)),
    "two whole cards that must have memory": ({CORE: "200", MEMORY: "64"}, Share(200, 64)),
    "a thousand units as the API server writes them": ({CORE: "1k", MEMORY: "1k"}, Share(1000, 1000)),
    "Tencent's units are the same": ({"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "30"}, Share(30, 30)),
    "units of 1 MiB": ({"nvidia.com/vcuda-core": "30", "nvidia.com/vcuda-memory": "7681"}, Share(30, 31)),
    "AWS tenths": ({"k8s.amazonaws.com/vgpu": "3"}, Share(30, follows=True)),
    "older AWS tenths, all of a card": ({"eks.amazonaws.com/vgpu": "10"}, Share(100)),
    "AWS tenths of two cards": ({"k8s.amazonaws.com/vgpu": "20"}, Share(200)),
    "nano-gpu's percent": ({"nano-gpu/gpu-percent": "25"}, Share(25, follows=True)),
    "part of a card as people write it": ({CARDS: "0.3"}, Share(30, follows=True)),
    "part of a card as the API server writes it": ({CARDS: "300m"}, Share(30, follows=True)),
    "two cards": ({CARDS: "2"}, Share(200)),
    "zero beside a request counts as absent": ({CORE: "100", MEMORY: "0", CARDS: "0"}, Share(100)),
}


@pytest.mark.parametrize(("amounts", "share"), READ_AS.values(), ids=READ_AS.keys())
def test_each_vocabulary_is_read_into_a_share(amounts: dict[str, Any], share: Share) -> None:
    """Every way of asking comes down to cores and memory."""
    reading = read(container(limits=amounts))
    assert reading.reasons == ()
    assert [each.share for each in reading.request.containers] == [share]


HAMI_READ_AS = {
    "a part of one card": ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}, Share(30, 12)),
    "count left out": ({"nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}, Share(30, 12)),
    "whole cards": ({"nvidia.com/gpu": 2}, Share(200)),
    "whole cards that must have memory": (
        {"nvidia.com/gpu": 2, "nvidia.com/gpumem": 1024, "nvidia.com/gpucores": 100},
        Share(200, 8),
    ),
    "cores without memory": ({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 50}, Share(50, follows=True)),
}


@pytest.mark.parametrize(("amounts", "share"), HAMI_READ_AS.values(), ids=HAMI_READ_AS.keys())
def test_hami_is_read_where_it_is_switched_on(amounts: dict[str, Any], share: Share) -> None:
    """Opt-in: without it these keys belong to somebody else."""
    assert [each.share for each in read(container(limits=amounts), dialects=HAMI).request.containers] == [share]
    assert not read(container(limits=amounts)).request.is_gpu


def test_hami_memory_in_percent_must_be_that_of_the_cores() -> None:
    """Anything else cannot be promised before the card is known."""
    amounts = {"nvidia.com/gpucores": 50, "nvidia.com/gpumem-percentage": 50}
    assert read(container(limits=amounts), dialects=HAMI).request.containers[0].share == Share(50, follows=True)
    amounts["nvidia.com/gpumem-percentage"] = 30
    assert [each.code for each in read(container(limits=amounts), dialects=HAMI).reasons] == [Code.MEMORY_INVALID]


def test_under_nvidias_domain_its_cards_are_still_opt_in() -> None:
    """The domain alone takes nobody's resource away."""
    keys = [key for vocabulary in vocabularies(Names("nvidia.com")) for key in vocabulary.keys]
    assert "nvidia.com/gpu" not in keys


def test_nvidia_cards_are_read_where_they_are_switched_on() -> None:
    """Opt-in, and whole cards only."""
    amounts = {"nvidia.com/gpu": "2"}
    assert not read(container(limits=amounts)).request.is_gpu
    assert read(container(limits=amounts), dialects=WHOLE_CARDS).request.containers[0].share == Share(200)


REFUSED = {
    "one and a half cards": ({CORE: "150", MEMORY: "1"}, CORE, Code.CORE_INVALID, "ask for 100 or 200"),
    "one and a half cards for people": ({CARDS: "1.5"}, CARDS, Code.CORE_INVALID, 'ask for "1" or "2"'),
    "finer than a hundredth": ({CARDS: "0.333"}, CARDS, Code.CORE_INVALID, 'ask for "0.33"'),
    "a thousandth": ({CARDS: "1m"}, CARDS, Code.CORE_INVALID, 'ask for "0.01"'),
    "less than nothing": ({CORE: "-50", MEMORY: "30"}, CORE, Code.QUANTITY_INVALID, "ask for a positive amount"),
    "half a card, as cores": ({CORE: "500m", MEMORY: "1"}, CORE, Code.QUANTITY_INVALID, "ask for 50"),
    "no number": ({CORE: "fifty", MEMORY: "1"}, CORE, Code.QUANTITY_INVALID, "write a number such as 50, or 8Gi"),
    "memory without cores": ({MEMORY: "30"}, MEMORY, Code.CORE_MISSING, f"add {CORE}: 1 to 99, or a multiple of 100"),
    "memory with zero cores": (
        {CORE: "0", MEMORY: "30"},
        MEMORY,
        Code.CORE_MISSING,
        f"add {CORE}: 1 to 99, or a multiple of 100",
    ),
    "a part of a unit": (
        {CORE: "50", MEMORY: "1500m"},
        MEMORY,
        Code.MEMORY_INVALID,
        "ask for a whole number of 256 MiB units, or for bytes such as 8Gi",
    ),
    "AWS tenths of one and a half cards": (
        {"k8s.amazonaws.com/vgpu": "15"},
        "k8s.amazonaws.com/vgpu",
        Code.CORE_INVALID,
        "ask for 10 or 20",
    ),
    "a fraction without memory": (
        {CORE: "50"},
        CORE,
        Code.MEMORY_MISSING,
        f"add {MEMORY}, or name the container in the annotation {NAMES.memory_follows_core}",
    ),
}


@pytest.mark.parametrize(("amounts", "key", "code", "remedy"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_refused_with_field_value_and_remedy(
    amounts: dict[str, Any], key: str, code: Code, remedy: str
) -> None:
    """A refusal says where, what, and what to write instead."""
    reading = read(container(limits=amounts))
    assert [reason.code for reason in reading.reasons] == [code]
    reason = reading.reasons[0]
    assert reason.field == f"spec.containers[0].resources.limits[{key}]"
    assert reason.value == str(amounts[key])
    assert reason.remedy == remedy
    assert not reading.request.is_gpu


def test_two_vocabularies_in_one_container_are_refused() -> None:
    """Nobody could tell which of them should count."""
    reading = read(container(limits={CORE: "50", MEMORY: "1", "nano-gpu/gpu-percent": "50"}))
    assert [reason.code for reason in reading.reasons] == [Code.VOCABULARIES_MIXED]
    assert "nano-gpu/gpu-percent" in reading.reasons[0].value


@pytest.mark.parametrize("domain", ["inspur.com", "tencent.com", "nvidia.com", "gpu.example.org"])
@pytest.mark.parametrize("dialects", [VocabularyOptions(), WHOLE_CARDS, HAMI])
def test_no_key_means_two_things(domain: str, dialects: VocabularyOptions) -> None:
    """Whatever the domain and the dialects, each resource name belongs to one vocabulary."""
    keys = [key for vocabulary in vocabularies(Names(domain), 256, dialects) for key in vocabulary.keys]
    assert len(keys) == len(set(keys))
    assert keys[:2] == [f"{domain}/vcuda-core", f"{domain}/vcuda-memory"]


@given(st.integers(1, 99), st.integers(1, 10_000), st.integers(1, 2048))
def test_changing_the_unit_changes_the_count_and_not_the_memory(core: int, mib: int, unit: int) -> None:
    """A pod of a 1 MiB vocabulary gets the memory it asked for, rounded up to units."""
    amounts = {"nvidia.com/vcuda-core": core, "nvidia.com/vcuda-memory": mib}
    share = read(container(limits=amounts), unit_mib=unit).request.containers[0].share
    assert 0 <= share.memory_units * unit - mib < unit


CORE_KEYS = [CORE, CARDS, "k8s.amazonaws.com/vgpu", "nano-gpu/gpu-percent"]


@given(st.sampled_from(CORE_KEYS), st.decimals(min_value="0.001", max_value=1000, places=3))
def test_following_a_remedy_gives_no_further_reason(key: str, amount: Decimal) -> None:
    """Advice that is refused itself is worse than none."""

    def asked(written: str) -> ParsedRequest:
        memory = {MEMORY: "1"} if key == CORE else {}
        return read(container(limits={key: written, **memory}))

    for reason in asked(str(amount)).reasons:
        advised = re.findall(r"[0-9.]+", reason.remedy)
        assert advised
        for written in advised:
            assert asked(written).reasons == ()


@given(st.integers(1, 100), st.integers(1, 400))
def test_virtual_gpus_never_give_less_than_one_core_nor_more_than_asked(per_gpu: int, count: int) -> None:
    """Rounded down, so that as many fit on a card as its owner said."""
    reading = read(
        container(limits={"k8s.amazonaws.com/vgpu": count}), dialects=VocabularyOptions(vgpu_per_gpu=per_gpu)
    )
    for each in reading.request.containers:
        assert 1 <= each.share.cores <= max(1, 100 * count / per_gpu)
    assert bool(reading.reasons) == (count > per_gpu and count % per_gpu != 0)


@pytest.mark.parametrize(
    "domain",
    [
        "",
        "com",
        "Inspur.com",
        "a b.com",
        "-a.com",
        "kubernetes.io",
        "mykubernetes.io",
        "requests.a.org",
        "x.k8s.io",
        "a." * 100 + "com",
    ],
)
def test_a_domain_that_cannot_hold_resources_is_refused(domain: str) -> None:
    """Kubernetes would refuse the names, or take them for its own."""
    with pytest.raises(ValueError, match=r"DNS domain|reserved"):
        names_for(domain)


def test_names_follow_the_domain() -> None:
    """All of them, and the default is the canonical one."""
    assert names_for("inspur.com") == NAMES
    own = names_for("gpu.example.org")
    shown = [getattr(own, name) for name in dir(Names) if isinstance(getattr(Names, name, None), cached_property)]
    assert len(shown) > 10
    assert all(name.startswith("gpu.example.org/") for name in shown)


TOO_MUCH = {
    "cores": ({CORE: "102500"}, Code.CORE_INVALID, "ask for at most 102400"),
    "percent": ({"nano-gpu/gpu-percent": "1e12"}, Code.CORE_INVALID, "ask for at most 102400"),
    "tenths": ({"k8s.amazonaws.com/vgpu": "10250"}, Code.CORE_INVALID, "ask for at most 10240"),
    "cards": ({CARDS: "1000000.5"}, Code.CORE_INVALID, "ask for at most 1024"),
    "memory in bytes": ({CORE: "50", MEMORY: "245Ti"}, Code.MEMORY_INVALID, "such as 8Gi"),
    "memory on several cards": (
        {"nvidia.com/gpu": "100", "nvidia.com/gpumem": "60000000", "nvidia.com/gpucores": "100"},
        Code.MEMORY_INVALID,
        "less on each card",
    ),
}


@pytest.mark.parametrize(("amounts", "code", "remedy"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_more_than_any_node_has_is_refused(amounts: dict[str, Any], code: Code, remedy: str) -> None:
    """A count so large would be read as bytes the next time, and no node could ever hold it."""
    (reason,) = read(container(limits=amounts), dialects=HAMI).reasons
    assert reason.code is code
    assert remedy in reason.remedy
