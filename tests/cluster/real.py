"""A real Kubernetes for tests and for `make cluster`: start it, use it, break it, end it."""

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
# What a start that was cut short may leave in a state folder before it writes its order.
OURS = ("logs", "pki", "cni", "containerd")


class ClusterError(Exception):
    """The cluster did not do what was asked; the message carries the end of the log that should say why."""


class RealCluster:
    """One running cluster. With `node`, it has a kubelet and can run pods."""

    def __init__(self, place: Layout) -> None:
        self.layout = place
        self._keeper: subprocess.Popen[bytes] | None = None
        self._lifelines: list[tuple[int, subprocess.Popen[bytes]]] = []

    @classmethod
    def start(
        cls,
        *,
        api: bool = True,
        node: bool = False,
        state: Path | None = None,
        detached: bool = False,
        cdi: bool = False,
    ) -> "RealCluster":
        """Start a cluster and wait until its API (and its node) is ready; with `cdi`, its runtime reads CDI files.

        Without `api` it is etcd alone: enough to see what becomes of a cluster's processes.
        """
        kubernetes, packages = toolchain.kubernetes(), debian.unpack_packages(DEBIAN_PACKAGES)
        folder = state or Path(tempfile.mkdtemp(prefix="quotient-cluster-"))
        folder.mkdir(parents=True, exist_ok=True)
        newer = debian.newer_containerd() if cdi else None
        cluster = cls(Layout(uuid.uuid4().hex[:8], folder, kubernetes, packages, newer))
        try:
            cluster._keeper = start_keeper(cluster.layout, detached=detached)
            cluster._bring_up(api=api, node=node)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    def _bring_up(self, *, api: bool, node: bool) -> None:
        self.until("the keeper to publish the API", (self.layout.state / "keeper.json").exists, "keeper")
        self.until("the control socket", self.layout.control.exists, "keeper")
        if not api:
            self.run("etcd")
            return
        for name in (*layout.CONTROL_PLANE, *(layout.NODE[:1] if node else ())):
            self.run(name)
        self.until("kube-apiserver to be ready", self.api_ready, "kube-apiserver")
        for name in layout.CONTROLLERS:
            self.run(name)
        if node:
            self.until("containerd to take images", self._import_images, "containerd")
            self.run("kubelet")
            self.until("the node to be ready", self._node_ready, "kubelet")
        self.until("the default service account", self._account_ready, "kube-controller-manager")

    @property
    def kubeconfig(self) -> Path:
        """For clients on this machine."""
        return self.layout.kubeconfig

    def order(self, **order: Any) -> dict[str, Any]:
        """Give an order to the cluster's first process."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            with short_path(self.layout.control) as control:
                connection.connect(control)
            connection.sendall(json.dumps(order).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer: dict[str, Any] = json.loads(stream.readline())
        if "error" in answer:
            raise ClusterError(answer["error"])
        return answer

    def run(self, name: str) -> None:
        """Start one program."""
        self.order(start=name)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one program; after a deadly one, wait until it is gone."""
        self.order(signal=name, number=int(number))
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.until(f"{name} to end", lambda: name not in self.running(), name)

    def restart(self, name: str) -> None:
        """Kill a program and start it again."""
        self.kill(name)
        self.run(name)
        if name == "kube-apiserver":
            self.until("kube-apiserver to be ready", self.api_ready, name)

    def running(self) -> dict[str, int]:
        """Name the programs that run, with their process ids inside."""
        running: dict[str, int] = self.order(status=True)["running"]
        return running

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Run kubectl against the cluster."""
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

    def enter(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command inside the cluster's namespaces."""
        namespaces = ["nsenter", f"--target={self.kept()['init']}", "--mount", "--net", "--pid", "--"]
        return subprocess.run([*namespaces, *command], capture_output=True, text=True, check=False)

    def expose(self, port: int) -> str:
        """Make a server on this machine's loopback reachable for the cluster, and give its address there."""
        lifeline, held = os.pipe()
        inside, outside = f"/proc/{self.kept()['init']}/ns/net", f"/proc/{os.getpid()}/ns/net"
        forward = start_forward(inside, "127.0.0.1:0", outside, f"127.0.0.1:{port}", lifeline)
        os.close(lifeline)
        self._lifelines.append((held, forward))
        assert forward.stdout is not None
        return f"127.0.0.1:{int(forward.stdout.readline())}"

    def stop(self) -> None:
        """End the cluster; returns when nothing of it is left."""
        for held, forward in self._lifelines:
            os.close(held)
            forward.wait()
            if forward.stdout is not None:
                forward.stdout.close()
        self._lifelines.clear()
        if self._keeper is not None:
            self._keeper.terminate()
            self.wait_keeper()
        sweep(self.layout.state)

    def wait_keeper(self) -> None:
        """Wait until the keeper has ended, and forget it."""
        if self._keeper is not None:
            self._keeper.wait(30)
            if self._keeper.stdin is not None:
                self._keeper.stdin.close()

    def kept(self) -> dict[str, Any]:
        """Read what the keeper wrote of itself."""
        kept: dict[str, Any] = json.loads((self.layout.state / "keeper.json").read_text())
        return kept

    def api_ready(self) -> bool:
        """Ask the API server whether it is ready."""
        context = ssl.create_default_context(cafile=str(self.layout.state / "pki/ca.crt"))
        token = (self.layout.state / "admin.token").read_text()
        address = f"https://127.0.0.1:{self.kept()['port']}/readyz"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def import_image(self, archive: Path) -> None:
        """Give the node an image."""
        done = self._import(archive)
        if done.returncode:
            raise ClusterError(f"{archive} was not imported: {done.stderr.strip()}")

    def _import_images(self) -> bool:
        return self._import(self.layout.state / "images.tar").returncode == 0

    def _import(self, archive: Path) -> "subprocess.CompletedProcess[str]":
        ctr = [str(self.layout.debian / "usr/bin/ctr"), f"--address={layout.CONTAINERD_SOCKET}", "--namespace=k8s.io"]
        return self.enter(*ctr, "image", "import", "--snapshotter=overlayfs", str(archive))

    def _node_ready(self) -> bool:
        path = "{.items[*].status.conditions[?(@.type=='Ready')].status}"
        return self.kubectl("get", "nodes", f"-o=jsonpath={path}", check=False) == "True"

    def _account_ready(self) -> bool:
        return (
            self.kubectl("get", "serviceaccount", "default", "-o=name", check=False).strip() == "serviceaccount/default"
        )

    def until(self, what: str, condition: Callable[[], bool], log: str, timeout_s: float = READY_S) -> None:
        """Wait for a condition; on a timeout, show the end of the log that should say why."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._keeper is not None and self._keeper.poll() is not None:
                raise ClusterError(f"the cluster ended while waiting for {what}")
            if time.monotonic() > deadline:
                raise ClusterError(f"waited {timeout_s:.0f} s for {what}; the end of its log:\n{self.log_end(log)}")
            time.sleep(POLL_S)

    def log_end(self, name: str, lines: int = 30) -> str:
        """Give the last lines of a program's log."""
        file = self.layout.logs / f"{name}.log"
        return "\n".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists() else "(no log)"


def start_keeper(place: Layout, *, detached: bool) -> "subprocess.Popen[bytes]":
    """Write everything a cluster needs into its folder and start its keeper; attached, it ends with this process."""
    write_order(place, layout.prepare(place))
    images.archive(place.debian / "bin/busybox", place.state / "images.tar")
    mode = "detached" if detached else "attached"
    with (place.logs / "keeper.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.supervisor", str(place.state / "order.json"), mode],
            cwd=ROOT,
            stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {layout.MARK: place.ident},
        )


def write_order(place: Layout, programs: dict[str, layout.Program]) -> None:
    """Write down all that the keeper and the first process need to know."""
    order = {
        "ident": place.ident,
        "state": str(place.state),
        "kubernetes": str(place.kubernetes),
        "debian": str(place.debian),
        "newer": str(place.newer or ""),
        "control": str(place.control),
        "cgroup": place.cgroup,
        "busybox": str(place.debian / "bin/busybox"),
        "bridge": layout.BRIDGE,
        "address": layout.NODE_ADDRESS,
        "keep": [str(ROOT), sys.prefix, sys.base_prefix, str(toolchain.cache_dir()), str(place.state)],
        "programs": {name: msgspec.to_builtins(program) for name, program in programs.items()},
    }
    (place.state / "order.json").write_text(json.dumps(order))


def sweep(state: Path) -> None:
    """Remove what a cluster left whose keeper and first process were both killed; a folder of others is spared."""
    if not state.exists():
        return
    order = state / "order.json"
    if order.exists():
        cgroups.remove(json.loads(order.read_text())["cgroup"])
    elif any(entry.name not in OURS for entry in state.iterdir()):
        raise ClusterError(f"{state} holds something else than a cluster: name another folder")
    subprocess.run(["rm", "-rf", "--one-file-system", str(state)], check=True)


def why_no_cluster() -> str:
    """Say why no real cluster can be started here; empty if one can."""
    if sys.platform != "linux":
        return f"needs Linux, and this is {sys.platform}"
    return "" if os.geteuid() == 0 else "needs root, for namespaces, mounts and cgroups"
