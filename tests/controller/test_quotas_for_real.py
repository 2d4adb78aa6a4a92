"""Quotas on a real API server, from the first pod to the last."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.errors import NotFound
from cluster.objects import CONFIG_MAPS, EVENTS, NAMESPACES, NODES, PODS
from tests.cluster.objects import new_namespace
from tests.cluster.supervisor import ROOT
from tests.controller.conftest import SYSTEM, Held
from tests.running import flags
from tests.waiting import eventually
from tests.webhook.pods import NAMES, gpu, pod, workload
from vcuda.ledger import LedgerState
from vcuda.names import LEDGER_PREFIX, LEDGER_REGISTRY

pytestmark = pytest.mark.kubernetes

QUOTA = 'types: {A100: {cores: 100}, T4: {cores: 50}, "*": {pods: 5}}'


def test_pods_are_admitted_up_to_the_quota_and_refused_with_all_numbers(held: Held) -> None:
    """And everybody in the namespace sees it."""
    namespace = held.namespace(QUOTA)
    first = held.create(namespace, 60, "A100")
    assert first.startswith("p-")
    eventually(lambda: held.cores(namespace) == (100, 60, 0), "the usage")
    refused = held.create(namespace, 50, "A100")
    for part in (
        f"{namespace}/gpu-quota: types.A100.cores: '50'",
        "asked 50 cores (100 = one GPU) of A100; used 60, reserved 0, hard 100: short by 10",
        f"largest holders: Pod/{first} (60)",
        "ask for at most 40 cores",
        "enough quota is left for T4",
    ):
        assert part in refused
    assert "QuotaExceeded" not in held.create(namespace, 40, "A100", dry_run=True)
    assert held.create(namespace, 40, "A100").startswith("p-")
    assert "short by 1" in held.create(namespace, 1, "A100", dry_run=True)
    assert held.create(namespace, 50).startswith("p-"), "a pod that leaves the choice goes where there is room"
    assert "the quota does not list this GPU model" in held.create(namespace, 1, "H100")


def test_a_dry_run_charges_nothing(held: Held) -> None:
    """However often."""
    namespace = held.namespace(QUOTA)
    assert all(held.create(namespace, 100, "A100", dry_run=True).startswith("p-") for _ in range(5))
    assert len(held.ledger(namespace)) == 0


def test_room_comes_back_when_pods_end(held: Held) -> None:
    """Deleted or done, soon enough for who waits."""
    namespace = held.namespace(QUOTA)
    first = held.create(namespace, 100, "A100")
    held.delete(namespace, first)
    eventually(lambda: held.create(namespace, 100, "A100", dry_run=True).startswith("p-"), "the room", 2)
    second = held.create(namespace, 100, "A100")
    held.cluster.patch(PODS, second, namespace, {"status": {"phase": "Succeeded"}}, subresource="status")
    eventually(lambda: held.create(namespace, 100, "A100", dry_run=True).startswith("p-"), "the room", 2)


def test_many_at_once_get_exactly_what_there_is(held: Held) -> None:
    """Not one more, and not one less."""
    namespace = held.namespace("types: {A100: {cores: 200}}")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: held.create(namespace, 10, "A100"), range(60)))
    assert sum(answer.startswith("p-") for answer in answers) == 20
    assert all("short by" in answer for answer in answers if not answer.startswith("p-"))
    eventually(lambda: held.cores(namespace) == (200, 200, 0), "the usage")


def test_both_forms_apply_together(held: Held) -> None:
    """The older one counts whole GPUs for all namespaces; the stricter holds."""
    namespace = held.namespace("types: {A100: {cores: 300}}")
    text = json.dumps({namespace: {"quota": {"A100": 1}}})
    held.real.kubectl("create", "configmap", "gpuquota", "-n", "kube-system", f"--from-literal=gpu_quota={text}")
    try:
        eventually(lambda: len(held.status(namespace)["quotas"]) == 2, "both")
        assert held.create(namespace, 100, "A100").startswith("p-")
        assert "kube-system/gpuquota: types.A100.cores" in held.create(namespace, 1, "A100")
    finally:
        held.real.kubectl("delete", "configmap", "gpuquota", "-n", "kube-system")
    eventually(lambda: held.create(namespace, 1, "A100", dry_run=True).startswith("p-"), "the other alone")


def test_a_quota_can_be_lowered_below_what_is_in_use(held: Held) -> None:
    """Nothing is ended, nothing more is admitted, and it is said."""
    namespace = held.namespace(QUOTA)
    running = held.create(namespace, 100, "A100")
    held.write(namespace, "types: {A100: {cores: 50}}")
    refused = held.create(namespace, 1, "A100")
    assert "over the limit: no pod is admitted until usage drops below it" in refused
    eventually(lambda: "nothing that runs is ended" in str(held.status(namespace).get("notes")), "the note")
    assert held.cluster.get(PODS, running, namespace).metadata.deletion_timestamp is None
    held.write(namespace, "types: {A100: {cores: 150}}")
    assert held.create(namespace, 50, "A100").startswith("p-")


def test_a_new_quota_counts_what_is_there_already(held: Held) -> None:
    """Pods are charged in every namespace, whether or not it has a quota."""
    namespace = held.namespace()
    assert held.create(namespace, 80, "A100").startswith("p-")
    held.write(namespace, QUOTA)
    assert "short by 10" in held.create(namespace, 30, "A100")


def test_audit_admits_and_warns(held: Held) -> None:
    """So that a quota can be tried out."""
    namespace = held.namespace("types: {A100: {cores: 50}}\nmode: audit")
    made = pod(gpu(core="60", memory="4"), annotations={NAMES.use_models: "A100"})
    made["metadata"]["namespace"] = namespace
    told = held.real.kubectl("create", "-f-", stdin=json.dumps(made), check=False)
    assert "created" in told
    eventually(lambda: held.cores(namespace) == (50, 60, 0), "the usage")


def test_a_namespace_leaves_nothing_behind(held: Held) -> None:
    """And one of the same name begins anew."""
    namespace = held.namespace(QUOTA)
    assert held.create(namespace, 100, "A100").startswith("p-")
    held.cluster.delete(NAMESPACES, namespace)

    def has_gone() -> bool:
        try:
            held.ledger(namespace)
        except NotFound:
            known = held.cluster.get(CONFIG_MAPS, LEDGER_REGISTRY, SYSTEM).data["namespaces"]
            return namespace not in known
        return False

    eventually(has_gone, "the ledger to go", 40)
    new_namespace(held.cluster, namespace)
    held.write(namespace, QUOTA)
    assert held.create(namespace, 100, "A100").startswith("p-")


def without_webhook(held: Held, namespace: str, core: int, **spec: Any) -> str:
    """Create a pod that no webhook sees."""
    hooks = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
    saved = [json.loads(held.real.kubectl("get", kind, "quotient", "-o", "json")) for kind in hooks]
    for kind in hooks:
        held.real.kubectl("delete", kind, "quotient")
    made = pod(gpu(core=str(core), memory="4"), annotations={NAMES.use_models: "A100"}, **spec)
    name = f"w-{uuid.uuid4().hex[:8]}"
    made["metadata"] |= {"name": name, "namespace": namespace}
    try:
        eventually(lambda: "created" in held.real.kubectl("create", "-f-", stdin=json.dumps(made), check=False))
    finally:
        for each in saved:
            each["metadata"] = {"name": "quotient"}
            held.real.kubectl("apply", "-f-", stdin=json.dumps(each))
    return name


def test_a_pod_that_got_in_another_way_waits_for_a_charge(held: Held) -> None:
    """With the reason on it; it gets one when there is room, and what runs already is counted at once."""
    namespace = held.namespace(QUOTA)
    first = held.create(namespace, 60, "A100")
    late = without_webhook(held, namespace, 60)
    eventually(lambda: late in str(held.status(namespace).get("waiting")), "the status to name it")

    def is_told() -> bool:
        events = held.cluster.list(EVENTS, namespace).items
        return any(each.involved_object.name == late and "not charged" in each.message for each in events)

    eventually(is_told, "an event on the pod")
    assert held.cores(namespace) == (100, 60, 0)
    held.delete(namespace, first)
    eventually(lambda: held.cores(namespace) == (100, 60, 0) and not held.status(namespace)["waiting"], "the charge")
    running = without_webhook(held, namespace, 90, nodeName="some-node")
    eventually(lambda: held.cores(namespace) == (100, 150, 0), f"{running}, which has its GPUs, to be counted")


def test_models_are_those_of_the_node_a_pod_is_on(held: Held) -> None:
    """Charged by the first choice at admission, by what it got afterwards; and freed on a node that is lost."""
    namespace = held.namespace("types: {A100: {cores: 100}, T4: {cores: 100, memory: 100Gi}}")
    node = f"n-{uuid.uuid4().hex[:6]}"
    gpus = [{"uuid": "GPU-1", "index": 0, "model": "Tesla T4", "memoryMiB": 15360, "healthy": True}]
    notes = {NAMES.inventory: json.dumps({"v": 1, "gpus": gpus})}
    held.cluster.create(NODES, {"metadata": {"name": node, "annotations": notes}})
    try:
        name = held.create(namespace, 100, "T4", "A100")
        placement = {"v": 1, "containers": {"c0": [{"uuid": "GPU-1", "cores": 100, "memoryMiB": 15360}]}}
        held.bind(namespace, name, node, placement)
        eventually(lambda: held.cores(namespace, "T4") == (100, 100, 0), "the charge to move")
        (quota,) = held.status(namespace)["quotas"]
        assert quota["types"]["T4"]["memoryMiB"]["used"] == 15360
        held.cluster.delete(PODS, name, namespace, grace_s=1)
        lost = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
        held.cluster.patch(NODES, node, "", lost, subresource="status")
        eventually(lambda: held.cores(namespace, "T4")[1] == 0, "the quota to be free")
        assert held.cluster.get(PODS, name, namespace)
    finally:
        held.cluster.delete(NODES, node)


def test_the_owner_of_refused_pods_is_told(held: Held) -> None:
    """On the Deployment, where people look, not only on its ReplicaSet."""
    namespace = held.namespace("types: {A100: {cores: 50}}")
    made = workload(
        pod(gpu(), annotations={NAMES.use_models: "A100"}), replicas=2, selector={"matchLabels": {"app": "x"}}
    )
    made["metadata"] = {"name": "web", "namespace": namespace}
    held.real.kubectl("create", "-f-", stdin=json.dumps(made))

    def is_told() -> bool:
        events = held.cluster.list(EVENTS, namespace).items
        return any(
            (each.involved_object.kind, each.reason) == ("Deployment", "QuotaExceeded")
            and "short by 50" in each.message
            for each in events
        )

    eventually(is_told, "an event on the Deployment")
    eventually(lambda: "Deployment/web" in str(held.status(namespace).get("holders")), "the holder")


def test_decisions_are_shown_to_who_may_see_them(held: Held) -> None:
    """And to nobody else."""
    namespace = held.namespace(QUOTA)
    held.create(namespace, 300, "A100")
    token = (held.real.layout.state / "admin.token").read_text()
    trusted = held.webhook.authority.client_context()
    stranger = held.real.kubectl("create", "token", "default", "-n", namespace).strip()

    def ask(authorization: str) -> tuple[int, str]:
        url = f"https://127.0.0.1:{held.webhook.port}/decisions?namespace={namespace}&limit=5"
        asked = urllib.request.Request(url, headers={"Authorization": authorization})
        try:
            with urllib.request.urlopen(asked, context=trusted) as answer:  # noqa: S310
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    assert ask("")[0] == ask("Bearer nonsense")[0] == 401
    assert ask(f"Bearer {stranger}")[0] == 403
    status, text = ask(f"Bearer {token}")
    assert status == 200
    decision, *_ = json.loads(text)["decisions"]
    assert (decision["kind"], decision["operation"], decision["allowed"]) == ("Pod", "CREATE", False)
    assert decision["reasons"][0]["numbers"]["short"] == 200


def test_the_command_line_shows_what_the_cluster_shows(held: Held) -> None:
    """One namespace, or all; and says so where there is none."""
    namespace = held.namespace(QUOTA)
    held.create(namespace, 60, "A100")
    eventually(lambda: held.cores(namespace) == (100, 60, 0), "the usage")
    options = [f"cluster.kubeconfig={held.real.kubeconfig}", "log.level=error"]
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
    assert "no node has such a card" in run("lint").stdout
    nothing = run("kube-public")
    assert (nothing.returncode, "no GPU quota in namespace kube-public" in nothing.stderr) == (1, True)


def test_the_metrics_say_it_too(held: Held) -> None:
    """Of quotas, by the leader; of charging, by the webhook."""
    namespace = held.namespace(QUOTA)
    held.create(namespace, 60, "A100")
    series = f'{{namespace="{namespace}",quota="{namespace}/gpu-quota",resource="cores",type="A100"}}'
    for name, value in (("hard", 100), ("used", 60), ("reserved", 0)):
        wanted = f"quotient_quota_{name}{series} {value}.0"
        eventually(lambda wanted=wanted: wanted in held.controller.ops("/metrics")[1], wanted)  # type: ignore[misc]
    told = held.webhook.ops("/metrics")[1]
    assert "quotient_ledger_batch_size_count" in told
    assert "quotient_ledger_conflicts_total" in told
    assert "quotient_controller_lag_seconds" in held.controller.ops("/metrics")[1]


class Reluctant:
    """Things that take a minute, waited for at the same time."""

    def __init__(self, held: Held) -> None:
        self.held = held

    def refused_by_native_quota(self) -> str:
        """Kubernetes' own quota refuses after us; room comes back."""
        namespace = self.held.namespace(QUOTA)
        hard = {"hard": {"pods": "0"}}
        made = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": hard}
        self.held.real.kubectl("apply", "-n", namespace, "-f-", stdin=json.dumps(made))
        eventually(lambda: "exceeded quota: none" in self.held.create(namespace, 1, "A100"), "Kubernetes' own quota")
        began = time.monotonic()
        assert "exceeded quota: none" in self.held.create(namespace, 90, "A100")
        assert "short by" in self.held.create(namespace, 90, "A100", dry_run=True)
        eventually(lambda: not list(self.held.ledger(namespace).reservations()), "the reservations to expire", 75)
        assert 40 < time.monotonic() - began < 61
        return namespace

    def lost_ledger(self) -> str:
        """Somebody deletes a ledger: nothing is admitted for 45 s, then it is right again."""
        namespace = self.held.namespace(QUOTA)
        assert self.held.create(namespace, 60, "A100").startswith("p-")
        eventually(lambda: self.held.cores(namespace)[1] == 60, "the usage")
        self.held.cluster.delete(CONFIG_MAPS, LEDGER_PREFIX + namespace, SYSTEM)
        began = time.monotonic()
        while "ledger" in (answer := self.held.create(namespace, 40, "A100")):
            assert "lost and is being rebuilt" in answer or "has no ledger yet" in answer
            assert time.monotonic() - began < 70
            time.sleep(0.5)
        assert time.monotonic() - began > 44
        assert answer.startswith("p-")
        assert self.held.ledger(namespace).state is LedgerState.OPEN
        assert "short by" in self.held.create(namespace, 10, "A100")
        return namespace


def test_what_takes_a_minute(held: Held) -> None:
    """Reservations whose pods never come, and a ledger that is deleted."""
    slow = Reluctant(held)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(slow.refused_by_native_quota), pool.submit(slow.lost_ledger)]:
            assert done.result()


def test_quotas_hold_while_the_controller_is_away(held: Held) -> None:
    """New quotas too: replicas take them over themselves; only a first ledger has to wait."""
    namespace = held.namespace(QUOTA)
    held.controller.send(signal.SIGSTOP)
    try:
        assert held.create(namespace, 60, "A100").startswith("p-")
        assert "reserved 60" in held.create(namespace, 60, "A100")
        held.write(namespace, "types: {A100: {cores: 70}}")
        eventually(lambda: "hard 70" in held.create(namespace, 20, "A100", dry_run=True), "the new quota")
        new = held.namespace()
        assert "this namespace has no ledger yet" in held.create(new, 10, "A100")
    finally:
        held.controller.send(signal.SIGCONT)
    eventually(lambda: held.cores(namespace) == (70, 60, 0), "the controller to catch up")
