"""`make cluster` and `make cluster-down`: a real Kubernetes on this machine, for people.

python -m tests.cluster up      start it, run a pod to prove it, write .cluster/kubeconfig
python -m tests.cluster down    end it and leave nothing behind
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.cluster.binaries import BuildError, say
from tests.cluster.keeper import ROOT
from tests.cluster.pods import run_to_end
from tests.cluster.real import ClusterError, RealCluster, sweep

STATE = ROOT / ".cluster"
END_S = 30.0


def up() -> None:
    """Start the cluster and prove it with a pod."""
    if keeper_pid():
        raise ClusterError(f"a cluster runs already: KUBECONFIG={STATE}/kubeconfig; end it with `make cluster-down`")
    sweep(STATE)
    say("starting etcd, kube-apiserver, kube-controller-manager, kube-scheduler, containerd and a kubelet")
    began = time.monotonic()
    cluster = RealCluster.start(node=True, state=STATE, detached=True)
    say(f"ready after {time.monotonic() - began:.0f} s; running a pod")
    try:
        log = run_to_end(cluster, "hello", "echo hello from a pod on $(cat /etc/hostname)")
    except BaseException:
        cluster.stop()
        raise
    say(f"the pod said {log.strip()!r} after {time.monotonic() - began:.0f} s")
    say(f"use it with: export KUBECONFIG={STATE}/kubeconfig; kubectl is {cluster.layout.kubernetes}/kubectl")


def down() -> None:
    """End the cluster, however it was left."""
    pid = keeper_pid()
    if pid:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while keeper_pid():
            if time.monotonic() > deadline:
                raise ClusterError(f"the keeper, process {pid}, has not ended after {END_S:.0f} s")
            time.sleep(0.05)
    sweep(STATE)
    say("the cluster is gone" if pid else "no cluster ran")


def keeper_pid() -> int:
    """Find the keeper of this checkout's cluster; 0 if none runs. A number used anew is not mistaken for it."""
    try:
        pid = int(json.loads((STATE / "keeper.json").read_text())["keeper"])
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except (OSError, ValueError, KeyError):
        return 0
    return pid if f"{STATE}/order.json" in command else 0


if __name__ == "__main__":
    try:
        {"up": up, "down": down}[sys.argv[1]]()
    except (ClusterError, BuildError) as wrong:
        sys.exit(f"error: {wrong}")
