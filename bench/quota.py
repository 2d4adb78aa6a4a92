"""The cost of quotas: pod creation rate compared with native ResourceQuota, and the controller on a large cluster.

    python -m bench.quota [--rounds 3] [--pods 2000] [--scale 1000x100] [--only rate|scale]

Rate: 50 clients create small GPU pods in one namespace at full speed, on a real API server; in turns with Quotient's
webhook and ledger, and with a native ResourceQuota on the same resources and no webhook. Everything shares one machine,
so only the ratio within a round is meaningful.

Scale: many namespaces, each with a quota and pods. The controller is started on them, and then pods are deleted at a
steady rate.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from bench.creating import CLIENTS
from bench.reporting import current_commit, print_progress, resident_bytes
from cluster.api import ApiCluster, connect
from cluster.informer import Informer
from cluster.objects import CONFIG_MAPS, NAMESPACES, PODS, ConfigMap
from ledger.ledger_store import LEDGER_SELECTOR, ledger_namespace
from tests.cluster.objects import new_namespace
from tests.cluster.quotient import run_beside
from tests.cluster.real import RealCluster
from tests.running import RunningController
from vcuda.ledger import PodKey, pack_uid
from vcuda.names import LEDGER_KEY, QUOTA_KEY, Names

RESULTS = Path(__file__).parent / "results" / "quota.json"
TARGETS = {
    "times_native": 0.5,
    "hoped_for_times_native": 0.8,
    "scale_ready_s": 15,
    "scale_rss_mb": 500,
    "scale_freed_s": 1.0,
}
HOOKS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
NAMES = Names()
DEFAULT_SYSTEM_NAMESPACE = "quotient-system"
# More than all pods together request: the cost of accounting is measured, not refusals.
PLENTY = 10**7
DELETIONS_PER_S, DELETIONS_FOR_S = 50, 20
READY_TIMEOUT_S, FREED_TIMEOUT_S = 300, 30

Figures = dict[str, Any]


def gpu_quota(namespace: str) -> dict[str, Any]:
    text = f"types: {{A100: {{cores: {PLENTY}, memory: {PLENTY}Gi}}}}"
    metadata = {"name": "q", "namespace": namespace, "labels": {NAMES.quota_label: "true"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {QUOTA_KEY: text}}


def native_quota(namespace: str) -> dict[str, Any]:
    """Return a ResourceQuota on the same resources."""
    hard = {f"requests.{NAMES.core}": str(PLENTY), f"requests.{NAMES.memory}": str(PLENTY)}
    metadata = {"name": "q", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}


def create_pods(real: RealCluster, namespaces: list[str], count: int, clients: int = CLIENTS) -> Figures:
    """Create pods at full speed; returns the figures of `bench.creating`."""
    # In a process of its own, inside the cluster's network namespace.
    kubeconfig = real.layout.state / "admin.kubeconfig"
    arguments = (str(kubeconfig), ",".join(namespaces), str(count), f"--clients={clients}")
    done = real.enter(sys.executable, "-m", "bench.creating", *arguments)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    figures: Figures = json.loads(done.stdout)
    return figures


def create_all_pods(real: RealCluster, namespaces: list[str], count: int) -> Figures:
    """Create pods with 50 clients; raises RuntimeError unless all of them are created."""
    figures = create_pods(real, namespaces, count)
    if set(figures["statuses"]) != {"201"}:
        raise RuntimeError(f"not all pods were created: statuses {figures['statuses']}, errors {figures['errors']}")
    return figures


def measure_rate(rounds: int, pods: int) -> Figures:
    """Measure both quotas in turns on one cluster."""
    real = RealCluster.start(node=False)
    figures: dict[str, list[Figures]] = {"quotient": [], "native": []}
    try:
        run_beside(real)
        hooks = [json.loads(real.kubectl("get", kind, "quotient", "-o", "json")) for kind in HOOKS]
        for number in range(rounds):
            for hook in hooks:
                real.kubectl("apply", "-f-", stdin=json.dumps(hook | {"metadata": {"name": "quotient"}}))
            name = f"quotient-{number}"
            figures["quotient"].append(measure_round(real, name, gpu_quota(name), pods))
            for kind in HOOKS:
                real.kubectl("delete", kind, "quotient")
            name = f"native-{number}"
            figures["native"].append(measure_round(real, name, native_quota(name), pods))
            ratio = figures["quotient"][-1]["per_s"] / figures["native"][-1]["per_s"]
            print_progress(f"round {number + 1} of {rounds}: {ratio:.2f} times native")
        metrics = real.enter(str(shutil.which("curl")), "-s", "http://127.0.0.1:8080/metrics").stdout
    finally:
        real.stop()
    pairs = zip(figures["quotient"], figures["native"], strict=True)
    ratios = [ours["per_s"] / theirs["per_s"] for ours, theirs in pairs]
    return {
        "pods": pods,
        "per_s": {name: round(statistics.median(each["per_s"] for each in runs)) for name, runs in figures.items()},
        "p99_ms": {name: round(statistics.median(each["p99_ms"] for each in runs)) for name, runs in figures.items()},
        "times_native": round(statistics.median(ratios), 2),
        "times_native_of_each_round": [round(ratio, 2) for ratio in ratios],
        "ledger": ledger_counters(metrics),
    }


def ledger_counters(metrics: str) -> Figures:
    """Extract from the webhook's metrics how often the ledger was written, and how often that conflicted."""
    wanted = ("quotient_ledger_writes_total", "quotient_ledger_conflicts_total", "quotient_connections_total")
    return {
        line.split()[0].removeprefix("quotient_").removesuffix("_total"): float(line.split()[1])
        for line in metrics.splitlines()
        if line.startswith(wanted)
    }


def measure_round(real: RealCluster, namespace: str, quota: dict[str, Any], pods: int) -> Figures:
    """Create pods in a new namespace with this quota."""
    real.kubectl("create", "namespace", namespace)
    real.kubectl("apply", "-f-", stdin=json.dumps(quota))
    time.sleep(3)  # until the quota is in force everywhere, and the machine is idle
    figures = create_all_pods(real, [namespace], pods)
    print_progress(f"{namespace}: {figures['per_s']:.0f}/s, p99 {figures['p99_ms']:.0f} ms")
    return figures


class ReleaseTimer:
    """Measures how long after its deletion a pod is released from its ledger, by watching the ledgers."""

    def __init__(self, cluster: ApiCluster, system_namespace: str) -> None:
        # Guards the two fields below: the informer's thread and the caller's change them.
        self._lock = threading.Lock()
        self._deleted: dict[PodKey, tuple[str, float]] = {}
        self.latencies_s: list[float] = []
        self._informer = Informer(cluster, CONFIG_MAPS, system_namespace, LEDGER_SELECTOR)
        self._informer.on_change(self._on_ledger_change)

    def __enter__(self) -> Self:
        self._informer.start()
        self._informer.wait_synced(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._informer.stop()

    def start_timer(self, namespace: str, uid: str) -> None:
        """Start the time of a pod; call this just before its deletion."""
        with self._lock:
            self._deleted[pack_uid(uid)] = namespace, time.monotonic()

    @property
    def pending(self) -> int:
        """How many deleted pods are still in their ledger."""
        return len(self._deleted)

    def _on_ledger_change(self, _: ConfigMap | None, after: ConfigMap | None) -> None:
        if after is None:
            return
        namespace, text = ledger_namespace(after), after.data.get(LEDGER_KEY, "")
        with self._lock:
            # A search in the text, not a decoded ledger: decoding would compete with the controller for the CPU.
            released = [key for key, (where, _) in self._deleted.items() if where == namespace and key not in text]
            for key in released:
                self.latencies_s.append(time.monotonic() - self._deleted.pop(key)[1])


def measure_scale(namespaces: int, each: int) -> Figures:
    """Fill a cluster, start the controller on it, and delete pods."""
    real = RealCluster.start(node=False)
    try:
        cluster = connect(str(real.kubeconfig))
        names = [f"team-{number:04}" for number in range(namespaces)]
        print_progress(f"creating {namespaces} namespaces with a quota each")
        cluster.create(NAMESPACES, {"metadata": {"name": DEFAULT_SYSTEM_NAMESPACE}})
        for name in names:
            new_namespace(cluster, name)
            cluster.create(CONFIG_MAPS, gpu_quota(name))
        print_progress(f"creating {namespaces * each:,} pods")
        rate = create_all_pods(real, names, namespaces * each)["per_s"]
        print_progress(f"created at {rate:.0f}/s; starting the controller")
        folder = real.layout.state
        figures: Figures = {"namespaces": namespaces, "pods": namespaces * each}
        # The first start builds all ledgers, the second finds them complete.
        figures["first_start_s"], controller = start_controller(real, folder, namespaces, each)
        controller.stop()
        figures["start_s"], controller = start_controller(real, folder, namespaces, each)
        try:
            figures |= delete_pods(cluster, names)
            figures["rss_mb"] = round(rss_mb(controller), 1)
        finally:
            controller.stop()
        return figures
    finally:
        real.stop()


def start_controller(real: RealCluster, folder: Path, namespaces: int, each: int) -> tuple[float, RunningController]:
    """Start a controller, and wait until it has accounted for all namespaces; returns the seconds that it took."""
    controller = RunningController(real.kubeconfig, folder)
    began = time.monotonic()
    controller.start(ready=False)
    deadline = began + READY_TIMEOUT_S
    while "initial_reconcile_done" not in controller.log.read_text():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the controller did not catch up within {READY_TIMEOUT_S} s")
        time.sleep(0.05)
    took_s = time.monotonic() - began
    lines = controller.ops("/metrics")[1].splitlines()
    used = [line for line in lines if line.startswith("quotient_quota_used") and 'resource="cores"' in line]
    if len(used) != namespaces or not all(float(line.split()[-1]) >= each for line in used):
        raise RuntimeError("the controller logged initial_reconcile_done, but its metrics do not account for all pods")
    print_progress(f"synced and reconciled after {took_s:.1f} s, {rss_mb(controller):.0f} MB")
    return round(took_s, 1), controller


def rss_mb(controller: RunningController) -> float:
    """Return the controller's resident memory in MB, which is 10**6 bytes."""
    return resident_bytes(controller.pids()[0]) / 1e6


def delete_pods(cluster: ApiCluster, names: list[str]) -> Figures:
    """Delete pods at a steady rate, and measure until each is released from its ledger."""
    rng = random.Random(1)
    print_progress(f"{DELETIONS_PER_S} deletions per second for {DELETIONS_FOR_S} s")
    pods = [pod for name in rng.sample(names, min(50, len(names))) for pod in cluster.list(PODS, name).items]
    rng.shuffle(pods)
    with ReleaseTimer(cluster, DEFAULT_SYSTEM_NAMESPACE) as timer:
        began = time.monotonic()
        for number, pod in enumerate(pods[: DELETIONS_PER_S * DELETIONS_FOR_S]):
            time.sleep(max(0.0, began + number / DELETIONS_PER_S - time.monotonic()))
            timer.start_timer(pod.metadata.namespace, pod.metadata.uid)
            cluster.delete(PODS, pod.metadata.name, pod.metadata.namespace, grace_s=0)
        deadline = time.monotonic() + FREED_TIMEOUT_S
        while timer.pending and time.monotonic() < deadline:
            time.sleep(0.05)
        latencies_s = sorted(timer.latencies_s)
    p50_s, p99_s = latencies_s[len(latencies_s) // 2], latencies_s[len(latencies_s) * 99 // 100]
    print_progress(f"{len(latencies_s)} pods released, p50 {p50_s:.2f} s, p99 {p99_s:.2f} s after their deletion")
    return {
        "ended": len(latencies_s),
        "never_freed": timer.pending,
        "freed_s": {"p50": round(p50_s, 3), "p99": round(p99_s, 3)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the rate")
    parser.add_argument("--pods", type=int, default=2000, help="pods per round of the rate")
    parser.add_argument("--scale", default="1000x100", help="namespaces x pods per namespace")
    parser.add_argument("--only", choices=["rate", "scale"], help="measure one; the other keeps its earlier results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the results")
    options = parser.parse_args()
    before = json.loads(options.results.read_text()) if options.results.exists() else {}
    about = {"commit": current_commit(), "seed": 1, "cores": os.cpu_count(), "python": platform.python_version()}
    figures: Figures = {key: before[key] for key in ("rate", "scale") if key in before}
    if options.only != "scale":
        figures["rate"] = measure_rate(options.rounds, options.pods)
        print_progress(f"rate: {figures['rate']['times_native']} times native")
    if options.only != "rate":
        namespaces, each = map(int, options.scale.split("x"))
        figures["scale"] = measure_scale(namespaces, each)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(about | {"targets": TARGETS} | figures, indent=1) + "\n")
    print_progress(f"results written to {options.results}")


if __name__ == "__main__":
    main()
