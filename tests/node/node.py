"""A real node with GPUs that are not there: kubelet, containerd, the plugin, and pods that tell what they see."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from cluster.api import ApiCluster, connect
from cluster.connection import SERVICE_ACCOUNT
from cluster.errors import NotFound
from cluster.objects import NODES, PODS, Pod
from nodeplugin.injection import ContainerFile
from tests.cluster import layout
from tests.cluster.images import BUSYBOX
from tests.cluster.layout import NODE_NAME, NODE_PLUGIN
from tests.cluster.real import RealCluster
from tests.node.driver import FakeDriver
from tests.waiting import eventually
from vcuda.inventory import Gpu, decode_inventory
from vcuda.names import Names
from vcuda.placement_annotation import GpuSlice, decode_placement, encode_placement

NAMES = Names()
SCHEDULER = "placed-by-the-test"
WAIT_S = 60.0
END = "== that is all"
# What a container sees of GPUs; then it waits, so that it can be killed from inside.
LOOK = f"""
for node in /dev/nvidia*; do test -e $node && echo "device $node $(ls -l $node | tr -s ' ' | cut -d' ' -f5,6)"; done
for file in /usr/local/nvidia/lib64/* /usr/local/nvidia/bin/*; do test -e $file && echo "file $file"; done
echo "visible $NVIDIA_VISIBLE_DEVICES"
echo "libraries $LD_LIBRARY_PATH"
test -e /etc/quotient/limits.json && echo "limits $(cat /etc/quotient/limits.json)"
echo x 2>/dev/null >/etc/quotient/limits.json && echo "writable"
echo "{END}"
"""
# Asked to end it does so at once, or the kubelet would give it two seconds.
WAIT_FOR_EVER = LOOK + "trap 'exit 0' TERM; sleep 1000000 & wait $!; exit 1"
NS_PID = re.compile(r"^NSpid:\s+(\d+)\s+(\d+)$", re.MULTILINE)
CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}


class Seen(Struct, frozen=True):
    """What a container found inside of itself."""

    devices: dict[str, str]
    files: frozenset[str]
    visible: str
    libraries: str
    limits: ContainerFile | None
    writable: bool


def container(name: str, cores: int, units: int, script: str = WAIT_FOR_EVER, **more: Any) -> dict[str, Any]:
    """Describe a container; 0 of a resource means that it is not asked for."""
    asked = {NAMES.core: cores, NAMES.memory: units}
    limits = {key: str(amount) for key, amount in asked.items() if amount}
    return {
        "name": name,
        "image": BUSYBOX,
        "command": ["sh", "-c", script],
        "resources": {"limits": limits},
        "imagePullPolicy": "Never",
        **more,
    }


def placement(**containers: Sequence[tuple[str, int, int]]) -> dict[str, tuple[GpuSlice, ...]]:
    """Write a placement: for each container cards, cores and MiB."""
    return {name: tuple(GpuSlice(*each) for each in slices) for name, slices in containers.items()}


class GpuNode:
    """A node of four cards or so, and what a test does to it."""

    def __init__(self, cluster: RealCluster, *kinds: str, **described: Any) -> None:
        self.cluster = cluster
        self.driver = FakeDriver(cluster.layout.driver).install(*kinds, **described)
        self.api: ApiCluster = connect(str(cluster.kubeconfig))
        self.kinds = kinds

    def start(self) -> "GpuNode":
        """Start the plugin with its account, as in a pod, and wait until the node offers its cards."""
        state = self.cluster.layout.state
        for source, target in ((f"{NODE_PLUGIN}.token", "token"), ("pki/ca.crt", "ca.crt")):
            self.cluster.enter("install", "-D", str(state / source), str(SERVICE_ACCOUNT / target))
        self.cluster.run(NODE_PLUGIN)
        self.wait_offered()
        return self

    def wait_offered(self, cores: int | None = None) -> None:
        """Wait until the node says that it has so many cores, and the kubelet listens."""
        wanted = str(100 * len(self.kinds) if cores is None else cores)
        try:
            eventually(lambda: self.allocatable().get(NAMES.core) == wanted, f"{wanted} cores to be offered", WAIT_S)
            eventually(self.is_registered, "the kubelet to listen", WAIT_S)
        except AssertionError as late:
            running = ", ".join(self.cluster.running())
            raise AssertionError(f"{late}; there run {running}\n{self.cluster.log_end(NODE_PLUGIN, 15)}") from None

    def allocatable(self) -> Mapping[str, str]:
        """Ask what the node offers."""
        return self.api.get(NODES, NODE_NAME).status.allocatable

    def inventory(self) -> tuple[Gpu, ...]:
        """Ask what the node says of its cards."""
        return decode_inventory(
            self.api.get(NODES, NODE_NAME).metadata.annotations.get(NAMES.inventory, '{"v":1,"gpus":[]}')
        )

    def monitor(self, path: str, *headers: str) -> str:
        """Ask the plugin's monitor, from the node itself."""
        busybox = str(self.cluster.layout.debian / "bin/busybox")
        flags = [part for header in headers for part in ("--header", header)]
        return self.cluster.enter(
            busybox, "wget", "-q", "-O-", *flags, f"http://127.0.0.1:{layout.MONITOR_PORT}{path}"
        ).stdout

    def is_registered(self) -> bool:
        """Ask whether the kubelet listens to the plugin."""
        return "quotient_nodeplugin_registered 1.0" in self.monitor("/metrics")

    def create(self, name: str, *containers: dict[str, Any], **spec: Any) -> Pod:
        """Make a pod that nobody schedules."""
        annotations = spec.pop("annotations", {})
        body = {
            "metadata": {"name": name, "namespace": "default", "annotations": annotations},
            "spec": {
                "schedulerName": SCHEDULER,
                "terminationGracePeriodSeconds": 0,
                "containers": list(containers),
                "enableServiceLinks": False,
                "automountServiceAccountToken": False,
                **spec,
            },
        }
        return self.api.create(PODS, body)

    def bind(self, pod: Pod, placed: Mapping[str, Sequence[GpuSlice]] | None = None) -> None:
        """Give a pod to the node, with its placement in the same write, as the scheduler will."""
        annotations = {} if placed is None else {NAMES.placement: encode_placement(placed)}
        self.api.bind(pod.metadata.name, "default", NODE_NAME, uid=pod.metadata.uid, annotations=annotations)

    def run(
        self,
        name: str,
        *containers: dict[str, Any],
        placed: Mapping[str, Sequence[GpuSlice]] | None = None,
        **spec: Any,
    ) -> Pod:
        """Make a pod, give it to the node, and wait until it runs."""
        self.bind(self.create(name, *containers, **spec), placed)
        self.wait_phase(name, "Running")
        return self.pod(name)

    def pod(self, name: str) -> Pod:
        """Look at a pod."""
        return self.api.get(PODS, name, "default")

    def placed(self, name: str) -> dict[str, tuple[GpuSlice, ...]] | None:
        """Read a pod's placement as it stands now."""
        return decode_placement(self.pod(name).metadata.annotations.get(NAMES.placement, ""))

    def wait_phase(self, name: str, phase: str, timeout_s: float = WAIT_S) -> None:
        """Wait for a phase; another end is told with all that the kubelet says of it."""

        def reached() -> bool:
            status = self.pod(name).status
            if status.phase != phase and status.phase in {"Failed", "Succeeded"}:
                raise AssertionError(f"pod {name} is {status.phase}: {status.reason}: {status.message}")
            return status.phase == phase

        try:
            eventually(reached, f"pod {name} to be {phase}", timeout_s)
        except AssertionError as late:
            told = self.cluster.kubectl("describe", "pod", name, check=False)[-1500:]
            raise AssertionError(f"{late}\n{told}\n{self.cluster.log_end(NODE_PLUGIN, 15)}") from None

    def wait_failed(self, name: str) -> str:
        """Wait until a pod was refused, and give the reason that stands on it."""
        eventually(lambda: self.pod(name).status.phase == "Failed", f"pod {name} to be refused", WAIT_S)
        return self.pod(name).status.message

    def delete(self, *names: str) -> None:
        """Delete pods, and wait until they are gone."""
        for name in names:
            with suppress(NotFound):
                self.api.delete(PODS, name, "default")
        eventually(lambda: not set(names) & self.pods(), f"{names} to be gone", WAIT_S)

    def pods(self) -> set[str]:
        """Name the pods there are."""
        return {pod.metadata.name for pod in self.api.list(PODS, "default").items}

    def clear(self) -> None:
        """Delete all pods, and wait until the plugin has let go of them."""
        self.delete(*self.pods())
        eventually(lambda: not self.book(), "the book to be empty", WAIT_S)

    def book(self) -> dict[str, Any]:
        """Read what the plugin wrote down: holds by pod."""
        done = self.cluster.enter("cat", "/var/lib/quotient/allocations.json")
        if done.returncode:
            return {}
        holds: dict[str, Any] = json.loads(done.stdout)["data"].get("holds", {})
        return holds

    def seen(self, pod: str, name: str = "c0") -> Seen:
        """Read what a container found inside of itself."""
        text = ""

        def told() -> bool:
            nonlocal text
            text = self.cluster.kubectl("logs", pod, "-c", name, check=False)
            return END in text

        eventually(told, f"{pod}/{name} to have looked around", WAIT_S)
        return read_seen(text)

    def kill_container(self, pod: str, name: str = "c0") -> None:
        """End a container from inside, and wait until it runs again."""
        before = self.container_id(pod, name)
        self.cluster.kubectl("exec", pod, "-c", name, "--", "sh", "-c", "kill -9 -1", check=False)
        eventually(
            lambda: self.container_id(pod, name) not in {before, ""}, f"{pod}/{name} to be another container", WAIT_S
        )
        self.wait_phase(pod, "Running")

    def container_id(self, pod: str, name: str = "c0") -> str:
        """Give the id of a container that runs; nothing if it does not."""
        path = f"{{.status.containerStatuses[?(@.name=='{name}')].state.running}}"
        running = self.cluster.kubectl("get", "pod", pod, f"-o=jsonpath={path}", check=False)
        statuses = self.pod(pod).status.container_statuses
        return next((each.container_id for each in statuses if each.name == name), "") if running else ""

    def restart(self, program: str) -> None:
        """Kill a program of the node and start it again, and wait until the node is whole."""
        self.cluster.restart(program)
        self.wait_whole()

    def wait_whole(self) -> None:
        """Wait until the node is ready and offers everything."""
        eventually(self.is_ready, "the node to be ready", WAIT_S)
        self.wait_offered()

    def is_ready(self) -> bool:
        """Ask whether the node is ready."""
        conditions = self.api.get(NODES, NODE_NAME).status.conditions
        return any(each.type == "Ready" and each.status == "True" for each in conditions)

    def reboot(self) -> None:
        """End everything on the node, empty what does not survive, and start again."""
        for program in (NODE_PLUGIN, "kubelet", "containerd"):
            self.cluster.kill(program)
        self.cluster.enter("sh", "-c", KILL_PODS)
        self.cluster.enter("sh", "-c", EMPTY_RUN)
        self.cluster.run("containerd")
        ready = ["test", "-S", layout.CONTAINERD_SOCKET]
        eventually(lambda: self.cluster.enter(*ready).returncode == 0, "containerd to listen", WAIT_S)
        self.cluster.run(NODE_PLUGIN)
        self.cluster.run("kubelet")
        self.wait_whole()

    def plugin_pid(self) -> int:
        """Give the plugin's process id, as this machine sees it."""
        return self.host_pid(NODE_PLUGIN, "nodeplugin")

    def host_pid(self, program: str, called: str = "") -> int:
        """Give the process id of a program of the node, as this machine sees it."""
        inside = self.cluster.running()[program]
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                found = NS_PID.search((entry / "status").read_text()) if entry.name.isdecimal() else None
                if not found or int(found[2]) != inside or (called or program) not in (entry / "cmdline").read_text():
                    continue
                if f"{layout.MARK}={self.cluster.layout.ident}".encode() in (entry / "environ").read_bytes():
                    return int(found[1])
        raise AssertionError(f"{program} does not run")


# Containers die with their shims' children; what they had mounted goes with the folders.
KILL_PODS = """
for pid in $(ls /proc | grep '^[0-9]*$'); do
  grep -q 'pod[0-9a-f-]*/' /proc/$pid/cgroup 2>/dev/null && kill -9 $pid 2>/dev/null
done
pkill -9 -f containerd-shim
true
"""
EMPTY_RUN = """
sleep 0.2
for place in $(cut -d' ' -f5 /proc/self/mountinfo | grep -E '^/run/(containerd|netns|cni)' | sort -r); do
  umount -l $place
done
rm -rf /run/containerd /run/cdi /run/netns /run/cni
mkdir -p /run/containerd /run/cni
"""


def read_seen(text: str) -> Seen:
    """Read what a container printed, of its last start."""
    last = text.rsplit(END, 1)[0].rsplit(END, 1)[-1]
    lines = [line.partition(" ") for line in last.splitlines()]
    found: dict[str, list[str]] = {}
    for kind, _, value in lines:
        found.setdefault(kind, []).append(value)
    limits = found.get("limits")
    return Seen(
        devices={path: numbers for path, _, numbers in (each.partition(" ") for each in found.get("device", ()))},
        files=frozenset(found.get("file", ())),
        visible=found.get("visible", [""])[0],
        libraries=found.get("libraries", [""])[0],
        limits=msgspec.json.decode(limits[0], type=ContainerFile) if limits else None,
        writable="writable" in found,
    )


def wait_until(what: str, condition: Callable[[], object]) -> None:
    """Wait for something on the node."""
    eventually(condition, what, WAIT_S)
