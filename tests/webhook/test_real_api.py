"""Admission by a real API server: every rule, every vocabulary, every attempt to bypass it."""

import json
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.api import ApiCluster, connect
from cluster.errors import ApiError
from cluster.objects import PODS
from settings.configuration import Configuration
from tests.cluster.objects import new_namespace
from tests.cluster.real import ClusterError, RealCluster
from tests.conftest import SharedClusters
from tests.waiting import eventually
from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, annotation_in, container, gpu, pod, workload
from tests.webhook.running import Authority, RunningWebhook, register, run_controller, unregister
from tests.webhook.service import Service
from tests.webhook.test_refusals import INVALID
from tests.webhook.test_rewriting import VOCABULARIES
from tests.webhook.test_updates import MANIFESTS
from tests.webhook.test_workloads import CHANGES, KINDS
from vcuda.decision import Unavailable
from vcuda.vocabulary import VocabularyOptions

pytestmark = pytest.mark.kubernetes

CONFIGURATION = Configuration(vocabularies=VocabularyOptions(hami=True))
SYSTEM = "quotient-system"
SCHEDULER = f"system:serviceaccount:{SYSTEM}:quotient-scheduler"

Obj = dict[str, Any]


class Governed:
    """A real cluster with the webhook registered."""

    def __init__(self, real: RealCluster, webhook: RunningWebhook, authority: Authority) -> None:
        self.real, self.webhook, self.authority = real, webhook, authority
        self.cluster: ApiCluster = connect(str(real.kubeconfig))

    def namespace(self) -> str:
        """Create a namespace and return its name."""
        return new_namespace(self.cluster, f"t-{uuid.uuid4().hex[:8]}")

    def create(self, manifest: Obj, namespace: str = "default", *, dry_run: bool = False) -> Obj:
        """Create an object of any kind, and return it as it is stored; raises Refusal."""
        body = {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace}}
        version, plural = body["apiVersion"], body["kind"].lower() + "s"
        base = f"/apis/{version}" if "/" in version else f"/api/{version}"
        query = {"dryRun": "All"} if dry_run else {}
        try:
            stored: Obj = json.loads(self.cluster._call("POST", f"{base}/namespaces/{namespace}/{plural}", query, body))
        except (ApiError, Unavailable) as error:
            raise Refusal(str(error)) from None
        return stored

    def raw(self, path: str, body: Obj, *flags: str) -> str:
        """Send an object to a path of the API, and return the response or error as text."""
        return self.real.kubectl("create", "--raw", path, "-f-", *flags, stdin=json.dumps(body), check=False)


class Refusal(Exception):  # noqa: N818
    """The API server's message when it rejects a request."""


@pytest.fixture(scope="module", params=["true", "false"], ids=["short", "long"])
def governed(
    request: pytest.FixtureRequest, shared_clusters: SharedClusters, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Governed]:
    """The webhook as a process, with the short path on or off, registered at a real API server."""
    request.getfixturevalue("real_cluster_possible")
    real = shared_clusters.get(node=False)
    authority = Authority(tmp_path_factory.mktemp("webhook") / "tls")
    settings = ("vocabularies.hami=true", f"webhook.shortPath={request.param}")
    with (
        run_controller(real, authority.folder.parent),
        RunningWebhook(authority, real.kubeconfig, *settings) as webhook,
    ):
        try:
            register(real, CONFIGURATION, webhook.port, authority)
            yield Governed(real, webhook, authority)
        finally:
            unregister(real)


def plain() -> Obj:
    return pod(container(limits={"cpu": "100m"}))


def as_typed(amounts: dict[str, str]) -> dict[str, str]:
    """Return amounts as users write them: 0.3, which the API server sends to webhooks as 300m."""
    return {key: {"300m": "0.3", "500m": "0.5"}.get(value, value) for key, value in amounts.items()}


@pytest.mark.parametrize(("amounts", "config", "expected", "follows"), VOCABULARIES.values(), ids=VOCABULARIES.keys())
def test_every_vocabulary_is_stored_in_the_canonical_one(
    governed: Governed, amounts: dict[str, str], config: dict[str, Any], expected: tuple[str, str], follows: str | None
) -> None:
    del config
    written = pod({"name": "c0", "image": "i", "resources": {"limits": as_typed(amounts)}})
    stored = governed.create(written, dry_run=True)
    limits = stored["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {CORE: expected[0], MEMORY: expected[1]}
    assert stored["spec"]["containers"][0]["resources"]["requests"] == limits
    assert annotation_in(stored, NAMES.memory_follows_core) == follows
    assert stored["spec"]["schedulerName"] == "quotient-scheduler"


# Names that are not unique are rejected by the API server itself, before it calls validating webhooks.
REVIEWED = {name: case for name, case in INVALID.items() if case[1] != ["ContainerDuplicate"]}


@pytest.mark.parametrize(("invalid", "codes", "remedy"), REVIEWED.values(), ids=REVIEWED.keys())
def test_every_mistake_is_refused_with_its_remedy(
    governed: Governed, invalid: Obj, codes: list[str], remedy: str
) -> None:
    """By the webhook, before the API server's own validation."""
    del codes
    with pytest.raises(Refusal) as refusal:
        governed.create(invalid, dry_run=True)
    assert remedy in str(refusal.value)
    assert 'quotient.dev" denied the request: ' in str(refusal.value)


def test_the_api_server_passes_on_status_and_message(governed: Governed) -> None:
    invalid = pod(gpu(core="150"), nodeName="n")
    with pytest.raises(ApiError) as refusal:
        governed.cluster.create(PODS, invalid, dry_run=True)
    assert refusal.value.code == 403
    response = governed.raw("/api/v1/namespaces/default/pods?dryRun=All", invalid)
    assert "a multiple of 100 (whole GPUs)" in response


@pytest.mark.parametrize(("kind", "version"), KINDS.items())
def test_workloads_are_checked_when_they_are_applied(governed: Governed, kind: str, version: str) -> None:
    """Every kind; valid ones are stored unchanged, except that fractions of a card are rewritten."""
    selector: Any = {"app": "x"} if kind == "ReplicationController" else {"matchLabels": {"app": "x"}}
    extra: Obj = {
        "CronJob": {"schedule": "* * * * *"},
        "Job": {},
        "StatefulSet": {"selector": selector, "serviceName": "s"},
    }.get(kind, {"selector": selector})
    policy: Obj = {"restartPolicy": "Never"} if kind in ("Job", "CronJob") else {}
    with pytest.raises(Refusal, match="a multiple of 100"):
        governed.create(workload(pod(gpu(core="150"), **policy), kind, version, **extra), dry_run=True)
    fractional = pod({"name": "c0", "image": "i", "resources": {"limits": {CARDS: "0.3"}}}, **policy)
    stored = governed.create(workload(fractional, kind, version, **extra), dry_run=True)
    spec = stored["spec"]["jobTemplate"]["spec"] if kind == "CronJob" else stored["spec"]
    template = spec["template"]
    assert template["spec"]["containers"][0]["resources"]["limits"] == {CORE: "30", MEMORY: "1"}
    assert template["metadata"]["annotations"] == {NAMES.memory_follows_core: "c0", NAMES.cards_rewritten: "c0=30"}
    untouched = governed.create(workload(pod(container(), **policy), kind, version, **extra), dry_run=True)
    assert "inspur.com" not in json.dumps(untouched)


def test_the_pods_of_a_deployment_are_admitted(governed: Governed) -> None:
    """From the template through the ReplicaSet to the pods."""
    namespace = governed.namespace()
    template = pod({"name": "c0", "image": "i", "resources": {"limits": {CARDS: "0.5"}}})
    governed.create(workload(template, replicas=2, selector={"matchLabels": {"app": "x"}}), namespace)
    eventually(lambda: len(governed.cluster.list(PODS, namespace).items) == 2, "the pods")
    for each in governed.cluster.list(PODS, namespace).items:
        assert each.spec.scheduler_name == "quotient-scheduler"
        assert NAMES.limits in each.metadata.annotations


@pytest.mark.parametrize("flags", [(), ("--server-side",)], ids=["client-side", "server-side"])
@pytest.mark.parametrize(("limits", "expected", "follows"), CHANGES.values(), ids=CHANGES.keys())
def test_a_deployments_fraction_of_a_card_can_be_changed(
    governed: Governed,
    limits: dict[str, str] | None,
    expected: dict[str, str],
    follows: str | None,
    flags: tuple[str, ...],
) -> None:
    """With kubectl, which merges the manifest with what the API server has stored."""
    namespace = governed.namespace()

    def apply(amounts: dict[str, str] | None) -> Obj:
        written = {"name": "c0", "image": "i", "resources": {"limits": as_typed(amounts or {})}}
        manifest = workload(pod(written), selector={"matchLabels": {"app": "x"}}, replicas=0)
        manifest["metadata"] |= {"namespace": namespace}
        output = governed.real.kubectl("apply", "-ojson", "-f-", *flags, stdin=json.dumps(manifest))
        template: Obj = json.loads(output)["spec"]["template"]
        return template

    apply({CARDS: "300m"})
    template = apply(limits)
    assert template["spec"]["containers"][0]["resources"]["limits"] == expected
    assert template["metadata"].get("annotations", {}).get(NAMES.memory_follows_core) == follows


def test_a_request_that_another_user_added_is_kept(governed: Governed) -> None:
    """Although the manifest that was applied first requests no GPU: it does not change afterwards."""
    namespace = governed.namespace()
    plain_workload = workload(pod(container(limits={"cpu": "1"})), selector={"matchLabels": {"app": "x"}}, replicas=0)
    governed.real.kubectl("apply", "-f-", stdin=json.dumps(as_manifest(plain_workload, namespace)))
    patch = {"spec": {"template": {"spec": {"containers": [{"name": "c0", "resources": {"limits": {CARDS: "0.3"}}}]}}}}
    governed.real.kubectl("patch", "deployment", "w", "-n", namespace, "-p", json.dumps(patch))
    governed.real.kubectl("label", "deployment", "w", "-n", namespace, "a=b")
    ((spec, _),) = stored_specs(governed, namespace)
    limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "1", CORE: "30", MEMORY: "1"}


APPLIES = {
    "client-side": [(), ()],
    "server-side": [("--server-side",), ("--server-side",)],
    "server-side, forced": [("--server-side", "--force-conflicts")] * 2,
    "client-side, then server-side": [(), ("--server-side", "--force-conflicts")],
}
APPLICABLE = MANIFESTS | {
    name: pod(container(limits=amounts)) for name, (amounts, config, *_) in VOCABULARIES.items() if "HAMi" in name
}


def as_manifest(obj: Obj, namespace: str) -> Obj:
    """Return a pod or Deployment as a user writes it: fractions as typed, limits alone."""
    typed: Obj = json.loads(json.dumps(obj).replace('"300m"', '"0.3"').replace('"500m"', '"0.5"'))
    typed["metadata"]["namespace"] = namespace
    spec = typed["spec"]["template"]["spec"] if "template" in typed["spec"] else typed["spec"]
    for each in spec["containers"]:
        each.get("resources", {}).pop("requests", None)
    return typed


@pytest.mark.parametrize("flags", APPLIES.values(), ids=APPLIES.keys())
@pytest.mark.parametrize("manifest", APPLICABLE.values(), ids=APPLICABLE.keys())
def test_applying_a_manifest_again_changes_nothing(
    governed: Governed, manifest: Obj, flags: list[tuple[str, ...]]
) -> None:
    """With kubectl; pods, which the webhook has rewritten, and Deployments, whose fractions of a card it has."""
    namespace = governed.namespace()
    deployment = workload(manifest, selector={"matchLabels": {"app": "x"}}, replicas=0)
    both = as_manifest(manifest, namespace), as_manifest(deployment, namespace)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": both})
    stored: list[list[tuple[Obj, Obj]]] = []
    for each in flags:
        governed.real.kubectl("apply", "-f-", *each, stdin=text)
        stored.append(stored_specs(governed, namespace))
    assert stored[0] == stored[1]


def stored_specs(governed: Governed, namespace: str) -> list[tuple[Obj, Obj]]:
    """Return spec and annotations of a namespace's pods and Deployments, without what Kubernetes writes there."""
    items = json.loads(governed.real.kubectl("get", "pods,deployments", "-n", namespace, "-ojson"))["items"]
    written_by_kubernetes = ("kubectl.kubernetes.io/", "deployment.kubernetes.io/")
    annotations = [each["metadata"].get("annotations", {}) for each in items]
    return [
        (item["spec"], {key: value for key, value in each.items() if not key.startswith(written_by_kubernetes)})
        for item, each in zip(items, annotations, strict=True)
    ]


@pytest.mark.parametrize("flags", [(), ("--server-side",)], ids=["client-side", "server-side"])
@pytest.mark.parametrize("amounts", [{"nano-gpu/gpu-percent": "20"}, {CARDS: "0.3"}], ids=str)
def test_a_pods_manifest_that_drops_its_request_is_refused(
    governed: Governed, amounts: dict[str, str], flags: tuple[str, ...]
) -> None:
    """The pod keeps its GPUs, and the API server sees no change. The same request in other names is no change."""
    namespace = governed.namespace()

    def apply(limits: Obj) -> str:
        manifest = as_manifest(pod(container(limits=limits)), namespace)
        return governed.real.kubectl("apply", "-f-", *flags, stdin=json.dumps(manifest), check=False)

    for limits in (amounts, {"k8s.amazonaws.com/vgpu": str(3 if CARDS in amounts else 2)}):
        assert "pod/p" in apply(limits)
    assert "the GPU request of an existing pod cannot change" in apply({"cpu": "1"})


@pytest.mark.parametrize("flags", [(), ("--server-side",)], ids=["client-side", "server-side"])
def test_annotations_that_were_ignored_can_be_dropped_from_a_manifest(
    governed: Governed, flags: tuple[str, ...]
) -> None:
    """Whether the pod has GPUs or not: they were removed when it was created, with the advice to drop them."""
    namespace = governed.namespace()
    owned = {NAMES.placement: "{}", NAMES.limits: "{}", "inspur.com/gpu-assigned": "true"}
    for containers in ([gpu()], [container()]):
        for annotations in (owned, owned, {}):
            manifest = as_manifest(pod(*containers, annotations={"mine": "1", **annotations}), namespace)
            governed.real.kubectl("apply", "-f-", *flags, stdin=json.dumps(manifest))
        governed.real.kubectl("delete", "pod", "p", "-n", namespace, "--grace-period=0", "--force")


def test_only_quotient_may_change_owned_and_frozen_annotations(governed: Governed) -> None:
    namespace = governed.namespace()
    governed.create(pod(gpu()), namespace)
    annotate = ["annotate", "pod", "p", "-n", namespace, "--overwrite"]
    for change, message in (
        (f"{NAMES.placement}=x", "only Quotient may write this annotation"),
        (f"{NAMES.limits}=x", "only Quotient may write this annotation"),
        (f"{NAMES.limits}-", "only Quotient may write this annotation"),
        ("tencent.com/predicate-gpu-idx-0=1", "only Quotient may write this annotation"),
        (f"{NAMES.core_limit}=99", "admitted and charged with '50'"),
        (f"{NAMES.use_models}=A100", "admitted and charged without this annotation"),
    ):
        assert message in governed.real.kubectl(*annotate, change, check=False)
    assert "annotated" in governed.real.kubectl(*annotate, "mine=1")
    governed.real.kubectl(
        "create",
        "clusterrolebinding",
        f"q-{namespace}",
        "--clusterrole=edit",
        f"--serviceaccount={SYSTEM}:quotient-scheduler",
    )
    assert "annotated" in governed.real.kubectl(*annotate, f"{NAMES.placement}=x", f"--as={SCHEDULER}")


def binding(name: str, node: str = "nowhere", **annotations: str) -> Obj:
    metadata = {"name": name, "annotations": annotations}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": {"kind": "Node", "name": node}}


def test_only_schedulers_bind_gpu_pods(governed: Governed) -> None:
    """Through `pods/binding` and through `bindings`."""
    namespace = governed.namespace()
    governed.create(pod(gpu()), namespace)
    other = plain()
    other["metadata"]["name"] = "other"
    governed.create({**other, "spec": {**other["spec"], "schedulerName": "none"}}, namespace)
    base = f"/api/v1/namespaces/{namespace}"
    for path in (f"{base}/pods/p/binding", f"{base}/bindings"):
        assert "may not bind a pod with GPUs" in governed.raw(path, binding("p"))
    assert "only Quotient may write this annotation" in governed.raw(
        f"{base}/pods/other/binding", binding("other", **{NAMES.placement: "{}"})
    )
    assert '"Success"' in governed.raw(f"{base}/pods/other/binding", binding("other"))
    governed.real.kubectl(
        "create", "clusterrole", f"binder-{namespace}", "--verb=create", "--resource=pods/binding,bindings"
    )
    governed.real.kubectl(
        "create",
        "clusterrolebinding",
        f"binder-{namespace}",
        f"--clusterrole=binder-{namespace}",
        f"--serviceaccount={SYSTEM}:quotient-scheduler",
    )
    placed = binding("p", **{NAMES.placement: '{"v":1}'})
    assert '"Success"' in governed.raw(f"{base}/pods/p/binding", placed, f"--as={SCHEDULER}")
    assert governed.cluster.get(PODS, "p", namespace).metadata.annotations[NAMES.placement] == '{"v":1}'


def test_ephemeral_containers_of_kubectl_debug_see_no_gpu(governed: Governed) -> None:
    namespace = governed.namespace()
    governed.create(pod(gpu()), namespace)
    output = governed.real.kubectl(
        "debug",
        "p",
        "-n",
        namespace,
        "--image=busybox",
        "--env=NVIDIA_VISIBLE_DEVICES=all",
        "--env=A=1",
        "-c",
        "dbg",
        check=False,
    )
    stored = governed.real.kubectl("get", "pod", "p", "-n", namespace, "-ojson")
    (added,) = json.loads(stored)["spec"]["ephemeralContainers"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in added["env"], output
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"} not in added["env"]


def test_mirror_pods_cannot_be_forged(governed: Governed) -> None:
    """The API server lets any user who sets spec.nodeName write the annotation."""
    forged = pod(gpu(), annotations={"kubernetes.io/config.mirror": "x"}, nodeName="n1")
    with pytest.raises(Refusal, match="only the kubelet of node n1"):
        governed.create(forged, dry_run=True)


def test_annotations_cannot_be_changed_through_the_status_subresource(governed: Governed) -> None:
    """Updates of the status itself, such as a kubelet's, are not sent to the webhook."""
    namespace = governed.namespace()
    governed.create(pod(gpu()), namespace)
    patch = ["patch", "pod", "p", "-n", namespace, "--subresource=status", "--type=merge", "-p"]
    predicates = (f"{NAMES.domain}/predicate-gpu-idx-1", "tencent.com/predicate-gpu-idx-63")
    for key in (NAMES.placement, NAMES.limits, NAMES.use_models, *predicates):
        forged = json.dumps({"metadata": {"annotations": {key: "x"}}})
        assert "denied the request" in governed.real.kubectl(*patch, forged, check=False)
    before = call_count(governed.webhook)
    assert "patched" in governed.real.kubectl(
        *patch, '{"status": {"phase": "Running"}, "metadata": {"labels": {"a": "b"}}}'
    )
    # The API server limits the cost of a condition: a pod with many annotations has to stay below that.
    many = {f"a{index}": "x" * 20 for index in range(2500)}
    assert "patched" in governed.real.kubectl(*patch, json.dumps({"metadata": {"annotations": many}}))
    assert call_count(governed.webhook) == before


def test_a_gpu_pod_cannot_be_bound_by_racing_its_creation(governed: Governed) -> None:
    """Users that keep binding a pod that does not exist yet never bind it."""
    namespace = governed.namespace()
    base = f"/api/v1/namespaces/{namespace}"
    going, bound = True, []

    def keep_binding() -> None:
        while going:
            try:
                governed.cluster._call("POST", f"{base}/pods/p/binding", {}, binding("p"))
                bound.append("p")
            except (ApiError, Unavailable):
                continue

    with ThreadPoolExecutor(2) as pool:
        try:
            for _ in range(2):
                pool.submit(keep_binding)
            for _ in range(8):
                governed.create(pod(gpu()), namespace)
                governed.cluster.delete(PODS, "p", namespace, grace_s=0)
        finally:
            going = False
    assert bound == []


def test_mirror_pods_cannot_carry_owned_annotations(governed: Governed) -> None:
    """Even without GPU resources."""
    forged = pod(container(), annotations={"kubernetes.io/config.mirror": "x", NAMES.placement: "{}"}, nodeName="n1")
    with pytest.raises(Refusal, match="only the kubelet of node n1"):
        governed.create(forged, dry_run=True)


def test_a_pod_may_have_as_many_annotations_as_kubernetes_allows(governed: Governed) -> None:
    """The cost of a matchCondition must not grow with them: the API server rejects a request that exceeds its limit."""
    namespace = governed.namespace()
    for number, count, prefix in ((0, 1000, f"{'a' * 60}.{'b' * 60}."), (1, 8000, "")):
        annotations = {f"{prefix}example.org/{index:05}{'k' * (50 if prefix else 1)}": "" for index in range(count)}
        plain_pod = pod(container(), annotations=annotations)
        plain_pod["metadata"]["name"] = f"p{number}"
        governed.create(plain_pod, namespace)
        governed.real.kubectl("label", "pod", f"p{number}", "-n", namespace, "x=y")


def test_other_objects_are_not_sent_to_the_webhook(governed: Governed) -> None:
    """Nor are those of Quotient's own namespace."""
    before = call_count(governed.webhook)
    governed.create(plain(), dry_run=True)
    governed.create(
        pod(container(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]), hostIPC=True), dry_run=True
    )
    governed.create(
        pod(container(), annotations={"inspur.com/use-gputype": "A100", "x": "predicate-node"}), dry_run=True
    )
    governed.create(workload(plain(), selector={"matchLabels": {"app": "x"}}), dry_run=True)
    if SYSTEM not in governed.real.kubectl("get", "ns"):
        governed.real.kubectl("create", "ns", SYSTEM)
    governed.create(pod(gpu(core="150")), SYSTEM, dry_run=True)
    assert call_count(governed.webhook) == before
    governed.create(pod(container(), annotations={NAMES.placement: "x"}), dry_run=True)
    # The mutating webhook removes the annotation; then the conditions of the validating one are false.
    assert call_count(governed.webhook) == before + 1


def call_count(webhook: RunningWebhook) -> float:
    """Return the number of calls that the webhook has answered."""
    lines = webhook.ops("/metrics")[1].splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("quotient_admission_duration_seconds_count")
    )


def test_a_namespaces_quota_sets_its_policy(governed: Governed) -> None:
    """Pools, core limit and mode, a moment after it is written; if it is invalid, the last valid one applies."""
    namespace = governed.namespace()

    def write(text: str) -> None:
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "quota", "namespace": namespace, "labels": {NAMES.quota_label: "true"}},
            "data": {"quota.yaml": text},
        }
        governed.real.kubectl("apply", "-f-", stdin=json.dumps(config_map))

    def stored() -> Obj:
        return governed.create(pod(gpu()), namespace, dry_run=True)

    write("pools: [training]\ncoreLimit: {default: 80}")
    eventually(lambda: "affinity" in stored()["spec"], "the pools")
    assert annotation_in(stored(), NAMES.limits)["containers"]["c0"]["limitSource"] == "policy"
    with pytest.raises(ClusterError, match=r"quotas\.validate\.quotient\.dev.* denied"):
        write("pools: [training\n")
    unregister(governed.real)
    try:
        write("pools: [training\n")
    finally:
        register(governed.real, CONFIGURATION, governed.webhook.port, governed.authority)
    eventually(
        lambda: "quotient_quotas_invalid 1.0" in governed.webhook.ops("/metrics")[1], "the invalid quota to be counted"
    )
    assert "affinity" in stored()["spec"]
    write("mode: audit")
    eventually(lambda: "affinity" not in stored()["spec"], "the new quota")
    assert governed.create(pod(gpu(core="150")), namespace, dry_run=True)
    governed.real.kubectl("delete", "configmap", "quota", "-n", namespace)


def test_the_older_quota_sets_pools_too(governed: Governed) -> None:
    """The ConfigMap of gpu-admission, with all namespaces in one object."""
    namespace = governed.namespace()
    text = json.dumps({namespace: {"quota": {"A100": 4}, "pool": ["public"]}})
    governed.real.kubectl("create", "configmap", "gpuquota", "-n", "kube-system", f"--from-literal=gpu_quota={text}")
    try:
        eventually(lambda: "affinity" in governed.create(pod(gpu()), namespace, dry_run=True)["spec"], "the pool")
    finally:
        governed.real.kubectl("delete", "configmap", "gpuquota", "-n", "kube-system")


def test_without_the_webhook_gpu_pods_are_rejected_and_other_pods_are_not_affected(governed: Governed) -> None:
    """Only objects that match the conditions are subject to failurePolicy Fail."""
    namespace = governed.namespace()
    governed.create(pod(gpu()), namespace)
    governed.webhook.stop()
    try:
        with pytest.raises(Refusal, match="failed calling webhook"):
            governed.create(pod(gpu(core="20")), dry_run=True)
        with pytest.raises(Refusal, match="failed calling webhook"):
            governed.create(workload(pod(gpu()), selector={"matchLabels": {"app": "x"}}), dry_run=True)
        assert governed.create(plain(), dry_run=True)
        assert governed.create(workload(plain(), selector={"matchLabels": {"app": "x"}}), dry_run=True)
        assert "deleted" in governed.real.kubectl("delete", "pod", "p", "-n", namespace, "--grace-period=0", "--force")
    finally:
        governed.webhook.start()


@pytest.mark.parametrize("governed", ["true"], ids=["short"], indirect=True)
def test_no_creation_fails_during_restarts_and_certificate_renewal(governed: Governed) -> None:
    """Two replicas behind one address are replaced one after the other while pods are created.

    With the short path only: tests/webhook/test_serving.py tests draining with and without it.
    """
    unregister(governed.real)
    replicas = [RunningWebhook(governed.authority, governed.real.kubeconfig) for _ in range(2)]
    failures: list[str] = []
    done: list[int] = []
    going = True

    def keep_creating(number: int) -> None:
        created = pod(gpu())
        created["metadata"]["name"] = f"p{number}"
        while going:
            try:
                governed.cluster.create(PODS, created, dry_run=True)
                done.append(1)
            except ApiError as error:
                failures.append(str(error))

    for each in replicas:
        each.start(ready=False)
    try:
        with Service(*replicas) as service, ThreadPoolExecutor(4) as pool:
            eventually(lambda: len(service.ready) == 2, "both replicas")
            register(governed.real, CONFIGURATION, service.port, governed.authority)
            try:
                for number in range(4):
                    pool.submit(keep_creating, number)
                eventually(lambda: len(done) > 20, "the load")
                for each in replicas:
                    each.stop()
                    each.start()
                    eventually(lambda: len(service.ready) == 2, "the new replica")
                governed.authority.issue()
                before = len(done)
                eventually(lambda: len(done) > before + 200, "more load, over the new certificate")
            finally:
                going = False
    finally:
        for each in replicas:
            each.stop(signal.SIGKILL)
        unregister(governed.real)
        register(governed.real, CONFIGURATION, governed.webhook.port, governed.authority)
    assert failures == []
    assert len(done) > 200
