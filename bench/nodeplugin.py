"""What the node plugin costs a node: time for the kubelet's calls, memory, processor, and how soon it is there.

    python -m bench.nodeplugin [--pods 100]

A real kubelet and containerd, the fake driver with 16 cards of 192 GiB. Pods are made at once and bound with a
placement, as the scheduler does it. A pair is all that the kubelet asks for one container: two preferences and two
allocations. It is set beside what the kubelet needs in all from the binding to the running pod, on the same machine
in the same run.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from nodeplugin.cards import Card
from nodeplugin.device_plugin import encode_devices
from tests.cluster.layout import NODE_PLUGIN, PATIENT
from tests.cluster.real import RealCluster
from tests.node.driver import uuid
from tests.node.node import GpuNode, container, placement
from tests.waiting import eventually

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "nodeplugin.json"
TARGETS = {
    "pair_p99_ms": 20,
    "rss_mb": 80,
    "start_to_registered_s": 2,
    "kubelet_to_registered_s": 5,
    "idle_percent": 1,
    "list_mib": 4,
}
CARDS, CARD_MIB, UNIT_MIB = 16, 192 * 1024, 256
SETTLE_S, IDLE_S = 10, 20


def main() -> None:
    """Measure, show, and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=100)
    options = parser.parse_args()
    os.environ[PATIENT] = "1"
    cluster = RealCluster.start(node=True)
    try:
        node = GpuNode(cluster, *["H200"] * CARDS)
        began = time.time()
        node.start()
        figures: dict[str, Any] = {"start_to_registered_s": round(last_said(node, "registered") - began, 2)}
        figures["idle_percent"] = idle_percent(node)
        figures |= one_by_one(node, options.pods)
        figures |= at_once(node, options.pods)
        figures["idle_with_pods_percent"] = idle_percent(node)
        figures["rss_mb"] = rss_mb(node)
        figures |= after_a_kubelet_restart(node)
        figures["list_mib"] = round(max(list_mib(node, resource) for resource in ("core", "memory")), 3)
    finally:
        cluster.stop()
    result = {
        "commit": git("rev-parse", "--short", "HEAD")
        + ("-dirty" if git("status", "--porcelain", "--", ".", ":!bench/results") else ""),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "pods": options.pods,
        "figures": figures,
        "targets": TARGETS,
        "missed": {key: figures[key] for key, most in TARGETS.items() if figures[key] > most},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))  # noqa: T201 - what it is for


def lines(node: GpuNode) -> list[dict[str, Any]]:
    """Read what the plugin logged."""
    file = node.cluster.layout.logs / f"{NODE_PLUGIN}.log"
    return [json.loads(line) for line in file.read_text().splitlines() if line.startswith("{")]


def last_said(node: GpuNode, event: str) -> float:
    """When the plugin last logged an event."""
    said = [line for line in lines(node) if line["event"] == event]
    return datetime.fromisoformat(said[-1]["timestamp"]).timestamp()


def start(node: GpuNode, number: int) -> str:
    """Make a pod and bind it."""
    name = f"pod-{number}"
    pod = node.create(name, container("c0", 10, 4))
    node.bind(pod, placement(c0=[(uuid(number % CARDS), 10, 4 * UNIT_MIB)]))
    return name


def pairs_since(node: GpuNode, first: int) -> list[float]:
    """Give how long the kubelet's calls for each container took, of those after the first so many."""
    said = [line for line in lines(node) if line["event"] == "answered" and line["step"] != "start"][first:]
    # The kubelet asks for one container after another: four answers belong together.
    return sorted(sum(line["took_ms"] for line in said[at : at + 4]) for at in range(0, len(said) - 3, 4))


def one_by_one(node: GpuNode, count: int) -> dict[str, Any]:
    """Start pods one after another: the plugin's own time, with nobody else in need of the processor."""
    began = time.time()
    for number in range(count):
        node.wait_phase(start(node, number), "Running")
    whole_s = time.time() - began
    pairs = pairs_since(node, 0)
    starts = sorted(line["took_ms"] for line in lines(node) if line["event"] == "answered" and line["step"] == "start")
    return {
        "pairs": len(pairs),
        "pair_median_ms": round(statistics.median(pairs), 2),
        "pair_p99_ms": round(pairs[int(len(pairs) * 0.99)], 2),
        "prestart_p99_ms": round(starts[int(len(starts) * 0.99)], 2),
        "part_of_the_time": round(sum(pairs) / 1000 / whole_s, 4),
    }


def at_once(node: GpuNode, count: int) -> dict[str, Any]:
    """Start pods all at once: both processors are busy with containerd and the kubelet, and everybody waits."""
    node.clear()
    before = 4 * len(pairs_since(node, 0))
    began = time.time()
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda number: start(node, number), range(count)))
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


def rss_mb(node: GpuNode) -> float:
    """Measure the plugin's memory."""
    status = Path(f"/proc/{node.plugin_pid()}/status").read_text()
    return round(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024, 1)


def idle_percent(node: GpuNode) -> float:
    """Measure the processor's time while nothing happens; the fake driver's own waking is part of it."""
    time.sleep(SETTLE_S)
    pid = node.plugin_pid()
    before = ticks(pid)
    time.sleep(IDLE_S)
    used_s = (ticks(pid) - before) / os.sysconf("SC_CLK_TCK")
    return round(100 * used_s / IDLE_S, 2)


def ticks(pid: int) -> int:
    """Give the processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def after_a_kubelet_restart(node: GpuNode) -> dict[str, Any]:
    """Measure from the start of a new kubelet, which takes a while itself, to the registration."""
    before = last_said(node, "registered")
    node.cluster.kill("kubelet")
    began = time.time()
    node.cluster.run("kubelet")
    eventually(lambda: last_said(node, "registered") > before, "the plugin to register again", 60)
    return {"kubelet_to_registered_s": round(last_said(node, "registered") - began, 2)}


def list_mib(node: GpuNode, resource: str) -> float:
    """Measure the message that lists all devices."""
    units = (
        100 if resource == "core" else Card(uuid="", index=0, minor=0, product="", memory_mib=CARD_MIB).units(UNIT_MIB)
    )
    devices = {f"{resource}-{number}": False for number in range(units * len(node.kinds))}
    return len(encode_devices(devices).SerializeToString()) / 2**20


def git(*arguments: str) -> str:
    """Ask git about this checkout."""
    return subprocess.run(["git", *arguments], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603, S607


if __name__ == "__main__":
    main()
