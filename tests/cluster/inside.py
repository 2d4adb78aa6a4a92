"""The first process of a test cluster, in namespaces of its own.

When it ends, the kernel kills every process of the cluster, and mounts and network links disappear with the last of
them. It uses the standard library alone. It executes commands from a Unix socket, one JSON object per connection:
`{"start": NAME}`, `{"signal": NAME, "number": 9}`, `{"status": true}`.
"""

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.cluster import cgroups

# The kubelet sets these for the whole machine. Files mounted over them pretend that they are set already.
SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
COVERED = ("/run", "/var/lib", "/var/log")


class Inside:
    """Mounts, network and programs of one cluster."""

    def __init__(self, spec: dict[str, Any], lifeline: int) -> None:
        self._state = Path(spec["state"])
        self._spec = spec
        self._lifeline = lifeline
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # By node: the process that keeps its mount namespace.
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()

    def main(self) -> None:
        """Set up, execute commands until SIGTERM or the supervisor's end, then kill all processes."""
        mount("--make-rprivate", "/")
        cover_folders(self._spec)
        self._network()
        listener = socket.socket(socket.AF_UNIX)
        with short_path(Path(self._spec["control"])) as control:
            # Renamed only once it listens: a client that finds the socket can connect.
            listener.bind(f"{control}.new")
            listener.listen()
            Path(f"{control}.new").replace(control)
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.settimeout(0)
        signal.set_wakeup_fd(woken.fileno())
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        for readable in (listener, wake, self._lifeline):
            self._selector.register(readable, selectors.EVENT_READ)
        supervisor_is_gone = self._serve(listener, wake)
        self._end()
        if supervisor_is_gone:
            cgroups.remove(self._spec["cgroup"])
            shutil.rmtree(self._state, ignore_errors=True)

    def _serve(self, listener: socket.socket, wake: socket.socket) -> bool:
        """Return True if the supervisor is gone, False after SIGTERM."""
        while True:
            for ready, _ in self._selector.select():
                if ready.fileobj is listener:
                    self._answer(listener.accept()[0])
                elif ready.fileobj is wake:
                    if signal.SIGTERM in wake.recv(64):
                        return False
                else:
                    return True
            self._reap()

    def _network(self) -> None:
        """Bring up loopback and the pods' bridge, whose address is the node's."""
        busybox = self._spec["busybox"]
        bridge, (address, second) = self._spec["bridge"], self._spec["addresses"]
        for line in (
            "link set lo up",
            f"link add name {bridge} type bridge",
            f"addr add {address}/16 dev {bridge}",
            f"addr add {second}/16 dev {bridge}",
            f"link set {bridge} up",
        ):
            subprocess.run([busybox, "ip", *line.split()], check=True)
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            connection.settimeout(5)
            try:
                answer = self._execute(json.loads(stream.readline()))
            except (ValueError, KeyError, OSError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            stream.write(json.dumps(answer).encode() + b"\n")

    def _execute(self, command: dict[str, Any]) -> dict[str, Any]:
        self._reap()
        if name := command.get("start"):
            if name in self._running:
                raise ValueError(f"{name} runs already")
            self._start(name)
        elif name := command.get("signal"):
            self._running[name].send_signal(command["number"])
        return {"running": {name: process.pid for name, process in self._running.items()}}

    def _start(self, name: str) -> None:
        program = self._spec["programs"][name]
        argv = [*self._enter(program["node"]), *program["argv"]] if program["node"] else program["argv"]
        with (self._state / "logs" / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                argv,
                env=os.environ | program.get("env", {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/run/quotient",
                start_new_session=True,
            )

    def _enter(self, node: str) -> list[str]:
        """Return the command that runs another one in a node's mount namespace, which is created if necessary."""
        if node not in self._holders:
            holder = [sys.executable, "-m", "tests.cluster.inside", str(self._state / "spec.json"), node]
            command = ["unshare", "--mount", "--propagation=private", *holder]
            self._holders[node] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            ready = self._holders[node].stdout
            if ready is None or not ready.readline():
                raise OSError(f"the mount namespace of {node} was not created")
        return ["nsenter", f"--mount=/proc/{self._holders[node].pid}/ns/mnt", "--"]

    def _reap(self) -> None:
        """Reap ended processes: our programs, and orphans, whose parent is the first process."""
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG)[0]:
                for name, process in list(self._running.items()):
                    if process.pid == ended:
                        del self._running[name]

    @staticmethod
    def _end() -> None:
        """Kill every other process of the namespace, and wait until they are gone."""
        try:
            os.kill(-1, signal.SIGKILL)
            while True:
                os.wait()
        except (ProcessLookupError, ChildProcessError):
            return


def cover_folders(spec: dict[str, Any]) -> None:
    """Mount an empty file system over each folder that programs write to, with what they need bound into it."""
    needed = [Path(path).resolve() for path in spec["keep"]]
    for covered in COVERED:
        below = [path for path in needed if path.is_relative_to(covered)]
        # Opened before the folder is covered, or they could not be reached any more.
        handles = {path: os.open(path, os.O_PATH) for path in below}
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", covered)
        for path, handle in handles.items():
            path.mkdir(parents=True, exist_ok=True)
            mount("--bind", f"/proc/self/fd/{handle}", str(path), pass_fd=handle)
            os.close(handle)
    for folder in ("/run/quotient", "/run/containerd", "/run/cni", "/run/lock", "/var/lib/kubelet"):
        Path(folder).mkdir(parents=True, exist_ok=True)
    for name, value in SYSCTLS.items():
        target = Path("/proc/sys") / name
        if target.exists():
            replacement = Path("/run/quotient") / name.replace("/", ".")
            replacement.write_text(value + "\n")
            mount("--bind", str(replacement), str(target))
    mount("--make-rshared", "/")


def hold_node(spec: dict[str, Any], node: str) -> None:
    """Set up the mount namespace of another node, and keep it until this process is killed.

    The node has folders of its own at the paths of the first node's, so that both have the same configuration.
    """
    cover_folders(spec)
    for folder in spec["ofNode"]:
        mount("--bind", f"{spec['state']}/{node}/{folder}", f"{spec['state']}/{folder}")
    print("ready", flush=True)
    signal.pause()


@contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Return a short path to a socket: its address has at most 107 characters, a checkout's path may have more."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def mount(*arguments: str, pass_fd: int = -1) -> None:
    subprocess.run(["mount", *arguments], check=True, pass_fds=(pass_fd,) if pass_fd >= 0 else ())


if __name__ == "__main__":
    described = json.loads(Path(sys.argv[1]).read_text())
    if sys.argv[2].isdecimal():
        Inside(described, int(sys.argv[2])).main()
    else:
        hold_node(described, sys.argv[2])
