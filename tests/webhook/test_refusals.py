"""What is refused: every mistake at once, each with field, value, reason and remedy."""

from typing import Any

import pytest

from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, container, gpu, pod
from tests.webhook.reviews import Caller, MakeCaller
from vcuda.namespace_policy import CoreLimitPolicy, NamespacePolicy

C0 = "spec.containers[0].resources.limits"

WRONG: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "150 cores": (pod(gpu(core="150")), ["CoreInvalid"], "ask for 100 or 200"),
    "250 percent": (pod(container(limits={"nano-gpu/gpu-percent": "250"})), ["CoreInvalid"], "ask for 200 or 300"),
    "15 tenths": (pod(container(limits={"k8s.amazonaws.com/vgpu": "15"})), ["CoreInvalid"], "ask for 10 or 20"),
    "a card and a half": (pod(container(limits={CARDS: "1500m"})), ["CoreInvalid"], 'ask for "1" or "2"'),
    "a fraction without memory": (pod(gpu(memory=None)), ["MemoryMissing"], f"add {MEMORY}"),
    "memory without cores": (pod(gpu(core=None)), ["CoreMissing"], f"add {CORE}"),
    "zero cores with memory": (pod(gpu(core="0")), ["CoreMissing"], f"add {CORE}"),
    "two vocabularies": (
        pod(container(limits={CORE: "50", MEMORY: "1", "nano-gpu/gpu-percent": "50"})),
        ["VocabulariesMixed"],
        f"keep {CORE} and {MEMORY} and remove nano-gpu/gpu-percent",
    ),
    "half a card as cores": (pod(gpu(core="500m")), ["QuantityInvalid"], "100 is one GPU; ask for 50"),
    "a core and a half": (pod(gpu(core="1500m")), ["QuantityInvalid"], "must be a whole number; ask for 2"),
    "a limit of nothing": (
        pod(gpu(), annotations={NAMES.core_limit: "0"}),
        ["CoreLimitInvalid"],
        'write "50" to "100"',
    ),
    "models separated otherwise": (
        pod(gpu(), annotations={NAMES.use_models: "A100;V100"}),
        ["ModelInvalid"],
        "separated by commas",
    ),
    "a series that is no model": (pod(gpu(), annotations={NAMES.use_models: "RTX"}), ["ModelInvalid"], "RTX-3090"),
    "a negative amount": (pod(gpu(core="-50")), ["QuantityInvalid"], "positive"),
    "a limit below the core": (
        pod(gpu(), annotations={NAMES.core_limit: "40"}),
        ["CoreLimitInvalid"],
        'write "50" to "100", in quotes',
    ),
    "a limit above a card": (pod(gpu(), annotations={NAMES.core_limit: "101"}), ["CoreLimitInvalid"], "in quotes"),
    "a limit that is no number": (
        pod(gpu(), annotations={NAMES.core_limit: "half"}),
        ["CoreLimitInvalid"],
        "whole number",
    ),
    "a model that is none": (
        pod(gpu(), annotations={NAMES.use_models: "A100,nvidia"}),
        ["ModelInvalid"],
        "such as A100",
    ),
    "models that are all excluded": (
        pod(gpu(), annotations={NAMES.use_models: "A100-SXM4-40GB", NAMES.avoid_models: "a100"}),
        ["ModelInvalid"],
        "from one of the two annotations",
    ),
    "wishes that contradict each other": (
        pod(gpu(), annotations={NAMES.use_models: "A100", "nvidia.com/use-gputype": "T4"}),
        ["VocabulariesMixed"],
        "remove nvidia.com/use-gputype",
    ),
    "a follower that is no container": (
        pod(container(limits={CORE: "50"}), annotations={NAMES.memory_follows_core: "c0,c1"}),
        ["ContainerUnknown"],
        "c0",
    ),
    "a node of one's own choice": (pod(gpu(), nodeName="n1"), ["NodeChosen"], "kubernetes.io/hostname: n1"),
    "another scheduler": (pod(gpu(), schedulerName="volcano"), ["SchedulerForeign"], "quotient-scheduler"),
}


@pytest.mark.parametrize(("wrong", "codes", "remedy"), WRONG.values(), ids=WRONG.keys())
def test_each_mistake_is_refused_with_its_remedy(
    api: Caller, wrong: dict[str, Any], codes: list[str], remedy: str
) -> None:
    """The author learns what to change."""
    answer = api.create(wrong)
    assert not answer.allowed
    assert answer.codes == codes
    assert remedy in answer.message


def test_all_mistakes_of_a_pod_come_in_one_answer(api: Caller) -> None:
    """Nobody should have to apply a manifest once for each."""
    wrong = pod(
        gpu("a", "150", "-1"),
        gpu("b", "50", None),
        init=[gpu("i", None, "8")],
        annotations={NAMES.core_limit: "x", NAMES.avoid_models: "gpu nvidia"},
        nodeName="n",
        schedulerName="mine",
    )
    answer = api.create(wrong)
    assert sorted(answer.codes) == sorted(
        [
            "CoreInvalid",
            "MemoryInvalid",
            "MemoryMissing",
            "CoreMissing",
            "CoreLimitInvalid",
            "NodeChosen",
            "SchedulerForeign",
        ]
    )
    assert answer.message.startswith("7 problems:\n- ")
    assert len(answer.message.splitlines()) == 8


def test_a_refusal_is_read_by_people_and_by_programs(api: Caller) -> None:
    """In words, and as causes with code and field."""
    answer = api.create(pod(gpu(core="150")))
    status = answer.response["status"]
    assert status["code"] == 403
    assert status["reason"] == "Forbidden"
    assert status["message"] == (
        f"{C0}[{CORE}]: '150': must be 1 to 99 (part of one GPU) or a multiple of 100 (whole GPUs); ask for 100 or 200"
    )
    assert status["details"]["causes"] == [
        {"reason": "CoreInvalid", "field": f"{C0}[{CORE}]", "message": status["message"]}
    ]
    assert "patch" not in answer.response


@pytest.mark.parametrize("core", ["500m", "-50"])
def test_what_the_api_server_would_refuse_in_poor_words_is_refused_first(api: Caller, core: str) -> None:
    """Its own validation comes between the two calls, so the first has to speak."""
    answer = api.mutate(pod(gpu(core=core), nodeName="n"))
    assert answer.codes == ["QuantityInvalid", "NodeChosen"]


def test_requests_that_differ_are_refused_first(api: Caller) -> None:
    """The API server says only that they must be equal."""
    different = {
        "name": "c0",
        "image": "i",
        "resources": {"limits": {CORE: "50", MEMORY: "8"}, "requests": {CORE: "40"}},
    }
    answer = api.mutate(pod(different))
    assert answer.codes == ["RequestDiffersFromLimit"]
    assert "remove the request" in answer.message


def test_other_mistakes_are_left_to_the_final_word(api: Caller) -> None:
    """Another webhook may mend them in between."""
    assert api.mutate(pod(gpu(core="150"))).allowed
    assert api.mutate(pod(gpu(core="150"))).patch == []


def test_a_limit_beyond_the_namespaces_is_refused(make_caller: MakeCaller) -> None:
    """And the message says how far it may go."""
    api = make_caller(policy=NamespacePolicy(core_limit=CoreLimitPolicy(max=80)))
    answer = api.create(pod(gpu(), annotations={NAMES.core_limit: "90"}))
    assert answer.codes == ["CoreLimitInvalid"]
    assert 'write "50" to "80"' in answer.message
    assert api.create(pod(gpu(), annotations={NAMES.core_limit: "80"})).allowed
    assert api.create(pod(gpu(core="90"))).allowed


def test_quotas_without_a_common_pool_leave_no_node(make_caller: MakeCaller) -> None:
    """Better refused than Pending for ever."""
    assert make_caller(policy=NamespacePolicy(pools=())).create(pod(gpu())).codes == ["PoolNotGranted"]


def test_a_pod_that_never_passed_the_first_call_does_not_pass_the_second(api: Caller) -> None:
    """Nor one that another webhook spoiled in between."""
    assert set(api.validate(pod(gpu())).codes) == {"NotRewritten"}
    made = api.mutate(pod(gpu())).patched()
    assert api.validate(made).allowed
    made["metadata"]["annotations"][NAMES.limits] = made["metadata"]["annotations"][NAMES.limits].replace("50", "99")
    answer = api.validate(made)
    assert answer.codes == ["NotRewritten"]
    assert answer.fields == [f"metadata.annotations.{NAMES.limits}"]
    spoiled = api.mutate(pod(gpu())).patched()
    spoiled["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    assert api.validate(spoiled).codes == ["NotRewritten"]


def test_a_message_is_bounded_however_much_is_wrong(api: Caller) -> None:
    """Nobody reads a thousand lines."""
    answer = api.create(pod(*(gpu(f"c{number}", "150") for number in range(500))))
    assert answer.message.startswith("500 problems:\n")
    assert answer.message.endswith("\n- and 480 more")
    assert len(answer.codes) == 20
    warned = api.create(pod(*(gpu(f"c{number}", memory="1") for number in range(500))))
    assert warned.allowed
    assert warned.warnings[-1] == "and 480 more warnings"


MIRROR = "kubernetes.io/config.mirror"


def test_mirror_pods_come_from_their_node_alone(api: Caller) -> None:
    """Anybody can write the annotation."""
    mirror = pod(gpu(), annotations={MIRROR: "x"}, nodeName="n1")
    node: dict[str, Any] = {"user": "system:node:n1", "groups": ["system:nodes", "system:authenticated"]}
    assert api.mutate(mirror, **node).patch == []
    assert api.validate(mirror, **node).allowed
    forgers: tuple[dict[str, Any], ...] = (
        {},
        {"user": "system:node:n1"},
        {"user": "system:node:n2", "groups": ["system:nodes"]},
        {"user": "system:serviceaccount:default:x"},
    )
    for forger in forgers:
        assert api.validate(mirror, **forger).codes == ["MirrorForged"]
    nowhere = pod(gpu(), annotations={MIRROR: "x"})
    assert api.validate(nowhere, user="system:node:", groups=["system:nodes"]).codes == ["MirrorForged"]
    assert api.validate(pod(container(), annotations={MIRROR: "x"}, nodeName="n")).allowed


ADVICE: dict[str, tuple[dict[str, Any], str]] = {
    "memory beside a whole card": (pod(gpu(core="100", memory="30")), "only the least"),
    "less memory than CUDA takes": (pod(gpu(memory="1")), "less than CUDA itself takes"),
    "MiB where units are counted": (pod(gpu(memory="8192")), "more than any card has"),
    "a limit that whole cards ignore": (
        pod(gpu(core="100", memory=None), annotations={NAMES.core_limit: "50"}),
        "no effect",
    ),
    "a privileged container": (pod(gpu(securityContext={"privileged": True})), "sees every GPU"),
    "a claim beside a share": (pod(gpu(), resourceClaims=[{"name": "x"}]), "count in no quota"),
}


@pytest.mark.parametrize(("odd", "told"), ADVICE.values(), ids=ADVICE.keys())
def test_what_is_probably_not_meant_is_allowed_with_a_warning(api: Caller, odd: dict[str, Any], told: str) -> None:
    """Legal, but worth a word."""
    answer = api.create(odd)
    assert answer.allowed
    assert any(told in warning for warning in answer.warnings)
    assert all(len(warning) <= 250 for warning in answer.warnings)


def test_an_ordinary_pod_gets_no_warning(api: Caller) -> None:
    """Or nobody would read them."""
    assert api.create(pod(gpu(memory="30"))).warnings == []
