"""Bindings by users, kinds and operations that are not checked, and audit mode."""

from typing import Any

import pytest

from tests.webhook.pods import CARDS, NAMES, container, gpu, limits_in, pod, workload
from tests.webhook.reviews import Caller, MakeCaller
from vcuda.namespace_policy import Mode, NamespacePolicy
from vcuda.pod import Container, PodSpec, Resources
from webhook.validating import PodToBind

GPU = PodToBind("u1", {NAMES.limits: "{}"}, PodSpec())
PLAIN = PodToBind("u2", {}, PodSpec())


def binding(name: str, **annotations: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": {"kind": "Node", "name": "n1"}}


@pytest.fixture
def with_pods(make_caller: MakeCaller) -> Caller:
    """A cluster with a GPU pod and a plain pod, in which the user `volcano` may bind."""
    return make_caller(pods={"gpu": GPU, "plain": PLAIN}, binders=("volcano",))


@pytest.mark.parametrize("subresource", ["binding", ""])
def test_only_schedulers_bind_gpu_pods(with_pods: Caller, subresource: str) -> None:
    """Through `pods/binding` and through `bindings`."""
    answer = with_pods.validate(binding("gpu"), subresource=subresource)
    assert answer.codes == ["BindingForeign"]
    assert "alice" in answer.message
    for user in (
        "system:serviceaccount:quotient-system:quotient-scheduler",
        "system:kube-scheduler",
        "volcano",
    ):
        assert with_pods.validate(binding("gpu"), subresource=subresource, user=user).allowed


def test_pods_without_gpus_may_be_bound_by_any_user(with_pods: Caller) -> None:
    """By name, or by name and uid; RBAC decides who may."""
    assert with_pods.validate(binding("plain"), subresource="binding").allowed
    known = binding("plain")
    known["metadata"]["uid"] = "u2"
    assert with_pods.validate(known, subresource="binding").allowed


def test_a_missing_pod_cannot_be_bound(with_pods: Caller) -> None:
    """When the Binding takes effect, a GPU pod of that name may exist: a user could win that race by retrying."""
    answer = with_pods.validate(binding("gone"), subresource="binding")
    assert answer.codes == ["BindingForeign"]
    assert "pod not found" in answer.message
    other = binding("plain")
    other["metadata"]["uid"] = "another"
    assert with_pods.validate(other, subresource="binding").fields == ["metadata.uid"]


def test_a_binding_cannot_carry_a_placement(with_pods: Caller) -> None:
    """The API server copies the annotations of a Binding to the pod."""
    forged = binding("plain", **{NAMES.placement: "{}"})
    assert with_pods.validate(forged, subresource="binding").codes == ["AnnotationOwned"]


def test_a_gpu_pod_from_before_quotient_cannot_be_bound_either(make_caller: MakeCaller) -> None:
    """It has no annotation of Quotient's, but GPU resources."""
    spec = PodSpec(containers=[Container("c", Resources(requests={"tencent.com/vcuda-core": "1"}))])
    api = make_caller(pods={"p": PodToBind("u", {}, spec)})
    assert api.validate(binding("p"), subresource="binding").codes == ["BindingForeign"]


def test_other_kinds_and_operations_are_allowed_unchanged(api: Caller) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {}}
    for answer in (api.mutate(service), api.validate(service)):
        assert answer.allowed
        assert answer.patch == []
    assert api.validate(None, "DELETE", pod(gpu(core="150"))).allowed
    assert api.mutate(None, "DELETE", pod(gpu())).patch == []
    assert api.mutate(pod(gpu(), name="x"), "UPDATE", pod(gpu()), subresource="status").patch == []


def test_a_cluster_in_audit_mode_only_warns(make_caller: MakeCaller) -> None:
    """Nothing is refused or rewritten; what enforce mode would refuse is returned as a warning, and counted."""
    api = make_caller(cluster_mode=Mode.AUDIT)
    invalid = pod(gpu(core="150"), nodeName="n")
    assert api.mutate(pod(gpu())).patch == []
    assert api.mutate(workload(pod(container(limits={CARDS: "300m"})))).patch == []
    answer = api.validate(invalid)
    assert answer.allowed
    assert len(answer.warnings) == 2
    assert all(warning.startswith("audit: would be refused: ") for warning in answer.warnings)
    # A remedy would be cut in the middle: warnings have at most 250 characters.
    assert any("spec.nodeName: 'n': " in warning for warning in answer.warnings)
    assert not any("; " in warning for warning in answer.warnings)
    labels = {"route": "validate", "kind": "Pod", "operation": "CREATE", "decision": "audited"}
    assert api.metrics.registry.get_sample_value("quotient_admission_decisions_total", labels) == 1
    assert api.metrics.registry.get_sample_value("quotient_admission_reasons_total", {"code": "CoreInvalid"}) == 1
    assert api.mutate(pod(gpu(core="500m"))).allowed
    for valid in (pod(gpu()), pod(container(limits={"tencent.com/vcuda-core": "100"}))):
        assert api.create(valid).warnings == [], "a valid pod gets no warning"


def test_pods_of_a_namespace_in_audit_mode_are_rewritten_but_not_refused(make_caller: MakeCaller) -> None:
    api = make_caller(policy=NamespacePolicy(mode=Mode.AUDIT))
    patched = api.mutate(pod(container(limits={"nano-gpu/gpu-percent": "20"}))).patched()
    assert limits_in(patched)[NAMES.core] == "20"
    assert api.validate(pod(gpu(core="150"))).allowed


def test_a_namespace_can_enforce_in_a_cluster_in_audit_mode(make_caller: MakeCaller) -> None:
    """So that namespaces can be migrated one by one."""
    api = make_caller(policy=NamespacePolicy(mode=Mode.ENFORCE), cluster_mode=Mode.AUDIT)
    assert api.mutate(pod(gpu())).patch != []
    assert not api.validate(pod(gpu(core="150"))).allowed
