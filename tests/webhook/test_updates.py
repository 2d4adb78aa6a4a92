"""Updates of pods: what belongs to Quotient cannot change, and applying the same manifest again changes nothing."""

import copy
import json
from typing import Any

import pytest

from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, annotation_in, container, gpu, managed, pod
from tests.webhook.reviews import Caller, MakeCaller
from vcuda.namespace_policy import NamespacePolicy

APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
OWN_ACCOUNT = "system:serviceaccount:quotient-system:quotient-scheduler"

Obj = dict[str, Any]


def changed(stored: Obj, **annotations: str | None) -> Obj:
    """Return a pod with other annotations; None removes one."""
    after = copy.deepcopy(stored)
    for key, value in annotations.items():
        after["metadata"].setdefault("annotations", {})
        if value is None:
            after["metadata"]["annotations"].pop(key)
        else:
            after["metadata"]["annotations"][key] = value
    return after


def test_only_quotient_may_add_change_or_remove_owned_annotations(api: Caller) -> None:
    stored = changed(api.mutate(pod(gpu())).patched(), **{NAMES.placement: "{}"})
    for annotations in (
        {NAMES.placement: '{"v":1}'},
        {NAMES.placement: None},
        {NAMES.limits: None},
        {NAMES.limits: "{}"},
        {"tencent.com/predicate-gpu-idx-0": "1"},
        {"inspur.com/gpu-assigned": "true"},
    ):
        after = changed(stored, **annotations)
        answer = api.validate(after, "UPDATE", stored)
        assert answer.codes == ["AnnotationOwned"]
        assert answer.fields == [f"metadata.annotations[{next(iter(annotations))}]"]
        assert api.validate(after, "UPDATE", stored, user=OWN_ACCOUNT).allowed
    for forger in ("system:serviceaccount:quotient-system-2:x", "system:serviceaccount:default:quotient-scheduler"):
        assert not api.validate(changed(stored, **{NAMES.placement: "x"}), "UPDATE", stored, user=forger).allowed


def test_an_update_cannot_give_a_placement_to_a_pod_without_gpus(api: Caller) -> None:
    plain = pod(container())
    assert api.validate(changed(plain, **{NAMES.placement: "{}"}), "UPDATE", plain).codes == ["AnnotationOwned"]


@pytest.mark.parametrize(
    "key",
    [NAMES.core_limit, NAMES.use_models, NAMES.avoid_models, NAMES.memory_follows_core, "tencent.com/use-gputype"],
)
def test_options_cannot_change_after_the_pod_was_charged(api: Caller, key: str) -> None:
    """The charge depends on them."""
    stored = api.mutate(pod(gpu())).patched()
    answer = api.validate(changed(stored, **{key: "99"}), "UPDATE", stored)
    assert answer.codes == ["AnnotationFrozen"]
    assert "create it again" in answer.message


def test_a_pod_from_before_quotient_can_be_updated(api: Caller) -> None:
    """Only changes are checked, and only of what belongs to Quotient."""
    before = pod(gpu(core="150"), annotations={NAMES.core_limit: "x"}, nodeName="n", schedulerName="other")
    after = copy.deepcopy(before)
    after["metadata"]["labels"]["new"] = "label"
    after["metadata"]["annotations"] |= {"other": "x"}
    assert api.mutate(after, "UPDATE", before).patch == []
    assert api.validate(after, "UPDATE", before).allowed
    after["metadata"]["annotations"] |= {NAMES.memory_follows_core: "c0"}
    assert api.validate(after, "UPDATE", before).codes == ["AnnotationFrozen"], "its charge depends on it"


def test_updates_of_other_fields_are_allowed_unchanged(api: Caller) -> None:
    stored = api.mutate(pod(gpu(), container("side"))).patched()
    after = copy.deepcopy(stored)
    after["metadata"]["finalizers"] = ["x/y"]
    after["spec"]["containers"][0]["image"] = "other"
    assert api.mutate(after, "UPDATE", stored).patch == []
    assert api.validate(after, "UPDATE", stored).allowed


def applied(manifest: Obj, stored: Obj) -> Obj:
    """Merge a manifest into a stored pod as `kubectl apply` does: maps by key, named lists by name, others replaced."""
    merged: Obj = merge(copy.deepcopy(stored), copy.deepcopy(manifest))
    merged["metadata"].setdefault("annotations", {})[APPLIED] = json.dumps(manifest)
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
    "canonical resources": pod(gpu()),
    "memory in bytes": pod(gpu(memory="8Gi")),
    "Tencent's": pod(
        container(limits={"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "30"}),
        annotations={"tencent.com/vcuda-core-limit": "80"},
    ),
    "NVIDIA's with models": pod(
        container(limits={"nvidia.com/vcuda-core": "30", "nvidia.com/vcuda-memory": "7680"}),
        annotations={"nvidia.com/use-gputype": "A100,V100"},
    ),
    "AWS with hostIPC and its hostPath": pod(
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
    "some containers whose memory follows": pod(
        container("a", {CORE: "30"}), container("b", {CARDS: "500m"}), annotations={NAMES.memory_follows_core: "a"}
    ),
    "Tencent's, with memory that follows": pod(
        container(limits={"tencent.com/vcuda-core": "30"}), annotations={NAMES.memory_follows_core: "c0"}
    ),
    "forged annotations on a pod without GPUs": pod(container(), annotations={NAMES.placement: "{}"}),
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
    """The API server would reject most of the changes that `kubectl apply` makes: the fields are immutable."""
    api = make_caller(policy=NamespacePolicy(pools=("training",)), tolerations=({"key": "gpu", "operator": "Exists"},))
    first = copy.deepcopy(manifest)
    first["metadata"].setdefault("annotations", {})[APPLIED] = json.dumps(manifest)
    stored = api.mutate(first).patched()
    assert api.validate(stored).allowed
    again = api.mutate(applied(manifest, stored), "UPDATE", stored)
    assert again.allowed
    assert again.patched() == stored
    assert api.validate(again.patched(), "UPDATE", stored).allowed


def test_a_manifest_with_another_gpu_request_is_refused(api: Caller) -> None:
    """With a remedy, which the API server's own message lacks."""
    manifest = pod(container(limits={"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "30"}))
    stored = api.mutate(manifest).patched()
    other = pod(container(limits={"tencent.com/vcuda-core": "60", "tencent.com/vcuda-memory": "30"}))
    answer = api.mutate(applied(other, stored), "UPDATE", stored)
    assert set(answer.codes) == {"RequestFrozen"}
    assert "delete the pod and create it again" in answer.message


def test_a_manifest_with_another_option_is_refused(api: Caller) -> None:
    """Under the domain of an ancestor too."""
    manifest = pod(gpu(), annotations={"tencent.com/vcuda-core-limit": "80"})
    stored = api.mutate(manifest).patched()
    other = pod(gpu(), annotations={"tencent.com/vcuda-core-limit": "60"})
    after = api.mutate(applied(other, stored), "UPDATE", stored).patched()
    assert api.validate(after, "UPDATE", stored).codes == ["AnnotationFrozen"]
    assert annotation_in(stored, NAMES.core_limit) == "80"


PLACEMENT = f"metadata>annotations>{NAMES.placement}"
LIMITS = 'spec>containers>k:{"name":"c0"}>resources>limits'


def test_owned_annotations_of_server_side_apply_change_nothing(api: Caller) -> None:
    """Applied again or dropped: there is no stored manifest, but the managed fields show who has declared them."""
    stored = managed(api.mutate(pod(gpu(), annotations={NAMES.placement: "{}"})).patched(), PLACEMENT)
    again = changed(stored, **{NAMES.placement: "{}"})
    assert api.mutate(again, "UPDATE", stored).patched() == stored
    placed = changed(stored, **{NAMES.placement: '{"v":1}'})
    dropped = managed(stored)
    restored = api.mutate(dropped, "UPDATE", placed).patched()
    assert restored["metadata"]["annotations"] == placed["metadata"]["annotations"]
    for before in (managed(stored), managed(stored, PLACEMENT, operation="Update")):
        after = managed(again, PLACEMENT)
        assert api.mutate(after, "UPDATE", before).patch == []
        assert api.validate(after, "UPDATE", before).codes == ["AnnotationOwned"]


@pytest.mark.parametrize("how", ["client-side", "server-side"])
def test_a_manifest_that_no_longer_requests_gpus_is_refused(api: Caller, how: str) -> None:
    """The pod keeps them, and the API server sees no change: the manifest's keys are not in the stored pod."""
    amounts = {"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "30"}
    stored = api.mutate(pod(container(limits=amounts))).patched()
    if how == "client-side":
        stored["metadata"]["annotations"][APPLIED] = json.dumps(pod(container(limits=amounts)))
        after = applied(pod(container()), stored)
    else:
        stored = managed(stored, *(f"{LIMITS}>{key}" for key in amounts))
        after = managed(stored, 'spec>containers>k:{"name":"c0"}>image')
        assert api.mutate(managed(after, manager="other"), "UPDATE", stored).patch == [], "managed fields cleared"
    answer = api.mutate(after, "UPDATE", stored)
    assert (answer.codes, answer.fields) == (["RequestFrozen"], ["spec.containers[0].resources"])


def test_a_placement_set_by_hand_is_refused_not_restored(api: Caller) -> None:
    """It is not in the manifest that `kubectl apply` stores, so it cannot come from applying that again."""
    stored = api.mutate(pod(gpu(), annotations={APPLIED: "{}"})).patched()
    after = changed(stored, **{NAMES.placement: "{}"})
    assert api.mutate(after, "UPDATE", stored).patch == []
    assert api.validate(after, "UPDATE", stored).codes == ["AnnotationOwned"]


@pytest.mark.parametrize("manifest", ["", "[]", "{", '{"metadata": 1}', '{"metadata": {"annotations": {"a": 1}}}'])
def test_a_malformed_stored_manifest_is_ignored(api: Caller, manifest: str) -> None:
    """Users can write anything into the annotation of `kubectl apply`."""
    stored = changed(api.mutate(pod(gpu())).patched(), **{APPLIED: manifest})
    assert api.validate(changed(stored, **{NAMES.placement: "{}"}), "UPDATE", stored).codes == ["AnnotationOwned"]
    assert api.mutate(changed(stored, **{NAMES.placement: "{}"}), "UPDATE", stored).status == 200


def with_ephemeral(stored: Obj, *containers: Obj) -> Obj:
    after = copy.deepcopy(stored)
    after["spec"]["ephemeralContainers"] = list(containers)
    return after


def test_ephemeral_containers_see_no_gpu(api: Caller) -> None:
    """They cannot request GPUs, and must not get them by a variable."""
    stored = api.mutate(pod(gpu())).patched()
    exposing = container("debug", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"name": "A", "value": "1"}])
    answer = api.mutate(with_ephemeral(stored, exposing), "UPDATE", stored, subresource="ephemeralcontainers")
    env = answer.patched()["spec"]["ephemeralContainers"][0]["env"]
    assert env == [{"name": "A", "value": "1"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    after = answer.patched()
    assert api.validate(after, "UPDATE", stored, subresource="ephemeralcontainers").allowed
    refused = api.validate(with_ephemeral(stored, exposing), "UPDATE", stored, subresource="ephemeralcontainers")
    assert refused.codes == ["NotRewritten"]
    # The first one is immutable now, so only the second is patched.
    more = with_ephemeral(after, *after["spec"]["ephemeralContainers"], container("second"))
    patch = api.mutate(more, "UPDATE", after, subresource="ephemeralcontainers").patch
    assert [operation["path"] for operation in patch] == ["/spec/ephemeralContainers/1/env"]


def test_ephemeral_containers_of_a_pod_without_gpus_are_not_changed(api: Caller) -> None:
    plain = pod(container())
    after = with_ephemeral(plain, container("debug", env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]))
    assert api.mutate(after, "UPDATE", plain, subresource="ephemeralcontainers").patch == []
    assert api.validate(after, "UPDATE", plain, subresource="ephemeralcontainers").allowed


def test_memory_in_bytes_is_compared_by_its_amount(api: Caller) -> None:
    """16Gi is refused on a pod that was created with 8Gi, and stored as 32 units."""
    stored = api.mutate(pod(gpu(memory="8Gi"))).patched()
    assert stored["spec"]["containers"][0]["resources"]["limits"][MEMORY] == "32"
    answer = api.mutate(applied(pod(gpu(memory="16Gi")), stored), "UPDATE", stored)
    assert set(answer.codes) == {"RequestFrozen"}
    assert answer.fields == [f"spec.containers[0].resources.{part}[{MEMORY}]" for part in ("limits", "requests")]
