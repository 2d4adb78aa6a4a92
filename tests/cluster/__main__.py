"""`make cluster` and `make cluster-down`: a real Kubernetes on this machine, for people.

python -m tests.cluster up      start it, run a pod to prove that it works, write .cluster/kubeconfig
python -m tests.cluster down    stop it and leave nothing behind
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
from tests.cluster.layout import DEBIAN_PACKAGES, SPEC_FILE
from tests.cluster.pods import run_to_end
from tests.cluster.quotient import give_images, install_chart
from tests.cluster.real import ClusterError, RealCluster, sweep, why_no_cluster
from tests.cluster.supervisor import ROOT

END_S = 30.0


def up(state: Path) -> None:
    """Start a cluster, run a pod, and install Quotient."""
    if supervisor_pid(state):
        raise ClusterError(f"a cluster runs already: {state}/kubeconfig; stop it with `make cluster-down`")
    sweep(state)
    say("starting etcd, kube-apiserver, kube-controller-manager, kube-scheduler, containerd and a kubelet")
    began = time.monotonic()
    cluster = RealCluster.start(node=True, state=state, detached=True)
    say(f"ready after {time.monotonic() - began:.0f} s; running a pod")
    try:
        log = run_to_end(cluster, "hello", "echo hello from a pod on $(cat /etc/hostname)")
        say("installing Quotient with its chart")
        give_images(cluster, state)
        install_chart(cluster)
    except BaseException:
        cluster.stop()
        raise
    say(f"the pod said {log.strip()!r} after {time.monotonic() - began:.0f} s")
    say("Quotient is installed, by its chart: try `quotient doctor`, `quotient admit FILE`, then `kubectl apply`")
    say(f"use it with: export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))}")
    say(f"kubectl is {cluster.layout.kubernetes}/kubectl")


def down(state: Path) -> None:
    """Stop the cluster, whatever state it is in."""
    pid = supervisor_pid(state)
    if pid:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + END_S
        while supervisor_pid(state):
            if time.monotonic() > deadline:
                raise ClusterError(f"the supervisor, process {pid}, has not ended after {END_S:.0f} s")
            time.sleep(0.05)
    sweep(state)
    say("the cluster is gone" if pid else "no cluster ran")


def supervisor_pid(state: Path) -> int:
    """Return the supervisor of the cluster in a folder; 0 if none runs."""
    try:
        pid = int(json.loads((state / "supervisor.json").read_text())["supervisor"])
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except (OSError, ValueError, KeyError):
        return 0
    # The process id may belong to another program by now.
    return pid if f"{state}/{SPEC_FILE}" in command else 0


def lock_of(folder: Path) -> Path:
    """Return the lock file of a state folder; it is elsewhere, as the folder itself is removed."""
    locks = cache_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    return locks / hashlib.sha256(str(folder).encode()).hexdigest()[:16]


def parts() -> None:
    """Download and build what a cluster needs, on machines that can run one."""
    if why := why_no_cluster():
        say(f"a real Kubernetes {why}: tests that need one will be skipped")
        return
    kubernetes()
    helm()
    unpack_packages(DEBIAN_PACKAGES)
    newer_containerd()


def main(arguments: list[str]) -> None:
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
    except (ClusterError, BuildError) as error:
        sys.exit(f"error: {error}")
