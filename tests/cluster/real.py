"""A real Kubernetes for tests and for `make cluster`: start it, use it, kill parts of it, stop it."""

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from deploy import debian, toolchain
from tests.cluster import cgroups, images, layout
from tests.cluster.inside import short_path
from tests.cluster.layout import DEBIAN_PACKAGES, Layout
from tests.cluster.supervisor import ROOT, start_forward

READY_S = 60.0
POLL_S = 0.1
# Folders that an interrupted start leaves in a state folder before it writes its spec.
OUR_FOLDERS = ("logs", "pki", *layout.OF_NODE, layout.SECOND_NODE)


class ClusterError(Exception):
    """The cluster failed; the message ends with the last lines of the log that should say why."""


class RealCluster:
    """One running cluster. Started with `node`, it has a kubelet and can run pods."""

    def __init__(self, place: Layout) -> None:
        self.layout = place
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._lifelines: list[tuple[int, subprocess.Popen[bytes]]] = []

    @classmethod
    def start(
        cls,
        *,
        api: bool = True,
        node: bool = False,
        second_node: bool = False,
        state: Path | None = None,
        detached: bool = False,
        cdi: bool = False,
    ) -> "RealCluster":
        """Start a cluster and wait until its API (and its node) is ready; with `cdi`, its runtime supports CDI.

        Without `api` it runs etcd alone, which is enough to test how its processes end.
        """
        kubernetes, packages = toolchain.kubernetes(), debian.unpack_packages(DEBIAN_PACKAGES)
        folder = state or Path(tempfile.mkdtemp(prefix="quotient-cluster-"))
        folder.mkdir(parents=True, exist_ok=True)
        newer = debian.newer_containerd() if cdi else None
        cluster = cls(Layout(uuid.uuid4().hex[:8], folder, kubernetes, packages, newer))
        try:
            cluster._supervisor = start_supervisor(cluster.layout, detached=detached)
            cluster._bring_up(api=api, node=node)
            if second_node:
                cluster._add_second_node()
        except BaseException:
            cluster.stop()
            raise
        return cluster

    def _bring_up(self, *, api: bool, node: bool) -> None:
        self.until("the supervisor to publish the API", (self.layout.state / "supervisor.json").exists, "supervisor")
        self.until("the control socket", self.layout.control.exists, "supervisor")
        if not api:
            self.run("etcd")
            return
        for name in (*layout.CONTROL_PLANE, *(layout.NODE[:1] if node else ())):
            self.run(name)
        self.until("kube-apiserver to be ready", self.api_ready, "kube-apiserver")
        for name in layout.CONTROLLERS:
            self.run(name)
        if node:
            self.until("containerd to import images", self._import_images, "containerd")
            self.run("kubelet")
            self.until("the node to be ready", lambda: self._node_ready(layout.NODE_NAME), "kubelet")
        self.until("the default service account", self._account_ready, "kube-controller-manager")

    def _add_second_node(self) -> None:
        for name in layout.SECOND:
            self.run(name)
            if name == layout.SECOND[0]:
                self.until("containerd to import images", lambda: self._import_images(layout.SECOND_NODE), name)
        self.until("the second node to be ready", lambda: self._node_ready(layout.SECOND_NODE), name)

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, for clients on this machine."""
        return self.layout.kubeconfig

    def command(self, **command: Any) -> dict[str, Any]:
        """Send a command to the cluster's first process, and return its answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            with short_path(self.layout.control) as control:
                connection.connect(control)
            connection.sendall(json.dumps(command).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer: dict[str, Any] = json.loads(stream.readline())
        if "error" in answer:
            raise ClusterError(answer["error"])
        return answer

    def run(self, name: str) -> None:
        """Start one program of the cluster."""
        self.command(start=name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one program; after SIGKILL and SIGTERM, wait until it has ended."""
        self.command(signal=name, number=int(number))
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.until(f"{name} to end", lambda: name not in self.running(), name)

    def restart(self, name: str) -> None:
        """Kill a program and start it again."""
        self.kill(name)
        self.run(name)
        if name == "kube-apiserver":
            self.until("kube-apiserver to be ready", self.api_ready, name)

    def running(self) -> dict[str, int]:
        """Return the programs that run, with their process ids inside the cluster."""
        running: dict[str, int] = self.command(status=True)["running"]
        return running

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl and return its output, or with `check=False` its error output if it fails."""
        done = subprocess.run(
            [self.layout.kubernetes / "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout if done.returncode == 0 else done.stderr

    def enter(self, *command: str, node: str = layout.NODE_NAME) -> "subprocess.CompletedProcess[str]":
        """Run a command inside the cluster's namespaces, with the mounts of one of its nodes."""
        if node == layout.SECOND_NODE:
            containerd = self.running()[layout.SECOND[0]]
            command = ("nsenter", f"--mount=/proc/{containerd}/ns/mnt", "--", *command)
        namespaces = ["nsenter", f"--target={self.supervisor_info()['init']}", "--mount", "--net", "--pid", "--"]
        return subprocess.run([*namespaces, *command], capture_output=True, text=True, check=False)

    def expose(self, port: int) -> str:
        """Make a server on this machine's loopback reachable for the cluster; returns its address there."""
        lifeline, held = os.pipe()
        inside, outside = f"/proc/{self.supervisor_info()['init']}/ns/net", f"/proc/{os.getpid()}/ns/net"
        forward = start_forward(inside, "127.0.0.1:0", outside, f"127.0.0.1:{port}", lifeline)
        os.close(lifeline)
        self._lifelines.append((held, forward))
        assert forward.stdout is not None
        return f"127.0.0.1:{int(forward.stdout.readline())}"

    def stop(self) -> None:
        """Stop the cluster; returns when nothing of it is left."""
        for held, forward in self._lifelines:
            os.close(held)
            forward.wait()
            if forward.stdout is not None:
                forward.stdout.close()
        self._lifelines.clear()
        if self._supervisor is not None:
            self._supervisor.terminate()
            self.wait_supervisor()
        sweep(self.layout.state)

    def wait_supervisor(self) -> None:
        """Wait until the supervisor has ended and cleaned up."""
        if self._supervisor is not None:
            self._supervisor.wait(30)
            if self._supervisor.stdin is not None:
                self._supervisor.stdin.close()

    def supervisor_info(self) -> dict[str, Any]:
        """Return the process ids of `supervisor` and `init` (the first process), and the API's `port` on loopback."""
        info: dict[str, Any] = json.loads((self.layout.state / "supervisor.json").read_text())
        return info

    def api_ready(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.layout.state / "pki/ca.crt"))
        token = (self.layout.state / "admin.token").read_text()
        address = f"https://127.0.0.1:{self.supervisor_info()['port']}/readyz"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def import_image(self, archive: Path) -> None:
        """Load an image archive into the containerd of every node."""
        nodes = [layout.NODE_NAME, *([layout.SECOND_NODE] if layout.SECOND[0] in self.running() else [])]
        for node in nodes:
            done = self._import(archive, node)
            if done.returncode:
                raise ClusterError(f"{archive} was not imported on {node}: {done.stderr.strip()}")

    def _import_images(self, node: str = layout.NODE_NAME) -> bool:
        return self._import(self.layout.state / "images.tar", node).returncode == 0

    def _import(self, archive: Path, node: str) -> "subprocess.CompletedProcess[str]":
        return self._ctr("image", "import", "--snapshotter=overlayfs", str(archive), node=node)

    def kill_container(self, container_id: str) -> None:
        """Kill a container's first process with SIGKILL."""
        done = self._ctr("task", "kill", "--signal=SIGKILL", container_id)
        if done.returncode:
            raise ClusterError(f"container {container_id} was not killed: {done.stderr.strip()}")

    def _ctr(self, *arguments: str, node: str = layout.NODE_NAME) -> "subprocess.CompletedProcess[str]":
        ctr = [str(self.layout.debian / "usr/bin/ctr"), f"--address={layout.CONTAINERD_SOCKET}", "--namespace=k8s.io"]
        return self.enter(*ctr, *arguments, node=node)

    def _node_ready(self, name: str) -> bool:
        path = "{.status.conditions[?(@.type=='Ready')].status}"
        return self.kubectl("get", "node", name, f"-o=jsonpath={path}", check=False) == "True"

    def _account_ready(self) -> bool:
        return (
            self.kubectl("get", "serviceaccount", "default", "-o=name", check=False).strip() == "serviceaccount/default"
        )

    def until(self, what: str, condition: Callable[[], bool], log: str, timeout_s: float = READY_S) -> None:
        """Wait for a condition; on a timeout the error shows the end of this program's log."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._supervisor is not None and self._supervisor.poll() is not None:
                raise ClusterError(f"the cluster ended while waiting for {what}")
            if time.monotonic() > deadline:
                raise ClusterError(f"waited {timeout_s:.0f} s for {what}; the end of its log:\n{self.log_end(log)}")
            time.sleep(POLL_S)

    def log_end(self, name: str, lines: int = 30) -> str:
        file = self.layout.logs / f"{name}.log"
        return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists() else "(no log)"


def start_supervisor(place: Layout, *, detached: bool) -> "subprocess.Popen[bytes]":
    """Write a cluster's files and start its supervisor; unless detached, it ends with this process."""
    write_spec(place, layout.prepare(place))
    images.archive(place.debian / "bin/busybox", place.state / "images.tar")
    mode = "detached" if detached else "attached"
    with (place.logs / "supervisor.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.supervisor", str(place.state / layout.SPEC_FILE), mode],
            cwd=ROOT,
            stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {layout.MARK: place.ident},
        )


def write_spec(place: Layout, programs: dict[str, layout.Program]) -> None:
    """Write the file from which supervisor and first process learn what to run."""
    spec = {
        "ident": place.ident,
        "state": str(place.state),
        "kubernetes": str(place.kubernetes),
        "debian": str(place.debian),
        "newer": str(place.newer or ""),
        "control": str(place.control),
        "cgroup": place.cgroup,
        "busybox": str(place.debian / "bin/busybox"),
        "bridge": layout.BRIDGE,
        "addresses": [layout.NODE_ADDRESS, layout.SECOND_ADDRESS],
        "ofNode": layout.OF_NODE,
        "keep": [str(ROOT), sys.prefix, sys.base_prefix, str(toolchain.cache_dir()), str(place.state)],
        "programs": {name: msgspec.to_builtins(program) for name, program in programs.items()},
    }
    (place.state / layout.SPEC_FILE).write_text(json.dumps(spec))


def sweep(state: Path) -> None:
    """Remove what is left of a cluster whose supervisor and first process were both killed.

    ClusterError if the folder is not a cluster's: a mistyped path must not delete other files.
    """
    if not state.exists():
        return
    spec = state / layout.SPEC_FILE
    if spec.exists():
        cgroups.remove(json.loads(spec.read_text())["cgroup"])
    elif not is_being_removed(state):
        raise ClusterError(f"{state} is not the folder of a cluster: name another one")
    subprocess.run(["rm", "-rf", "--one-file-system", str(state)], check=True)


def is_being_removed(state: Path, timeout_s: float = 5.0) -> bool:
    """Whether nothing else than a cluster's folders is left: its supervisor may be removing the rest at this moment."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(FileNotFoundError):
            others = [entry.name for entry in state.iterdir() if entry.name not in OUR_FOLDERS]
            if others and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            return not others
        return True


def why_no_cluster() -> str:
    """Return why no real cluster can be started on this machine; empty if one can."""
    if sys.platform != "linux":
        return f"needs Linux, and this is {sys.platform}"
    return "" if os.geteuid() == 0 else "needs root, for namespaces, mounts and cgroups"
