"""Quotas: strictly read in both forms, and charged to every line that matches."""

import pytest

from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.gpu_model import parse_model
from vcuda.namespace_policy import CoreLimitPolicy, Mode, NamespacePolicy, combine_policies
from vcuda.quota import Quota, QuotaError, parse_legacy_quotas, parse_quota

WHOLE = """
types:
  A100: {cores: 400, memory: 160Gi}
  A100-SXM4-80GB: {cores: 100}
  "*":  {cores: 500, pods: 20}
unlisted: deny
pools: [training, public]
untyped: float
coreLimit: {default: 90, max: 95}
mode: audit
"""


def test_every_field_is_read() -> None:
    """As the documentation has them."""
    quota = parse_quota(WHOLE, "team/quota")
    assert quota.types == {
        "A100": {CORES: 400, MEMORY: 163840},
        "A100-SXM4-80GB": {CORES: 100},
        "*": {CORES: 500, PODS: 20},
    }
    assert quota.unlisted == "deny"
    assert quota.policy == NamespacePolicy(("training", "public"), CoreLimitPolicy(90, 95), Mode.AUDIT)


def test_what_is_left_out_has_a_meaning() -> None:
    """No pools are all pools, no mode is the cluster's, and with "*" alone every model is granted."""
    assert parse_quota("types: {T4: {cores: 1}}", "q") == Quota("q", {"T4": {CORES: 1}})
    over_all = parse_quota('types: {"*": {cores: 1}}', "q")
    assert over_all.unlisted == "allow"
    assert over_all.policy == NamespacePolicy()
    assert parse_quota("pools: []", "q").policy.pools is None
    assert parse_quota("types: {T4: {memory: 10}}", "q").types["T4"] == {MEMORY: 2560}
    assert parse_quota("types: {T4: {memory: 1500000000}}", "q").types["T4"] == {MEMORY: 1430}


WRONG = {
    "no mapping": ("[]", "quota"),
    "a slip of the pen": ("type: {}", "type: type: there is no such field"),
    "the same twice": ("pools: [a]\npools: [b]", "line 2: duplicate key 'pools'; remove one"),
    "a negative ceiling": ("types: {T4: {cores: -1}}", "types.T4.cores: -1"),
    "cores that are no number": ("types: {T4: {cores: many}}", "types.T4.cores: many"),
    "half a core": ("types: {T4: {cores: 0.5}}", "types.T4.cores: 0.5"),
    "a truth value": ("types: {T4: {pods: true}}", "types.T4.pods: true"),
    "memory that is none": ("types: {T4: {memory: 1X}}", "types.T4.memory: 1X"),
    "negative memory": ("types: {T4: {memory: -1Gi}}", "types.T4.memory: -1Gi"),
    "another dimension": ("types: {T4: {gpus: 1}}", "types.T4.gpus"),
    "a line without ceilings": ("types: {T4: 4}", "types.T4: 4: write its ceilings"),
    "a model that is none": ("types: {nvidia: {cores: 1}}", "types.nvidia: nvidia"),
    "an unknown word": ("unlisted: maybe", "unlisted: maybe: write one of deny, allow"),
    "an unknown mode": ("mode: off-ish", "mode: off-ish: write one of enforce, audit"),
    "pools that are no list": ("pools: training", "pools: training: write a list"),
    "a limit above a card": ("coreLimit: {max: 101}", "coreLimit"),
    "an unknown default": ("coreLimit: {default: burst}", "coreLimit"),
    "no YAML": ("a: {", "line 1"),
    "two documents": ("pools: [a]\n---\npools: [b]", "2 documents"),
}


@pytest.mark.parametrize(("text", "told"), WRONG.values(), ids=WRONG.keys())
def test_a_quota_that_cannot_be_meant_is_refused_with_its_path(text: str, told: str) -> None:
    """A mistake must not be an unlimited quota."""
    with pytest.raises(QuotaError) as wrong:
        parse_quota(text, "team/quota")
    assert told in str(wrong.value)
    assert all(mistake.quota == "team/quota" for mistake in wrong.value.mistakes)


def test_all_mistakes_of_a_quota_come_at_once() -> None:
    """As for pods."""
    with pytest.raises(QuotaError) as wrong:
        parse_quota("types: {T4: {cores: x, memory: y}}\nmode: z\nother: 1", "q")
    assert len(wrong.value.mistakes) == 4


def test_the_older_form_is_read_for_all_namespaces() -> None:
    """Whole GPUs; a model that is not named is not granted."""
    quotas = parse_legacy_quotas(
        '{"a": {"quota": {"M40": 4}, "pool": ["public"]}, "b": {"quota": {}}}', "kube-system/gpuquota"
    )
    assert quotas["a"].types == {"M40": {CORES: 400}}
    assert quotas["a"].policy.pools == ("public",)
    assert not quotas["a"].grants(parse_model("P100"))
    assert not quotas["b"].grants(parse_model("M40"))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": {"quota": {"A100": 1}}, "a": {"quota": {"A100": 8}}}',
        '{"a": {"quota": 0}}',
        '{"a": {"quota": []}}',
        "[" * 100_000,
        "{",
        "[]",
        '{"a": 1}',
        '{"a": {"quota": {"M40": 1.5}}}',
        '{"a": {"quotas": {}}}',
        '{"a": {"pool": 1}}',
    ],
)
def test_the_older_form_is_read_strictly_too(text: str) -> None:
    """It was not, by those who invented it."""
    with pytest.raises(QuotaError):
        parse_legacy_quotas(text, "q")


def test_policies_join_to_what_all_of_them_allow() -> None:
    """Pools in common, the lower limits, and enforcement if any of them wants it."""
    assert combine_policies([]) == NamespacePolicy()
    both = combine_policies(
        [
            NamespacePolicy(("a", "b"), CoreLimitPolicy(90, 95), Mode.AUDIT),
            NamespacePolicy(("b", "c"), CoreLimitPolicy(80, 99)),
            NamespacePolicy(),
        ]
    )
    assert both == NamespacePolicy(("b",), CoreLimitPolicy(80, 95), None), (
        "a quota that says nothing is held to as the cluster says"
    )
    assert combine_policies([NamespacePolicy(mode=Mode.AUDIT), NamespacePolicy(mode=Mode.AUDIT)]).mode is Mode.AUDIT
    assert (
        combine_policies(
            [NamespacePolicy(core_limit=CoreLimitPolicy(80)), NamespacePolicy(core_limit=CoreLimitPolicy("request"))]
        ).core_limit.default
        == "request"
    )
    assert combine_policies([NamespacePolicy(("a",)), NamespacePolicy(("b",))]).pools == ()
    assert combine_policies([NamespacePolicy(mode=Mode.AUDIT), NamespacePolicy(mode=Mode.ENFORCE)]).mode is Mode.ENFORCE
    assert (
        combine_policies(
            [NamespacePolicy(core_limit=CoreLimitPolicy(90)), NamespacePolicy(core_limit=CoreLimitPolicy(80))]
        ).core_limit.default
        == 80
    )
