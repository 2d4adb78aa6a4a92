"""The cost of the scheduler: the extender's answers on large clusters, and kube-scheduler's throughput with it.

    python -m bench.scheduler [--only extender|throughput|room|memory] [--nodes 5000] [--pods 400]

Extender: nodes of 8 GPUs, four running GPU pods on each, no two nodes alike; pods of nine sizes are filtered, ranked
and bound over HTTP by one client, as kube-scheduler does it, with the default policy, which learns from them meanwhile:
twice in the measured part.
The order of the node names is another one in every request. Then pods of which no two are alike. The median of three
runs, and the means of all. For comparison the same with `binpack`, which estimates nothing.

Throughput: Node objects on a real API server, and the real kube-scheduler, in turns with the extender and without it,
and otherwise with the same configuration. The same number of pods is created before each turn. Everything shares one
machine, so only the ratio is meaningful.

Memory: the same nodes and running pods as objects of a real API server, which an extender lists and watches.

Room: a pod waits for the only GPU of a node; the pod that uses it is deleted. The time from its deletion until the
waiting pod is bound, on an idle cluster.
"""

import argparse
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.reporting import current_commit, print_progress, resident_bytes
from bench.scheduler_process import ARRIVING, node_name, pod_manifest
from cluster.objects import PODS
from tests.cluster import layout
from tests.cluster.objects import new_namespace
from tests.cluster.real import RealCluster
from tests.scheduler.real import NAMES, SchedulerCluster, pod_spec
from vcuda.placement_annotation import GpuSlice, encode_placement

RESULTS = Path(__file__).parent / "results" / "scheduler.json"
TARGETS = {
    "extender_mean_ms": 5,
    "extender_p99_ms": 25,
    "new_shape_p99_ms": 100,
    "times_binpack": 0.9,
    "bind_ms": 2,
    "extender_rss_mb": 500,
    "times_plain": 0.5,
    "room_to_binding_p99_s": 2,
}
SIZES = (1000, 5000, 20000)
PODS_PER_NODE = 4
ROUNDS = 300
# So many pods that the workload is learned again twice while 300 are measured: at 342 and 513 pods. Before, it is more
# often than any cluster sees it: each time the pods have grown by half.
WARM_UP = 250
NEW_SHAPES = 100
COMPARED = 5000
# The pod that is bound, and the clients that create objects.
CLIENTS = 16
TURNS = 3
TURN_TIMEOUT_S = 600.0
# How often room is made, and how long the cluster is left alone before: longer than the backoff of a waiting pod.
ROOMS, QUIET_S = 40, 11.0

Figures = dict[str, Any]


class ExtenderClient:
    """One connection to an extender, with little overhead of its own."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(2**24)

    def call(self, verb: str, body: bytes) -> tuple[float, bytes]:
        """Send a request; returns the seconds until its answer was received, and the answer."""
        head = f"POST /scheduler/{verb} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        started = time.perf_counter()
        self._socket.sendall(head + body)
        view, received, needed = memoryview(self._buffer), 0, None
        while needed is None or received < needed:
            received += self._socket.recv_into(view[received:])
            end = self._buffer.find(b"\r\n\r\n", 0, received)
            if needed is None and end > 0:
                needed = end + 4 + int(bytes(self._buffer[:end]).split(b"Content-Length: ")[1].split(b"\r\n")[0])
        took_s = time.perf_counter() - started
        start = self._buffer.find(b"\r\n\r\n", 0, received) + 4
        return took_s, bytes(self._buffer[start:received])


def compact(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Encode JSON as Go does."""
    return json.dumps(value, separators=(",", ":")).encode()


def measure_extender(nodes: int, policy: str = "fragmentation") -> Figures:
    """Measure the answers of an extender on a cluster of this size."""
    print_progress(f"extender: {nodes} nodes, {nodes * PODS_PER_NODE} running pods, {policy}")
    command = [sys.executable, "-m", "bench.scheduler_process", str(nodes), str(nodes * PODS_PER_NODE), policy]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: S603 - our own program
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        client = ExtenderClient(int(process.stdout.readline()))
        try:
            times, bindings = run_pods(client, nodes)
            new_shapes = run_new_shapes(client, nodes)
            memory = resident_bytes(process.pid)
        finally:
            process.terminate()
    return {
        "nodes": nodes,
        "filter_mean_ms": mean_ms([filter_s for filter_s, _ in times]),
        "prioritize_mean_ms": mean_ms([prioritize_s for _, prioritize_s in times]),
        "mean_ms": mean_ms(list(map(sum, times))),
        "p99_ms": percentile_ms(list(map(sum, times)), 0.99),
        "new_shape_mean_ms": mean_ms(new_shapes),
        "new_shape_p99_ms": percentile_ms(new_shapes, 0.99),
        "bind_mean_ms": mean_ms(bindings),
        "rss_mb": round(memory / 2**20),
    }


def measure_sizes() -> list[Figures]:
    """Measure each size a few times, in turns, as the machine's speed drifts; returns the median run of each."""
    cases = [*((nodes, "fragmentation") for nodes in SIZES), (COMPARED, "binpack")]
    runs = [[measure_extender(*case) | {"policy": case[1]} for case in cases] for _ in range(TURNS)]
    sizes = [sorted(of_case, key=lambda run: float(run["mean_ms"])) for of_case in zip(*runs, strict=True)]
    return [of_case[TURNS // 2] | {"means_ms": [run["mean_ms"] for run in of_case]} for of_case in sizes]


def run_pods(client: ExtenderClient, nodes: int) -> tuple[list[tuple[float, float]], list[float]]:
    choose = random.Random(42)
    names = [node_name(number) for number in range(nodes)]
    times: list[tuple[float, float]] = []
    bindings: list[float] = []
    for number in range(ROUNDS + WARM_UP):
        pod = pod_manifest(10**6 + number, choose.choice(ARRIVING))
        choose.shuffle(names)
        took, fitting = decide(client, pod, names)
        bind_s, bound = bind(client, pod, fitting[0]) if fitting else (0.0, b"")
        if number >= WARM_UP:
            times.append(took)
            bindings += [bind_s] if b'"Error":""' in bound else []
    return times, bindings


def decide(client: ExtenderClient, pod: dict[str, Any], names: list[str]) -> tuple[tuple[float, float], list[str]]:
    """Return how long filter and prioritize took, and the nodes that fit."""
    filter_s, answer = client.call("filter", compact({"Pod": pod, "Nodes": None, "NodeNames": names}))
    fitting: list[str] = json.loads(answer)["NodeNames"]
    prioritize_s = 0.0
    if len(fitting) > 1:
        prioritize_s, _ = client.call("prioritize", compact({"Pod": pod, "Nodes": None, "NodeNames": fitting}))
    return (filter_s, prioritize_s), fitting


def run_new_shapes(client: ExtenderClient, nodes: int) -> list[float]:
    """Return the times of pods of which no two are alike."""
    choose, names, times = random.Random(43), [node_name(number) for number in range(nodes)], []
    for number in range(NEW_SHAPES):
        shape = (choose.randint(1, 99), choose.randint(1, 40))
        pod = pod_manifest(2 * 10**6 + number, shape, cpu=f"{1000 + number}m")
        took, fitting = decide(client, pod, names)
        times.append(sum(took))
        if fitting:
            bind(client, pod, fitting[0])
    return times


def bind(client: ExtenderClient, pod: dict[str, Any], node: str) -> tuple[float, bytes]:
    metadata = pod["metadata"]
    args = {"PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"], "Node": node}
    return client.call("bind", compact(args))


def mean_ms(seconds: list[float]) -> float:
    return round(1000 * statistics.mean(seconds), 2)


def percentile_ms(seconds: list[float], part: float) -> float:
    return round(1000 * sorted(seconds)[int(part * len(seconds))], 2)


class ThroughputRun:
    """A cluster with many Node objects, on which pods are scheduled in turns with and without the extender."""

    def __init__(self, nodes: int, pods: int) -> None:
        self._pods = pods
        self._cluster = SchedulerCluster(RealCluster.start())
        self._api = self._cluster.cluster
        print_progress(f"throughput: creating {nodes} nodes")
        started = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda number: self._cluster.add_node(node_name(number), 8), range(nodes)))
        print_progress(f"throughput: {nodes} nodes after {time.monotonic() - started:.0f} s")

    def stop(self) -> None:
        self._cluster.stop()

    def turn(self, name: str, *programs: str) -> Figures:
        """Create pods, start a scheduler, and measure how fast it binds them."""
        namespace = new_namespace(self._api, name)
        real = self._cluster.real
        for program in programs:
            real.run(program)
        # The first pod shows that the scheduler has its caches and leads.
        self._create(namespace, 0)
        self._wait_bound(namespace, 1)
        with ThreadPoolExecutor(CLIENTS) as pool:
            real.kill(programs[-1], 19)
            list(pool.map(lambda number: self._create(namespace, number), range(1, self._pods + 1)))
        started = time.monotonic()
        real.kill(programs[-1], 18)
        self._wait_bound(namespace, self._pods + 1)
        took_s = time.monotonic() - started
        for program in reversed(programs):
            real.kill(program)
        figures = {"pods_per_s": round(self._pods / took_s, 1)}
        print_progress(f"throughput: {name}: {figures}")
        return figures

    def _create(self, namespace: str, number: int) -> None:
        body = {"metadata": {"name": f"p-{number}", "namespace": namespace}, "spec": pod_spec(50, 8)}
        self._api.create(PODS, body)

    def _wait_bound(self, namespace: str, count: int) -> None:
        deadline = time.monotonic() + TURN_TIMEOUT_S
        while sum(bool(pod.spec.node_name) for pod in self._api.list(PODS, namespace).items) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{namespace}: fewer than {count} pods are bound")
            time.sleep(0.2)


def measure_throughput(nodes: int, pods: int) -> Figures:
    run = ThroughputRun(nodes, pods)
    turns: list[dict[str, float]] = []
    scheduler = layout.kube_scheduler_name("a")
    try:
        for number in range(TURNS):
            plain = run.turn(f"plain-{number}", layout.PLAIN_SCHEDULER)["pods_per_s"]
            own = run.turn(f"extender-{number}", layout.extender_name("a"), scheduler)["pods_per_s"]
            binpack = run.turn(f"binpack-{number}", layout.BINPACK_EXTENDER, scheduler)["pods_per_s"]
            turns.append(
                {
                    "plain": plain,
                    "extender": own,
                    "binpack": binpack,
                    "ratio": round(own / plain, 2),
                    "to_binpack": round(own / binpack, 2),
                }
            )
    finally:
        run.stop()
    return {
        "nodes": nodes,
        "pods": pods,
        "turns": turns,
        "times_plain": round(statistics.median(each["ratio"] for each in turns), 2),
        "times_binpack": round(statistics.median(each["to_binpack"] for each in turns), 2),
    }


def measure_memory(nodes: int) -> Figures:
    """Measure the memory of an extender that has listed nodes and running pods."""
    cluster = SchedulerCluster(RealCluster.start())
    real, count = cluster.real, nodes * PODS_PER_NODE
    try:
        # Nobody has to admit the pods: they run already.
        for program in (layout.CONTROLLER, layout.WEBHOOK):
            real.kill(program)
        real.kubectl("delete", "validatingwebhookconfigurations,mutatingwebhookconfigurations", "--all")
        namespace = new_namespace(cluster.cluster, "running")

        def run_pod(number: int) -> None:
            node, gpu = node_name(number // PODS_PER_NODE), number % PODS_PER_NODE
            placed = {"c": [GpuSlice(f"GPU-{node}-{gpu}", 50, 2048)]}
            metadata = {
                "name": f"p-{number}",
                "namespace": namespace,
                "annotations": {NAMES.placement: encode_placement(placed)},
            }
            cluster.cluster.create(PODS, {"metadata": metadata, "spec": pod_spec(50, 8, nodeName=node)})

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda number: cluster.add_node(node_name(number), 8), range(nodes)))
            print_progress(f"memory: {nodes} nodes")
            list(pool.map(run_pod, range(count)))
        print_progress(f"memory: {count} pods")
        started = time.monotonic()
        cluster.start_replica("a")
        while cluster.metric("a", "free_cores") != 800 * nodes - 50 * count or cluster.metric("a", "active") != 1:
            time.sleep(0.2)
        ready_s = time.monotonic() - started
        status = f"/proc/{real.supervisor_info()['init']}/root/proc/{real.running()[layout.extender_name('a')]}/status"
        kib = {
            key: int(value.split()[0])
            for key, value in (line.split(":") for line in Path(status).read_text().splitlines())
            if key in {"VmRSS", "VmHWM"}
        }
    finally:
        cluster.stop()
    return {
        "nodes": nodes,
        "pods": count,
        "rss_mb": kib["VmRSS"] // 1024,
        "peak_rss_mb": kib["VmHWM"] // 1024,
        "ready_after_s": round(ready_s, 1),
    }


def measure_room() -> Figures:
    """Measure how soon a waiting pod is bound after room has appeared."""
    cluster = SchedulerCluster(RealCluster.start(), "a")
    times: list[float] = []
    try:
        cluster.namespace("room")
        cluster.add_node("only", 1)
        cluster.pod("room", "p-0", 100, 1)
        wait_until_bound(cluster, "p-0")
        for number in range(ROOMS):
            name = f"p-{number + 1}"
            cluster.pod("room", name, 100, 1)
            time.sleep(QUIET_S)
            started = time.monotonic()
            cluster.cluster.delete(PODS, f"p-{number}", "room", grace_s=0)
            wait_until_bound(cluster, name)
            times.append(time.monotonic() - started)
            print_progress(f"room: {number + 1} of {ROOMS}: {times[-1]:.2f} s")
    finally:
        cluster.stop()
    return {"median_s": round(statistics.median(times), 3), "p99_s": percentile_ms(times, 0.99) / 1000, "rooms": ROOMS}


def wait_until_bound(cluster: SchedulerCluster, name: str) -> None:
    deadline = time.monotonic() + TURN_TIMEOUT_S
    while not cluster.cluster.get(PODS, name, "room").spec.node_name:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} is not bound")
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("extender", "throughput", "room", "memory"))
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=400)
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results |= {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "targets": TARGETS,
    }
    parts: dict[str, Callable[[], Any]] = {
        "extender": measure_sizes,
        "throughput": lambda: measure_throughput(options.nodes, options.pods),
        "memory": lambda: measure_memory(options.nodes),
        "room": measure_room,
    }
    for name, measure in parts.items():
        if options.only in (None, name):
            results[name] = measure()
            # Parts are measured one by one, so each has the commit it was measured at.
            results.setdefault("commits", {})[name] = current_commit()
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print_progress(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
