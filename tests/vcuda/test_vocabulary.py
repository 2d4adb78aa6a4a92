"""The vocabularies: pods written for other systems are read as those systems read them."""

import re
from decimal import Decimal
from functools import cached_property
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.vcuda.pods import CARDS, CORE, MEMORY, NAMES, container, parse_pod
from vcuda.decision import Code
from vcuda.names import Names, names_for
from vcuda.request import ParsedRequest
from vcuda.vocabulary import Share, VocabularyOptions, build_vocabularies

HAMI = VocabularyOptions(hami=True)
WHOLE_CARDS = VocabularyOptions(nvidia_gpu=True)


def following(cores: int) -> Share:
    return Share(cores, memory_follows_cores=True)


READ_AS = {
    "half a card with memory in units": ({CORE: "50", MEMORY: "30"}, Share(50, 30)),
    "memory in bytes, rounded up": ({CORE: "50", MEMORY: "7.4Gi"}, Share(50, 30)),
    "numbers without quotes": ({CORE: 50, MEMORY: 30}, Share(50, 30)),
    "a whole card without memory": ({CORE: "100"}, Share(100)),
    "two whole cards with a minimum of memory": ({CORE: "200", MEMORY: "64"}, Share(200, 64)),
    "a thousand units as the API server writes them": ({CORE: "1k", MEMORY: "1k"}, Share(1000, 1000)),
    "Tencent's units of 256 MiB": ({"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "30"}, Share(30, 30)),
    "units of 1 MiB": ({"nvidia.com/vcuda-core": "30", "nvidia.com/vcuda-memory": "7681"}, Share(30, 31)),
    "AWS tenths": ({"k8s.amazonaws.com/vgpu": "3"}, following(30)),
    "older AWS tenths, a whole card": ({"eks.amazonaws.com/vgpu": "10"}, Share(100)),
    "AWS tenths of two cards": ({"k8s.amazonaws.com/vgpu": "20"}, Share(200)),
    "nano-gpu's percent": ({"nano-gpu/gpu-percent": "25"}, following(25)),
    "part of a card as users write it": ({CARDS: "0.3"}, following(30)),
    "part of a card as the API server writes it": ({CARDS: "300m"}, following(30)),
    "two cards": ({CARDS: "2"}, Share(200)),
    "zero beside a request counts as absent": ({CORE: "100", MEMORY: "0", CARDS: "0"}, Share(100)),
}


@pytest.mark.parametrize(("amounts", "share"), READ_AS.values(), ids=READ_AS.keys())
def test_each_vocabulary_is_read_into_a_share(amounts: dict[str, Any], share: Share) -> None:
    parsed = parse_pod(container(limits=amounts))
    assert parsed.reasons == ()
    assert [each.share for each in parsed.request.containers] == [share]


HAMI_READ_AS = {
    "part of one card": ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}, Share(30, 12)),
    "without the number of cards": ({"nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}, Share(30, 12)),
    "whole cards": ({"nvidia.com/gpu": 2}, Share(200)),
    "whole cards with a minimum of memory": (
        {"nvidia.com/gpu": 2, "nvidia.com/gpumem": 1024, "nvidia.com/gpucores": 100},
        Share(200, 8),
    ),
    "cores without memory": ({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 50}, following(50)),
    "memory without cores": ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}, Share(1, 12, bursts=True)),
    "memory alone": ({"nvidia.com/gpumem": 3000}, Share(1, 12, bursts=True)),
    "memory, and no cores": ({"nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 0}, Share(1, 12, bursts=True)),
    "a percentage of memory without cores": (
        {"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 30},
        Share(30, memory_follows_cores=True, bursts=True),
    ),
    "the same percentage of memory as of cores": (
        {"nvidia.com/gpucores": 50, "nvidia.com/gpumem-percentage": 50},
        following(50),
    ),
    "all memory of two cards": ({"nvidia.com/gpu": 2, "nvidia.com/gpumem-percentage": 100}, Share(200)),
    "memory beside its percentage": (
        {"nvidia.com/gpumem": 3000, "nvidia.com/gpumem-percentage": 90, "nvidia.com/gpucores": 30},
        Share(30, 12),
    ),
    "a card with priority": ({"nvidia.com/gpu": 1, "nvidia.com/priority": 1}, Share(100)),
}


@pytest.mark.parametrize(("amounts", "share"), HAMI_READ_AS.values(), ids=HAMI_READ_AS.keys())
def test_hami_is_read_where_it_is_enabled(amounts: dict[str, Any], share: Share) -> None:
    """Without the option these resources belong to another system."""
    parsed = parse_pod(container(limits=amounts), vocabulary_options=HAMI)
    assert [each.share for each in parsed.request.containers] == [share]
    assert not parse_pod(container(limits=amounts)).request.is_gpu


HAMI_REJECTED = {
    "another percentage of memory than of cores": (
        {"nvidia.com/gpucores": 50, "nvidia.com/gpumem-percentage": 30},
        "nvidia.com/gpumem-percentage",
        Code.MEMORY_INVALID,
        (
            "the percentage of memory must equal the percentage of cores, 50; ask for 50, use nvidia.com/gpumem "
            "instead, or remove nvidia.com/gpucores"
        ),
    ),
    "more than a card's cores": (
        {"nvidia.com/gpucores": 150},
        "nvidia.com/gpucores",
        Code.CORE_INVALID,
        "more than 100 percent of one GPU; ask for 1 to 100",
    ),
    "parts of two cards": (
        {"nvidia.com/gpu": 2, "nvidia.com/gpucores": 50},
        "nvidia.com/gpu",
        Code.CORE_INVALID,
        "a container cannot have parts of several GPUs; ask for 1, or remove nvidia.com/gpucores to get whole GPUs",
    ),
    "memory on two cards": (
        {"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000},
        "nvidia.com/gpu",
        Code.CORE_INVALID,
        "a container cannot have parts of several GPUs; ask for 1, or remove nvidia.com/gpumem to get whole GPUs",
    ),
    "more than a card's memory": (
        {"nvidia.com/gpumem-percentage": 150},
        "nvidia.com/gpumem-percentage",
        Code.CORE_INVALID,
        "more than 100 percent of one GPU; ask for 1 to 100",
    ),
    "a priority without a GPU": (
        {"nvidia.com/priority": 1},
        "nvidia.com/priority",
        Code.CORE_MISSING,
        "a priority is requested without GPUs; add nvidia.com/gpu, or remove nvidia.com/priority",
    ),
}


@pytest.mark.parametrize(("amounts", "key", "code", "text"), HAMI_REJECTED.values(), ids=HAMI_REJECTED.keys())
def test_hami_requests_that_cannot_be_granted_are_rejected(
    amounts: dict[str, int], key: str, code: Code, text: str
) -> None:
    (reason,) = parse_pod(container(limits=amounts), vocabulary_options=HAMI).reasons
    assert reason.code is code
    assert str(reason) == f"spec.containers[0].resources.limits[{key}]: '{amounts[key]}': {text}"


HAMI_AMOUNTS = st.dictionaries(
    st.sampled_from(["nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpucores", "nvidia.com/gpumem-percentage"]),
    st.sampled_from([1, 2, 30, 50, 100, 3000]),
    min_size=1,
)
REMOVED = re.compile(r"remove ((?:nvidia\.com/[a-z-]+(?:, )?)+)")


@given(HAMI_AMOUNTS)
def test_a_remedy_for_hami_does_not_lead_to_another_refusal(amounts: dict[str, Any]) -> None:
    """A user who removes what a refusal names gets GPUs, not the next refusal."""
    reasons = parse_pod(container(limits=amounts), vocabulary_options=HAMI).reasons
    assume(len(reasons) == 1)
    removed = REMOVED.findall(reasons[0].remedy)
    assume(removed)
    remaining = {key: value for key, value in amounts.items() if key not in removed[0].split(", ")}
    assert not parse_pod(container(limits=remaining), vocabulary_options=HAMI).reasons


def test_nvidias_cards_are_opt_in_under_its_own_domain_too() -> None:
    """The configured domain alone does not take over NVIDIA's resource."""
    keys = [key for vocabulary in build_vocabularies(Names("nvidia.com")) for key in vocabulary.keys]
    assert "nvidia.com/gpu" not in keys


def test_nvidias_cards_are_read_where_they_are_enabled() -> None:
    amounts = {"nvidia.com/gpu": "2"}
    assert not parse_pod(container(limits=amounts)).request.is_gpu
    parsed = parse_pod(container(limits=amounts), vocabulary_options=WHOLE_CARDS)
    assert parsed.request.containers[0].share == Share(200)


ADD_CORE = f"memory is requested without cores; add {CORE}: 1 to 99, or a multiple of 100"
ADD_MEMORY = (
    f"part of a GPU is requested without memory; add {MEMORY}, for example 8Gi, "
    f"or list the container in the annotation {NAMES.memory_follows_core}"
)
NOT_A_QUANTITY = (
    "not a Kubernetes quantity, which is a number and at most one suffix of n u m k M G T P E Ki Mi Gi Ti Pi Ei; "
)
CORE_ADVICE = "write 1 to 99, or a multiple of 100"
REJECTED = {
    "one and a half cards": (
        {CORE: "150", MEMORY: "1"},
        CORE,
        Code.CORE_INVALID,
        "must be 1 to 99 (part of one GPU) or a multiple of 100 (whole GPUs); ask for 100 or 200",
    ),
    "one and a half cards, as cards": (
        {CARDS: "1.5"},
        CARDS,
        Code.CORE_INVALID,
        'must be less than 1 (part of one GPU) or a whole number (whole GPUs); ask for "1" or "2"',
    ),
    "finer than a hundredth": (
        {CARDS: "0.333"},
        CARDS,
        Code.CORE_INVALID,
        'part of one GPU must be a multiple of 0.01; ask for "0.33"',
    ),
    "a thousandth": (
        {CARDS: "1m"},
        CARDS,
        Code.CORE_INVALID,
        'part of one GPU must be a multiple of 0.01; ask for "0.01"',
    ),
    "a negative amount": (
        {CORE: "-50", MEMORY: "30"},
        CORE,
        Code.QUANTITY_INVALID,
        "must not be negative; ask for a positive amount",
    ),
    "half a card, as cores": (
        {CORE: "500m", MEMORY: "1"},
        CORE,
        Code.QUANTITY_INVALID,
        "must be a whole number, where 100 is one GPU; ask for 50",
    ),
    "not a number": (
        {CORE: "fifty", MEMORY: "1"},
        CORE,
        Code.QUANTITY_INVALID,
        NOT_A_QUANTITY + CORE_ADVICE,
    ),
    "memory that is not a number": (
        {CORE: "50", MEMORY: "much"},
        MEMORY,
        Code.QUANTITY_INVALID,
        f"{NOT_A_QUANTITY}write a number of 256 MiB units, or bytes such as 8Gi",
    ),
    "memory in MiB that is not a number": (
        {"nvidia.com/vcuda-core": "50", "nvidia.com/vcuda-memory": "much"},
        "nvidia.com/vcuda-memory",
        Code.QUANTITY_INVALID,
        f"{NOT_A_QUANTITY}write a number of MiB, or bytes such as 8Gi",
    ),
    "cards that are not a number": (
        {CARDS: "half"},
        CARDS,
        Code.QUANTITY_INVALID,
        f'{NOT_A_QUANTITY}write part of one GPU such as "0.3", or whole GPUs such as "2"',
    ),
    "AWS tenths that are not a number": (
        {"k8s.amazonaws.com/vgpu": "half"},
        "k8s.amazonaws.com/vgpu",
        Code.QUANTITY_INVALID,
        f"{NOT_A_QUANTITY}write 1 to 9, or a multiple of 10",
    ),
    "a percentage that is not a number": (
        {"nano-gpu/gpu-percent": "50%"},
        "nano-gpu/gpu-percent",
        Code.QUANTITY_INVALID,
        NOT_A_QUANTITY + CORE_ADVICE,
    ),
    "one and a half cards, as a fraction of cores": (
        {CORE: "1.5", MEMORY: "1"},
        CORE,
        Code.QUANTITY_INVALID,
        "must be a whole number, where 100 is one GPU; 1.5 GPUs cannot be requested: ask for 100 or 200",
    ),
    "the same in thousandths": (
        {CORE: "2250m", MEMORY: "1"},
        CORE,
        Code.QUANTITY_INVALID,
        "must be a whole number, where 100 is one GPU; 2.25 GPUs cannot be requested: ask for 200 or 300",
    ),
    "more cards than a node has are cores": (
        {CORE: "50.5", MEMORY: "1"},
        CORE,
        Code.QUANTITY_INVALID,
        "must be a whole number; ask for 51",
    ),
    "memory without cores": ({MEMORY: "30"}, MEMORY, Code.CORE_MISSING, ADD_CORE),
    "memory with zero cores": ({CORE: "0", MEMORY: "30"}, MEMORY, Code.CORE_MISSING, ADD_CORE),
    "part of a unit": (
        {CORE: "50", MEMORY: "1500m"},
        MEMORY,
        Code.MEMORY_INVALID,
        "must be a whole number of 256 MiB units; ask for 256 MiB units such as 32, or for bytes such as 8Gi",
    ),
    "AWS tenths of one and a half cards": (
        {"k8s.amazonaws.com/vgpu": "15"},
        "k8s.amazonaws.com/vgpu",
        Code.CORE_INVALID,
        "must be 1 to 9 (part of one GPU) or a multiple of 10 (whole GPUs); ask for 10 or 20",
    ),
    "part of a card without memory": (
        {CORE: "50"},
        CORE,
        Code.MEMORY_MISSING,
        ADD_MEMORY,
    ),
}


@pytest.mark.parametrize(("amounts", "key", "code", "text"), REJECTED.values(), ids=REJECTED.keys())
def test_invalid_amounts_are_rejected_with_field_value_and_remedy(
    amounts: dict[str, Any], key: str, code: Code, text: str
) -> None:
    parsed = parse_pod(container(limits=amounts))
    assert [reason.code for reason in parsed.reasons] == [code]
    assert str(parsed.reasons[0]) == f"spec.containers[0].resources.limits[{key}]: '{amounts[key]}': {text}"
    assert not parsed.request.is_gpu


def test_two_vocabularies_in_one_container_are_rejected() -> None:
    """It is not clear which of them should count."""
    (reason,) = parse_pod(container(limits={CORE: "50", MEMORY: "1", "nano-gpu/gpu-percent": "50"})).reasons
    assert reason.code is Code.VOCABULARIES_MIXED
    assert str(reason) == (
        f"spec.containers[0].resources: '{CORE}, {MEMORY}, nano-gpu/gpu-percent': "
        "the container requests GPUs by resource names of several systems; "
        f"keep {CORE} and {MEMORY}, and remove nano-gpu/gpu-percent"
    )


TENCENT = {"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "30"}
KEPT = {
    "the complete one": (
        {CORE: "50", **TENCENT},
        f"keep tencent.com/vcuda-core and tencent.com/vcuda-memory, and remove {CORE}",
    ),
    "the complete one, although its amounts are fewer": (
        {CARDS: "0.5", "tencent.com/vcuda-core": "150", "tencent.com/vcuda-memory": "30"},
        f"keep {CARDS}, and remove tencent.com/vcuda-core and tencent.com/vcuda-memory",
    ),
    "the canonical one of equals": (
        {CORE: "50", MEMORY: "30", **TENCENT},
        f"keep {CORE} and {MEMORY}, and remove tencent.com/vcuda-core and tencent.com/vcuda-memory",
    ),
    "one of three": (
        {CORE: "100", **TENCENT, "nano-gpu/gpu-percent": "50"},
        f"keep tencent.com/vcuda-core and tencent.com/vcuda-memory, and remove {CORE} and nano-gpu/gpu-percent",
    ),
}


@pytest.mark.parametrize(("amounts", "remedy"), KEPT.values(), ids=KEPT.keys())
def test_of_several_vocabularies_a_complete_one_is_kept(amounts: dict[str, Any], remedy: str) -> None:
    """Following the advice does not lead to the next refusal."""
    (reason,) = parse_pod(container(limits=amounts)).reasons
    assert reason.remedy == remedy
    kept = remedy.partition(", and remove ")[0]
    assert not parse_pod(container(limits={key: amounts[key] for key in amounts if key in kept})).reasons


def test_an_empty_amount_is_said_to_be_empty() -> None:
    (reason,) = parse_pod(container(limits={CORE: "", MEMORY: "1"})).reasons
    assert str(reason) == f"spec.containers[0].resources.limits[{CORE}]: is empty; {CORE_ADVICE}"


@pytest.mark.parametrize("domain", ["inspur.com", "tencent.com", "nvidia.com", "gpu.example.org"])
@pytest.mark.parametrize("options", [VocabularyOptions(), WHOLE_CARDS, HAMI])
def test_a_resource_name_belongs_to_one_vocabulary(domain: str, options: VocabularyOptions) -> None:
    """Whatever the domain and the options."""
    keys = [key for vocabulary in build_vocabularies(Names(domain), 256, options) for key in vocabulary.keys]
    assert len(keys) == len(set(keys))
    assert keys[:2] == [f"{domain}/vcuda-core", f"{domain}/vcuda-memory"]


@given(st.integers(1, 99), st.integers(1, 10_000), st.integers(1, 2048))
def test_changing_the_unit_changes_the_count_and_not_the_memory(core: int, mib: int, unit: int) -> None:
    """A pod of a 1 MiB vocabulary gets the memory it requests, rounded up to units."""
    amounts = {"nvidia.com/vcuda-core": core, "nvidia.com/vcuda-memory": mib}
    share = parse_pod(container(limits=amounts), unit_mib=unit).request.containers[0].share
    assert 0 <= share.memory_units * unit - mib < unit


CORE_KEYS = [CORE, CARDS, "k8s.amazonaws.com/vgpu", "nano-gpu/gpu-percent"]


@given(st.sampled_from(CORE_KEYS), st.decimals(min_value="0.001", max_value=1000, places=3))
def test_following_a_remedy_gives_no_further_reason(key: str, amount: Decimal) -> None:
    def parse(written: str) -> ParsedRequest:
        memory = {MEMORY: "1"} if key == CORE else {}
        return parse_pod(container(limits={key: written, **memory}))

    for reason in parse(str(amount)).reasons:
        advised = re.findall(r"[0-9.]+", reason.remedy.rpartition("ask for ")[2])
        assert advised
        for written in advised:
            assert parse(written).reasons == ()


@given(st.integers(1, 100), st.integers(1, 400))
def test_virtual_gpus_never_give_less_than_one_core_nor_more_than_requested(per_gpu: int, count: int) -> None:
    """Cores are rounded down, so that `vgpuPerGpu` containers of one virtual GPU fit on a card."""
    parsed = parse_pod(
        container(limits={"k8s.amazonaws.com/vgpu": count}), vocabulary_options=VocabularyOptions(vgpu_per_gpu=per_gpu)
    )
    for each in parsed.request.containers:
        assert 1 <= each.share.cores <= max(1, 100 * count / per_gpu)
    assert bool(parsed.reasons) == (count > per_gpu and count % per_gpu != 0)


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
def test_a_domain_that_cannot_have_resources_is_rejected(domain: str) -> None:
    """Kubernetes would reject the names, or treat them as its own."""
    with pytest.raises(ValueError, match=r"DNS domain|reserved"):
        names_for(domain)


def test_all_names_are_under_the_domain() -> None:
    assert names_for("inspur.com") == NAMES
    own = names_for("gpu.example.org")
    names = [getattr(own, name) for name in dir(Names) if isinstance(getattr(Names, name, None), cached_property)]
    assert len(names) > 10
    assert all(name.startswith("gpu.example.org/") for name in names)


TOO_MUCH = {
    "cores": (
        {CORE: "102500"},
        Code.CORE_INVALID,
        "more than the maximum of 1024 GPUs per container; ask for at most 102400",
    ),
    "percent": ({"nano-gpu/gpu-percent": "1e12"}, Code.CORE_INVALID, "ask for at most 102400"),
    "tenths": ({"k8s.amazonaws.com/vgpu": "10250"}, Code.CORE_INVALID, "ask for at most 10240"),
    "cards": ({CARDS: "1000000.5"}, Code.CORE_INVALID, "ask for at most 1024"),
    "memory in bytes": (
        {CORE: "50", MEMORY: "245Ti"},
        Code.MEMORY_INVALID,
        "more than the maximum of 999999 units of 256 MiB; ask for 256 MiB units such as 32, or for bytes such as 8Gi",
    ),
    "memory on several cards": (
        {"nvidia.com/gpu": "100", "nvidia.com/gpumem": "60000000", "nvidia.com/gpucores": "100"},
        Code.MEMORY_INVALID,
        "ask for less memory per GPU",
    ),
}


@pytest.mark.parametrize(("amounts", "code", "text"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_more_than_the_maximum_is_rejected(amounts: dict[str, Any], code: Code, text: str) -> None:
    """A larger count of units would be read as bytes the next time."""
    (reason,) = parse_pod(container(limits=amounts), vocabulary_options=HAMI).reasons
    assert reason.code is code
    assert str(reason).endswith(text)
