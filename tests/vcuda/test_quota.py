"""Quotas: both forms are parsed strictly, and all mistakes are reported at once."""

import json

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from vcuda.decoding import decoder_for
from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.gpu_model import parse_model
from vcuda.isolation import Isolation, Rung
from vcuda.namespace_policy import CoreLimitPolicy, Mode, NamespacePolicy, PrivilegedPolicy, combine_policies
from vcuda.quota import MAX_LINES, Quota, QuotaError, parse_legacy_quotas, parse_quota

COMPLETE = """
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


def test_every_field_is_parsed() -> None:
    quota = parse_quota(COMPLETE, "team/quota")
    assert quota.types == {
        "A100": {CORES: 400, MEMORY: 163840},
        "A100-SXM4-80GB": {CORES: 100},
        "*": {CORES: 500, PODS: 20},
    }
    assert quota.unlisted == "deny"
    assert quota.policy == NamespacePolicy(("training", "public"), CoreLimitPolicy(90, 95), Mode.AUDIT)


def test_fields_have_defaults() -> None:
    """No pools are all pools, no mode is the cluster's, and with "*" alone every model is granted."""
    assert parse_quota("types: {T4: {cores: 1}}", "q") == Quota("q", {"T4": {CORES: 1}})
    over_all = parse_quota('types: {"*": {cores: 1}}', "q")
    assert over_all.unlisted == "allow"
    assert over_all.policy == NamespacePolicy()
    assert parse_quota("pools: []", "q").policy.pools is None


def test_memory_is_bytes_or_units() -> None:
    """Units as on pods; bytes beyond a whole MiB are not granted."""
    assert parse_quota("types: {T4: {memory: 10}}", "q").types["T4"] == {MEMORY: 2560}
    assert parse_quota("types: {T4: {memory: 1500000000}}", "q").types["T4"] == {MEMORY: 1430}


INVALID = {
    "not a mapping": ("[]", "quota: []: write a mapping with the fields types"),
    "a misspelled field": ("type: {}", "type: unknown field; did you mean types?"),
    "an unknown field": ("burst: 1", "burst: unknown field; the fields are types, unlisted, "),
    "cores in quotes": ('types: {A100: {cores: "400"}}', 'types.A100.cores: "400" is text; remove the quotes'),
    "pods in quotes": ('types: {A100: {pods: "4"}}', 'types.A100.pods: "4" is text; remove the quotes'),
    "octal cores": (
        "types: {A100: {cores: 0400}}",
        "line 1: '0400' is not a decimal number; write 400 (a leading zero means octal in YAML)",
    ),
    "an unknown field of the core limit": (
        "coreLimit: {burst: 5}",
        "coreLimit.burst: unknown field; the fields are default, max",
    ),
    "a known field beside an unknown one": ("coreLimit: {burst: 5, max: 0}", 'coreLimit: {"max": 0}: write {default: '),
    "empty memory": ('types: {T4: {memory: ""}}', "types.T4.memory: is empty; write memory such as 160Gi"),
    "a field twice": ("pools: [a]\npools: [b]", "line 2"),
    "a negative limit": ("types: {T4: {cores: -1}}", "types.T4.cores: -1: write a whole number of cores, 0 or more"),
    "cores that are no number": ("types: {T4: {cores: many}}", "types.T4.cores: many"),
    "half a core": ("types: {T4: {cores: 0.5}}", "types.T4.cores: 0.5"),
    "a truth value": ("types: {T4: {pods: true}}", "types.T4.pods: true"),
    "memory with an unknown suffix": ("types: {T4: {memory: 1X}}", "types.T4.memory: 1X"),
    "memory that is a list": ("types: {T4: {memory: [1]}}", "types.T4.memory: [1]: not a quantity; write memory"),
    "negative memory": ("types: {T4: {memory: -1Gi}}", "types.T4.memory: -1Gi"),
    "an unknown dimension": ("types: {T4: {gpus: 1}}", "types.T4.gpus: unknown field; the fields are cores, "),
    "a line without limits": ("types: {T4: 4}", "types.T4: 4: write its limits"),
    "a line with no limit": ("types: {T4: {}}", "types.T4: {}: write its limits, such as {cores: 400, "),
    "the line of all types with no limit": ('types: {"*": {}}', "types.*: {}: write its limits"),
    "no line": ("types: {}", "types: {}: write lines such as A100: {cores: 400}, or leave types out"),
    "types without a value": ("types:", "types: null: write lines such as A100: {cores: 400}"),
    "more cores than can be": (
        "types: {T4: {cores: 1000000001}}",
        "types.T4.cores: 1000000001: too large; write at most 1000000000, or leave it out for no limit",
    ),
    "more pods than can be": ("types: {T4: {pods: 18446744073709551616}}", "types.T4.pods: 18446744073709551616: too"),
    "more memory than can be": ("types: {T4: {memory: 4Ei}}", "types.T4.memory: 4Ei: more than 1000000000000 MiB; "),
    "many pools": (f"pools: {[f'p{number}' for number in range(65)]}", "pools: 65: too many pools; write at most 64"),
    "a long pool": (f"pools: [{'p' * 64}]", 'pools: ["pppp'),
    "a long text": (f"# {'x' * 32768}", "quota.yaml has 32770 characters; write at most 32768"),
    "a brand": ("types: {nvidia: {cores: 1}}", "types.nvidia: nvidia: not a GPU model"),
    "a series": ("types: {RTX: {cores: 1}}", "types.RTX: RTX: not a GPU model"),
    "an unknown word": ("unlisted: maybe", "unlisted: maybe: write one of deny, allow"),
    "an unknown mode": ("mode: off-ish", "mode: off-ish: write one of enforce, audit"),
    "pools that are no list": ("pools: training", "pools: training: write a list"),
    "a core limit above one card": ("coreLimit: {max: 101}", 'coreLimit: {"max": 101}: write {default: request, '),
    "an unknown default": ("coreLimit: {default: burst}", 'coreLimit: {"default": "burst"}'),
    "invalid YAML": ("a: {", "line 1"),
    "two documents": ("pools: [a]\n---\npools: [b]", "contains 2 YAML documents; write exactly one"),
    "no document": ("", "quota.yaml is empty; write lines such as types: "),
    "comments alone": ("# later\n", "quota.yaml is empty"),
}


@pytest.mark.parametrize(("text", "expected"), INVALID.values(), ids=INVALID.keys())
def test_an_invalid_quota_is_refused_with_its_path(text: str, expected: str) -> None:
    """A mistake must not become an unlimited quota."""
    with pytest.raises(QuotaError) as refused:
        parse_quota(text, "team/quota")
    assert f"team/quota: {expected}" in str(refused.value)
    assert all(mistake.quota == "team/quota" for mistake in refused.value.mistakes)


def test_the_number_of_lines_is_limited() -> None:
    lines = {f"A{number}": {"cores": 1} for number in range(MAX_LINES + 1)}
    with pytest.raises(QuotaError, match="types: 257: too many lines; write at most 256"):
        parse_quota(json.dumps({"types": lines}), "q")


def test_all_mistakes_of_a_quota_are_reported_at_once() -> None:
    with pytest.raises(QuotaError) as refused:
        parse_quota("types: {T4: {cores: x, memory: y}}\nmode: z\nother: 1", "q")
    assert len(refused.value.mistakes) == 4


def test_a_limited_number_of_mistakes_is_collected() -> None:
    """They are shown in refusals and in the status of the namespace, and may have been written to fill both."""
    with pytest.raises(QuotaError) as refused:
        parse_quota("\n".join(f"{'x' * 1000}{number}: 1" for number in range(30)), "q")
    assert len(refused.value.mistakes) == 20
    assert len(str(refused.value)) < 20 * 400


def test_an_aliased_value_is_shown_in_part() -> None:
    """Nine aliases of nine aliases of nine: written out, it would be very long."""
    levels = ["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 5))]
    with pytest.raises(QuotaError) as refused:
        parse_quota("\n".join([*levels, "mode: *a4"]), "q")
    assert len(str(refused.value)) < 2000


def test_the_older_form_is_parsed_for_all_namespaces() -> None:
    """Whole GPUs; a model that is not listed is not granted."""
    quotas = parse_legacy_quotas(
        '{"a": {"quota": {"M40": 4}, "pool": ["public"]}, "b": {"quota": {}}}', "kube-system/gpuquota"
    )
    assert quotas["a"].types == {"M40": {CORES: 400}}
    assert quotas["a"].policy.pools == ("public",)
    assert not quotas["a"].grants(parse_model("P100"))
    assert not quotas["b"].grants(parse_model("M40"))


INVALID_LEGACY = {
    "a namespace twice": ('{"a": {"quota": {"A100": 1}}, "a": {"quota": {"A100": 8}}}', "q: duplicate key 'a'"),
    "a number for the models": ('{"a": {"quota": 0}}', "q: a.quota: 0: write GPUs by model"),
    "a list of models": ('{"a": {"quota": []}}', "q: a.quota: []: write GPUs by model"),
    "deep nesting": ("[" * 100_000, "q: invalid JSON: nested too deeply"),
    "invalid JSON": ("{", "q: line 1, column 2: invalid JSON"),
    "a list of namespaces": ("[]", "q: gpu_quota: []: write a mapping of namespaces to quotas"),
    "a number for a quota": ('{"a": 1}', 'q: a: 1: write {"quota": '),
    "more GPUs than can be": ('{"a": {"quota": {"M40": 10000001}}}', "q: a.quota.M40: 10000001: too large; write at"),
    "a fraction of a GPU": ('{"a": {"quota": {"M40": 1.5}}}', "q: a.quota.M40: 1.5: write a whole number of GPUs"),
    "a model that is none": ('{"a": {"quota": {"nvidia": 1}}}', "q: a.quota.nvidia: nvidia: not a GPU model"),
    "a misspelled field": ('{"a": {"quotas": {}}}', "q: a.quotas: unknown field; did you mean quota?"),
    "an unknown field": ('{"a": {"limit": {}}}', "q: a.limit: unknown field; the fields are quota, pool"),
    "a number in quotes": ('{"a": {"quota": {"A100": "4"}}}', 'q: a.quota.A100: "4" is text; remove the quotes'),
    "pools that are no list": ('{"a": {"pool": 1}}', "q: a.pool: 1: write a list of node pools"),
}


@pytest.mark.parametrize(("text", "expected"), INVALID_LEGACY.values(), ids=INVALID_LEGACY.keys())
def test_the_older_form_is_parsed_strictly_too(text: str, expected: str) -> None:
    """Unlike in gpu-admission, where it comes from."""
    with pytest.raises(QuotaError) as refused:
        parse_legacy_quotas(text, "q")
    assert str(refused.value).startswith(expected)


ALLOW, DENY = PrivilegedPolicy.ALLOW, PrivilegedPolicy.DENY
PRIVILEGES = {
    "one quota": ((ALLOW,), ALLOW),
    "all allow": ((ALLOW, ALLOW), ALLOW),
    "one denies": ((ALLOW, DENY), DENY),
    "one does not say, and follows the cluster": ((UNSET, ALLOW), UNSET),
    "one does not say, one denies": ((UNSET, ALLOW, DENY), DENY),
}


@pytest.mark.parametrize(("each", "expected"), PRIVILEGES.values(), ids=PRIVILEGES.keys())
def test_privileges_combine_to_what_all_quotas_allow(
    each: tuple[PrivilegedPolicy | UnsetType, ...], expected: PrivilegedPolicy | UnsetType
) -> None:
    assert combine_policies([NamespacePolicy(privileged=one) for one in each]).privileged is expected


def test_a_quota_may_allow_privileged_containers() -> None:
    """A ledger stores the setting only where it is set: older releases know none."""
    assert parse_quota("privileged: allow", "q").policy.privileged is ALLOW
    assert parse_quota("privileged: deny", "q").policy.privileged is DENY
    assert b"privileged" not in msgspec.json.encode(parse_quota("pools: [a]", "q").policy)
    with pytest.raises(QuotaError, match="privileged: true: write one of deny, allow"):
        parse_quota("privileged: true", "q")


MIN_ISOLATIONS = {
    "one quota": (("preload",), Isolation(Rung.PRELOAD)),
    "the strongest of several": (("preload", "mps", "none"), Isolation(Rung.MPS)),
    "in each dimension": (("memory=driver,compute=none", "compute=mps"), Isolation(Rung.DRIVER, Rung.MPS)),
    "one that does not say": (("preload", ""), Isolation(Rung.PRELOAD)),
    "none that says": (("", ""), UNSET),
}


@pytest.mark.parametrize(("texts", "expected"), MIN_ISOLATIONS.values(), ids=MIN_ISOLATIONS)
def test_the_strongest_isolation_that_a_quota_requires_counts(
    texts: tuple[str, ...], expected: Isolation | UnsetType
) -> None:
    """In any order."""
    quotas = [parse_quota(f"minIsolation: {text}" if text else "pools: [a]", "q") for text in texts]
    for each in (quotas, quotas[::-1]):
        assert combine_policies([quota.policy for quota in each]).min_isolation == expected


def test_a_ledger_stores_the_required_isolation_where_it_is_set() -> None:
    """Older releases know none."""
    policy = parse_quota("minIsolation: memory=preload,compute=mps", "q").policy
    text = msgspec.json.encode(policy)
    assert b'"min_isolation":{"memory":"preload","compute":"mps"}' in text
    assert decoder_for(NamespacePolicy).decode(text) == policy
    assert b"min_isolation" not in msgspec.json.encode(parse_quota("pools: [a]", "q").policy)


INVALID_ISOLATIONS = {
    "an unknown word": ("strict", "q: minIsolation: strict: must be one of none, preload, mps, driver"),
    "no text": ("{memory: preload}", 'q: minIsolation: {"memory": "preload"}: write text such as preload, or memory='),
    "two mistakes": (
        "memory=strict,compute=driver",
        "q: minIsolation: memory=strict: memory must be one of none, preload, mps, driver\nq: minIsolation: compute=",
    ),
}


@pytest.mark.parametrize(("text", "expected"), INVALID_ISOLATIONS.values(), ids=INVALID_ISOLATIONS)
def test_an_invalid_isolation_is_refused_with_its_remedy(text: str, expected: str) -> None:
    with pytest.raises(QuotaError) as refused:
        parse_quota(f"minIsolation: {text}", "q")
    assert str(refused.value).startswith(expected)


def test_policies_combine_to_what_all_of_them_allow() -> None:
    """Pools in common, the lower limits, and enforcement if any of them sets it."""
    assert combine_policies([]) == NamespacePolicy()
    both = combine_policies(
        [
            NamespacePolicy(("a", "b"), CoreLimitPolicy(90, 95), Mode.AUDIT),
            NamespacePolicy(("b", "c"), CoreLimitPolicy(80, 99)),
            NamespacePolicy(),
        ]
    )
    assert both == NamespacePolicy(("b",), CoreLimitPolicy(80, 95), None), "a quota without a mode follows the cluster"
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
