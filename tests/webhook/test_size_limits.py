"""A pod or a template that has more than is read is refused, with what it has too many of."""

import gc
import tracemalloc

import pytest

from tests.webhook.pods import CARDS, NAMES, Obj, container, gpu, pod, workload
from tests.webhook.reviews import Caller, MakeCaller
from vcuda.namespace_policy import Mode, NamespacePolicy
from webhook.review import MAX_REASON
from webhook.size_limits import MAX_ANNOTATION_LENGTH, MAX_CONTAINERS, MAX_TERMS, MAX_VARIABLES
from webhook.value_limit import MAX_VALUES

MIB = 2**20
PREDICATE = "tencent.com/predicate-gpu-idx-"


def variables(count: int) -> list[Obj]:
    return [{"name": f"V{number}", "value": "1"} for number in range(count)]


def containers(count: int) -> list[Obj]:
    return [container(f"x{number}") for number in range(count)]


def terms(count: int) -> Obj:
    listed = [{"matchFields": [{"key": str(number)}]} for number in range(count)]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": listed}}}


TOO_LARGE = {
    "containers": (pod(gpu(), *containers(256)), "spec.containers", "'257'", "at most 256 containers"),
    "init containers": (
        pod(gpu(), init=containers(257)),
        "spec.initContainers",
        "'257'",
        "at most 256 init containers",
    ),
    "variables of several containers": (
        pod(gpu(env=variables(4000)), container("x", env=variables(97))),
        "spec.containers[*].env",
        "'4097'",
        "put them into a ConfigMap, and refer to it in envFrom",
    ),
    "sources of variables": (
        pod(gpu(envFrom=[{"prefix": "A_"}] * 1025)),
        "spec.containers[*].envFrom",
        "'1025'",
        "at most 1024 sources in all containers here; merge them",
    ),
    "mounts": (pod(gpu(volumeMounts=[{}] * 4097)), "spec.containers[*].volumeMounts", "'4097'", "at most 4096 mounts"),
    "volumes": (pod(volumes=[{"name": "v"}] * 1025), "spec.volumes", "'1025'", "at most 1024 volumes"),
    "tolerations": (pod(tolerations=[{}] * 1025), "spec.tolerations", "'1025'", "at most 1024 tolerations"),
    "node selector terms": (
        pod(affinity=terms(MAX_TERMS + 1)),
        "spec.affinity.nodeAffinity",
        "'513'",
        "label nodes, and select them by the label",
    ),
    "annotations": (
        pod(annotations={f"a/{number}": "" for number in range(4097)}),
        "metadata.annotations",
        "'4097'",
        "at most 4096 annotations",
    ),
    "annotations of another scheduler": (
        pod(annotations={f"{PREDICATE}{number}": "1" for number in range(257)}),
        "metadata.annotations",
        "'257'",
        "only Quotient may write here; remove them",
    ),
    "a key": (
        pod(annotations={PREDICATE + "1" * 317: "1"}),
        "metadata.annotations",
        "'347'",
        "at most 317 characters in a key here; remove the annotation",
    ),
    "an option": (
        pod(annotations={NAMES.use_models: "a" * (MAX_ANNOTATION_LENGTH + 1)}),
        f"metadata.annotations[{NAMES.use_models}]",
        "'32769'",
        "at most 32768 characters here; shorten or remove it",
    ),
    "part of a card, which the API server would refuse in its own words": (
        pod(container(limits={CARDS: "300m"}), *containers(256)),
        "spec.containers",
        "'257'",
        "divide them among several pods",
    ),
}


@pytest.mark.parametrize(("large", "field", "value", "text"), TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_a_pod_with_more_than_is_read_is_refused(api: Caller, large: Obj, field: str, value: str, text: str) -> None:
    """By both webhooks, as either may be called without the other."""
    for answer in (api.mutate(large), api.validate(large)):
        assert not answer.allowed
        assert answer.codes[0] == "TooLarge"
        assert answer.fields[0] == field
        assert value in answer.message
        assert text in answer.message


@pytest.mark.parametrize(("large", "field", "value", "text"), TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_a_template_with_more_than_is_read_is_refused(
    api: Caller, large: Obj, field: str, value: str, text: str
) -> None:
    for answer in (api.mutate(workload(large)), api.validate(workload(large))):
        assert answer.codes[0] == "TooLarge"
        assert answer.fields[0] == f"spec.template.{field}"
        assert value in answer.message
        assert text in answer.message


def test_nothing_else_is_read_of_an_object_that_is_too_large(api: Caller) -> None:
    """Half a million empty containers fit into one: to look for their mistakes takes a second."""
    large = pod(gpu(), *containers(256), nodeName="n", volumes=[{"name": "v"}] * 1025)
    for obj in (large, workload(large)):
        assert api.validate(obj).codes == ["TooLarge", "TooLarge"]


def test_what_is_just_read_is_admitted(api: Caller) -> None:
    large = pod(gpu(env=variables(MAX_VARIABLES)), *containers(MAX_CONTAINERS - 1), annotations={"a/b": "c" * 100_000})
    assert api.mutate(large).allowed


def test_a_workload_that_was_stored_before_can_be_scaled(api: Caller) -> None:
    large = pod(gpu(), *containers(300))
    old, new = workload(large, replicas=1), workload(large, replicas=2)
    assert api.mutate(new, "UPDATE", old).allowed
    assert api.validate(new, "UPDATE", old).allowed
    changed = workload(pod(gpu(), *containers(301)))
    assert api.mutate(changed, "UPDATE", old).codes == ["TooLarge"]


def test_an_update_may_not_add_more_than_is_read(api: Caller) -> None:
    """A pod that was stored with more stays as it is."""
    limits = {NAMES.limits: "{}"}
    small, large = pod(annotations=limits), pod(annotations=limits, tolerations=[{}] * 1025)
    assert api.mutate(large, "UPDATE", small).codes == ["TooLarge"]
    assert api.mutate(large, "UPDATE", large).allowed
    many = pod(annotations=limits, ephemeralContainers=containers(257))
    assert api.mutate(many, "UPDATE", small, subresource="ephemeralcontainers").patch == []
    answer = api.validate(many, "UPDATE", small, subresource="ephemeralcontainers")
    assert answer.codes == ["TooLarge"]
    assert answer.fields == ["spec.ephemeralContainers"]


def test_warnings_stay_below_the_length_that_the_api_server_passes_on(api: Caller) -> None:
    """It drops those beyond 4096 characters in all, without a word."""
    names = [f"CUDA_MPS_{'X' * 90}{number}" for number in range(100)]
    answer = api.create(pod(gpu(env=[{"name": name, "value": "1"} for name in names])))
    assert answer.allowed
    assert sum(map(len, answer.warnings)) <= 4096
    shown = len(answer.warnings) - 1
    assert 10 < shown < 20
    assert answer.warnings[-1] == f"and {100 - shown} more warnings"


def test_a_refusal_does_not_grow_with_what_a_tenant_wrote(api: Caller) -> None:
    """Names, keys and amounts are shortened where they are shown."""
    long = "x" * 300_000
    for refused in (
        api.validate(pod(annotations={PREDICATE + long: "1"})),
        api.mutate(pod(gpu(core=long))),
        api.validate(pod(gpu(), nodeName=long, schedulerName=long)),
        api.validate(pod(gpu(), annotations={NAMES.memory_follows_core: "a" * 30_000})),
    ):
        assert not refused.allowed
        assert len(refused.body) < 4 * len(refused.codes) * MAX_REASON


def test_no_key_of_a_pod_is_kept(api: Caller) -> None:
    """A cache that keeps keys of 3 MiB fills the memory: of owned annotations, and of resources that are removed."""
    api.create(pod(gpu()))
    tracemalloc.start()
    try:
        for number in range(4):
            long = f"{number}" * (MIB // 2)
            api.create(pod(gpu(), annotations={PREDICATE + long: "1", "inspur.com/" + long: "1"}))
            api.create(pod(container(limits={CARDS: "300m", "inspur.com/" + long: "1"})))
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < MIB
    finally:
        tracemalloc.stop()


TOO_MANY_VALUES = {
    "tolerations": (pod(gpu(), tolerations=[{"key": "a"}] * MAX_VALUES), "spec.tolerations"),
    "labels": (
        {**pod(gpu()), "metadata": {"name": "p", "labels": {str(number): "" for number in range(MAX_VALUES)}}},
        "metadata.labels",
    ),
    "host aliases of a template": (
        workload(pod(container(limits={CARDS: "300m"}), hostAliases=[{"ip": ""}] * MAX_VALUES)),
        "spec.template.spec.hostAliases",
    ),
    "variables of a CronJob": (
        workload(pod(gpu(env=[{}] * MAX_VALUES)), "CronJob", "batch/v1"),
        "spec.jobTemplate.spec.template.spec.containers",
    ),
    "a field that Quotient does not know": (pod(gpu(), unknown=[{}] * MAX_VALUES), "spec"),
}


@pytest.mark.parametrize(("large", "field"), TOO_MANY_VALUES.values(), ids=TOO_MANY_VALUES.keys())
def test_an_object_with_more_values_than_are_decoded_is_refused(api: Caller, large: Obj, field: str) -> None:
    """Each takes many times the memory of its text: the maximum counts before an object is decoded."""
    for answer in (api.mutate(large), api.validate(large), api.validate(large, "UPDATE", large)):
        assert not answer.allowed
        assert (answer.codes, answer.fields) == (["TooLarge"], [field])
        assert "at most 100000 values in all" in answer.message


def test_a_binding_with_more_values_than_are_decoded_is_refused(api: Caller) -> None:
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "p", "annotations": {str(number): "" for number in range(MAX_VALUES)}},
    }
    answer = api.validate(binding, subresource="binding")
    assert (answer.codes, answer.fields) == (["TooLarge"], ["metadata.annotations"])


def test_an_object_with_more_values_than_are_decoded_gets_a_warning_in_audit_mode(make_caller: MakeCaller) -> None:
    api = make_caller(policy=NamespacePolicy(mode=Mode.AUDIT))
    large = TOO_MANY_VALUES["tolerations"][0]
    assert api.mutate(large).allowed
    answer = api.validate(large)
    assert answer.allowed
    assert "at most 100000 values in all" in answer.warnings[0]
