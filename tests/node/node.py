"""A real node with simulated GPUs: kubelet, containerd, the plugin, and pods that print what they see."""

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
END = "== end of output"
# Prints what a container sees of GPUs.
LOOK = f"""
for node in /dev/nvidia*; do test -e $node && echo "device $node $(ls -l $node | tr -s ' ' | cut -d' ' -f5,6)"; done
for file in /usr/local/nvidia/lib64/* /usr/local/nvidia/bin/*; do test -e $file && echo "file $file"; done
echo "visible $NVIDIA_VISIBLE_DEVICES"
echo "libraries $LD_LIBRARY_PATH"
test -e /etc/quotient/limits.json && echo "limits $(cat /etc/quotient/limits.json)"
echo x 2>/dev/null >/etc/quotient/limits.json && echo "writable"
echo "{END}"
"""
# Then waits, so that it can be killed from inside; exits on TERM at once, or the kubelet would wait two seconds.
WAIT_FOR_EVER = LOOK + "trap 'exit 0' TERM; sleep 1000000 & wait $!; exit 1"
NS_PID = re.compile(r"^NSpid:\s+(\d+)\s+(\d+)$", re.MULTILINE)
CONTROL = {"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"}


class Seen(Struct, frozen=True):
    """What a container sees."""

    devices: dict[str, str]
    files: frozenset[str]
    visible: str
    libraries: str
    limits: ContainerFile | None
    writable: bool


def container(name: str, cores: int, units: int, script: str = WAIT_FOR_EVER, **more: Any) -> dict[str, Any]:
    """A container's manifest; 0 means that it does not request a resource."""
    amounts = {NAMES.core: cores, NAMES.memory: units}
    limits = {key: str(amount) for key, amount in amounts.items() if amount}
    return {
        "name": name,
        "image": BUSYBOX,
        "command": ["sh", "-c", script],
        "resources": {"limits": limits},
        "imagePullPolicy": "Never",
        **more,
    }


def placement(**containers: Sequence[tuple[str, int, int]]) -> dict[str, tuple[GpuSlice, ...]]:
    """A placement: card, cores and MiB of each slice, by container."""
    return {name: tuple(GpuSlice(*each) for each in slices) for name, slices in containers.items()}


class GpuNode:
    """A node with GPUs, and what tests do to it."""

    def __init__(self, cluster: RealCluster, *kinds: str, **described: Any) -> None:
        self.cluster = cluster
        self.driver = FakeDriver(cluster.layout.driver).install(*kinds, **described)
        self.api: ApiCluster = connect(str(cluster.kubeconfig))
        self.kinds = kinds

    def start(self) -> "GpuNode":
        """Start the plugin with its service account, as in a pod, and wait until the node offers its cards."""
        state = self.cluster.layout.state
        for source, target in ((f"{NODE_PLUGIN}.token", "token"), ("pki/ca.crt", "ca.crt")):
            self.cluster.enter("install", "-D", str(state / source), str(SERVICE_ACCOUNT / target))
        self.cluster.run(NODE_PLUGIN)
        self.wait_offered()
        return self

    def wait_offered(self, cores: int | None = None) -> None:
        """Wait until the node has this many allocatable cores, by default all, and the plugin is registered."""
        wanted = str(100 * len(self.kinds) if cores is None else cores)
        try:
            eventually(lambda: self.allocatable().get(NAMES.core) == wanted, f"{wanted} cores to be offered", WAIT_S)
            eventually(self.is_registered, "the plugin to be registered", WAIT_S)
        except AssertionError as error:
            running = ", ".join(self.cluster.running())
            raise AssertionError(f"{error}; running: {running}\n{self.cluster.log_end(NODE_PLUGIN, 15)}") from None

    def allocatable(self) -> Mapping[str, str]:
        return self.api.get(NODES, NODE_NAME).status.allocatable

    def inventory(self) -> tuple[Gpu, ...]:
        return decode_inventory(
            self.api.get(NODES, NODE_NAME).metadata.annotations.get(NAMES.inventory, '{"v":1,"gpus":[]}')
        )

    def monitor(self, path: str, *headers: str) -> str:
        """Read a page of the plugin's monitor, from the node itself."""
        busybox = str(self.cluster.layout.debian / "bin/busybox")
        flags = [part for header in headers for part in ("--header", header)]
        return self.cluster.enter(
            busybox, "wget", "-q", "-O-", *flags, f"http://127.0.0.1:{layout.MONITOR_PORT}{path}"
        ).stdout

    def is_registered(self) -> bool:
        return "quotient_nodeplugin_registered 1.0" in self.monitor("/metrics")

    def create(self, name: str, *containers: dict[str, Any], **spec: Any) -> Pod:
        """Create a pod that no scheduler binds."""
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
        """Bind a pod to the node, with its placement in the same write, as the scheduler does."""
        annotations = {} if placed is None else {NAMES.placement: encode_placement(placed)}
        self.api.bind(pod.metadata.name, "default", NODE_NAME, uid=pod.metadata.uid, annotations=annotations)

    def run(
        self,
        name: str,
        *containers: dict[str, Any],
        placed: Mapping[str, Sequence[GpuSlice]] | None = None,
        **spec: Any,
    ) -> Pod:
        """Create a pod, bind it, and wait until it runs."""
        self.bind(self.create(name, *containers, **spec), placed)
        self.wait_phase(name, "Running")
        return self.pod(name)

    def pod(self, name: str) -> Pod:
        return self.api.get(PODS, name, "default")

    def placed(self, name: str) -> dict[str, tuple[GpuSlice, ...]] | None:
        return decode_placement(self.pod(name).metadata.annotations.get(NAMES.placement, ""))

    def wait_phase(self, name: str, phase: str, timeout_s: float = WAIT_S) -> None:
        """Wait for a phase; a failure shows what the kubelet reports."""

        def reached() -> bool:
            status = self.pod(name).status
            if status.phase != phase and status.phase in {"Failed", "Succeeded"}:
                raise AssertionError(f"pod {name} is {status.phase}: {status.reason}: {status.message}")
            return status.phase == phase

        try:
            eventually(reached, f"pod {name} to be {phase}", timeout_s)
        except AssertionError as error:
            description = self.cluster.kubectl("describe", "pod", name, check=False)[-1500:]
            raise AssertionError(f"{error}\n{description}\n{self.cluster.log_end(NODE_PLUGIN, 15)}") from None

    def wait_failed(self, name: str) -> str:
        """Wait until a pod is rejected, and return the message in its status."""
        eventually(lambda: self.pod(name).status.phase == "Failed", f"pod {name} to be rejected", WAIT_S)
        return self.pod(name).status.message

    def delete(self, *names: str) -> None:
        """Delete pods, and wait until they are gone."""
        for name in names:
            with suppress(NotFound):
                self.api.delete(PODS, name, "default")
        eventually(lambda: not set(names) & self.pods(), f"{names} to be gone", WAIT_S)

    def pods(self) -> set[str]:
        """Return the names of all pods."""
        return {pod.metadata.name for pod in self.api.list(PODS, "default").items}

    def clear(self) -> None:
        """Delete all pods, and wait until the plugin has released them."""
        self.delete(*self.pods())
        eventually(lambda: not self.allocations(), "all allocations to be released", WAIT_S)

    def allocations(self) -> dict[str, Any]:
        """Read the plugin's allocation checkpoint: raw allocations by pod UID."""
        done = self.cluster.enter("cat", "/var/lib/quotient/allocations.json")
        if done.returncode:
            return {}
        allocations: dict[str, Any] = json.loads(done.stdout)["data"].get("holds", {})
        return allocations

    def seen(self, pod: str, name: str = "c0") -> Seen:
        """Read what a container printed about itself."""
        text = ""

        def is_complete() -> bool:
            nonlocal text
            text = self.cluster.kubectl("logs", pod, "-c", name, check=False)
            return END in text

        eventually(is_complete, f"{pod}/{name} to print what it sees", WAIT_S)
        return read_seen(text)

    def kill_container(self, pod: str, name: str = "c0") -> None:
        """Kill a container from inside, and wait until it runs again."""
        before = self.container_id(pod, name)
        self.cluster.kubectl("exec", pod, "-c", name, "--", "sh", "-c", "kill -9 -1", check=False)
        eventually(lambda: self.container_id(pod, name) not in {before, ""}, f"{pod}/{name} to be restarted", WAIT_S)
        self.wait_phase(pod, "Running")

    def container_id(self, pod: str, name: str = "c0") -> str:
        """Return the ID of a running container; empty if it does not run."""
        path = f"{{.status.containerStatuses[?(@.name=='{name}')].state.running}}"
        running = self.cluster.kubectl("get", "pod", pod, f"-o=jsonpath={path}", check=False)
        statuses = self.pod(pod).status.container_statuses
        return next((each.container_id for each in statuses if each.name == name), "") if running else ""

    def restart(self, program: str) -> None:
        """Kill a program of the node and start it again, and wait until the node is ready."""
        self.cluster.restart(program)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the node is ready and offers all its cards."""
        eventually(self.is_ready, "the node to be ready", WAIT_S)
        self.wait_offered()

    def is_ready(self) -> bool:
        conditions = self.api.get(NODES, NODE_NAME).status.conditions
        return any(each.type == "Ready" and each.status == "True" for each in conditions)

    def reboot(self) -> None:
        """Kill everything on the node, empty /run, and start again."""
        for program in (NODE_PLUGIN, "kubelet", "containerd"):
            self.cluster.kill(program)
        self.cluster.enter("sh", "-c", KILL_PODS)
        self.cluster.enter("sh", "-c", EMPTY_RUN)
        self.cluster.run("containerd")
        ready = ["test", "-S", layout.CONTAINERD_SOCKET]
        eventually(lambda: self.cluster.enter(*ready).returncode == 0, "containerd to listen", WAIT_S)
        self.cluster.run(NODE_PLUGIN)
        self.cluster.run("kubelet")
        self.wait_ready()

    def plugin_pid(self) -> int:
        """Return the plugin's process ID in this test's PID namespace."""
        return self.host_pid(NODE_PLUGIN, "nodeplugin")

    def host_pid(self, program: str, called: str = "") -> int:
        """Return the ID of a process of the node in this test's PID namespace."""
        inside = self.cluster.running()[program]
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                match = NS_PID.search((entry / "status").read_text()) if entry.name.isdecimal() else None
                if not match or int(match[2]) != inside or (called or program) not in (entry / "cmdline").read_text():
                    continue
                if f"{layout.MARK}={self.cluster.layout.ident}".encode() in (entry / "environ").read_bytes():
                    return int(match[1])
        raise AssertionError(f"{program} is not running")


# Kills the processes of all pods, then the shims.
KILL_PODS = """
for pid in $(ls /proc | grep '^[0-9]*$'); do
  grep -q 'pod[0-9a-f-]*/' /proc/$pid/cgroup 2>/dev/null && kill -9 $pid 2>/dev/null
done
pkill -9 -f containerd-shim
true
"""
EMPTY_RUN = """
sleep 0.2
gone='^(/run/(containerd|netns|cni)|/var/lib/quotient/containers/)'
for place in $(cut -d' ' -f5 /proc/self/mountinfo | grep -E $gone | sort -r); do
  umount -l $place
done
rm -rf /run/containerd /run/cdi /run/netns /run/cni
mkdir -p /run/containerd /run/cni
"""


def read_seen(text: str) -> Seen:
    """Parse what a container printed after its last start."""
    last = text.rsplit(END, 1)[0].rsplit(END, 1)[-1]
    lines = [line.partition(" ") for line in last.splitlines()]
    values: dict[str, list[str]] = {}
    for kind, _, value in lines:
        values.setdefault(kind, []).append(value)
    limits = values.get("limits")
    return Seen(
        devices={path: numbers for path, _, numbers in (each.partition(" ") for each in values.get("device", ()))},
        files=frozenset(values.get("file", ())),
        visible=values.get("visible", [""])[0],
        libraries=values.get("libraries", [""])[0],
        limits=msgspec.json.decode(limits[0], type=ContainerFile) if limits else None,
        writable="writable" in values,
    )


def wait_until(what: str, condition: Callable[[], object]) -> None:
    eventually(condition, what, WAIT_S)
