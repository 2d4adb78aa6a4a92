"""Updates: what is Quotient's stays, the same manifest changes nothing, and everything else is nobody's business."""

import copy
import json
from typing import Any

import pytest

from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, container, gpu, note, pod
from tests.webhook.reviews import Caller, MakeCaller
from vcuda.namespace_policy import NamespacePolicy

APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
OURS = "system:serviceaccount:quotient-system:quotient-scheduler"

Obj = dict[str, Any]


def changed(made: Obj, **notes: str | None) -> Obj:
    """Change annotations; None takes one away."""
    after = copy.deepcopy(made)
    for key, value in notes.items():
        after["metadata"].setdefault("annotations", {})
        if value is None:
            after["metadata"]["annotations"].pop(key)
        else:
            after["metadata"]["annotations"][key] = value
    return after


def test_owned_annotations_change_for_quotient_alone(api: Caller) -> None:
    """Added, changed or taken away."""
    stored = changed(api.mutate(pod(gpu())).patched(), **{NAMES.placement: "{}"})
    for notes in (
        {NAMES.placement: '{"v":1}'},
        {NAMES.placement: None},
        {NAMES.limits: None},
        {NAMES.limits: "{}"},
        {"tencent.com/predicate-gpu-idx-0": "1"},
        {"inspur.com/gpu-assigned": "true"},
    ):
        after = changed(stored, **notes)
        answer = api.validate(after, "UPDATE", stored)
        assert answer.codes == ["AnnotationOwned"]
        assert answer.fields == [f"metadata.annotations[{next(iter(notes))}]"]
        assert api.validate(after, "UPDATE", stored, user=OURS).allowed
    for forger in ("system:serviceaccount:quotient-system-2:x", "system:serviceaccount:default:quotient-scheduler"):
        assert not api.validate(changed(stored, **{NAMES.placement: "x"}), "UPDATE", stored, user=forger).allowed


def test_a_pod_without_gpus_cannot_be_given_a_placement(api: Caller) -> None:
    """By an update either."""
    plain = pod(container())
    assert api.validate(changed(plain, **{NAMES.placement: "{}"}), "UPDATE", plain).codes == ["AnnotationOwned"]


@pytest.mark.parametrize(
    "key",
    [NAMES.core_limit, NAMES.use_models, NAMES.avoid_models, NAMES.memory_follows_core, "tencent.com/use-gputype"],
)
def test_wishes_are_frozen_once_the_pod_is_charged(api: Caller, key: str) -> None:
    """They decided what it was charged for."""
    stored = api.mutate(pod(gpu())).patched()
    answer = api.validate(changed(stored, **{key: "99"}), "UPDATE", stored)
    assert answer.codes == ["AnnotationFrozen"]
    assert "create it anew" in answer.message


def test_a_pod_that_was_there_before_quotient_stays_usable(api: Caller) -> None:
    """Only what changes is looked at, and only where it is ours."""
    before = pod(gpu(core="150"), annotations={NAMES.core_limit: "x"}, nodeName="n", schedulerName="other")
    after = copy.deepcopy(before)
    after["metadata"]["labels"]["new"] = "label"
    after["metadata"]["annotations"] |= {"other": "x"}
    assert api.mutate(after, "UPDATE", before).patch == []
    assert api.validate(after, "UPDATE", before).allowed
    after["metadata"]["annotations"] |= {NAMES.memory_follows_core: "c0"}
    assert api.validate(after, "UPDATE", before).codes == ["AnnotationFrozen"], "it is charged by what they say"


def test_an_update_of_something_else_changes_nothing(api: Caller) -> None:
    """Labels, finalizers, images."""
    stored = api.mutate(pod(gpu(), container("side"))).patched()
    after = copy.deepcopy(stored)
    after["metadata"]["finalizers"] = ["x/y"]
    after["spec"]["containers"][0]["image"] = "other"
    assert api.mutate(after, "UPDATE", stored).patch == []
    assert api.validate(after, "UPDATE", stored).allowed


def applied(manifest: Obj, stored: Obj) -> Obj:
    """Merge a manifest over a stored pod, as `kubectl apply` does: maps by key, named lists by name, others whole."""
    text = json.dumps(manifest)
    merged: Obj = merge(copy.deepcopy(stored), manifest)
    merged["metadata"].setdefault("annotations", {})[APPLIED] = text
    return merged


def merge(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: merge(old[key], value) if key in old else value for key, value in new.items()}}
    named = (
        isinstance(old, list)
        and isinstance(new, list)
        and all(isinstance(each, dict) and "name" in each for each in (*old, *new))
    )
    if not named:
        return new
    after = {each["name"]: each for each in old}
    for each in new:
        after[each["name"]] = each if "hostPath" in each else merge(after.get(each["name"], {}), each)
    return list(after.values())


MANIFESTS: dict[str, Obj] = {
    "the canonical vocabulary": pod(gpu()),
    "memory in bytes": pod(gpu(memory="8Gi")),
    "Tencent's": pod(
        container(limits={"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "30"}),
        annotations={"tencent.com/vcuda-core-limit": "80"},
    ),
    "NVIDIA's with models": pod(
        container(limits={"nvidia.com/vcuda-core": "30", "nvidia.com/vcuda-memory": "7680"}),
        annotations={"nvidia.com/use-gputype": "A100,V100"},
    ),
    "AWS with all that belongs to it": pod(
        container(limits={"k8s.amazonaws.com/vgpu": "3"}, env=[{"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}]),
        hostIPC=True,
        volumes=[{"name": "nvidia-mps", "hostPath": {"path": "/tmp/nvidia-mps"}}],
    ),
    "percent, two containers": pod(
        container("a", {"nano-gpu/gpu-percent": "20"}), container("b", {"nano-gpu/gpu-percent": "200"})
    ),
    "part of a card": pod(container(limits={CARDS: "300m"})),
    "variables in a container without GPU": pod(
        gpu(), container("side", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])
    ),
    "followers that were added to": pod(
        container("a", {CORE: "30"}), container("b", {CARDS: "500m"}), annotations={NAMES.memory_follows_core: "a"}
    ),
    "forged annotations": pod(
        gpu(), annotations={NAMES.placement: "{}", NAMES.limits: "{}", "inspur.com/gpu-assigned": "true"}
    ),
    "an affinity of its own": pod(
        gpu(),
        affinity={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
                }
            }
        },
    ),
    "tolerations of its own": pod(gpu(), tolerations=[{"key": "mine", "operator": "Exists"}]),
}


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_the_same_manifest_applied_again_changes_nothing(make_caller: MakeCaller, manifest: Obj) -> None:
    """Most of it could not change on a living pod, and the API server would refuse."""
    api = make_caller(policy=NamespacePolicy(pools=("training",)), tolerations=({"key": "gpu", "operator": "Exists"},))
    first = copy.deepcopy(manifest)
    first["metadata"].setdefault("annotations", {})[APPLIED] = json.dumps(manifest)
    stored = api.mutate(first).patched()
    assert api.validate(stored).allowed
    again = api.mutate(applied(manifest, stored), "UPDATE", stored)
    assert again.allowed
    assert again.patched() == stored
    assert api.validate(again.patched(), "UPDATE", stored).allowed


def test_a_manifest_that_asks_for_another_share_is_refused(api: Caller) -> None:
    """In words that say what to do; the API server's own do not."""
    manifest = pod(container(limits={"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "30"}))
    stored = api.mutate(manifest).patched()
    other = pod(container(limits={"tencent.com/vcuda-core": "60", "tencent.com/vcuda-memory": "30"}))
    answer = api.mutate(applied(other, stored), "UPDATE", stored)
    assert set(answer.codes) == {"RequestFrozen"}
    assert "delete the pod and create it anew" in answer.message


def test_a_manifest_with_another_wish_is_refused(api: Caller) -> None:
    """An ancestor's annotation with another value is no re-apply."""
    manifest = pod(gpu(), annotations={"tencent.com/vcuda-core-limit": "80"})
    stored = api.mutate(manifest).patched()
    other = pod(gpu(), annotations={"tencent.com/vcuda-core-limit": "60"})
    after = api.mutate(applied(other, stored), "UPDATE", stored).patched()
    assert api.validate(after, "UPDATE", stored).codes == ["AnnotationFrozen"]
    assert note(stored, NAMES.core_limit) == "80"


def test_someone_who_writes_a_placement_by_hand_is_refused_not_corrected(api: Caller) -> None:
    """A re-apply is told from it by what `kubectl apply` remembers."""
    stored = api.mutate(pod(gpu(), annotations={APPLIED: "{}"})).patched()
    after = changed(stored, **{NAMES.placement: "{}"})
    assert api.mutate(after, "UPDATE", stored).patch == []
    assert api.validate(after, "UPDATE", stored).codes == ["AnnotationOwned"]


@pytest.mark.parametrize("remembered", ["", "[]", "{", '{"metadata": 1}', '{"metadata": {"annotations": {"a": 1}}}'])
def test_what_kubectl_remembers_may_be_anything(api: Caller, remembered: str) -> None:
    """It is a tenant's text."""
    stored = changed(api.mutate(pod(gpu())).patched(), **{APPLIED: remembered})
    assert api.validate(changed(stored, **{NAMES.placement: "{}"}), "UPDATE", stored).codes == ["AnnotationOwned"]
    assert api.mutate(changed(stored, **{NAMES.placement: "{}"}), "UPDATE", stored).status == 200


def debugged(stored: Obj, *containers: Obj) -> Obj:
    after = copy.deepcopy(stored)
    after["spec"]["ephemeralContainers"] = list(containers)
    return after


def test_containers_added_for_debugging_see_no_gpu(api: Caller) -> None:
    """They can ask for none, and must not get one by a variable."""
    stored = api.mutate(pod(gpu())).patched()
    curious = container("debug", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "A", "value": "1"}])
    answer = api.mutate(debugged(stored, curious), "UPDATE", stored, subresource="ephemeralcontainers")
    made = answer.patched()["spec"]["ephemeralContainers"][0]["env"]
    assert made == [{"name": "A", "value": "1"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    after = answer.patched()
    assert api.validate(after, "UPDATE", stored, subresource="ephemeralcontainers").allowed
    refused = api.validate(debugged(stored, curious), "UPDATE", stored, subresource="ephemeralcontainers")
    assert refused.codes == ["NotRewritten"]
    # A second one: the first cannot change any more, and is left alone.
    more = debugged(after, *after["spec"]["ephemeralContainers"], container("second"))
    patch = api.mutate(more, "UPDATE", after, subresource="ephemeralcontainers").patch
    assert [operation["path"] for operation in patch] == ["/spec/ephemeralContainers/1/env"]


def test_debugging_a_pod_without_gpus_is_nobodys_business(api: Caller) -> None:
    """Whatever its variables say."""
    plain = pod(container())
    after = debugged(plain, container("debug", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]))
    assert api.mutate(after, "UPDATE", plain, subresource="ephemeralcontainers").patch == []
    assert api.validate(after, "UPDATE", plain, subresource="ephemeralcontainers").allowed


def test_memory_is_not_confused_with_another_amount(api: Caller) -> None:
    """8Gi again is the same, 16Gi is not."""
    stored = api.mutate(pod(gpu(memory="8Gi"))).patched()
    assert stored["spec"]["containers"][0]["resources"]["limits"][MEMORY] == "32"
    answer = api.mutate(applied(pod(gpu(memory="16Gi")), stored), "UPDATE", stored)
    assert set(answer.codes) == {"RequestFrozen"}
    assert answer.fields == [f"spec.containers[0].resources.{part}[{MEMORY}]" for part in ("limits", "requests")]
