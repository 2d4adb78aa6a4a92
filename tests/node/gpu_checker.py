"""Checks what containers have of GPUs against what the API server says, at every moment, without Quotient's own code.

Three sources are compared: every state of the pods that a watch shows, the node plugin's checkpoint, and the processes
that run on the node, each with the limits and device nodes that it sees.
"""

import json
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from tests.background import Background
from tests.cluster.real import RealCluster

PLACEMENT, CORE, MEMORY = "inspur.com/gpu-placement", "inspur.com/vcuda-core", "inspur.com/vcuda-memory"
UNIT_MIB, CARD_CORES = 256, 100
ENDED = {"Succeeded", "Failed"}
POLL_S = 0.05
POD_CGROUP = re.compile(r"/pod[0-9a-f]{8}-")
CARD_NODE = re.compile(r"nvidia\d+")

RawPod = dict[str, Any]
# UUID of the card, cores, MiB.
Slice = tuple[str, int, int]
# The slices of each container of a pod.
Placement = dict[str, tuple[Slice, ...]]


class PhysicalCard(Struct, frozen=True):
    """A card as the driver was configured to report it."""

    model: str
    memory_mib: int
    minor: int


class RunningContainer(Struct, frozen=True):
    """A container of which a process runs: its limits, and its cards' device nodes."""

    pod_uid: str
    name: str
    slices: tuple[Slice, ...]
    nodes: frozenset[str]


class GpuChecker(Background):
    """Follows pods, checkpoint and processes, and records every contradiction in `violations`."""

    def __init__(self, cluster: RealCluster, cards: dict[str, PhysicalCard]) -> None:
        super().__init__()
        self._cluster, self._cards = cluster, cards
        self._root = Path(f"/proc/{cluster.supervisor_info()['init']}/root")
        self.violations: list[str] = []
        # By UID: the latest state of every pod that exists, and the placement of every pod that ever had one.
        self.pods: dict[str, RawPod] = {}
        self.placements: dict[str, Placement] = {}
        # Containers that were seen running, by pod UID and name.
        self.seen: set[tuple[str, str]] = set()
        self.pod_states = self.process_states = self.checkpoint_states = 0
        # Allocations that the plugin recorded before the watch showed the pod's binding; compared at the end.
        self._early: list[tuple[str, Placement]] = []
        self._watch: subprocess.Popen[str] | None = None
        self._threads = [
            threading.Thread(target=run, name=f"gpu-checker-{run.__name__}", daemon=True)
            for run in (self._follow_pods, self._follow_node)
        ]

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        if self._watch is not None:
            self._watch.terminate()
            self._watch.wait()
        super().__exit__()
        for uid, allocated in self._early:
            self._compare(uid, allocated, "the checkpoint")

    def pod_named(self, name: str) -> RawPod | None:
        return next((pod for pod in list(self.pods.values()) if pod["metadata"]["name"] == name), None)

    def phase(self, name: str) -> str:
        """Return the phase of a pod; empty if there is none."""
        pod = self.pod_named(name)
        return str(pod["status"].get("phase", "")) if pod else ""

    # Pods, as the API server shows them.

    def _follow_pods(self) -> None:
        command = ["get", "pods", "--namespace=default", "--watch", "--output-watch-events", "--output=json"]
        kubectl = self._cluster.layout.kubernetes / "kubectl"
        self._watch = subprocess.Popen(
            [kubectl, f"--kubeconfig={self._cluster.kubeconfig}", *command], stdout=subprocess.PIPE, text=True
        )
        assert self._watch.stdout is not None
        with self._watch.stdout as lines:
            for line in lines:
                self._handle(json.loads(line))
        if not self._ending.is_set():
            self.violations.append("the watch ended: later states of pods were not checked")

    def _handle(self, event: dict[str, Any]) -> None:
        pod = event["object"]
        uid = pod["metadata"]["uid"]
        if event["type"] == "DELETED":
            self.pods.pop(uid, None)
            return
        self.pods[uid] = pod
        placed = placement_of(pod)
        if placed is not None and uid not in self.placements:
            self.placements[uid] = placed
            self.violations += request_problems(pod, placed, self._cards)
        elif placed != self.placements.get(uid):
            self._report(f"the placement of {title(pod)} changed from {self.placements[uid]} to {placed}")
        self.pod_states += 1
        holding = [each for each in self.pods.values() if holds_cards(each)]
        self._check_sum((slices_at_peak(each, self.placements[each["metadata"]["uid"]]) for each in holding), "pods")

    # What the node has.

    def _follow_node(self) -> None:
        while not self._ending.wait(POLL_S):
            self._check_checkpoint()
            self._check_processes()

    def _check_checkpoint(self) -> None:
        with suppress(FileNotFoundError):
            text = (self._root / "var/lib/quotient/allocations.json").read_text()
            allocations = json.loads(text)["data"].get("holds", {})
            self.checkpoint_states += 1
            for uid, allocation in allocations.items():
                placed = read_placement(allocation["placed"])
                if uid in self.placements:
                    self._compare(uid, placed, "the checkpoint")
                else:
                    self._early.append((uid, placed))
            held = [[(uuid, *amounts) for uuid, amounts in each["held"].items()] for each in allocations.values()]
            self._check_sum(held, "the checkpoint")

    def _check_processes(self) -> None:
        running = {pid: container for pid in pod_processes(self._cluster) if (container := look_into(pid))}
        # All that are alive after the last one was read ran at the same time.
        alive = {(each.pod_uid, each.name): each for pid, each in running.items() if Path(f"/proc/{pid}").exists()}
        self.process_states += 1
        self.seen |= alive.keys()
        for container in alive.values():
            self._check_container(container)
        self._check_sum((each.slices for each in alive.values()), "running processes")

    def _check_container(self, container: RunningContainer) -> None:
        what = f"container {container.name} of {container.pod_uid}"
        placed = self.placements.get(container.pod_uid)
        if placed is not None and placed.get(container.name) != container.slices:
            self._report(f"{what} has {container.slices}, not {placed.get(container.name)}")
        expected = {f"nvidia{self._cards[uuid].minor}" for uuid, _, _ in container.slices}
        if container.nodes != expected:
            self._report(f"{what} sees {sorted(container.nodes)}, not {sorted(expected)}")

    def _compare(self, uid: str, allocated: Placement, where: str) -> None:
        if self.placements.get(uid) != allocated:
            self._report(f"{where} has {allocated} for {uid}, not {self.placements.get(uid)}")

    def _check_sum(self, held: Iterable[Iterable[Slice]], where: str) -> None:
        """No card is given beyond its size."""
        cores, memory = Counter[str](), Counter[str]()
        for slices in held:
            for uuid, part, mib in slices:
                cores[uuid] += part
                memory[uuid] += mib
        for uuid in cores:
            if cores[uuid] > CARD_CORES or memory[uuid] > self._cards[uuid].memory_mib:
                self._report(f"{where}: {cores[uuid]} cores and {memory[uuid]} MiB of {uuid}")

    def _report(self, violation: str) -> None:
        if violation not in self.violations:
            self.violations.append(violation)


def read_placement(containers: dict[str, list[dict[str, Any]]]) -> Placement:
    return {
        name: tuple((each["uuid"], each["cores"], each["memoryMiB"]) for each in slices)
        for name, slices in containers.items()
    }


def placement_of(pod: RawPod) -> Placement | None:
    text = pod["metadata"].get("annotations", {}).get(PLACEMENT)
    return read_placement(json.loads(text)["containers"]) if text else None


def title(pod: RawPod) -> str:
    return f"pod {pod['metadata']['name']}"


def holds_cards(pod: RawPod) -> bool:
    return "nodeName" in pod["spec"] and pod["status"].get("phase") not in ENDED


def slices_at_peak(pod: RawPod, placed: Placement) -> list[Slice]:
    """Return the most that a pod has of each card at any time: an init container runs before those after it."""
    sidecars, peak = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in pod["spec"].get("initContainers", []):
        amounts = amounts_of(placed.get(each["name"], ()))
        peak |= sidecars + amounts
        if each.get("restartPolicy") == "Always":
            sidecars += amounts
    together = sidecars.copy()
    for each in pod["spec"]["containers"]:
        together += amounts_of(placed.get(each["name"], ()))
    peak |= together
    return [(uuid, peak[uuid, "cores"], peak[uuid, "MiB"]) for uuid in {uuid for uuid, _ in peak}]


def amounts_of(slices: Iterable[Slice]) -> Counter[tuple[str, str]]:
    amounts = Counter[tuple[str, str]]()
    for uuid, cores, mib in slices:
        amounts[uuid, "cores"] += cores
        amounts[uuid, "MiB"] += mib
    return amounts


def request_problems(pod: RawPod, placed: Placement, cards: dict[str, PhysicalCard]) -> list[str]:
    """Compare a placement with what each container of the pod requests."""
    containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
    requested = {each["name"]: each["resources"]["limits"] for each in containers if "limits" in each["resources"]}
    if requested.keys() != placed.keys():
        return [f"{title(pod)}: containers {sorted(requested)} request GPUs, {sorted(placed)} are placed"]
    found = []
    for name, limits in requested.items():
        expected = expected_slices(int(limits[CORE]), limits.get(MEMORY), placed[name], cards)
        if placed[name] != expected:
            found.append(f"{title(pod)}: container {name} requests {limits} and got {placed[name]}")
    return found


def expected_slices(
    cores: int, units: str | None, placed: tuple[Slice, ...], cards: dict[str, PhysicalCard]
) -> tuple[Slice, ...]:
    """Return what a container should have on the cards that it got: whole ones, or a part of one."""
    uuids = [uuid for uuid, _, _ in placed]
    if cores >= CARD_CORES:
        return tuple((uuid, CARD_CORES, cards[uuid].memory_mib) for uuid in uuids) if count_ok(uuids, cores) else ()
    mib = int(units) * UNIT_MIB if units is not None else 0
    return ((uuids[0], cores, mib),)


def count_ok(uuids: list[str], cores: int) -> bool:
    return len(set(uuids)) == len(uuids) == cores // CARD_CORES


def pod_processes(cluster: RealCluster) -> Iterator[int]:
    """Yield the processes, as this process numbers them, that run in a pod of the cluster."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            text = (entry / "cgroup").read_text() if entry.name.isdecimal() else ""
            if cluster.layout.cgroup in text and POD_CGROUP.search(text):
                yield int(entry.name)


def look_into(pid: int) -> RunningContainer | None:
    """Return what a process sees of GPUs; None if it has none, has ended, or is not in its container yet."""
    root = Path(f"/proc/{pid}/root")
    try:
        limits = json.loads((root / "etc/quotient/limits.json").read_text())
        nodes = frozenset(each.name for each in (root / "dev").iterdir() if CARD_NODE.fullmatch(each.name))
    except (OSError, ValueError):
        return None
    slices = read_placement({"": limits["cards"]})[""]
    return RunningContainer(limits["podUID"], limits["container"], slices, nodes)
