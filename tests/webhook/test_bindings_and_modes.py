"""Bindings by others, kinds and operations that are not ours, and clusters that only look on."""

from typing import Any

import pytest

from tests.webhook.pods import CARDS, NAMES, container, gpu, limits_in, pod, workload
from tests.webhook.reviews import Caller, MakeCaller
from vcuda.namespace_policy import Mode, NamespacePolicy
from vcuda.pod import PodSpec
from webhook.validating import PodToBind

GPU = PodToBind("u1", {NAMES.limits: "{}"}, PodSpec())
PLAIN = PodToBind("u2", {}, PodSpec())


def binding(name: str, **notes: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "annotations": notes}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": {"kind": "Node", "name": "n1"}}


@pytest.fixture
def with_pods(make_caller: MakeCaller) -> Caller:
    """A cluster with a pod of each sort."""
    return make_caller(pods={"gpu": GPU, "plain": PLAIN}, binders=("volcano",))


@pytest.mark.parametrize("subresource", ["binding", ""])
def test_only_schedulers_put_gpu_pods_on_nodes(with_pods: Caller, subresource: str) -> None:
    """In either form of the API."""
    answer = with_pods.validate(binding("gpu"), subresource=subresource)
    assert answer.codes == ["BindingForeign"]
    assert "alice" in answer.message
    for user in (
        "system:serviceaccount:quotient-system:quotient-scheduler",
        "system:kube-scheduler",
        "volcano",
    ):
        assert with_pods.validate(binding("gpu"), subresource=subresource, user=user).allowed


def test_other_pods_may_be_bound_by_anybody_who_may(with_pods: Caller) -> None:
    """By their name, or by their uid."""
    assert with_pods.validate(binding("plain"), subresource="binding").allowed
    known = binding("plain")
    known["metadata"]["uid"] = "u2"
    assert with_pods.validate(known, subresource="binding").allowed


def test_a_pod_that_is_not_there_cannot_be_bound(with_pods: Caller) -> None:
    """It may be there, with GPUs, when the binding takes effect: whoever tries often enough would win."""
    answer = with_pods.validate(binding("gone"), subresource="binding")
    assert answer.codes == ["BindingForeign"]
    assert "no such pod" in answer.message
    other = binding("plain")
    other["metadata"]["uid"] = "another"
    assert with_pods.validate(other, subresource="binding").fields == ["metadata.uid"]


def test_a_binding_cannot_carry_a_placement(with_pods: Caller) -> None:
    """Its annotations would end up on the pod."""
    forged = binding("plain", **{NAMES.placement: "{}"})
    assert with_pods.validate(forged, subresource="binding").codes == ["AnnotationOwned"]


def test_a_pod_known_by_its_resources_counts_as_well(make_caller: MakeCaller) -> None:
    """One from before Quotient."""
    spec = PodSpec(containers=[gpu_container()])
    assert make_caller(pods={"p": PodToBind("u", {}, spec)}).validate(binding("p"), subresource="binding").codes == [
        "BindingForeign"
    ]


def gpu_container() -> Any:
    from vcuda.pod import Container, Resources  # noqa: PLC0415

    return Container("c", Resources(requests={"tencent.com/vcuda-core": "1"}))


def test_other_kinds_and_operations_are_allowed_untouched(api: Caller) -> None:
    """They are none of our business."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {}}
    for answer in (api.mutate(service), api.validate(service)):
        assert answer.allowed
        assert answer.patch == []
    assert api.validate(None, "DELETE", pod(gpu(core="150"))).allowed
    assert api.mutate(None, "DELETE", pod(gpu())).patch == []
    assert api.mutate(pod(gpu(), name="x"), "UPDATE", pod(gpu()), subresource="status").patch == []


def test_a_cluster_in_audit_looks_on(make_caller: MakeCaller) -> None:
    """Nothing is refused, nothing rewritten; what would be refused is told and counted."""
    api = make_caller(cluster_mode=Mode.AUDIT)
    wrong = pod(gpu(core="150"), nodeName="n")
    assert api.mutate(pod(gpu())).patch == []
    assert api.mutate(workload(pod(container(limits={CARDS: "300m"})))).patch == []
    answer = api.validate(wrong)
    assert answer.allowed
    assert len(answer.warnings) == 2
    assert all(warning.startswith("audit: would be refused: ") for warning in answer.warnings)
    labels = {"route": "validate", "kind": "Pod", "operation": "CREATE", "decision": "audited"}
    assert api.metrics.registry.get_sample_value("quotient_admission_decisions_total", labels) == 1
    assert api.metrics.registry.get_sample_value("quotient_admission_reasons_total", {"code": "CoreInvalid"}) == 1
    assert api.mutate(pod(gpu(core="500m"))).allowed
    for right in (pod(gpu()), pod(container(limits={"tencent.com/vcuda-core": "100"}))):
        assert api.create(right).warnings == [], "what is right is not told to be wrong"


def test_a_namespace_in_audit_is_rewritten_but_not_refused(make_caller: MakeCaller) -> None:
    """Its pods run as all others; only the refusals are spared."""
    api = make_caller(policy=NamespacePolicy(mode=Mode.AUDIT))
    made = api.mutate(pod(container(limits={"nano-gpu/gpu-percent": "20"}))).patched()
    assert limits_in(made)[NAMES.core] == "20"
    assert api.validate(pod(gpu(core="150"))).allowed


def test_a_namespace_may_enforce_in_a_cluster_that_looks_on(make_caller: MakeCaller) -> None:
    """So that namespaces can follow one by one."""
    api = make_caller(policy=NamespacePolicy(mode=Mode.ENFORCE), cluster_mode=Mode.AUDIT)
    assert api.mutate(pod(gpu())).patch != []
    assert not api.validate(pod(gpu(core="150"))).allowed
