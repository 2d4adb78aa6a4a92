"""What a refusal says: all numbers, and remedies that can be followed."""

import pytest

from tests.vcuda.demands import CARDS, fixed, quota, whole_card
from vcuda.amounts import Amounts
from vcuda.charging import fit_charge
from vcuda.decision import Code
from vcuda.dimensions import CORES, PODS
from vcuda.pod_options import PodOptions
from vcuda.quota_refusals import RemedyContext
from vcuda.quota_usage import Charge, Holder, QuotaUsage, Reserved, usage_of_charges


def cores_of(**cores: int) -> dict[str, Amounts]:
    """What one pod of each model takes."""
    return {model: Amounts({CORES: amount, PODS: 1}) for model, amount in cores.items()}


def test_a_refusal_says_everything() -> None:
    """Asked, used, reserved, hard, short by, who holds most, what to do, and which other model would fit."""
    usage = QuotaUsage(
        [quota("types: {A100: {cores: 400}, T4: {cores: 200}}")],
        cores_of(A100=350),
        cores_of(A100=25),
        [Holder("Job/train", "A100", cores=300, pods=3, memory_mib=0), Holder("Pod/n", "T4", 90, 1, 0)],
    )
    (reason,) = fit_charge(usage, fixed(50), PodOptions(models=("A100",)), {}).reasons
    assert reason.numbers == {"asked": 50, "used": 350, "reserved": 25, "hard": 400, "short": 25}
    assert str(reason) == (
        "team/q: types.A100.cores: '50': exceeded quota: asked 50 cores (100 = one GPU) of A100; used 350, reserved "
        "25, hard 400: short by 25; largest holders: Job/train (300); ask for at most 25 cores, wait until 25 more "
        "cores are free, or have an administrator raise types.A100.cores in team/q; enough quota is left for T4: name "
        "it in the annotation use-gputype"
    )


SCOPES = {
    "a family names the product": ("types: {A100: {cores: 10}}", "of A100 (as A100-SXM4-80GB); used"),
    "a product names itself": ("types: {A100-SXM4-80GB: {cores: 10}}", "of A100-SXM4-80GB; used"),
    "all types": ('types: {"*": {cores: 10}}', "of all types together; used"),
    "pods": ('types: {"*": {pods: 0}}', "asked 1 pod(s) of all types together; used 0"),
}


@pytest.mark.parametrize(("text", "expected"), SCOPES.values(), ids=SCOPES.keys())
def test_a_refusal_names_what_the_limit_is_about(text: str, expected: str) -> None:
    (reason,) = fit_charge(QuotaUsage([quota(text)]), fixed(50), PodOptions(models=("A100-SXM4-80GB",)), CARDS).reasons
    assert expected in reason.message


def test_a_quota_lowered_below_its_usage_says_so() -> None:
    """Nothing more is admitted, and the numbers say how much has to be released first."""
    usage = QuotaUsage([quota("types: {A100: {cores: 100}}")], cores_of(A100=300))
    (reason,) = fit_charge(usage, fixed(50), PodOptions(models=("A100",)), {}).reasons
    assert "already 200 over the limit" in reason.message
    assert reason.numbers["short"] == 250
    assert "at most" not in reason.remedy


REMEDIES = {
    "whole cards are not asked for in parts": (
        50,
        200,
        200,
        "ask for at most 100 cores, wait until 50 more cores are free, or",
    ),
    "a fraction of a card is": (70, 50, 100, "ask for at most 30 cores, wait until 20 more cores are free, or"),
    "more than the quota ever allows": (
        0,
        50,
        10,
        "ask for at most 10 cores, or have an administrator raise types.A100.cores in team/q",
    ),
    "nothing at all": (0, 50, 0, "have an administrator raise types.A100.cores in team/q"),
}


@pytest.mark.parametrize(("used", "asked", "hard", "expected"), REMEDIES.values(), ids=REMEDIES.keys())
def test_a_remedy_can_be_followed(used: int, asked: int, hard: int, expected: str) -> None:
    """What it says to ask for would be granted, and what it says to wait for can happen."""
    usage = QuotaUsage([quota(f"types: {{A100: {{cores: {hard}}}}}")], cores_of(A100=used))
    (reason,) = fit_charge(usage, fixed(asked), PodOptions(models=("A100",)), {}).reasons
    assert reason.remedy.startswith(expected)


def test_no_less_memory_is_advised_for_a_whole_card() -> None:
    usage = QuotaUsage([quota("types: {A100: {memory: 30Gi}}")])
    (reason,) = fit_charge(usage, whole_card, PodOptions(models=("A100",)), CARDS | {"A100-SXM4-80GB": 40960}).reasons
    assert "at most" not in reason.remedy


def test_memory_is_advised_in_whole_units() -> None:
    """1000 MiB cannot be asked for where the unit is 256 MiB."""
    usage = QuotaUsage([quota("types: {A100: {memory: 1000Mi}}")])
    (reason,) = fit_charge(
        usage, fixed(50, 7680), PodOptions(models=("A100",)), {}, RemedyContext(unit_mib=256)
    ).reasons
    assert reason.remedy.startswith("ask for at most 768 MiB (vcuda-memory: 3)")


def test_a_model_that_no_node_has_is_not_advised() -> None:
    """If any node is known at all."""
    usage = QuotaUsage([quota("types: {A100: {cores: 0}, T4: {cores: 100}, L4: {cores: 100}}")])
    (reason,) = fit_charge(
        usage, fixed(50), PodOptions(models=("A100",)), {"A100": 1, "L4": 1}, RemedyContext("x/use-gputype")
    ).reasons
    assert "enough quota is left for L4: name it in the annotation x/use-gputype" in reason.remedy


def test_a_model_that_is_not_granted_is_refused_with_those_that_are() -> None:
    """Unless the quota allows unlisted models."""
    (reason,) = fit_charge(
        QuotaUsage([quota("types: {A100: {cores: 1}}")]), fixed(1), PodOptions(models=("H100",)), {}
    ).reasons
    assert (reason.code, reason.value) == (Code.MODEL_NOT_GRANTED, "H100")
    assert reason.remedy.startswith("ask for A100, or have an administrator add H100 to team/q")
    permissive = quota("types: {A100: {cores: 1}}\nunlisted: allow")
    assert fit_charge(QuotaUsage([permissive]), fixed(1), PodOptions(models=("H100",)), {}).reasons == ()


def test_only_models_that_all_quotas_grant_are_advised() -> None:
    """Two quotas may exclude each other's models."""
    both = [quota("types: {A100: {cores: 100}}"), quota("types: {T4: {cores: 100}}")]
    (reason,) = fit_charge(QuotaUsage(both), fixed(50), PodOptions(models=("A100",)), {}).reasons
    assert "no model is listed in all of this namespace's quotas" in reason.remedy


def test_a_quota_without_models_says_so() -> None:
    """Once, whichever models the pod requests and the cluster has."""
    for text in ("unlisted: deny", 'types: {"*": {cores: 100}}\nunlisted: deny'):
        for options in (PodOptions(), PodOptions(models=("A100", "T4")), PodOptions(avoided_models=("A100", "T4"))):
            for cards in ({}, CARDS):
                (reason,) = fit_charge(QuotaUsage([quota(text)]), fixed(1), options, cards).reasons
                assert reason.code is Code.MODEL_NOT_GRANTED
                assert str(reason).endswith(
                    "the quota lists no GPU model and denies unlisted ones; "
                    "have an administrator list models, or set unlisted: allow"
                )


@pytest.mark.parametrize("cards", [{}, CARDS], ids=["an empty cluster", "other cards"])
@pytest.mark.parametrize("untyped", ["float", "deny"])
def test_a_pod_that_names_no_slice_is_told_to_name_one(cards: dict[str, int], untyped: str) -> None:
    """An administrator need not change a quota that lists only slices."""
    usage = QuotaUsage([quota(f"types: {{A100-MIG-1g.5gb: {{cores: 100}}}}\nuntyped: {untyped}")])
    (reason,) = fit_charge(usage, fixed(100), PodOptions(), cards).reasons
    assert str(reason) == (
        "team/q: types: the quota lists only MIG slices, and a pod runs on one only if it names it; "
        "name one in use-gputype: A100-MIG-1g.5gb"
    )
    assert fit_charge(usage, fixed(100), PodOptions(models=("A100-MIG-1g.5gb",)), cards).reasons == ()


def test_excluding_every_granted_model_is_not_an_exceeded_quota() -> None:
    """Other models of the cluster do not matter: the pod did not ask for them."""
    usage = QuotaUsage([quota("types: {A100: {cores: 1}}")])
    for cards in ({}, CARDS, {"T4": 16384, "L4": 24576}):
        (reason,) = fit_charge(usage, fixed(1), PodOptions(avoided_models=("A100",)), cards).reasons
        assert reason.code is Code.MODEL_NOT_GRANTED
        assert str(reason) == (
            "team/q: types: 'A100': the annotation nouse-gputype excludes every GPU model that this namespace may use; "
            "exclude fewer models"
        )


def test_quotas_that_exclude_each_other_are_not_blamed_on_excluded_models() -> None:
    both = [quota("types: {A100: {cores: 100}}"), quota("types: {T4: {cores: 100}}")]
    reasons = fit_charge(QuotaUsage(both), fixed(1), PodOptions(avoided_models=("L4",)), CARDS).reasons
    assert reasons
    assert not any("nouse-gputype" in reason.message for reason in reasons)


def test_a_refusal_says_what_is_reserved_for_pods_that_do_not_exist_and_when_that_ends() -> None:
    """Another webhook or quota may have refused them after they were charged; a pod that is being bound exists."""
    moving = Charge("A100", 10, 0, moved_from=Charge("A100", 10, 0))
    charges = [
        (Charge("A100", 100, 0), 86, 1),
        (Charge("A100", 50, 0), 90, 2),
        (Charge("T4", 10, 0), 95, 1),
        (Charge("A100", 10, 0), None, 1),
        (moving, 99, 1),
    ]
    usage = usage_of_charges([quota("types: {A100: {cores: 220}, T4: {cores: 200}}")], charges)
    request = RemedyContext(now_s=100)
    (reason,) = fit_charge(usage, fixed(50), PodOptions(models=("A100",)), {}, request).reasons
    assert (
        "; 200 cores are reserved for 3 pods that do not exist yet, as far as is known; "
        "the last of these reservations ends in 35 s" in reason.message
    )
    assert reason.numbers["unconfirmed"] == 200
    assert (reason.numbers["unconfirmedPods"], reason.numbers["endsInS"]) == (3, 35)
    usage.reservations = [Reserved(Charge("A100", 100, 0), 10)]
    (reason,) = fit_charge(usage, fixed(50), PodOptions(models=("A100",)), {}, request).reasons
    assert "100 cores are reserved for 1 pod that does not exist yet" in reason.message
    assert "ends in 1 s" in reason.message, "it is overdue, and ends as soon as the controller has confirmed it"
