"""What pods are charged, on which model, and what is said when there is no room."""

import pytest

from vcuda.amounts import Amounts
from vcuda.charging import (
    ANY,
    Charge,
    ChargeFit,
    Demand,
    Holder,
    QuotaUsage,
    RemedyContext,
    candidates,
    count_fitting,
    fit_charge,
)
from vcuda.decision import Code
from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.gpu_model import parse_model
from vcuda.pod_options import PodOptions
from vcuda.quota import Quota, parse_quota

CARDS = {"A100-SXM4-40GB": 40960, "A100-SXM4-80GB": 81920, "T4": 16384}


def quota(text: str, name: str = "team/q") -> Quota:
    return parse_quota(text, name)


def needs(cores: int, memory_mib: int = 0) -> Demand:
    """A demand that is the same on every card."""
    return lambda _: Amounts({CORES: cores, MEMORY: memory_mib, PODS: 1})


def whole_card(card_mib: int) -> Amounts:
    return Amounts({CORES: 100, MEMORY: card_mib, PODS: 1})


def taken(**cores: int) -> dict[str, Amounts]:
    return {model: Amounts({CORES: amount, PODS: 1}) for model, amount in cores.items()}


def test_every_line_that_matches_is_charged() -> None:
    """Product, family, and the line over all types; in the dimensions that each has."""
    usage = QuotaUsage(
        [quota('types: {A100: {cores: 9, memory: 9}, A100-SXM4-80GB: {cores: 9}, T4: {cores: 9}, "*": {pods: 9}}')]
    )
    charged = usage.charged(parse_model("A100-SXM4-80GB"), Amounts({CORES: 50, MEMORY: 7680, PODS: 1}))
    assert charged == Amounts(
        {
            ("team/q", "A100", CORES): 50,
            ("team/q", "A100", MEMORY): 7680,
            ("team/q", "A100-SXM4-80GB", CORES): 50,
            ("team/q", "*", PODS): 1,
        }
    )


def test_a_pod_goes_to_the_first_model_that_has_room_in_all_quotas() -> None:
    """Several quotas all apply."""
    quotas = [quota("types: {A100: {cores: 100}, T4: {cores: 100}}"), quota("types: {'*': {pods: 2}}", "team/r")]
    usage = QuotaUsage(quotas)
    for model in ("A100", "T4"):
        found = fit_charge(usage, needs(60), PodOptions(), {})
        assert found == ChargeFit(Charge(model, 60, 0))
        usage.take(parse_model(model), found.charge.amounts)
    refused = fit_charge(usage, needs(60), PodOptions(), {})
    assert {reason.code for reason in refused.reasons} == {Code.QUOTA_EXCEEDED}
    assert [reason.field for reason in refused.reasons] == [
        "team/q: types.A100.cores",
        "team/r: types.*.pods",
        "team/q: types.T4.cores",
    ]


def test_without_quotas_everything_fits() -> None:
    """And is charged to whatever it may run on, so that it is known when a quota comes."""
    assert fit_charge(QuotaUsage([]), needs(10**9), PodOptions(), {}) == ChargeFit(Charge(ANY.name, 10**9, 0))
    assert fit_charge(QuotaUsage([]), needs(1), PodOptions(), CARDS).charge.model == "A100-SXM4-80GB"


def test_whole_cards_are_charged_at_the_largest_they_may_get() -> None:
    """What was charged can then only be lowered; where the largest does not fit, a smaller one may."""
    roomy, tight = quota("types: {A100: {memory: 100Gi}}"), quota("types: {A100: {memory: 50Gi}}")
    options = PodOptions(models=("A100",))
    assert fit_charge(QuotaUsage([roomy]), whole_card, options, CARDS) == ChargeFit(
        Charge("A100-SXM4-80GB", 100, 81920)
    )
    assert fit_charge(QuotaUsage([tight]), whole_card, options, CARDS) == ChargeFit(
        Charge("A100-SXM4-40GB", 100, 40960)
    )


def test_a_card_that_no_node_has_is_as_large_as_its_name_says() -> None:
    """A node may come; a name that does not say it is charged no memory before."""
    sizes = {each.model.name: each.card_mib for each in candidates([], PodOptions(models=("H100-80GB", "L4")), CARDS)}
    assert sizes == {"H100-80GB": 81920, "L4": 0}


ORDERS = {
    "wishes come in their order": ((), PodOptions(models=("T4", "A100")), ["T4", "A100-SXM4-80GB", "A100-SXM4-40GB"]),
    "what some node has comes before what none has": ((), PodOptions(models=("H100", "T4")), ["T4", "H100"]),
    "without wishes, the lines of the quotas": (
        ("types: {T4: {cores: 1}, A100: {cores: 1}}",),
        PodOptions(),
        ["T4", "A100-SXM4-80GB", "A100-SXM4-40GB"],
    ),
    "what a quota does not grant is not tried": (("types: {T4: {cores: 1}}",), PodOptions(), ["T4"]),
    "what it does not name but allows is": (
        ("types: {T4: {cores: 1}}\nunlisted: allow",),
        PodOptions(),
        ["T4", "A100-SXM4-80GB", "A100-SXM4-40GB"],
    ),
    "what is excluded is not tried": ((), PodOptions(avoided_models=("A100",)), ["T4"]),
    "a product can be excluded alone": (
        (),
        PodOptions(models=("A100",), avoided_models=("A100-SXM4-80GB",)),
        ["A100-SXM4-40GB"],
    ),
}


@pytest.mark.parametrize(("quotas", "options", "expected"), ORDERS.values(), ids=ORDERS.keys())
def test_the_order_of_candidates(quotas: tuple[str, ...], options: PodOptions, expected: list[str]) -> None:
    """The first with room is taken."""
    found = candidates([quota(text) for text in quotas], options, CARDS)
    assert [each.model.name for each in found] == expected


def test_quotas_may_want_pods_to_name_one_model() -> None:
    """`untyped: deny`: with a single family there is nothing to choose, and two wishes are a choice as well."""
    strict = quota("types: {A100: {cores: 100}, T4: {cores: 100}}\nuntyped: deny")
    for options in (PodOptions(), PodOptions(models=("A100", "T4"))):
        (reason,) = fit_charge(QuotaUsage([strict]), needs(1), options, {}).reasons
        assert reason.code is Code.MODEL_NOT_GRANTED
        assert "use-gputype" in reason.remedy
    single = quota("types: {A100: {cores: 100}}\nuntyped: deny")
    assert fit_charge(QuotaUsage([single]), needs(1), PodOptions(), CARDS).reasons == ()
    assert fit_charge(QuotaUsage([strict]), needs(1), PodOptions(models=("A100",)), CARDS).reasons == ()


def test_a_refusal_says_everything() -> None:
    """Asked, used, reserved, hard, short by, who holds most, what to do, and which other model has room."""
    usage = QuotaUsage(
        [quota("types: {A100: {cores: 400}, T4: {cores: 200}}")],
        taken(A100=350),
        taken(A100=25),
        [Holder("Job/train", "A100", cores=300, pods=3, memory_mib=0), Holder("Pod/n", "T4", 90, 1, 0)],
    )
    (reason,) = fit_charge(usage, needs(50), PodOptions(models=("A100",)), {}).reasons
    assert reason.numbers == {"asked": 50, "used": 350, "reserved": 25, "hard": 400, "short": 25}
    assert str(reason) == (
        "team/q: types.A100.cores: '50': asked 50 cores (100 = one GPU) of A100; used 350, reserved 25, hard 400: "
        "short by 25; most is held by Job/train (300); ask for at most 25, wait until 25 more cores are free, or "
        "have types.A100.cores of team/q raised; there is room on T4: name it in the annotation use-gputype"
    )


def test_a_quota_lowered_below_what_is_in_use_says_so() -> None:
    """Nothing more is admitted, and the refusal names what has to be freed first."""
    usage = QuotaUsage([quota("types: {A100: {cores: 100}}")], taken(A100=300))
    (reason,) = fit_charge(usage, needs(50), PodOptions(models=("A100",)), {}).reasons
    assert "more is in use than the quota now allows" in reason.message
    assert reason.numbers["short"] == 250
    assert "at most" not in reason.remedy


def test_a_model_that_is_not_granted_is_refused_with_those_that_are() -> None:
    """Unless the quota allows what it does not name."""
    (reason,) = fit_charge(
        QuotaUsage([quota("types: {A100: {cores: 1}}")]), needs(1), PodOptions(models=("H100",)), {}
    ).reasons
    assert (reason.code, reason.value) == (Code.MODEL_NOT_GRANTED, "H100")
    assert "ask for A100" in reason.remedy
    open_minded = quota("types: {A100: {cores: 1}}\nunlisted: allow")
    assert fit_charge(QuotaUsage([open_minded]), needs(1), PodOptions(models=("H100",)), {}).reasons == ()


def test_excluding_everything_that_is_granted_is_told() -> None:
    """Not as a quota that is exceeded."""
    usage = QuotaUsage([quota("types: {A100: {cores: 1}}")])
    (reason,) = fit_charge(usage, needs(1), PodOptions(avoided_models=("A100",)), {}).reasons
    assert "nouse-gputype" in reason.message


def test_how_many_pods_find_room() -> None:
    """Over all models they may run on, and under a line over all of them."""
    usage = QuotaUsage([quota('types: {A100: {cores: 100}, T4: {cores: 100}, "*": {cores: 150}}')])
    assert count_fitting(usage, needs(50), PodOptions(), {}, 10) == 3
    assert count_fitting(usage, needs(50), PodOptions(models=("T4",)), {}, 10) == 2
    assert count_fitting(QuotaUsage([]), needs(50), PodOptions(), {}, 10) == 10
    assert usage.taken == Amounts()


def test_memory_that_nobody_can_tell_is_not_granted() -> None:
    """All of a card that no node has, or a part of it, may be anything; what is asked for in numbers is known."""
    limited, free = quota("types: {A100: {cores: 400, memory: 40Gi}}"), quota("types: {A100: {cores: 400}}")
    options = PodOptions(models=("A100",))
    (reason,) = fit_charge(QuotaUsage([limited]), whole_card, options, {}).reasons
    assert reason.code is Code.CARD_UNKNOWN
    assert fit_charge(QuotaUsage([limited]), needs(50, 1024), options, {}).reasons == ()
    assert fit_charge(QuotaUsage([free]), whole_card, options, {}).reasons == ()
    assert fit_charge(QuotaUsage([limited]), whole_card, options, {"A100-SXM4-40GB": 0}).charge.memory_mib == 40960
    assert (
        fit_charge(QuotaUsage([limited]), whole_card, PodOptions(models=("A100-PCIE-40GB",)), {}).charge.memory_mib
        == 40960
    )


def test_a_family_may_be_granted_by_its_products() -> None:
    """Also while no node has any."""
    usage = QuotaUsage([quota("types: {A100-SXM4-40GB: {cores: 100}}")])
    assert fit_charge(usage, needs(50), PodOptions(models=("A100",)), {}).charge.model == "A100-SXM4-40GB"


REMEDIES = {
    "whole cards are not asked for in parts": (
        50,
        200,
        200,
        "ask for at most 100, wait until 50 more cores are free, or",
    ),
    "a part of a card is": (70, 50, 100, "ask for at most 30, wait until 20 more cores are free, or"),
    "more than the quota ever allows": (0, 50, 10, "ask for at most 10, or have types.A100.cores of team/q raised"),
    "nothing at all": (0, 50, 0, "have types.A100.cores of team/q raised"),
}


@pytest.mark.parametrize(("used", "asked", "hard", "told"), REMEDIES.values(), ids=REMEDIES.keys())
def test_a_remedy_can_be_followed(used: int, asked: int, hard: int, told: str) -> None:
    """What it says to ask for would be granted, and what it says to wait for can come."""
    usage = QuotaUsage([quota(f"types: {{A100: {{cores: {hard}}}}}")], taken(A100=used))
    (reason,) = fit_charge(usage, needs(asked), PodOptions(models=("A100",)), {}).reasons
    assert reason.remedy.startswith(told)


def test_memory_of_a_whole_card_cannot_be_asked_for_in_less() -> None:
    """So it is not advised."""
    usage = QuotaUsage([quota("types: {A100: {memory: 30Gi}}")])
    (reason,) = fit_charge(usage, whole_card, PodOptions(models=("A100",)), CARDS | {"A100-SXM4-80GB": 40960}).reasons
    assert "at most" not in reason.remedy


def test_a_model_that_no_node_has_is_no_advice() -> None:
    """If any node is known at all."""
    usage = QuotaUsage([quota("types: {A100: {cores: 0}, T4: {cores: 100}, L4: {cores: 100}}")])
    (reason,) = fit_charge(
        usage, needs(50), PodOptions(models=("A100",)), {"A100": 1, "L4": 1}, RemedyContext("x/use-gputype")
    ).reasons
    assert "there is room on L4: name it in the annotation x/use-gputype" in reason.remedy


def test_memory_is_advised_as_it_can_be_asked_for() -> None:
    """In whole units, which are named: 1000 MiB cannot be asked for where the unit is 256."""
    usage = QuotaUsage([quota("types: {A100: {memory: 1000Mi}}")])
    (reason,) = fit_charge(
        usage, needs(50, 7680), PodOptions(models=("A100",)), {}, RemedyContext(unit_mib=256)
    ).reasons
    assert reason.remedy.startswith("ask for at most 768 MiB, which is 3 of vcuda-memory")


def test_only_models_that_can_be_had_are_named() -> None:
    """Two quotas may exclude each other."""
    both = [quota("types: {A100: {cores: 100}}"), quota("types: {T4: {cores: 100}}")]
    (reason,) = fit_charge(QuotaUsage(both), needs(50), PodOptions(models=("A100",)), {}).reasons
    assert "no model is in all of this namespace's quotas" in reason.remedy
