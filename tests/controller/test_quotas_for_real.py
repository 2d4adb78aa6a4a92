"""Quotas on a real API server, with webhook and controller as processes."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.errors import NotFound
from cluster.objects import CONFIG_MAPS, EVENTS, NAMESPACES, NODES, PODS
from tests.cluster.objects import new_namespace
from tests.cluster.real import ClusterError
from tests.cluster.supervisor import ROOT
from tests.controller.conftest import SYSTEM, QuotientCluster
from tests.running import flags
from tests.waiting import eventually
from tests.webhook.pods import NAMES, container, gpu, pod, workload
from vcuda.ledger import LedgerState
from vcuda.names import LEDGER_PREFIX, LEDGER_REGISTRY

pytestmark = pytest.mark.kubernetes

QUOTA = 'types: {A100: {cores: 100}, T4: {cores: 50}, "*": {pods: 5}}'


def test_pods_are_admitted_up_to_the_quota_and_refused_with_all_numbers(quotient: QuotientCluster) -> None:
    """The status shows the usage."""
    namespace = quotient.namespace(QUOTA)
    first = quotient.create(namespace, 60, "A100")
    assert first.startswith("p-")
    eventually(lambda: quotient.cores(namespace) == (100, 60, 0), "the usage")
    refused = quotient.create(namespace, 50, "A100")
    for part in (
        f"{namespace}/gpu-quota: types.A100.cores: '50'",
        "asked 50 cores (100 = one GPU) of A100; used 60, reserved 0, hard 100: short by 10",
        f"largest holders: Pod/{first} (60)",
        "ask for at most 40 cores",
        "enough quota is left for T4",
    ):
        assert part in refused
    assert "QuotaExceeded" not in quotient.create(namespace, 40, "A100", dry_run=True)
    assert quotient.create(namespace, 40, "A100").startswith("p-")
    assert "short by 1" in quotient.create(namespace, 1, "A100", dry_run=True)
    assert quotient.create(namespace, 50).startswith("p-"), (
        "a pod without a model is charged to a model with free quota"
    )
    assert "the quota does not list this GPU model" in quotient.create(namespace, 1, "H100")


def test_a_dry_run_charges_nothing(quotient: QuotientCluster) -> None:
    namespace = quotient.namespace(QUOTA)
    assert all(quotient.create(namespace, 100, "A100", dry_run=True).startswith("p-") for _ in range(5))
    assert len(quotient.ledger(namespace)) == 0


def test_quota_is_free_within_2_s_of_a_pods_end(quotient: QuotientCluster) -> None:
    """Whether it was deleted or completed."""
    namespace = quotient.namespace(QUOTA)
    first = quotient.create(namespace, 100, "A100")
    quotient.delete(namespace, first)
    eventually(lambda: quotient.create(namespace, 100, "A100", dry_run=True).startswith("p-"), "the free quota", 2)
    second = quotient.create(namespace, 100, "A100")
    quotient.cluster.patch(PODS, second, namespace, {"status": {"phase": "Succeeded"}}, subresource="status")
    eventually(lambda: quotient.create(namespace, 100, "A100", dry_run=True).startswith("p-"), "the free quota", 2)


def test_concurrent_creates_get_exactly_the_quota(quotient: QuotientCluster) -> None:
    """Not one pod more, and not one less."""
    namespace = quotient.namespace("types: {A100: {cores: 200}}")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: quotient.create(namespace, 10, "A100"), range(60)))
    assert sum(answer.startswith("p-") for answer in answers) == 20
    assert all("short by" in answer for answer in answers if not answer.startswith("p-"))
    eventually(lambda: quotient.cores(namespace) == (200, 200, 0), "the usage")


def test_both_forms_of_a_quota_apply_together(quotient: QuotientCluster) -> None:
    """The legacy one counts whole GPUs for all namespaces; the stricter of the two limits."""
    namespace = quotient.namespace("types: {A100: {cores: 300}}")
    text = json.dumps({namespace: {"quota": {"A100": 1}}})
    quotient.real.kubectl("create", "configmap", "gpuquota", "-n", "kube-system", f"--from-literal=gpu_quota={text}")
    try:
        eventually(lambda: len(quotient.status(namespace)["quotas"]) == 2, "both quotas")
        assert quotient.create(namespace, 100, "A100").startswith("p-")
        assert "kube-system/gpuquota: types.A100.cores" in quotient.create(namespace, 1, "A100")
    finally:
        quotient.real.kubectl("delete", "configmap", "gpuquota", "-n", "kube-system")
    eventually(lambda: quotient.create(namespace, 1, "A100", dry_run=True).startswith("p-"), "the other quota alone")


@pytest.mark.parametrize("has_gpu", [True, False], ids=["a GPU pod has it", "another pod has it"])
def test_the_room_of_a_create_that_fails_because_of_its_name_is_usable_within_2_s(
    quotient: QuotientCluster,
    record_property: Callable[..., None],
    has_gpu: bool,  # noqa: FBT001
) -> None:
    """Validation comes before the API server sees that the name is taken, so the pod was charged."""
    namespace = quotient.namespace(QUOTA)
    existing, second = (
        each | {"metadata": {"name": "same", "namespace": namespace, "annotations": {NAMES.use_models: "A100"}}}
        for each in (pod(gpu(core="10", memory="4") if has_gpu else container()), pod(gpu(core="90", memory="4")))
    )
    assert "created" in quotient.real.kubectl("create", "-f-", stdin=json.dumps(existing))
    used = 10 if has_gpu else 0
    eventually(lambda: quotient.cores(namespace) == (100, used, 0), "the usage")
    with pytest.raises(ClusterError, match="already exists"):
        quotient.real.kubectl("create", "-f-", stdin=json.dumps(second))
    started = time.monotonic()
    refused = quotient.create(namespace, 90, "A100", dry_run=True)
    assert "90 cores are reserved for 1 pod that does not exist yet" in refused
    assert "this reservation ends in 4" in refused
    eventually(lambda: quotient.create(namespace, 90, "A100", dry_run=True).startswith("p-"), "the free quota", 5)
    took_s = time.monotonic() - started
    record_property("took_s", took_s)
    assert took_s < 5, "the reservation would have lasted 45 s"
    assert len(quotient.ledger(namespace)) == has_gpu


def test_a_quota_can_be_lowered_below_its_usage(quotient: QuotientCluster) -> None:
    """Running pods stay, new ones are refused, and a note in the status says so."""
    namespace = quotient.namespace(QUOTA)
    running = quotient.create(namespace, 100, "A100")
    quotient.apply_quota(namespace, "types: {A100: {cores: 50}}")
    refused = quotient.create(namespace, 1, "A100")
    assert "over the limit: no pod is admitted until usage drops below it" in refused
    eventually(lambda: "running pods are not evicted" in str(quotient.status(namespace).get("notes")), "the note")
    assert quotient.cluster.get(PODS, running, namespace).metadata.deletion_timestamp is None
    quotient.apply_quota(namespace, "types: {A100: {cores: 150}}")
    assert quotient.create(namespace, 50, "A100").startswith("p-")


def test_a_new_quota_counts_existing_pods(quotient: QuotientCluster) -> None:
    """Pods are charged in every namespace, whether or not it has a quota."""
    namespace = quotient.namespace()
    assert quotient.create(namespace, 80, "A100").startswith("p-")
    quotient.apply_quota(namespace, QUOTA)
    assert "short by 10" in quotient.create(namespace, 30, "A100")


def test_audit_admits_and_warns(quotient: QuotientCluster) -> None:
    namespace = quotient.namespace("types: {A100: {cores: 50}}\nmode: audit")
    made = pod(gpu(core="60", memory="4"), annotations={NAMES.use_models: "A100"})
    made["metadata"]["namespace"] = namespace
    output = quotient.real.kubectl("create", "-f-", stdin=json.dumps(made), check=False)
    assert "created" in output
    eventually(lambda: quotient.cores(namespace) == (50, 60, 0), "the usage")


def test_a_deleted_namespace_leaves_nothing_behind(quotient: QuotientCluster) -> None:
    """A new namespace of the same name starts with an empty, open ledger."""
    namespace = quotient.namespace(QUOTA)
    assert quotient.create(namespace, 100, "A100").startswith("p-")
    quotient.cluster.delete(NAMESPACES, namespace)

    def is_cleaned_up() -> bool:
        try:
            quotient.ledger(namespace)
        except NotFound:
            known = quotient.cluster.get(CONFIG_MAPS, LEDGER_REGISTRY, SYSTEM).data["namespaces"]
            return namespace not in known
        return False

    eventually(is_cleaned_up, "the ledger to be deleted", 40)
    new_namespace(quotient.cluster, namespace)
    quotient.apply_quota(namespace, QUOTA)
    assert quotient.create(namespace, 100, "A100").startswith("p-")


def without_webhook(quotient: QuotientCluster, namespace: str, core: int, **spec: Any) -> str:
    """Create a pod while no webhook is registered."""
    hooks = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    saved = [json.loads(quotient.real.kubectl("get", kind, "quotient", "-o", "json")) for kind in hooks]
    for kind in hooks:
        quotient.real.kubectl("delete", kind, "quotient")
    made = pod(gpu(core=str(core), memory="4"), annotations={NAMES.use_models: "A100"}, **spec)
    name = f"w-{uuid.uuid4().hex[:8]}"
    made["metadata"] |= {"name": name, "namespace": namespace}
    try:
        eventually(lambda: "created" in quotient.real.kubectl("create", "-f-", stdin=json.dumps(made), check=False))
    finally:
        for each in saved:
            each["metadata"] = {"name": "quotient"}
            quotient.real.kubectl("apply", "-f-", stdin=json.dumps(each))
    return name


def test_a_pod_created_without_the_webhook_waits_for_its_charge(quotient: QuotientCluster) -> None:
    """An event gives the reason. It is charged once the quota is free; a pod that is bound already, at once."""
    namespace = quotient.namespace(QUOTA)
    first = quotient.create(namespace, 60, "A100")
    late = without_webhook(quotient, namespace, 60)
    eventually(lambda: late in str(quotient.status(namespace).get("waiting")), "the status to name it")

    def has_event() -> bool:
        events = quotient.cluster.list(EVENTS, namespace).items
        return any(each.involved_object.name == late and "could not be charged" in each.message for each in events)

    eventually(has_event, "an event on the pod")
    assert quotient.cores(namespace) == (100, 60, 0)
    quotient.delete(namespace, first)
    eventually(
        lambda: quotient.cores(namespace) == (100, 60, 0) and not quotient.status(namespace)["waiting"], "the charge"
    )
    running = without_webhook(quotient, namespace, 90, nodeName="some-node")
    eventually(lambda: quotient.cores(namespace) == (100, 150, 0), f"{running}, which is bound, to be charged")


def test_a_bound_pod_is_charged_to_its_nodes_model(quotient: QuotientCluster) -> None:
    """At admission to its first model, after the bind to what it got; on a lost node its quota is freed."""
    namespace = quotient.namespace("types: {A100: {cores: 100}, T4: {cores: 100, memory: 100Gi}}")
    node = f"n-{uuid.uuid4().hex[:6]}"
    gpus = [{"uuid": "GPU-1", "index": 0, "model": "Tesla T4", "memoryMiB": 15360, "healthy": True}]
    annotations = {NAMES.inventory: json.dumps({"v": 1, "gpus": gpus})}
    quotient.cluster.create(NODES, {"metadata": {"name": node, "annotations": annotations}})
    try:
        name = quotient.create(namespace, 100, "T4", "A100")
        placement = {"v": 1, "containers": {"c0": [{"uuid": "GPU-1", "cores": 100, "memoryMiB": 15360}]}}
        quotient.bind(namespace, name, node, placement)
        eventually(lambda: quotient.cores(namespace, "T4") == (100, 100, 0), "the charge to move")
        (quota,) = quotient.status(namespace)["quotas"]
        assert quota["types"]["T4"]["memoryMiB"]["used"] == 15360
        quotient.cluster.delete(PODS, name, namespace, grace_s=1)
        lost = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
        quotient.cluster.patch(NODES, node, "", lost, subresource="status")
        eventually(lambda: quotient.cores(namespace, "T4")[1] == 0, "the quota to be free")
        assert quotient.cluster.get(PODS, name, namespace)
    finally:
        quotient.cluster.delete(NODES, node)


def test_a_refusal_is_recorded_as_an_event_on_the_deployment(quotient: QuotientCluster) -> None:
    """Not only on its ReplicaSet: people look at the Deployment."""
    namespace = quotient.namespace("types: {A100: {cores: 50}}")
    made = workload(
        pod(gpu(), annotations={NAMES.use_models: "A100"}), replicas=2, selector={"matchLabels": {"app": "x"}}
    )
    made["metadata"] = {"name": "web", "namespace": namespace}
    quotient.real.kubectl("create", "-f-", stdin=json.dumps(made))

    def has_event() -> bool:
        events = quotient.cluster.list(EVENTS, namespace).items
        return any(
            (each.involved_object.kind, each.reason) == ("Deployment", "QuotaExceeded")
            and "short by 50" in each.message
            for each in events
        )

    eventually(has_event, "an event on the Deployment")
    eventually(lambda: "Deployment/web" in str(quotient.status(namespace).get("holders")), "the holder")


def test_decisions_need_authorization(quotient: QuotientCluster) -> None:
    """401 without a valid token, 403 without permission on the path."""
    namespace = quotient.namespace(QUOTA)
    quotient.create(namespace, 300, "A100")
    token = (quotient.real.layout.state / "admin.token").read_text()
    trusted = quotient.webhook.authority.client_context()
    unprivileged = quotient.real.kubectl("create", "token", "default", "-n", namespace).strip()

    def get(authorization: str) -> tuple[int, str]:
        url = f"https://127.0.0.1:{quotient.webhook.port}/decisions?namespace={namespace}&limit=5"
        request = urllib.request.Request(url, headers={"Authorization": authorization})
        try:
            with urllib.request.urlopen(request, context=trusted) as answer:  # noqa: S310
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    assert get("")[0] == get("Bearer nonsense")[0] == 401
    assert get(f"Bearer {unprivileged}")[0] == 403
    status, text = get(f"Bearer {token}")
    assert status == 200
    decision, *_ = json.loads(text)["decisions"]
    assert (decision["kind"], decision["operation"], decision["allowed"]) == ("Pod", "CREATE", False)
    assert decision["reasons"][0]["numbers"]["short"] == 200


def test_the_quota_command_shows_the_status(quotient: QuotientCluster) -> None:
    """Of one namespace or of all; it exits with 1 where there is no quota."""
    namespace = quotient.namespace(QUOTA)
    quotient.create(namespace, 60, "A100")
    eventually(lambda: quotient.cores(namespace) == (100, 60, 0), "the usage")
    options = [f"cluster.kubeconfig={quotient.real.kubeconfig}", "log.level=error"]
    command = [sys.executable, "-m", "console.main", *flags(*options), "quota"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, cwd=ROOT)

    shown = json.loads(run(namespace, "-o", "json").stdout)
    assert shown[namespace]["quotas"][0]["types"]["A100"]["cores"] == {
        "hard": 100,
        "used": 60,
        "reserved": 0,
        "free": 40,
    }
    assert "Pod/p-" in run().stdout
    assert "no node has a GPU of this model" in run("lint").stdout
    nothing = run("kube-public")
    assert (nothing.returncode, "no GPU quota in namespace kube-public" in nothing.stderr) == (1, True)


def test_quota_usage_and_charging_are_in_the_metrics(quotient: QuotientCluster) -> None:
    """Usage in the leader's, charging in the webhook's."""
    namespace = quotient.namespace(QUOTA)
    quotient.create(namespace, 60, "A100")
    series = f'{{namespace="{namespace}",quota="{namespace}/gpu-quota",resource="cores",type="A100"}}'
    for name, value in (("hard", 100), ("used", 60), ("reserved", 0)):
        sample = f"quotient_quota_{name}{series} {value}.0"
        eventually(lambda sample=sample: sample in quotient.controller.ops("/metrics")[1], sample)  # type: ignore[misc]
    metrics = quotient.webhook.ops("/metrics")[1]
    assert "quotient_ledger_batch_size_count" in metrics
    assert "quotient_ledger_conflicts_total" in metrics
    assert "quotient_controller_lag_seconds" in quotient.controller.ops("/metrics")[1]


class SlowRules:
    """Rules that take a minute to check, so they are checked at the same time."""

    def __init__(self, quotient: QuotientCluster) -> None:
        self.quotient = quotient

    def reservation_expires(self) -> str:
        """A ResourceQuota refuses a pod that Quotient charged: its reservation expires within a minute."""
        namespace = self.quotient.namespace(QUOTA)
        hard = {"hard": {"pods": "0"}}
        made = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": hard}
        self.quotient.real.kubectl("apply", "-n", namespace, "-f-", stdin=json.dumps(made))
        eventually(lambda: "exceeded quota: none" in self.quotient.create(namespace, 1, "A100"), "the ResourceQuota")
        started = time.monotonic()
        assert "exceeded quota: none" in self.quotient.create(namespace, 90, "A100")
        assert "short by" in self.quotient.create(namespace, 90, "A100", dry_run=True)
        eventually(lambda: not list(self.quotient.ledger(namespace).reservations()), "the reservations to expire", 75)
        assert 40 < time.monotonic() - started < 61
        return namespace

    def deleted_ledger_is_rebuilt(self) -> str:
        """A deleted ledger is rebuilt, and admits nothing for 45 s."""
        namespace = self.quotient.namespace(QUOTA)
        assert self.quotient.create(namespace, 60, "A100").startswith("p-")
        eventually(lambda: self.quotient.cores(namespace)[1] == 60, "the usage")
        self.quotient.cluster.delete(CONFIG_MAPS, LEDGER_PREFIX + namespace, SYSTEM)
        started = time.monotonic()
        while "ledger" in (answer := self.quotient.create(namespace, 40, "A100")):
            assert "lost and is being rebuilt" in answer or "has no ledger yet" in answer
            assert time.monotonic() - started < 70
            time.sleep(0.5)
        assert time.monotonic() - started > 44
        assert answer.startswith("p-")
        assert self.quotient.ledger(namespace).state is LedgerState.OPEN
        assert "short by" in self.quotient.create(namespace, 10, "A100")
        return namespace


def test_reservations_expire_and_a_deleted_ledger_is_rebuilt(quotient: QuotientCluster) -> None:
    rules = SlowRules(quotient)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(rules.reservation_expires), pool.submit(rules.deleted_ledger_is_rebuilt)]:
            assert future.result()


def test_quotas_hold_while_the_controller_is_down(quotient: QuotientCluster) -> None:
    """Changed quotas too: the webhook applies them itself. Only a namespace's first ledger has to wait."""
    namespace = quotient.namespace(QUOTA)
    quotient.controller.send(signal.SIGSTOP)
    try:
        assert quotient.create(namespace, 60, "A100").startswith("p-")
        assert "reserved 60" in quotient.create(namespace, 60, "A100")
        quotient.apply_quota(namespace, "types: {A100: {cores: 70}}")
        eventually(lambda: "hard 70" in quotient.create(namespace, 20, "A100", dry_run=True), "the new quota")
        new = quotient.namespace()
        assert "this namespace has no ledger yet" in quotient.create(new, 10, "A100")
    finally:
        quotient.controller.send(signal.SIGCONT)
    eventually(lambda: quotient.cores(namespace) == (70, 60, 0), "the controller to catch up")


def test_what_a_tenant_writes_fills_neither_ledger_nor_refusals(quotient: QuotientCluster) -> None:
    """The API server stores an owner reference with a name of any length."""
    namespace = quotient.namespace("types: {A100: {cores: 40}}")
    # No garbage collector looks for the owner: its kind does not exist.
    owner = {"apiVersion": "example.org/v1", "kind": "Unknown", "uid": str(uuid.uuid4()), "controller": True}
    for number in range(4):
        made = pod(gpu(core="10", memory="4"), annotations={NAMES.use_models: "A100"})
        references = [{**owner, "name": f"{number}{'x' * 280_000}"}]
        made["metadata"] |= {"name": f"p-{number}", "namespace": namespace, "ownerReferences": references}
        quotient.cluster.create(PODS, made)
    eventually(lambda: len(quotient.ledger(namespace).holders) == 4, "the holders")
    eventually(lambda: quotient.cores(namespace) == (40, 40, 0), "the usage")
    assert all(len(holder.name) == 317 for holder in quotient.ledger(namespace).holders)
    refused = quotient.create(namespace, 10, "A100")
    assert "largest holders: Unknown/" in refused
    assert len(refused) < 3000


def test_a_template_with_a_long_annotation_is_refused_at_once(quotient: QuotientCluster) -> None:
    """The record of rewritten cards was searched in quadratic time: 70 kB held up all namespaces for 20 s."""
    namespace = quotient.namespace(QUOTA)
    made = workload(
        pod(gpu(), annotations={NAMES.cards_rewritten: "a" * 70_000}), selector={"matchLabels": {"app": "x"}}
    )
    made["metadata"]["namespace"] = namespace
    refused = quotient.real.kubectl("create", "-f-", stdin=json.dumps(made), check=False)
    assert "at most 32768 characters here; shorten or remove it" in refused
