"""`make cluster` and `make cluster-down`: a real Kubernetes on this machine, for people.

python -m tests.cluster up      start it, run a pod to prove it, write .cluster/kubeconfig
python -m tests.cluster down    end it and leave nothing behind
"""

import hashlib
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from deploy.debian import newer_containerd, unpack_packages
from deploy.toolchain import BuildError, cache_dir, helm, kubernetes, locked, say
from tests.cluster.layout import DEBIAN_PACKAGES
from tests.cluster.pods import run_to_end
from tests.cluster.quotient import give_image, install_chart
from tests.cluster.real import ClusterError, RealCluster, sweep, why_no_cluster
from tests.cluster.supervisor import ROOT

END_S = 30.0


def up(state: Path) -> None:
    """Start the cluster and prove it with a pod."""
    if keeper_pid(state):
        raise ClusterError(f"a cluster runs already: {state}/kubeconfig; end it with `make cluster-down`")
    sweep(state)
    say("starting etcd, kube-apiserver, kube-controller-manager, kube-scheduler, containerd and a kubelet")
    began = time.monotonic()
    cluster = RealCluster.start(node=True, state=state, detached=True)
    say(f"ready after {time.monotonic() - began:.0f} s; running a pod")
    try:
        log = run_to_end(cluster, "hello", "echo hello from a pod on $(cat /etc/hostname)")
        say("installing Quotient with its chart")
        give_image(cluster, state)
        install_chart(cluster)
    except BaseException:
        cluster.stop()
        raise
    say(f"the pod said {log.strip()!r} after {time.monotonic() - began:.0f} s")
    say("Quotient is installed, by its chart: try `quotient doctor`, `quotient admit FILE`, then `kubectl apply`")
    say(f"use it with: export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")
    say(f"kubectl is {cluster.layout.kubernetes}/kubectl")


def down(state: Path) -> None:
    """End the cluster, however it was left."""
    pid = keeper_pid(state)
    if pid:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while keeper_pid(state):
            if time.monotonic() > deadline:
                raise ClusterError(f"the keeper, process {pid}, has not ended after {END_S:.0f} s")
            time.sleep(0.05)
    sweep(state)
    say("the cluster is gone" if pid else "no cluster ran")


def keeper_pid(state: Path) -> int:
    """Find the keeper of the cluster in a folder; 0 if none runs. A number used anew is not mistaken for it."""
    try:
        pid = int(json.loads((state / "keeper.json").read_text())["keeper"])
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except (OSError, ValueError, KeyError):
        return 0
    return pid if f"{state}/order.json" in command else 0


def lock_of(folder: Path) -> Path:
    """Name the lock that keeps two commands off one folder; it cannot stand in the folder, which goes away."""
    locks = cache_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return locks / hashlib.sha256(str(folder).encode()).hexdigest()[:16]


def parts() -> None:
    """Fetch and build what a cluster needs, where one can run; elsewhere the tests that need one say so."""
    if why := why_no_cluster():
        say(f"a real Kubernetes {why}: tests that need one will be skipped")
        return
    kubernetes()
    helm()
    unpack_packages(DEBIAN_PACKAGES)
    newer_containerd()


def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    match arguments:
        case ["parts"]:
            parts()
        case ["up" | "down" as word, *rest] if len(rest) <= 1:
            folder = Path(rest[0] if rest else ROOT / ".cluster").resolve()
            with locked(lock_of(folder)):
                (up if word == "up" else down)(folder)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ClusterError, BuildError) as wrong:
        sys.exit(f"error: {wrong}")
