"""The supervisor of one test cluster: creates its namespaces, forwards its API to loopback, and cleans up after it.

Supervisor and first process (`tests.cluster.inside`) watch each other. If the first process dies, the kernel ends the
cluster and the supervisor removes cgroups and folder; if the supervisor dies, the first process does. After the death
of both, `make cluster-down` or the next start cleans up.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cluster import cgroups, layout

ROOT = layout.ROOT
OWN_NETWORK = "/proc/self/ns/net"


def main(spec_file: str, mode: str) -> None:
    """Run the cluster until a signal, until standard input is closed (unless mode is detached), or until it dies."""
    spec = json.loads(Path(spec_file).read_text())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    # Signals are turned into bytes on a pipe, so that one select waits for everything.
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    # Children read from the lifeline; when this process dies, the kernel closes `held` and they notice.
    lifeline, held = os.pipe()
    cgroups.make(spec["cgroup"])
    cgroups.make(layout.second_cgroup(spec["cgroup"]))
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    inside = [sys.executable, "-m", "tests.cluster.inside", spec_file, str(lifeline)]
    first = subprocess.Popen([*namespaces, *inside], pass_fds=(lifeline,), cwd=ROOT, stdin=subprocess.DEVNULL)
    forward = None
    try:
        forward = publish(spec, first, lifeline)
        os.close(lifeline)
        wait(wake, first, None if mode == "detached" else sys.stdin.fileno())
    finally:
        end(spec, first, held, forward)


def publish(spec: dict[str, Any], first: subprocess.Popen[bytes], lifeline: int) -> subprocess.Popen[bytes]:
    """Forward a port on loopback to the API server, and write the kubeconfig and `supervisor.json` that name it."""
    init = child_of(first)
    forward = start_forward(
        OWN_NETWORK, "127.0.0.1:0", f"/proc/{init}/ns/net", f"127.0.0.1:{layout.API_PORT}", lifeline
    )
    assert forward.stdout is not None
    port = int(forward.stdout.readline())
    place = layout.layout_from(spec)
    token = (place.state / "admin.token").read_text()
    layout.write_kubeconfig(place, place.kubeconfig, token, f"https://127.0.0.1:{port}")
    # Written under another name first, so that a reader never finds half of it.
    scratch = place.state / "supervisor.json.new"
    scratch.write_text(json.dumps({"supervisor": os.getpid(), "init": init, "port": port}))
    scratch.replace(place.state / "supervisor.json")
    return forward


def start_forward(
    listen_in: str, listen_at: str, connect_in: str, connect_to: str, lifeline: int
) -> "subprocess.Popen[bytes]":
    """Start a forwarder; the first line that it prints is its port."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.forward", listen_in, listen_at, connect_in, connect_to, str(lifeline)],
        pass_fds=(lifeline,),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )


def child_of(parent: subprocess.Popen[bytes]) -> int:
    """Return the process that `unshare` forked: the first one of the new namespace."""
    while parent.poll() is None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and parent_of(entry) == parent.pid:
                return int(entry.name)
    raise RuntimeError("the cluster's first process did not start")


def parent_of(process: Path) -> int:
    """Return a process's parent; 0 if the process has ended."""
    try:
        # The command's name, in parentheses, may contain spaces and parentheses.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait(wake: int, first: subprocess.Popen[bytes], lifeline: int | None) -> None:
    """Wait for a signal, the end of our own lifeline, or the end of the cluster."""
    ended = os.pidfd_open(first.pid)
    select.select([wake, ended, *([lifeline] if lifeline is not None else [])], [], [])
    os.close(ended)


def end(
    spec: dict[str, Any], first: subprocess.Popen[bytes], held: int, forward: "subprocess.Popen[bytes] | None"
) -> None:
    """Kill all processes, and remove what outlives them."""
    first.kill()  # kills the first process as well, and with it everything in the namespaces
    first.wait()
    os.close(held)
    if forward is not None:
        forward.wait()
    cgroups.remove(spec["cgroup"])
    shutil.rmtree(spec["state"], ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
