"""Refusals and warnings: all mistakes of an object in one answer, each with field, value, message and remedy."""

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, Obj, container, gpu, pod, workload
from tests.webhook.reviews import Caller, MakeCaller, UniformQuotaSource, review
from vcuda.catalogue import CardModel
from vcuda.namespace_policy import CoreLimitPolicy, NamespacePolicy
from vcuda.quota import parse_quota
from vcuda.scheme import build_scheme
from webhook.admission import Admission
from webhook.admission_config import AdmissionConfig
from webhook.review import decode_review

C0 = "spec.containers[0].resources.limits"

INVALID: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "150 cores": (pod(gpu(core="150")), ["CoreInvalid"], "ask for 100 or 200"),
    "250 percent": (pod(container(limits={"nano-gpu/gpu-percent": "250"})), ["CoreInvalid"], "ask for 200 or 300"),
    "15 tenths": (pod(container(limits={"k8s.amazonaws.com/vgpu": "15"})), ["CoreInvalid"], "ask for 10 or 20"),
    "a card and a half": (pod(container(limits={CARDS: "1500m"})), ["CoreInvalid"], 'ask for "1" or "2"'),
    "a fraction without memory": (pod(gpu(memory=None)), ["MemoryMissing"], f"add {MEMORY}"),
    "memory without cores": (pod(gpu(core=None)), ["CoreMissing"], f"add {CORE}"),
    "zero cores with memory": (pod(gpu(core="0")), ["CoreMissing"], f"add {CORE}"),
    "two containers with one name": (
        pod(gpu("c"), container("c")),
        ["ContainerDuplicate"],
        "rename one of them",
    ),
    "two vocabularies": (
        pod(container(limits={CORE: "50", MEMORY: "1", "nano-gpu/gpu-percent": "50"})),
        ["VocabulariesMixed"],
        "and remove nano-gpu/gpu-percent",
    ),
    "half a card as cores": (pod(gpu(core="500m")), ["QuantityInvalid"], "100 is one GPU; ask for 50"),
    "a core and a half": (
        pod(gpu(core="1500m")),
        ["QuantityInvalid"],
        "1.5 GPUs cannot be requested: ask for 100 or 200",
    ),
    "a core limit of zero": (
        pod(gpu(), annotations={NAMES.core_limit: "0"}),
        ["CoreLimitInvalid"],
        'write "50" to "100"',
    ),
    "models separated by semicolons": (
        pod(gpu(), annotations={NAMES.use_models: "A100;V100"}),
        ["ModelInvalid"],
        "separated by commas",
    ),
    "a series instead of a model": (pod(gpu(), annotations={NAMES.use_models: "RTX"}), ["ModelInvalid"], "RTX-3090"),
    "a negative amount": (pod(gpu(core="-50")), ["QuantityInvalid"], "positive"),
    "a core limit below the cores": (
        pod(gpu(), annotations={NAMES.core_limit: "40"}),
        ["CoreLimitInvalid"],
        'write "50" to "100", in quotes',
    ),
    "a core limit above a card": (pod(gpu(), annotations={NAMES.core_limit: "101"}), ["CoreLimitInvalid"], "in quotes"),
    "a core limit that is no number": (
        pod(gpu(), annotations={NAMES.core_limit: "half"}),
        ["CoreLimitInvalid"],
        "whole number",
    ),
    "a word that is no model": (
        pod(gpu(), annotations={NAMES.use_models: "A100,nvidia"}),
        ["ModelInvalid"],
        "such as A100",
    ),
    "a model that is also excluded": (
        pod(gpu(), annotations={NAMES.use_models: "A100-SXM4-40GB", NAMES.avoid_models: "a100"}),
        ["ModelInvalid"],
        "from one of the two",
    ),
    "options that contradict each other": (
        pod(gpu(), annotations={NAMES.use_models: "A100", "nvidia.com/use-gputype": "T4"}),
        ["VocabulariesMixed"],
        "remove nvidia.com/use-gputype",
    ),
    "an unknown container whose memory follows": (
        pod(container(limits={CORE: "50"}), annotations={NAMES.memory_follows_core: "c0,c1"}),
        ["ContainerUnknown"],
        "c0",
    ),
    "more containers with gpus than can be placed": (
        pod(*(gpu(name=f"c{number}") for number in range(65))),
        ["TooManyContainers"],
        "divide them among several pods",
    ),
    "a nodeName": (pod(gpu(), nodeName="n1"), ["NodeChosen"], "kubernetes.io/hostname: n1"),
    "another scheduler": (pod(gpu(), schedulerName="volcano"), ["SchedulerForeign"], "quotient-scheduler"),
}


@pytest.mark.parametrize(("invalid", "codes", "remedy"), INVALID.values(), ids=INVALID.keys())
def test_each_mistake_is_refused_with_its_remedy(
    api: Caller, invalid: dict[str, Any], codes: list[str], remedy: str
) -> None:
    answer = api.create(invalid)
    assert not answer.allowed
    assert answer.codes == codes
    assert remedy in answer.message


def test_all_mistakes_of_a_pod_are_in_one_answer(api: Caller) -> None:
    invalid = pod(
        gpu("a", "150", "-1"),
        gpu("b", "50", None),
        init=[gpu("i", None, "8")],
        annotations={NAMES.core_limit: "x", NAMES.avoid_models: "gpu nvidia"},
        nodeName="n",
        schedulerName="mine",
    )
    answer = api.create(invalid)
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


def test_a_refusal_has_a_message_for_users_and_causes_for_programs(api: Caller) -> None:
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
def test_the_mutating_webhook_refuses_what_the_api_server_would_reject_without_a_remedy(api: Caller, core: str) -> None:
    """The API server validates between the two calls, so the validating webhook would be too late."""
    answer = api.mutate(pod(gpu(core=core), nodeName="n"))
    assert answer.codes == ["QuantityInvalid", "NodeChosen"]


def test_the_mutating_webhook_refuses_requests_that_differ_from_limits(api: Caller) -> None:
    """The API server would only say that they must be equal."""
    different = {
        "name": "c0",
        "image": "i",
        "resources": {"limits": {CORE: "50", MEMORY: "8"}, "requests": {CORE: "40"}},
    }
    answer = api.mutate(pod(different))
    assert answer.codes == ["RequestDiffersFromLimit"]
    assert "remove the request" in answer.message


def test_the_mutating_webhook_allows_other_mistakes(api: Caller) -> None:
    """Another mutating webhook may correct them before validation."""
    assert api.mutate(pod(gpu(core="150"))).allowed
    assert api.mutate(pod(gpu(core="150"))).patch == []


def test_a_core_limit_above_the_namespaces_maximum_is_refused(make_caller: MakeCaller) -> None:
    api = make_caller(policy=NamespacePolicy(core_limit=CoreLimitPolicy(max=80)))
    answer = api.create(pod(gpu(), annotations={NAMES.core_limit: "90"}))
    assert answer.codes == ["CoreLimitInvalid"]
    assert 'write "50" to "80"' in answer.message
    assert api.create(pod(gpu(), annotations={NAMES.core_limit: "80"})).allowed
    assert api.create(pod(gpu(core="90"))).allowed


def test_pods_are_refused_if_the_quotas_have_no_common_pool(make_caller: MakeCaller) -> None:
    """They would stay Pending."""
    assert make_caller(policy=NamespacePolicy(pools=())).create(pod(gpu())).codes == ["PoolNotGranted"]


def test_a_pod_that_bypassed_the_mutating_webhook_is_refused(api: Caller) -> None:
    assert set(api.validate(pod(gpu())).codes) == {"NotRewritten"}
    assert api.validate(api.mutate(pod(gpu())).patched()).allowed


def remove_memory(rewritten: Obj) -> None:
    for part in ("limits", "requests"):
        del rewritten["spec"]["containers"][0]["resources"][part][MEMORY]


def raise_limits(rewritten: Obj) -> None:
    annotations = rewritten["metadata"]["annotations"]
    annotations[NAMES.limits] = annotations[NAMES.limits].replace("200", "300")


def show_all_gpus(rewritten: Obj) -> None:
    rewritten["spec"]["containers"][0]["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]


CHANGED_AFTERWARDS: dict[str, tuple[Callable[[Obj], None], list[str], str]] = {
    "a missing resource": (
        remove_memory,
        [f"spec.containers[0].resources.{part}[{MEMORY}]" for part in ("limits", "requests")],
        "missing: Quotient's mutating webhook adds 2",
    ),
    "a changed annotation": (
        raise_limits,
        [f"metadata.annotations[{NAMES.limits}]"],
        'differs: Quotient\'s mutating webhook writes {"v":1,',
    ),
    "an added variable": (
        show_all_gpus,
        ["spec.containers[0].env[0]"],
        """'{"name":"NVIDIA_VISIBLE_DEVICES","value":"all"}': not allowed: Quotient's mutating webhook removes it""",
    ),
}


@pytest.mark.parametrize(("change", "fields", "message"), CHANGED_AFTERWARDS.values(), ids=CHANGED_AFTERWARDS.keys())
def test_a_pod_that_was_changed_after_the_mutating_webhook_is_refused(
    api: Caller, change: Callable[[Obj], None], fields: list[str], message: str
) -> None:
    """The refusal names the field as Kubernetes does, what is there, and what should be."""
    rewritten = api.mutate(pod(gpu(core="200", memory=None))).patched()
    change(rewritten)
    answer = api.validate(rewritten)
    assert answer.codes == ["NotRewritten"] * len(fields)
    assert answer.fields == fields
    assert message in answer.message
    assert "no other webhook changes the pod after it" in answer.message


def test_the_number_of_reasons_and_warnings_in_an_answer_is_limited(api: Caller) -> None:
    answer = api.create(pod(*(gpu(f"c{number}", "150") for number in range(200))))
    assert answer.message.startswith("200 problems:\n")
    assert answer.message.endswith("\n- and 180 more")
    assert len(answer.codes) == 20
    warned = api.create(pod(*(gpu(f"c{number}", memory="1") for number in range(64))))
    assert warned.allowed
    assert warned.warnings[-1] == "and 44 more warnings"


MIRROR_ANNOTATION = "kubernetes.io/config.mirror"


def test_only_the_kubelet_of_its_node_may_create_a_mirror_pod(api: Caller) -> None:
    """Any user can set the annotation."""
    mirror = pod(gpu(), annotations={MIRROR_ANNOTATION: "x"}, nodeName="n1")
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
    without_node = pod(gpu(), annotations={MIRROR_ANNOTATION: "x"})
    assert api.validate(without_node, user="system:node:", groups=["system:nodes"]).codes == ["MirrorForged"]
    assert api.validate(pod(container(), annotations={MIRROR_ANNOTATION: "x"}, nodeName="n")).allowed


QUESTIONABLE: dict[str, tuple[dict[str, Any], str]] = {
    "memory beside a whole card": (pod(gpu(core="100", memory="30")), "is a minimum, not a limit"),
    "less memory than CUDA needs": (pod(gpu(memory="1")), "less than a CUDA context needs"),
    "MiB where units are counted": (
        pod(gpu(memory="7680")),
        f"{NAMES.memory}: 7680 is 1966080 MiB (1 is 256 MiB), more than any GPU has; for 7680 MiB write 30",
    ),
    "a core limit that whole cards ignore": (
        pod(gpu(core="100", memory=None), annotations={NAMES.core_limit: "50"}),
        "no effect",
    ),
    "a claim beside a share": (pod(gpu(), resourceClaims=[{"name": "x"}]), "not charged to any Quotient quota"),
}


@pytest.mark.parametrize(("questionable", "warning"), QUESTIONABLE.values(), ids=QUESTIONABLE.keys())
def test_a_valid_but_questionable_pod_is_allowed_with_a_warning(
    api: Caller, questionable: dict[str, Any], warning: str
) -> None:
    answer = api.create(questionable)
    assert answer.allowed
    assert any(warning in each for each in answer.warnings)
    assert all(len(each) <= 250 for each in answer.warnings)


@pytest.mark.parametrize("written", ["1000000", "1M"])
def test_a_number_that_is_read_as_few_bytes_causes_a_warning(api: Caller, written: str) -> None:
    """For a pod from the mutating webhook, because it replaces the number; for a workload from the validating one."""
    problem = f"{NAMES.memory} '1000000' is read as bytes (numbers from 1000000 on are), rounded up to 256 MiB"
    warnings = {
        "spec": api.mutate(pod(gpu(memory=written))).warnings,
        "spec.template.spec": api.validate(workload(pod(gpu(memory=written)))).warnings,
    }
    for prefix, answered in warnings.items():
        assert f"{prefix}.containers[0].resources: {problem}; 1 is 256 MiB" in answered
        assert all(len(each) <= 250 for each in answered)
    for clear in ("1", "1Mi", "8G"):
        assert api.mutate(pod(gpu(memory=clear))).warnings == []


CARD_MODELS = (CardModel("RTX-4090", 24564), CardModel("A100-SXM4-40GB", 40960))


@pytest.mark.parametrize("key", [NAMES.use_models, NAMES.avoid_models])
def test_a_model_that_no_card_of_the_cluster_has_causes_a_warning(make_caller: MakeCaller, key: str) -> None:
    """On pods and on workloads; a misspelled model would keep a pod pending, or exclude nothing."""
    api = make_caller(cards=CARD_MODELS)
    written = pod(gpu(memory="30"), annotations={key: "4080,A100"})
    for obj in (written, workload(written)):
        (warning,) = api.create(obj).warnings
        assert warning.startswith(
            f"annotation {key}: 4080 matches no GPU model of this cluster (A100-SXM4-40GB, RTX-4090)"
        )


@pytest.mark.parametrize("written", ["4090", "RTX-4090", "rtx4090", "GeForce RTX 4090", "A100"])
def test_a_model_that_some_card_has_causes_no_warning(make_caller: MakeCaller, written: str) -> None:
    """The number of a card is enough to name it."""
    api = make_caller(cards=CARD_MODELS)
    assert api.create(pod(gpu(memory="30"), annotations={NAMES.avoid_models: written})).warnings == []


def test_without_a_catalogue_no_model_causes_a_warning(api: Caller) -> None:
    """What the cluster has is unknown until the controller has listed its nodes."""
    assert api.create(pod(gpu(memory="30"), annotations={NAMES.use_models: "4080"})).warnings == []


UNCHARGED = (
    "spec.containers[0].resources: GPUs under {} are not charged to any quota; to charge them, set vocabularies.{} in "
    "Quotient's configuration"
)
UNREAD: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelled resource": (
        pod(container(limits={f"{CORE}s": "50"})),
        f"spec.containers[0].resources: {CORE}s is not a resource of Quotient; {CORE} is",
    ),
    "a misspelled resource beside GPUs": (
        pod(container("a", {f"{MEMORY}s": "50"}), gpu(memory="30")),
        f"spec.containers[0].resources: {MEMORY}s is not a resource of Quotient; {MEMORY} is",
    ),
    "another domain": (
        pod(container(limits={"inspur.io/vcuda-core": "50"})),
        f"spec.containers[0].resources: inspur.io/vcuda-core is not a resource of Quotient; {CORE} is",
    ),
    "NVIDIA's cards": (
        pod(container(limits={"nvidia.com/gpu": "1"})),
        UNCHARGED.format("nvidia.com/gpu", "nvidiaGpu"),
    ),
    "HAMi's memory": (
        pod(container(limits={"nvidia.com/gpumem": "3000"})),
        UNCHARGED.format("nvidia.com/gpumem", "hami"),
    ),
    "a misspelled annotation": (
        pod(gpu(memory="30"), annotations={f"{NAMES.use_models}s": "A100"}),
        f"metadata.annotations[{NAMES.use_models}s] is not read by Quotient; {NAMES.use_models} is",
    ),
}


@pytest.mark.parametrize(("written", "warning"), UNREAD.values(), ids=UNREAD.keys())
def test_names_that_were_probably_meant_for_quotient_cause_a_warning(
    api: Caller, written: dict[str, Any], warning: str
) -> None:
    """On pods and workloads, with or without other GPU requests: such a pod stays pending, or is not charged."""
    assert api.validate(api.mutate(written).patched()).warnings == [warning]
    assert warning in api.validate(workload(written)).warnings


@pytest.mark.parametrize(
    "key", ["rdma/hca", "amd.com/gpu", "nvidia.com/mig-1g.5gb", "hugepages-2Mi", "example.com/gpu"]
)
def test_resources_of_other_systems_cause_no_warning(api: Caller, key: str) -> None:
    assert api.validate(pod(container(limits={key: "1"}))).warnings == []


def test_an_ordinary_pod_gets_no_warning(api: Caller) -> None:
    """Users ignore warnings that always appear."""
    assert api.create(pod(gpu(memory="30"))).warnings == []


def test_a_refusal_says_what_is_reserved_for_pods_that_were_not_seen_yet(make_caller: MakeCaller) -> None:
    """Nothing confirms the first pod here: the API server may have refused it after it was charged."""
    api = make_caller(quotas=[parse_quota("types: {A100: {cores: 60}}", "team/quota")])
    assert api.create(pod(gpu())).allowed
    refused = api.create(pod(gpu()))
    assert "50 cores are reserved for 1 pod that does not exist yet, as far as is known" in refused.message
    assert "this reservation ends in 4" in refused.message


def test_a_charge_has_the_name_of_its_pod(api: Caller) -> None:
    """By it the controller finds out that the pod cannot be created, because another one has the name."""
    made = api.mutate(pod(gpu())).patched()
    made["metadata"] |= {"uid": str(uuid.uuid4()), "name": "train-0"}
    admission = Admission(AdmissionConfig(scheme=build_scheme()), UniformQuotaSource())
    request = admission.validate(decode_review(json.dumps(review(made)).encode())).ledger_request
    assert request is not None
    assert request.charge is not None
    assert request.charge.name == "train-0"
