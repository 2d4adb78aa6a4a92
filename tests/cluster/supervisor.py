"""Keeps one test cluster: makes its namespaces, forwards its API to loopback, and leaves nothing behind.

Keeper and first process watch each other. If the first process dies, the kernel ends the cluster and the
keeper removes cgroups and folder; if the keeper dies, the first process does. `down` sweeps after both.
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
HERE = "/proc/self/ns/net"


def main(order_file: str, mode: str) -> None:
    """Keep the cluster until told to end, until standard input breaks (attached), or until it dies."""
    order = json.loads(Path(order_file).read_text())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    lifeline, held = os.pipe()
    cgroups.make(order["cgroup"])
    namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    inside = [sys.executable, "-m", "tests.cluster.inside", order_file, str(lifeline)]
    first = subprocess.Popen([*namespaces, *inside], pass_fds=(lifeline,), cwd=ROOT, stdin=subprocess.DEVNULL)
    forward = None
    try:
        forward = publish(order, first, lifeline)
        os.close(lifeline)
        wait(wake, first, None if mode == "detached" else sys.stdin.fileno())
    finally:
        end(order, first, held, forward)


def publish(order: dict[str, Any], first: subprocess.Popen[bytes], lifeline: int) -> subprocess.Popen[bytes]:
    """Open a port on loopback for the API server, and write the kubeconfig that names it."""
    init = child_of(first)
    forward = start_forward(HERE, "127.0.0.1:0", f"/proc/{init}/ns/net", f"127.0.0.1:{layout.API_PORT}", lifeline)
    assert forward.stdout is not None
    port = int(forward.stdout.readline())
    place = layout.placed(order)
    token = (place.state / "admin.token").read_text()
    layout.write_kubeconfig(place, place.kubeconfig, token, f"https://127.0.0.1:{port}")
    kept = {"keeper": os.getpid(), "init": init, "port": port}
    scratch = place.state / "keeper.json.new"
    scratch.write_text(json.dumps(kept))
    scratch.replace(place.state / "keeper.json")
    return forward


def start_forward(
    listen_in: str, listen_at: str, connect_in: str, connect_to: str, lifeline: int
) -> "subprocess.Popen[bytes]":
    """Start a forwarder; the first line it prints is its port."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.forward", listen_in, listen_at, connect_in, connect_to, str(lifeline)],
        pass_fds=(lifeline,),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )


def child_of(parent: subprocess.Popen[bytes]) -> int:
    """Find the process that `unshare` forked: the first of the new namespace."""
    while parent.poll() is None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and parent_of(entry) == parent.pid:
                return int(entry.name)
    raise RuntimeError("the cluster's first process did not start")


def parent_of(process: Path) -> int:
    """Read a process's parent; 0 if it has gone."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait(wake: int, first: subprocess.Popen[bytes], lifeline: int | None) -> None:
    """Wait for a signal, for the end of our own lifeline, or for the end of the cluster."""
    ended = os.pidfd_open(first.pid)
    select.select([wake, ended, *([lifeline] if lifeline is not None else [])], [], [])
    os.close(ended)


def end(
    order: dict[str, Any], first: subprocess.Popen[bytes], held: int, forward: "subprocess.Popen[bytes] | None"
) -> None:
    """End everything and remove what outlives processes."""
    first.kill()  # takes the first process along, and with it the namespaces
    first.wait()
    os.close(held)
    if forward is not None:
        forward.wait()
    cgroups.remove(order["cgroup"])
    shutil.rmtree(order["state"], ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
