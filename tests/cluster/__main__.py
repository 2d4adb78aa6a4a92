"""`make cluster` and `make cluster-down`: a real Kubernetes with simulated GPUs on this machine, for people.

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
from nodeplugin.compiler import NoCompiler
from tests.cluster.layout import CDI, DEBIAN_PACKAGES, SPEC_FILE
from tests.cluster.quotient import give_images, install_chart
from tests.cluster.real import ClusterError, RealCluster, sweep, why_no_cluster
from tests.cluster.supervisor import ROOT
from tests.node.driver import FakeDriver
from vcuda.vocabulary import CORES_PER_CARD

END_S = 30.0
SAMPLE = ROOT / "examples/pod.yaml"
FIRST_NODES_GPUS, SECOND_NODES_GPUS = ("A100", "A100"), ("T4", "T4")
LINES_OF_TABLE = 3


def up(state: Path) -> None:
    """Start a cluster with two GPU nodes, install Quotient, and run the sample pod."""
    if supervisor_pid(state):
        raise ClusterError(f"a cluster runs already: {state}/kubeconfig; stop it with `make cluster-down`")
    sweep(state)
    say("starting etcd, kube-apiserver, kube-controller-manager, kube-scheduler and two nodes, each with a kubelet")
    began = time.monotonic()
    cluster = RealCluster.start(node=True, second_node=True, state=state, detached=True)
    try:
        say(f"ready after {time.monotonic() - began:.0f} s; installing Quotient with its chart")
        give_images(cluster, state)
        install_chart(cluster, *simulate_gpus(cluster))
        cluster.until("the GPUs to be allocatable", lambda: offers_gpus(cluster), "kubelet-2")
        say(f"Quotient is installed after {time.monotonic() - began:.0f} s; running {SAMPLE.relative_to(ROOT)}")
        log = run_sample(cluster)
    except BaseException:
        cluster.stop()
        raise
    say(f"it printed, after {time.monotonic() - began:.0f} s:\n{log.rstrip()}")
    tell_usage(cluster)


def simulate_gpus(cluster: RealCluster) -> list[str]:
    """Install a fake driver on each node, and label the nodes; returns the chart values for them."""
    place, count = cluster.layout, len(FIRST_NODES_GPUS)
    FakeDriver(place.driver).install(*FIRST_NODES_GPUS)
    FakeDriver(place.second_node / place.driver.name, first=count).install(*SECOND_NODES_GPUS)
    cluster.kubectl("label", "nodes", "--all", "nvidia-device-enable=enable")
    return [f"config.nodePlugin={json.dumps({'driverRoot': str(place.driver), 'cdi': CDI})}"]


def offers_gpus(cluster: RealCluster) -> bool:
    path = "{.items[*].status.allocatable.inspur\\.com/vcuda-core}"
    expected = [str(CORES_PER_CARD * len(gpus)) for gpus in (FIRST_NODES_GPUS, SECOND_NODES_GPUS)]
    return cluster.kubectl("get", "nodes", f"-o=jsonpath={path}").split() == expected


def run_sample(cluster: RealCluster) -> str:
    """Run the sample pod until it has printed its GPUs, delete it, and return what it printed."""
    cluster.kubectl("apply", "-f", str(SAMPLE))
    try:
        cluster.kubectl("wait", "--for=jsonpath={.status.phase}=Running", "pod/sample", "--timeout=60s")
    except ClusterError as error:
        raise ClusterError(f"{error}\n{cluster.kubectl('describe', 'pod', 'sample')[-2000:]}") from None
    log = ""

    def is_printed() -> bool:
        nonlocal log
        log = cluster.kubectl("logs", "sample", check=False)
        return log.endswith("+\n") and log.count("\n+") == LINES_OF_TABLE

    cluster.until("the sample pod to print its GPUs", is_printed, "kubelet")
    cluster.kubectl("delete", "pod", "sample")
    return log


def tell_usage(cluster: RealCluster) -> None:
    bin_folder = cluster.layout.state / "bin"
    bin_folder.mkdir()
    (bin_folder / "kubectl").symlink_to(cluster.layout.kubernetes / "kubectl")
    say("two nodes: node-1 with two A100 of 40 GiB, node-2 with two T4 of 15 GiB; they are simulated, all else is real")
    say("now try:")
    for line in (
        f"export KUBECONFIG={shlex.quote(str(cluster.kubeconfig))} PATH={shlex.quote(str(bin_folder))}:$PATH",
        f"kubectl apply -f {shlex.quote(str(SAMPLE))}",
        "kubectl logs sample",
        "make cluster-down",
    ):
        print(f"  {line}", file=sys.stderr)


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
    except (ClusterError, BuildError, NoCompiler) as error:
        sys.exit(f"error: {error}")
