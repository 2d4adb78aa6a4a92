"""What quotas cost: creations a second beside Kubernetes' own quota, and a large cluster in the controller.

    python -m bench.quota [--rounds 3] [--pods 2000] [--scale 1000x100] [--only rate|scale]

Rate: 50 clients create small GPU pods in one namespace as fast as they can, on a real API server; with Quotient's
webhook and ledger, then with native ResourceQuota on the same resources and no webhook, in turns. Everything shares the
machine, so that only the ratio within a round says something.

Scale: many namespaces with a quota and pods each; the controller is started on them, and then pods end and others
begin at a steady rate.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

from cluster.api import ApiCluster, connect
from cluster.informer import Informer
from cluster.objects import CONFIG_MAPS, NAMESPACES, PODS, ConfigMap
from ledger.ledger_store import LEDGER_SELECTOR, ledger_namespace
from tests.cluster.objects import new_namespace
from tests.cluster.quotient import run_beside
from tests.cluster.real import RealCluster
from tests.running import RunningController
from vcuda.ledger import PodKey, pack_uid
from vcuda.names import LEDGER_KEY, Names

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "quota.json"
TARGETS = {
    "times_native": 0.5,
    "hoped_for_times_native": 0.8,
    "scale_ready_s": 15,
    "scale_rss_mb": 500,
    "scale_freed_s": 1.0,
}
HOOKS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
NAMES = Names()
PLENTY = 10**7
CHANGES_PER_S, CHANGES_FOR_S = 50, 20
READY_S = 300

Figures = dict[str, Any]


def say(text: str) -> None:
    """Show progress."""
    print(text, flush=True)  # noqa: T201


def quota(namespace: str) -> dict[str, Any]:
    """Write a quota with room for everything."""
    text = f"types: {{A100: {{cores: {PLENTY}, memory: {PLENTY}Gi}}}}"
    metadata = {"name": "q", "namespace": namespace, "labels": {NAMES.quota_label: "true"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"quota.yaml": text}}


def native(namespace: str) -> dict[str, Any]:
    """Write Kubernetes' own quota for the same resources."""
    hard = {f"requests.{NAMES.core}": str(PLENTY), f"requests.{NAMES.memory}": str(PLENTY)}
    metadata = {"name": "q", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}}


def create(real: RealCluster, namespaces: list[str], count: int) -> Figures:
    """Let 50 clients create pods, inside the cluster's own network."""
    kubeconfig = real.layout.state / "admin.kubeconfig"
    done = real.enter(sys.executable, "-m", "bench.creating", str(kubeconfig), ",".join(namespaces), str(count))
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: Figures = json.loads(done.stdout)
    if set(found["answers"]) != {"201"}:
        raise RuntimeError(f"not all were created: {found}")
    return found


def measure_rate(rounds: int, pods: int) -> Figures:
    """Let both take turns on one cluster."""
    real = RealCluster.start(node=False)
    found: dict[str, list[Figures]] = {"quotient": [], "native": []}
    try:
        run_beside(real)
        hooks = [json.loads(real.kubectl("get", kind, "quotient", "-o", "json")) for kind in HOOKS]
        for number in range(rounds):
            for each in hooks:
                real.kubectl("apply", "-f-", stdin=json.dumps(each | {"metadata": {"name": "quotient"}}))
            found["quotient"].append(measured(real, f"quotient-{number}", quota(f"quotient-{number}"), pods))
            for kind in HOOKS:
                real.kubectl("delete", kind, "quotient")
            found["native"].append(measured(real, f"native-{number}", native(f"native-{number}"), pods))
            ratio = found["quotient"][-1]["per_s"] / found["native"][-1]["per_s"]
            say(f"round {number + 1} of {rounds}: {ratio:.2f} times native")
        metrics = real.enter(str(shutil.which("curl")), "-s", "http://127.0.0.1:8080/metrics").stdout
    finally:
        real.stop()
    ratios = [ours["per_s"] / theirs["per_s"] for ours, theirs in zip(found["quotient"], found["native"], strict=True)]
    return {
        "pods": pods,
        "per_s": {name: round(statistics.median(each["per_s"] for each in every)) for name, every in found.items()},
        "p99_ms": {name: round(statistics.median(each["p99_ms"] for each in every)) for name, every in found.items()},
        "times_native": round(statistics.median(ratios), 2),
        "times_native_of_each_round": [round(ratio, 2) for ratio in ratios],
        "ledger": series(metrics),
    }


def series(metrics: str) -> Figures:
    """Take from the webhook's metrics how charging went."""
    wanted = ("quotient_ledger_writes_total", "quotient_ledger_conflicts_total", "quotient_connections_total")
    return {
        line.split()[0].removeprefix("quotient_").removesuffix("_total"): float(line.split()[1])
        for line in metrics.splitlines()
        if line.startswith(wanted)
    }


def measured(real: RealCluster, namespace: str, held_to: dict[str, Any], pods: int) -> Figures:
    """Create pods in a new namespace."""
    real.kubectl("create", "namespace", namespace)
    real.kubectl("apply", "-f-", stdin=json.dumps(held_to))
    time.sleep(3)  # until the quota is in force everywhere, and the machine is quiet
    found = create(real, [namespace], pods)
    say(f"{namespace}: {found['per_s']:.0f}/s, p99 {found['p99_ms']:.0f} ms")
    return found


class Freed:
    """Watches ledgers, and says how long it took until what a pod held was free."""

    def __init__(self, cluster: ApiCluster, system_namespace: str) -> None:
        self._held: dict[PodKey, tuple[str, float]] = {}
        self._lock = threading.Lock()
        self.taken: list[float] = []
        self._informer = Informer(cluster, CONFIG_MAPS, system_namespace, LEDGER_SELECTOR)
        self._informer.on_change(self._changed)

    def __enter__(self) -> Self:
        self._informer.start()
        self._informer.wait_synced(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._informer.stop()

    def expect(self, namespace: str, uid: str) -> None:
        """Wait for a pod that was just deleted."""
        with self._lock:
            self._held[pack_uid(uid)] = namespace, time.monotonic()

    @property
    def waiting(self) -> int:
        """How many are not free yet."""
        return len(self._held)

    def _changed(self, _: ConfigMap | None, after: ConfigMap | None) -> None:
        if after is None:
            return
        namespace, text = ledger_namespace(after), after.data.get(LEDGER_KEY, "")
        with self._lock:
            gone = [key for key, (where, _) in self._held.items() if where == namespace and key not in text]
            for key in gone:
                self.taken.append(time.monotonic() - self._held.pop(key)[1])


def measure_scale(namespaces: int, each: int) -> Figures:
    """Fill a cluster, start the controller on it, and let pods come and go."""
    real = RealCluster.start(node=False)
    try:
        cluster = connect(str(real.kubeconfig))
        names = [f"team-{number:04}" for number in range(namespaces)]
        say(f"{namespaces} namespaces with a quota each")
        cluster.create(NAMESPACES, {"metadata": {"name": "quotient-system"}})
        for name in names:
            new_namespace(cluster, name)
            cluster.create(CONFIG_MAPS, quota(name))
        say(f"{namespaces * each:,} pods")
        rate = create(real, names, namespaces * each)["per_s"]
        say(f"made at {rate:.0f}/s; the controller takes them over")
        folder = real.layout.state
        figures: Figures = {"namespaces": namespaces, "pods": namespaces * each}
        figures["first_start_s"], _ = started(real, folder, namespaces, each)
        figures["start_s"], controller = started(real, folder, namespaces, each)
        try:
            figures |= churn(cluster, names)
            figures["rss_mb"] = round(rss_mb(controller), 1)
        finally:
            controller.stop()
        return figures
    finally:
        real.stop()


def started(real: RealCluster, folder: Path, namespaces: int, each: int) -> tuple[float, RunningController]:
    """Start a controller, and wait until all namespaces are accounted for; the second start finds them so."""
    controller = RunningController(real.kubeconfig, folder)
    began = time.monotonic()
    controller.start(ready=False)
    until = began + READY_S
    while "initial_reconcile_done" not in controller.log.read_text():
        if time.monotonic() > until:
            raise RuntimeError("the controller did not catch up in time")
        time.sleep(0.05)
    took = time.monotonic() - began
    lines = controller.ops("/metrics")[1].splitlines()
    used = [line for line in lines if line.startswith("quotient_quota_used") and 'resource="cores"' in line]
    if len(used) != namespaces or not all(float(line.split()[-1]) >= each for line in used):
        raise RuntimeError("the controller says it has caught up, and has not")
    say(f"synced and reconciled after {took:.1f} s, {rss_mb(controller):.0f} MB")
    if not (folder / "started").exists():
        (folder / "started").touch()
        controller.stop()
    return round(took, 1), controller


def rss_mb(controller: RunningController) -> float:
    """Give what the process holds of the machine's memory."""
    text = Path(f"/proc/{controller.pids()[0]}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS"))) * 1024 / 1e6


def churn(cluster: ApiCluster, names: list[str]) -> Figures:
    """Let pods end at a steady rate, and measure until what they held is free."""
    chance = random.Random(1)
    say(f"{CHANGES_PER_S} changes a second for {CHANGES_FOR_S} s")
    victims = [pod for name in chance.sample(names, min(50, len(names))) for pod in cluster.list(PODS, name).items]
    chance.shuffle(victims)
    with Freed(cluster, "quotient-system") as freed:
        began = time.monotonic()
        for number, pod in enumerate(victims[: CHANGES_PER_S * CHANGES_FOR_S]):
            time.sleep(max(0.0, began + number / CHANGES_PER_S - time.monotonic()))
            freed.expect(pod.metadata.namespace, pod.metadata.uid)
            cluster.delete(PODS, pod.metadata.name, pod.metadata.namespace, grace_s=0)
        until = time.monotonic() + 30
        while freed.waiting and time.monotonic() < until:
            time.sleep(0.05)
        taken = sorted(freed.taken)
    say(f"{len(taken)} ended; freed after {taken[len(taken) // 2]:.2f} s, p99 {taken[len(taken) * 99 // 100]:.2f} s")
    return {
        "ended": len(taken),
        "never_freed": freed.waiting,
        "freed_s": {"p50": round(taken[len(taken) // 2], 3), "p99": round(taken[len(taken) * 99 // 100], 3)},
    }


def main() -> None:
    """Measure, show and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pods", type=int, default=2000, help="in each round of the rate")
    parser.add_argument("--scale", default="1000x100", help="namespaces x pods in each")
    parser.add_argument("--only", choices=["rate", "scale"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    before = json.loads(options.results.read_text()) if options.results.exists() else {}
    git = [str(shutil.which("git")), "rev-parse", "HEAD"]
    commit = subprocess.run(git, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603
    about = {"commit": commit, "seed": 1, "cores": os.cpu_count(), "python": platform.python_version()}
    figures: Figures = {key: before[key] for key in ("rate", "scale") if key in before}
    if options.only != "scale":
        figures["rate"] = measure_rate(options.rounds, options.pods)
        say(f"rate: {figures['rate']['times_native']} times native")
    if options.only != "rate":
        namespaces, each = map(int, options.scale.split("x"))
        figures["scale"] = measure_scale(namespaces, each)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(about | {"targets": TARGETS} | figures, indent=1) + "\n")
    say(f"written to {options.results}")


if __name__ == "__main__":
    main()
