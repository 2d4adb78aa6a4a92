"""Workloads: mistakes are refused at `kubectl apply`, and only fractions of a card are rewritten in templates."""

import copy
import json
from typing import Any

import pytest

from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, container, gpu, managed, pod, workload
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


def template_field(kind: str) -> str:
    return "spec.jobTemplate.spec.template.spec" if kind == "CronJob" else "spec.template.spec"


@pytest.mark.parametrize(("kind", "version"), KINDS.items())
def test_templates_of_every_kind_are_checked_like_pods(api: Caller, kind: str, version: str) -> None:
    """With the same codes, and the field paths of the workload."""
    invalid = workload(pod(gpu(core="150"), nodeName="n"), kind, version)
    answer = api.create(invalid)
    assert answer.codes == ["CoreInvalid", "NodeChosen"]
    assert answer.fields == [
        f"{template_field(kind)}.containers[0].resources.limits[{CORE}]",
        f"{template_field(kind)}.nodeName",
    ]


@pytest.mark.parametrize(("kind", "version"), KINDS.items())
def test_templates_are_not_rewritten(api: Caller, kind: str, version: str) -> None:
    """They would differ from the manifests in Git for ever."""
    valid = workload(
        pod(container(limits={"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "8Gi"})), kind, version
    )
    assert api.mutate(valid).patch == []
    assert api.create(valid).allowed


@pytest.mark.parametrize(("kind", "version"), KINDS.items())
@pytest.mark.parametrize("with_requests", [True, False])
def test_fractions_of_a_card_in_templates_are_rewritten(
    api: Caller, kind: str, version: str, *, with_requests: bool
) -> None:
    """The API server would reject them."""
    fractional = container(limits={CARDS: "300m", "cpu": "1"})
    if not with_requests:
        del fractional["resources"]["requests"]
    written = workload(pod(fractional, container("side", {CARDS: "2"})), kind, version)
    after = api.mutate(written).patched()
    template = after["spec"]["jobTemplate"]["spec"]["template"] if kind == "CronJob" else after["spec"]["template"]
    first, second = template["spec"]["containers"]
    wanted = {CORE: "30", MEMORY: "1", "cpu": "1"}
    assert first["resources"] == {"limits": wanted, **({"requests": wanted} if with_requests else {})}
    assert second["resources"]["limits"] == {CARDS: "2"}
    assert template["metadata"]["annotations"] == {NAMES.memory_follows_core: "c0", NAMES.cards_rewritten: "c0=30"}
    assert "schedulerName" not in str(api.mutate(written).patch)
    assert api.validate(after).allowed


def test_workloads_of_a_controller_are_not_checked(api: Caller) -> None:
    """Their owner was checked, and refusing them would only stall the controller."""
    replica_set = workload(pod(container(limits={CARDS: "300m"}), nodeName="n"), "ReplicaSet")
    replica_set["metadata"]["ownerReferences"] = [{"kind": "Deployment", "name": "d", "controller": True}]
    assert api.mutate(replica_set).patch == []
    assert api.validate(replica_set).allowed
    replica_set["metadata"]["ownerReferences"][0]["controller"] = False
    assert not api.create(replica_set).allowed


def test_applying_a_fraction_of_a_card_again_changes_nothing(api: Caller) -> None:
    """`kubectl apply` merges the manifest's key with the canonical ones."""
    stored = api.mutate(workload(pod(container(limits={CARDS: "300m"})))).patched()
    again = copy.deepcopy(stored)
    for part in ("limits", "requests"):
        again["spec"]["template"]["spec"]["containers"][0]["resources"][part][CARDS] = "300m"
    answer = api.mutate(again, "UPDATE", stored)
    assert answer.patched() == stored
    assert api.validate(answer.patched(), "UPDATE", stored).allowed


def test_another_fraction_replaces_the_one_that_was_rewritten_before(api: Caller) -> None:
    stored = api.mutate(workload(pod(container(limits={CARDS: "300m"})))).patched()
    after = copy.deepcopy(stored)
    for part in ("limits", "requests"):
        after["spec"]["template"]["spec"]["containers"][0]["resources"][part][CARDS] = "500m"
    patched = api.mutate(after, "UPDATE", stored).patched()
    assert patched["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {CORE: "50", MEMORY: "1"}
    assert api.validate(patched, "UPDATE", stored).allowed


APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def reapplied(stored: Obj, limits: dict[str, str] | None, *, gone: tuple[str, ...] = (), name: str = "c0") -> Obj:
    """Merge a changed manifest into a stored workload, as `kubectl apply` does, and store the manifest."""
    after = copy.deepcopy(stored)
    template = after["spec"]["template"]["spec"]
    changed = container(name, limits)
    manifest = workload(pod(changed), replicas=1)
    after["metadata"]["annotations"] = {APPLIED: json.dumps(manifest)}
    if name != "c0":
        template["containers"] = [changed]
        return after
    resources = template["containers"][0]["resources"]
    for part in ("limits", "requests"):
        resources[part] |= limits or {}
        for key in gone:
            resources[part].pop(key, None)
    return after


CHANGES: dict[str, tuple[dict[str, str] | None, dict[str, str], str | None]] = {
    "another fraction": ({CARDS: "500m"}, {CORE: "50", MEMORY: "1"}, "c0"),
    "whole cards": ({CARDS: "1"}, {CARDS: "1"}, None),
    "canonical amounts": ({CORE: "50", MEMORY: "30"}, {CORE: "50", MEMORY: "30"}, None),
    "canonical amounts with the same cores": ({CORE: "30", MEMORY: "8"}, {CORE: "30", MEMORY: "8"}, None),
    "another vocabulary": ({"k8s.amazonaws.com/vgpu": "5"}, {"k8s.amazonaws.com/vgpu": "5"}, None),
    "zero cards": ({CARDS: "0"}, {CARDS: "0"}, None),
    "no GPU": ({"cpu": "1"}, {"cpu": "1"}, None),
    "the same fraction": ({CARDS: "300m"}, {CORE: "30", MEMORY: "1"}, "c0"),
}


@pytest.mark.parametrize(("limits", "expected", "follows"), CHANGES.values(), ids=CHANGES.keys())
def test_a_fraction_of_a_card_can_be_changed_to_anything(
    api: Caller, limits: dict[str, str] | None, expected: dict[str, str], follows: str | None
) -> None:
    """The amounts that the webhook wrote are removed, so they cause no refusal."""
    stored = api.mutate(workload(pod(container(limits={CARDS: "300m"})), replicas=1)).patched()
    after = reapplied(stored, limits)
    answer = api.mutate(after, "UPDATE", stored)
    assert answer.allowed, answer.message
    patched = answer.patched()
    template = patched["spec"]["template"]
    assert template["spec"]["containers"][0]["resources"]["limits"] == expected
    assert template["metadata"].get("annotations", {}).get(NAMES.memory_follows_core) == follows
    assert (NAMES.cards_rewritten in template["metadata"].get("annotations", {})) == (follows is not None)
    checked = api.validate(patched, "UPDATE", stored)
    assert checked.allowed, checked.message
    assert api.mutate(patched, "UPDATE", stored).patch == []


@pytest.mark.parametrize("kind", ["Deployment", "CronJob"])
def test_a_fraction_of_a_card_that_server_side_apply_drops_is_removed(api: Caller, kind: str) -> None:
    """The amounts are the webhook's, so they would stay; clearing all managed fields drops nothing."""
    containers = f'{template_field(kind).replace(".", ">")}>containers>k:{{"name":"c0"}}'
    fraction = f"{containers}>resources>limits>{CARDS}"
    written = workload(pod(container(limits={CARDS: "300m"})), kind, KINDS[kind])
    stored = managed(api.mutate(written).patched(), fraction)
    assert api.mutate(managed(stored, fraction), "UPDATE", stored).patch == []
    assert api.mutate(managed(stored, manager="other"), "UPDATE", stored).patch == []
    answer = api.mutate(managed(stored, f"{containers}>image"), "UPDATE", stored)
    assert answer.allowed
    assert "vcuda" not in str(answer.patched()["spec"])
    assert NAMES.cards_rewritten not in str(answer.patched())


def test_a_manifest_without_gpus_does_not_remove_what_another_user_requests(api: Caller) -> None:
    """It was applied before, and has not changed since."""
    stored = api.mutate(workload(pod(container(limits={CARDS: "300m"})))).patched()
    stored["metadata"]["annotations"] = {APPLIED: json.dumps(workload(pod(container())))}
    labelled = copy.deepcopy(stored)
    labelled["metadata"]["labels"] = {"a": "b"}
    assert api.mutate(labelled, "UPDATE", stored).patch == []


def test_a_container_with_a_fraction_of_a_card_can_be_renamed(api: Caller) -> None:
    """Both annotations name the new container."""
    stored = api.mutate(workload(pod(container(limits={CARDS: "300m"})))).patched()
    patched = api.mutate(reapplied(stored, {CARDS: "300m"}, name="main"), "UPDATE", stored).patched()
    assert patched["spec"]["template"]["metadata"]["annotations"] == {
        NAMES.memory_follows_core: "main",
        NAMES.cards_rewritten: "main=30",
    }
    assert api.validate(patched, "UPDATE", stored).allowed


def test_mistakes_beside_a_fraction_of_a_card_are_refused_with_a_remedy(api: Caller) -> None:
    """The API server would only say that the amount must be an integer."""
    both = workload(pod(container("a", {CARDS: "300m"}), gpu("b", "500m", "1")))
    assert api.mutate(both).codes == ["QuantityInvalid"]


def test_requests_without_limits_are_refused_in_a_template(api: Caller) -> None:
    """A pod's are completed. The API server would reject a template's."""
    requests_only = {
        "name": "c0",
        "image": "i",
        "resources": {"requests": {CORE: "50", MEMORY: "30"}, "limits": {"cpu": "1"}},
    }
    answer = api.mutate(workload(pod(requests_only)))
    assert answer.codes == ["LimitMissing", "LimitMissing"]
    assert answer.fields[0] == f"spec.template.spec.containers[0].resources.requests[{CORE}]"
    fractional = {"name": "c0", "image": "i", "resources": {"requests": {CARDS: "300m"}}}
    patched = api.mutate(workload(pod(fractional))).patched()
    resources = patched["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"] == {CORE: "30", MEMORY: "1"}


def test_a_fraction_of_a_card_beside_canonical_amounts_is_refused(api: Caller) -> None:
    """It is unclear which of the two is intended."""
    both = workload(pod(container(limits={CARDS: "300m", CORE: "40", MEMORY: "8"})))
    assert api.create(both).codes == ["VocabulariesMixed"]


def test_an_unchanged_template_is_not_checked_again(api: Caller) -> None:
    """A workload from before Quotient can be scaled down and labelled."""
    before = workload(pod(gpu(core="150")), replicas=3)
    after = copy.deepcopy(before)
    after["metadata"]["labels"] = {"a": "b"}
    after["spec"]["replicas"] = 0
    assert api.validate(after, "UPDATE", before).allowed
    after["spec"]["template"]["spec"]["containers"][0]["image"] = "new"
    assert not api.validate(after, "UPDATE", before).allowed


def test_options_on_the_workload_itself_cause_a_warning(api: Caller) -> None:
    """They count on the template only."""
    misplaced = workload(pod(gpu()))
    misplaced["metadata"]["annotations"] = {NAMES.use_models: "A100"}
    answer = api.validate(misplaced)
    assert answer.allowed
    assert answer.warnings == [
        f"metadata.annotations[{NAMES.use_models}] has no effect here: move it to spec.template.metadata.annotations"
    ]


def test_a_workload_gets_the_warnings_of_its_pods(api: Caller) -> None:
    """A controller creates the pods, so users would not see them."""
    written = workload(pod(gpu(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]), hostIPC=True))
    warnings = api.validate(written).warnings
    assert any(warning.startswith("spec.template.spec.hostIPC") for warning in warnings)
    assert any("spec.template.spec.containers[0].env[NVIDIA_VISIBLE_DEVICES]" in warning for warning in warnings)


def test_more_pods_than_fit_the_quota_cause_a_warning(make_caller: MakeCaller) -> None:
    """Not a refusal: capacity may be released before the pods are created."""
    api = make_caller(quotas=[parse_quota("types: {A100: {cores: 200}}", "team/quota")])
    fits, does_not = workload(pod(gpu()), replicas=4), workload(pod(gpu()), replicas=5)
    assert api.validate(fits).warnings == []
    (warning,) = api.validate(does_not).warnings
    assert warning.startswith(
        "only 4 of 5 pods fit the namespace's quota now: team/quota: types.A100.cores: '250': asked 250 cores"
    )
    assert "exceeded quota" not in warning
    assert "short by 50" in warning
    assert api.validate(does_not).allowed
    for _ in range(4):
        assert api.create(pod(gpu())).allowed
    (warning,) = api.validate(does_not, "UPDATE", fits).warnings
    assert warning.startswith("the pod does not fit the namespace's quota now: team/quota: types.A100.cores")
    assert api.validate(fits, "UPDATE", does_not).warnings == []


def test_the_warning_names_the_limit_that_keeps_the_next_pod_out(make_caller: MakeCaller) -> None:
    """All pods together exceed the cores too, but more cores would not let one more pod in."""
    api = make_caller(quotas=[parse_quota("types: {A100: {cores: 400, pods: 2}}", "team/quota")])
    (warning,) = api.validate(workload(pod(gpu()), replicas=10)).warnings
    assert warning.startswith(
        "only 2 of 10 pods fit the namespace's quota now: team/quota: types.A100.pods: '10': asked 10 pod(s) of A100"
    )


def test_the_warning_names_the_limit_that_is_exceeded_on_every_model(make_caller: MakeCaller) -> None:
    """More cores of A100 would not let one more pod in, nor would more of T4."""
    quota = parse_quota("types: {A100: {cores: 100}, T4: {cores: 50}, '*': {cores: 120}}", "team/quota")
    (warning,) = make_caller(quotas=[quota]).validate(workload(pod(gpu()), replicas=10)).warnings
    assert warning.startswith(
        "only 2 of 10 pods fit the namespace's quota now: team/quota: types.*.cores: '500': asked 500 cores"
    )


def test_pods_that_no_quota_grants_cause_a_warning_with_quota_and_model(make_caller: MakeCaller) -> None:
    api = make_caller(quotas=[parse_quota("types: {A100: {cores: 200}}", "team/quota")])
    (warning,) = api.validate(workload(pod(gpu(), annotations={NAMES.use_models: "T4"}), replicas=5)).warnings
    assert warning == (
        "none of the 5 pods fits the namespace's quota now: team/quota: types: 'T4': the quota does not list this GPU "
        "model, and denies models that it does not list"
    )


@pytest.mark.parametrize("template", [{}, {"spec": None}, {"metadata": None, "spec": {"containers": []}}], ids=str)
def test_empty_and_malformed_templates_cause_no_failure(api: Caller, template: dict[str, Any]) -> None:
    """The API server rejects them itself."""
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d"},
        "spec": {"template": template},
    }
    assert api.mutate(deployment).status in (200, 400)
    assert api.validate(deployment).status in (200, 400)


def test_the_mutating_webhook_refuses_invalid_quantities_in_templates(api: Caller) -> None:
    """The API server would reject them before the validating webhook is called, without a remedy."""
    assert api.mutate(workload(pod(gpu(core="500m")))).codes == ["QuantityInvalid"]
