"""What pods are charged, and for which model."""

import pytest

from tests.vcuda.demands import CARDS, fixed, quota, whole_card
from vcuda.amounts import Amounts
from vcuda.charging import ChargeFit, candidates, count_fitting, fit_charge
from vcuda.decision import Code
from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.gpu_model import parse_model
from vcuda.pod_options import PodOptions
from vcuda.quota_usage import ANY, Charge, QuotaUsage


def test_every_line_that_matches_is_charged() -> None:
    """Product, family, and the line over all types; in the dimensions that each limits."""
    usage = QuotaUsage(
        [quota('types: {A100: {cores: 9, memory: 9}, A100-SXM4-80GB: {cores: 9}, T4: {cores: 9}, "*": {pods: 9}}')]
    )
    charged = usage.amounts_by_limit(parse_model("A100-SXM4-80GB"), Amounts({CORES: 50, MEMORY: 7680, PODS: 1}))
    assert charged == Amounts(
        {
            ("team/q", "A100", CORES): 50,
            ("team/q", "A100", MEMORY): 7680,
            ("team/q", "A100-SXM4-80GB", CORES): 50,
            ("team/q", "*", PODS): 1,
        }
    )


def test_a_pod_is_charged_for_the_first_model_that_fits_all_quotas() -> None:
    quotas = [quota("types: {A100: {cores: 100}, T4: {cores: 100}}"), quota("types: {'*': {pods: 2}}", "team/r")]
    usage = QuotaUsage(quotas)
    for model in ("A100", "T4"):
        fit = fit_charge(usage, fixed(60), PodOptions(), {})
        assert fit == ChargeFit(Charge(model, 60, 0))
        usage.reserve(parse_model(model), fit.charge.amounts)
    refused = fit_charge(usage, fixed(60), PodOptions(), {})
    assert {reason.code for reason in refused.reasons} == {Code.QUOTA_EXCEEDED}
    assert [reason.field for reason in refused.reasons] == [
        "team/q: types.A100.cores",
        "team/r: types.*.pods",
        "team/q: types.T4.cores",
    ]


def test_without_quotas_everything_fits() -> None:
    """And is charged nevertheless, so that it counts when a quota is created later."""
    assert fit_charge(QuotaUsage([]), fixed(10**9), PodOptions(), {}) == ChargeFit(Charge(ANY.name, 10**9, 0))
    assert fit_charge(QuotaUsage([]), fixed(1), PodOptions(), CARDS).charge.model == "A100-SXM4-80GB"


def test_whole_cards_are_charged_at_the_largest_that_fits() -> None:
    """The charge can then only be lowered; if the largest does not fit, a smaller one may."""
    large, small = quota("types: {A100: {memory: 100Gi}}"), quota("types: {A100: {memory: 50Gi}}")
    options = PodOptions(models=("A100",))
    assert fit_charge(QuotaUsage([large]), whole_card, options, CARDS) == ChargeFit(
        Charge("A100-SXM4-80GB", 100, 81920)
    )
    assert fit_charge(QuotaUsage([small]), whole_card, options, CARDS) == ChargeFit(
        Charge("A100-SXM4-40GB", 100, 40960)
    )


def test_a_card_that_no_node_has_is_as_large_as_its_name_says() -> None:
    """A node may be added; a model without a size in its name is charged no memory until then."""
    sizes = {each.model.name: each.card_mib for each in candidates([], PodOptions(models=("H100-80GB", "L4")), CARDS)}
    assert sizes == {"H100-80GB": 81920, "L4": 0}


ORDERS = {
    "requested models come in their order": (
        (),
        PodOptions(models=("T4", "A100")),
        ["T4", "A100-SXM4-80GB", "A100-SXM4-40GB"],
    ),
    "models of some node come before models of none": ((), PodOptions(models=("H100", "T4")), ["T4", "H100"]),
    "without requested models, the lines of the quotas": (
        ("types: {T4: {cores: 1}, A100: {cores: 1}}",),
        PodOptions(),
        ["T4", "A100-SXM4-80GB", "A100-SXM4-40GB"],
    ),
    "models that a quota does not grant are not tried": (("types: {T4: {cores: 1}}",), PodOptions(), ["T4"]),
    "unlisted models are tried if the quota allows them": (
        ("types: {T4: {cores: 1}}\nunlisted: allow",),
        PodOptions(),
        ["T4", "A100-SXM4-80GB", "A100-SXM4-40GB"],
    ),
    "excluded models are not tried": ((), PodOptions(avoided_models=("A100",)), ["T4"]),
    "a single product can be excluded": (
        (),
        PodOptions(models=("A100",), avoided_models=("A100-SXM4-80GB",)),
        ["A100-SXM4-40GB"],
    ),
}


@pytest.mark.parametrize(("quotas", "options", "expected"), ORDERS.values(), ids=ORDERS.keys())
def test_the_order_of_candidates(quotas: tuple[str, ...], options: PodOptions, expected: list[str]) -> None:
    names = [each.model.name for each in candidates([quota(text) for text in quotas], options, CARDS)]
    assert names == expected


def test_a_quota_can_require_pods_to_name_one_model() -> None:
    """`untyped: deny`: with a single family there is nothing to name, and two requested models are not one."""
    strict = quota("types: {A100: {cores: 100}, T4: {cores: 100}}\nuntyped: deny")
    for options in (PodOptions(), PodOptions(models=("A100", "T4"))):
        (reason,) = fit_charge(QuotaUsage([strict]), fixed(1), options, {}).reasons
        assert reason.code is Code.MODEL_NOT_GRANTED
        assert "use-gputype" in reason.remedy
        assert count_fitting(QuotaUsage([strict]), fixed(1), options, {}, 3) == 0
    single = quota("types: {A100: {cores: 100}}\nuntyped: deny")
    assert fit_charge(QuotaUsage([single]), fixed(1), PodOptions(), CARDS).reasons == ()
    assert fit_charge(QuotaUsage([strict]), fixed(1), PodOptions(models=("A100",)), CARDS).reasons == ()


def test_how_many_pods_fit() -> None:
    """Over all models they may run on, and under a line over all of them."""
    usage = QuotaUsage([quota('types: {A100: {cores: 100}, T4: {cores: 100}, "*": {cores: 150}}')])
    assert count_fitting(usage, fixed(50), PodOptions(), {}, 10) == 3
    assert count_fitting(usage, fixed(50), PodOptions(models=("T4",)), {}, 10) == 2
    assert count_fitting(QuotaUsage([]), fixed(50), PodOptions(), {}, 10) == 10
    assert usage.taken == Amounts()


def test_memory_of_unknown_size_is_not_granted() -> None:
    """The memory of a GPU that no node has may be anything; a fixed amount of memory is known."""
    limited, unlimited = quota("types: {A100: {cores: 400, memory: 40Gi}}"), quota("types: {A100: {cores: 400}}")
    options = PodOptions(models=("A100",))
    (reason,) = fit_charge(QuotaUsage([limited]), whole_card, options, {}).reasons
    assert reason.code is Code.CARD_UNKNOWN
    assert fit_charge(QuotaUsage([limited]), fixed(50, 1024), options, {}).reasons == ()
    assert fit_charge(QuotaUsage([unlimited]), whole_card, options, {}).reasons == ()
    assert fit_charge(QuotaUsage([limited]), whole_card, options, {"A100-SXM4-40GB": 0}).charge.memory_mib == 40960
    assert (
        fit_charge(QuotaUsage([limited]), whole_card, PodOptions(models=("A100-PCIE-40GB",)), {}).charge.memory_mib
        == 40960
    )


def test_a_requested_family_may_be_granted_by_its_products() -> None:
    """Also while no node has any."""
    usage = QuotaUsage([quota("types: {A100-SXM4-40GB: {cores: 100}}")])
    assert fit_charge(usage, fixed(50), PodOptions(models=("A100",)), {}).charge.model == "A100-SXM4-40GB"
