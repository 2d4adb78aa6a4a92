"""Workloads: mistakes are told when they are applied, and templates stay as their authors wrote them."""

import copy
import json
from typing import Any

import pytest

from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, container, gpu, pod, workload
from tests.webhook.reviews import Caller, MakeCaller
from vcuda.quota import parse_quota

Obj = dict[str, Any]

KINDS = {
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "DaemonSet": "apps/v1",
    "ReplicaSet": "apps/v1",
    "ReplicationController": "v1",
    "Job": "batch/v1",
    "CronJob": "batch/v1",
}


def path_of(kind: str) -> str:
    return "spec.jobTemplate.spec.template.spec" if kind == "CronJob" else "spec.template.spec"


@pytest.mark.parametrize(("kind", "version"), KINDS.items())
def test_every_kind_is_held_to_the_rules_of_its_pods(api: Caller, kind: str, version: str) -> None:
    """Same codes, same words, and the path in the workload."""
    wrong = workload(pod(gpu(core="150"), nodeName="n"), kind, version)
    answer = api.create(wrong)
    assert answer.codes == ["CoreInvalid", "NodeChosen"]
    assert answer.fields == [
        f"{path_of(kind)}.containers[0].resources.limits[{CORE}]",
        f"{path_of(kind)}.nodeName",
    ]


@pytest.mark.parametrize(("kind", "version"), KINDS.items())
def test_templates_are_not_rewritten(api: Caller, kind: str, version: str) -> None:
    """That would fight those who keep them in Git."""
    right = workload(
        pod(container(limits={"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "8Gi"})), kind, version
    )
    assert api.mutate(right).patch == []
    assert api.create(right).allowed


@pytest.mark.parametrize(("kind", "version"), KINDS.items())
@pytest.mark.parametrize("with_requests", [True, False])
def test_parts_of_a_card_are_the_exception(api: Caller, kind: str, version: str, *, with_requests: bool) -> None:
    """The API server would refuse them in a template."""
    made = container(limits={CARDS: "300m", "cpu": "1"})
    if not with_requests:
        del made["resources"]["requests"]
    written = workload(pod(made, container("side", {CARDS: "2"})), kind, version)
    after = api.mutate(written).patched()
    template = after["spec"]["jobTemplate"]["spec"]["template"] if kind == "CronJob" else after["spec"]["template"]
    first, second = template["spec"]["containers"]
    wanted = {CORE: "30", MEMORY: "1", "cpu": "1"}
    assert first["resources"] == {"limits": wanted, **({"requests": wanted} if with_requests else {})}
    assert second["resources"]["limits"] == {CARDS: "2"}
    assert template["metadata"]["annotations"] == {NAMES.memory_follows_core: "c0", NAMES.cards_rewritten: "c0=30"}
    assert "schedulerName" not in str(api.mutate(written).patch)
    assert api.validate(after).allowed


def test_what_a_controller_made_is_left_alone(api: Caller) -> None:
    """Its owner was asked, and to refuse it would only stall the controller."""
    made = workload(pod(container(limits={CARDS: "300m"}), nodeName="n"), "ReplicaSet")
    made["metadata"]["ownerReferences"] = [{"kind": "Deployment", "name": "d", "controller": True}]
    assert api.mutate(made).patch == []
    assert api.validate(made).allowed
    made["metadata"]["ownerReferences"][0]["controller"] = False
    assert not api.create(made).allowed


def test_applying_a_part_of_a_card_again_changes_nothing(api: Caller) -> None:
    """The manifest's key comes back beside the canonical ones."""
    stored = api.mutate(workload(pod(container(limits={CARDS: "300m"})))).patched()
    again = copy.deepcopy(stored)
    for part in ("limits", "requests"):
        again["spec"]["template"]["spec"]["containers"][0]["resources"][part][CARDS] = "300m"
    answer = api.mutate(again, "UPDATE", stored)
    assert answer.patched() == stored
    assert api.validate(answer.patched(), "UPDATE", stored).allowed


def test_another_part_of_a_card_wins_over_what_was_rewritten_before(api: Caller) -> None:
    """The manifest says half a card now."""
    stored = api.mutate(workload(pod(container(limits={CARDS: "300m"})))).patched()
    after = copy.deepcopy(stored)
    for part in ("limits", "requests"):
        after["spec"]["template"]["spec"]["containers"][0]["resources"][part][CARDS] = "500m"
    made = api.mutate(after, "UPDATE", stored).patched()
    assert made["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {CORE: "50", MEMORY: "1"}
    assert api.validate(made, "UPDATE", stored).allowed


APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def reapplied(stored: Obj, limits: dict[str, str] | None, *, gone: tuple[str, ...] = (), name: str = "c0") -> Obj:
    """Merge a changed manifest over a stored workload, as `kubectl apply` does, with what it remembers."""
    after = copy.deepcopy(stored)
    template = after["spec"]["template"]["spec"]
    made = container(name, limits)
    manifest = workload(pod(made), replicas=1)
    after["metadata"]["annotations"] = {APPLIED: json.dumps(manifest)}
    if name != "c0":
        template["containers"] = [made]
        return after
    resources = template["containers"][0]["resources"]
    for part in ("limits", "requests"):
        resources[part] |= limits or {}
        for key in gone:
            resources[part].pop(key, None)
    return after


CHANGES: dict[str, tuple[dict[str, str] | None, dict[str, str], str | None]] = {
    "another part": ({CARDS: "500m"}, {CORE: "50", MEMORY: "1"}, "c0"),
    "whole cards": ({CARDS: "1"}, {CARDS: "1"}, None),
    "canonical amounts": ({CORE: "50", MEMORY: "30"}, {CORE: "50", MEMORY: "30"}, None),
    "canonical amounts of the same cores": ({CORE: "30", MEMORY: "8"}, {CORE: "30", MEMORY: "8"}, None),
    "another vocabulary": ({"k8s.amazonaws.com/vgpu": "5"}, {"k8s.amazonaws.com/vgpu": "5"}, None),
    "no GPU any more": ({"cpu": "1"}, {"cpu": "1"}, None),
    "the same again": ({CARDS: "300m"}, {CORE: "30", MEMORY: "1"}, "c0"),
}


@pytest.mark.parametrize(("limits", "expected", "follows"), CHANGES.values(), ids=CHANGES.keys())
def test_a_part_of_a_card_can_be_changed_into_anything(
    api: Caller, limits: dict[str, str] | None, expected: dict[str, str], follows: str | None
) -> None:
    """What was put in before is taken out again, and nobody is told of what he did not write."""
    stored = api.mutate(workload(pod(container(limits={CARDS: "300m"})), replicas=1)).patched()
    after = reapplied(stored, limits)
    answer = api.mutate(after, "UPDATE", stored)
    assert answer.allowed, answer.message
    made = answer.patched()
    template = made["spec"]["template"]
    assert template["spec"]["containers"][0]["resources"]["limits"] == expected
    assert template["metadata"].get("annotations", {}).get(NAMES.memory_follows_core) == follows
    assert (NAMES.cards_rewritten in template["metadata"].get("annotations", {})) == (follows is not None)
    checked = api.validate(made, "UPDATE", stored)
    assert checked.allowed, checked.message
    assert api.mutate(made, "UPDATE", stored).patch == []


def test_a_container_with_a_part_of_a_card_can_be_renamed(api: Caller) -> None:
    """The annotation follows."""
    stored = api.mutate(workload(pod(container(limits={CARDS: "300m"})))).patched()
    made = api.mutate(reapplied(stored, {CARDS: "300m"}, name="main"), "UPDATE", stored).patched()
    assert made["spec"]["template"]["metadata"]["annotations"] == {
        NAMES.memory_follows_core: "main",
        NAMES.cards_rewritten: "main=30",
    }
    assert api.validate(made, "UPDATE", stored).allowed


def test_mistakes_beside_a_part_of_a_card_are_told_in_our_words(api: Caller) -> None:
    """Before the API server says only that something must be an integer."""
    both = workload(pod(container("a", {CARDS: "300m"}), gpu("b", "500m", "1")))
    assert api.mutate(both).codes == ["QuantityInvalid"]


def test_a_template_needs_limits(api: Caller) -> None:
    """A pod's are completed; a template's would be refused by the API server."""
    asked = {"name": "c0", "image": "i", "resources": {"requests": {CORE: "50", MEMORY: "30"}, "limits": {"cpu": "1"}}}
    answer = api.mutate(workload(pod(asked)))
    assert answer.codes == ["LimitMissing", "LimitMissing"]
    assert answer.fields[0] == f"spec.template.spec.containers[0].resources.requests[{CORE}]"
    part = {"name": "c0", "image": "i", "resources": {"requests": {CARDS: "300m"}}}
    made = api.mutate(workload(pod(part))).patched()
    resources = made["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"] == {CORE: "30", MEMORY: "1"}


def test_a_part_of_a_card_beside_an_amount_of_the_authors_own_is_a_mistake(api: Caller) -> None:
    """Nobody knows which of the two was meant."""
    both = workload(pod(container(limits={CARDS: "300m", CORE: "40", MEMORY: "8"})))
    assert api.create(both).codes == ["VocabulariesMixed"]


def test_what_did_not_change_is_not_judged_again(api: Caller) -> None:
    """A workload from before must remain usable: scaled down, labelled, deleted."""
    before = workload(pod(gpu(core="150")), replicas=3)
    after = copy.deepcopy(before)
    after["metadata"]["labels"] = {"a": "b"}
    after["spec"]["replicas"] = 0
    assert api.validate(after, "UPDATE", before).allowed
    after["spec"]["template"]["spec"]["containers"][0]["image"] = "new"
    assert not api.validate(after, "UPDATE", before).allowed


def test_wishes_on_the_workload_itself_are_told_to_be_misplaced(api: Caller) -> None:
    """Nobody reads them there."""
    made = workload(pod(gpu()))
    made["metadata"]["annotations"] = {NAMES.use_models: "A100"}
    answer = api.validate(made)
    assert answer.allowed
    assert answer.warnings == [
        f"metadata.annotations[{NAMES.use_models}] has no effect here: it belongs to spec.template.metadata.annotations"
    ]


def test_what_will_be_taken_out_of_the_pods_is_told(api: Caller) -> None:
    """When the author looks, not when the pods are made."""
    made = workload(pod(gpu(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]), hostIPC=True))
    warnings = api.validate(made).warnings
    assert any(warning.startswith("spec.template.spec.hostIPC") for warning in warnings)
    assert any("spec.template.spec.containers[0].env[NVIDIA_VISIBLE_DEVICES]" in warning for warning in warnings)


def test_more_pods_than_the_quota_holds_are_told_of(make_caller: MakeCaller) -> None:
    """Replicas times share; a warning only, for others may end."""
    api = make_caller(quotas=[parse_quota("types: {A100: {cores: 200}}", "team/quota")])
    fits, does_not = workload(pod(gpu()), replicas=4), workload(pod(gpu()), replicas=5)
    assert api.validate(fits).warnings == []
    (told,) = api.validate(does_not).warnings
    assert "4 of 5 pods" in told
    assert "asked 250 cores" in told
    assert "short by 50" in told
    assert api.validate(does_not).allowed
    for _ in range(4):
        assert api.create(pod(gpu())).allowed
    (told,) = api.validate(does_not, "UPDATE", fits).warnings
    assert "0 of 1 pods" in told
    assert api.validate(fits, "UPDATE", does_not).warnings == []


@pytest.mark.parametrize("odd", [{}, {"spec": None}, {"metadata": None, "spec": {"containers": []}}], ids=str)
def test_templates_that_are_hardly_there_do_no_harm(api: Caller, odd: dict[str, Any]) -> None:
    """The API server refuses them itself."""
    made = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"}, "spec": {"template": odd}}
    assert api.mutate(made).status in (200, 400)
    assert api.validate(made).status in (200, 400)


def test_quantities_are_refused_before_the_api_server_does(api: Caller) -> None:
    """It validates templates itself, in poor words."""
    assert api.mutate(workload(pod(gpu(core="500m")))).codes == ["QuantityInvalid"]
