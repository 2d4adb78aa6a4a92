"""The cost of the node plugin on a node: latency of the kubelet's calls, memory, CPU, and time to registration.

    python -m bench.nodeplugin [--pods 100]

Runs on a real kubelet and containerd, with the fake driver and 16 cards of 192 GiB. Pods are created and bound with a
placement, as the scheduler does it. A "pair" is everything that the kubelet calls to allocate one container: two
preferences and two allocations. It is compared with the time from the first binding until all pods run, on the same
machine in the same run.
"""

import argparse
import json
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.reporting import current_commit, resident_bytes
from nodeplugin.cards import Card
from nodeplugin.device_plugin import encode_devices
from tests.cluster.layout import NODE_PLUGIN, PATIENT
from tests.cluster.real import RealCluster
from tests.node.driver import uuid
from tests.node.node import GpuNode, container, placement
from tests.waiting import eventually

RESULTS = Path(__file__).parent / "results" / "nodeplugin.json"
# Upper limits. 4 MiB is the largest message that the kubelet accepts; the others are goals of our own.
TARGETS = {
    "pair_p99_ms": 20,
    "rss_mb": 80,
    "start_to_registered_s": 2,
    "kubelet_to_registered_s": 5,
    "idle_percent": 1,
    "list_mib": 4,
}
CARDS, CARD_MIB, UNIT_MIB = 16, 192 * 1024, 256
# Calls that the kubelet makes for one container, besides PreStartContainer.
CALLS_PER_PAIR = 4
SETTLE_S, IDLE_S = 10, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=100, help="number of pods")
    options = parser.parse_args()
    os.environ[PATIENT] = "1"
    cluster = RealCluster.start(node=True)
    try:
        node = GpuNode(cluster, *["H200"] * CARDS)
        began = time.time()
        node.start()
        figures: dict[str, Any] = {"start_to_registered_s": round(last_logged_at(node, "registered") - began, 2)}
        figures["idle_percent"] = measure_idle_percent(node)
        figures |= start_one_by_one(node, options.pods)
        figures |= start_at_once(node, options.pods)
        figures["idle_with_pods_percent"] = measure_idle_percent(node)
        # In MiB, whatever the name of the key says.
        figures["rss_mb"] = round(resident_bytes(node.plugin_pid()) / 2**20, 1)
        figures |= restart_kubelet(node)
        figures["list_mib"] = round(max(device_list_mib(node, resource) for resource in ("core", "memory")), 3)
    finally:
        cluster.stop()
    result = {
        "commit": current_commit(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "pods": options.pods,
        "figures": figures,
        "targets": TARGETS,
        "missed": {key: figures[key] for key, target in TARGETS.items() if figures[key] > target},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))  # noqa: T201 - the result


def log_entries(node: GpuNode) -> list[dict[str, Any]]:
    """Return everything that the plugin has logged."""
    file = node.cluster.layout.logs / f"{NODE_PLUGIN}.log"
    return [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]


def last_logged_at(node: GpuNode, event: str) -> float:
    """Return the Unix time of the last log entry of an event."""
    entries = [entry for entry in log_entries(node) if entry["event"] == event]
    return datetime.fromisoformat(entries[-1]["timestamp"]).timestamp()


def start_pod(node: GpuNode, number: int) -> str:
    """Create a pod and bind it, and return its name; does not wait until it runs."""
    name = f"pod-{number}"
    pod = node.create(name, container("c0", 10, 4))
    node.bind(pod, placement(c0=[(uuid(number % CARDS), 10, 4 * UNIT_MIB)]))
    return name


def pairs_since(node: GpuNode, first: int) -> list[float]:
    """Return the duration of each pair in ms, sorted, without the first calls that the plugin logged."""
    calls = [entry for entry in log_entries(node) if entry["event"] == "answered" and entry["step"] != "start"][first:]
    # The kubelet allocates containers one after another, so the calls of a pair are adjacent in the log.
    starts = range(0, len(calls) - CALLS_PER_PAIR + 1, CALLS_PER_PAIR)
    return sorted(sum(call["took_ms"] for call in calls[at : at + CALLS_PER_PAIR]) for at in starts)


def start_one_by_one(node: GpuNode, count: int) -> dict[str, Any]:
    """Start each pod after the previous one runs: the plugin's own latency, without competition for the CPU."""
    began = time.time()
    for number in range(count):
        node.wait_phase(start_pod(node, number), "Running")
    whole_s = time.time() - began
    pairs = pairs_since(node, 0)
    prestarts = sorted(
        entry["took_ms"] for entry in log_entries(node) if entry["event"] == "answered" and entry["step"] == "start"
    )
    return {
        "pairs": len(pairs),
        "pair_median_ms": round(statistics.median(pairs), 2),
        "pair_p99_ms": round(pairs[int(len(pairs) * 0.99)], 2),
        "prestart_p99_ms": round(prestarts[int(len(prestarts) * 0.99)], 2),
        "part_of_the_time": round(sum(pairs) / 1000 / whole_s, 4),
    }


def start_at_once(node: GpuNode, count: int) -> dict[str, Any]:
    """Start all pods at the same time: the plugin competes with containerd and the kubelet for all cores."""
    node.clear()
    before = CALLS_PER_PAIR * len(pairs_since(node, 0))
    began = time.time()
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda number: start_pod(node, number), range(count)))
    for name in names:
        node.wait_phase(name, "Running")
    whole_s = time.time() - began
    pairs = pairs_since(node, before)
    return {
        "at_once_pods": count,
        "at_once_pair_median_ms": round(statistics.median(pairs), 2),
        "at_once_pair_p99_ms": round(pairs[int(len(pairs) * 0.99)], 2),
        "at_once_running_after_s": round(whole_s, 1),
        "at_once_part_of_the_time": round(sum(pairs) / 1000 / whole_s, 4),
    }


def measure_idle_percent(node: GpuNode) -> float:
    """Measure the plugin's CPU usage without any requests, in percent of one core."""
    # Includes the fake driver's own polling for events, every 50 ms, which a real driver does not need.
    time.sleep(SETTLE_S)
    pid = node.plugin_pid()
    before = cpu_ticks(pid)
    time.sleep(IDLE_S)
    used_s = (cpu_ticks(pid) - before) / os.sysconf("SC_CLK_TCK")
    return round(100 * used_s / IDLE_S, 2)


def cpu_ticks(pid: int) -> int:
    """Return the CPU time of a process, user and system, in clock ticks."""
    # Split after the last ")": the name of the command may contain spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def restart_kubelet(node: GpuNode) -> dict[str, Any]:
    """Measure from the start of a new kubelet, which needs time itself, to the registration with it."""
    before = last_logged_at(node, "registered")
    node.cluster.kill("kubelet")
    began = time.time()
    node.cluster.run("kubelet")
    eventually(lambda: last_logged_at(node, "registered") > before, "the plugin to register again", 60)
    return {"kubelet_to_registered_s": round(last_logged_at(node, "registered") - began, 2)}


def device_list_mib(node: GpuNode, resource: str) -> float:
    """Return the size of the message that lists all devices of a resource."""
    units = (
        100 if resource == "core" else Card(uuid="", index=0, minor=0, product="", memory_mib=CARD_MIB).units(UNIT_MIB)
    )
    # All unhealthy: that is the longer word.
    devices = {f"{resource}-{number}": False for number in range(units * len(node.kinds))}
    return len(encode_devices(devices).SerializeToString()) / 2**20


if __name__ == "__main__":
    main()
