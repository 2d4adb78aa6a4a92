"""The real test cluster: it runs pods, and leaves nothing on the machine however it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import traces
from tests.cluster.images import BUSYBOX
from tests.cluster.layout import SPEC_FILE, Layout, layout_from
from tests.cluster.pods import run_to_end
from tests.cluster.real import ClusterError, RealCluster, sweep, why_no_cluster
from tests.cluster.supervisor import ROOT, parent_of
from tests.conftest import skip_or_fail
from tests.waiting import eventually

GONE_S = 30.0


class MachineBefore:
    """The machine's state before a test, to be compared with the one after it."""

    def __init__(self) -> None:
        self._before = traces.machine()

    def left(self, place: Layout) -> dict[str, list[str]]:
        return traces.left(self._before, place)

    def assert_clean(self, place: Layout) -> None:
        """Wait until nothing is left: the kernel may still be ending the last processes."""
        assert self._before.mounts
        try:
            eventually(lambda: not self.left(place), "the machine to be as before", GONE_S)
        except AssertionError:
            assert self.left(place) == {}


@pytest.fixture
def machine(real_cluster_possible: None) -> MachineBefore:
    return MachineBefore()


def layout_of(state: Path) -> Layout:
    return layout_from(json.loads((state / SPEC_FILE).read_text()))


def start_sleeper(cluster: RealCluster) -> None:
    """Run a pod that does not end, so that there are containers, cgroups, mounts and links to clean up."""
    cluster.kubectl("run", "sleeper", f"--image={BUSYBOX}", "--restart=Never", "--command", "--", "sleep", "600")
    running = "--output=jsonpath={.status.phase}"
    eventually(lambda: cluster.kubectl("get", "pod", "sleeper", running) == "Running", "the sleeper to run", 60)


def test_without_a_cluster_tests_are_skipped_and_in_ci_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """In CI, a skipped test would go unnoticed."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    why = why_no_cluster()
    assert "needs" in why
    with pytest.raises(pytest.skip.Exception, match="needs"):
        skip_or_fail(why, in_ci=False)
    with pytest.raises(pytest.fail.Exception, match="needs"):
        skip_or_fail(why, in_ci=True)


@pytest.mark.node
def test_a_pod_runs_and_its_log_can_be_read(node_cluster: RealCluster) -> None:
    """Through API server, scheduler, kubelet, containerd and the pod network."""
    assert run_to_end(node_cluster, "hello", "echo hello; ip addr show eth0").startswith("hello")


@pytest.mark.node
def test_a_pod_reaches_the_api_server_and_nothing_outside(node_cluster: RealCluster) -> None:
    """At the node's address; the cluster's network is not connected to any other."""
    script = "nc -w 3 10.88.0.1 6443 </dev/null && echo reached; ip route; nc -w 3 1.1.1.1 80 </dev/null || echo closed"
    log = run_to_end(node_cluster, "asker", script)
    assert "reached" in log
    assert "closed" in log


@pytest.mark.node
def test_every_program_killed_leaves_nothing_behind(machine: MachineBefore) -> None:
    """Each is killed with SIGKILL, and a container's shim as well; then the cluster is stopped."""
    cluster = RealCluster.start(node=True)
    start_sleeper(cluster)
    shim = next(pid for pid, command in traces.processes(cluster.layout) if "containerd-shim" in command)
    assert {"processes", "cgroups", "state"} <= machine.left(cluster.layout).keys(), (
        "traces of a running cluster are found"
    )
    os.kill(shim, signal.SIGKILL)
    for name in ("kubelet", "containerd", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
        cluster.kill(name)
    assert cluster.running() == {}
    cluster.stop()
    machine.assert_clean(cluster.layout)


@pytest.mark.node
def test_a_killed_supervisor_leaves_nothing_behind(machine: MachineBefore) -> None:
    """The cluster's first process cleans up after it."""
    cluster = RealCluster.start(node=True)
    start_sleeper(cluster)
    os.kill(cluster.supervisor_info()["supervisor"], signal.SIGKILL)
    cluster.wait_supervisor()
    machine.assert_clean(cluster.layout)


@pytest.mark.node
def test_after_the_death_of_supervisor_and_first_process_a_sweep_cleans_up(machine: MachineBefore) -> None:
    """`make cluster-down` and the next start sweep."""
    cluster = RealCluster.start(node=True)
    start_sleeper(cluster)
    info = cluster.supervisor_info()
    for process in ("supervisor", "init"):
        os.kill(info[process], signal.SIGKILL)
    cluster.wait_supervisor()
    sweep(cluster.layout.state)
    machine.assert_clean(cluster.layout)


@pytest.mark.kubernetes
def test_a_killed_first_process_leaves_nothing_behind(machine: MachineBefore) -> None:
    """The kernel kills the rest, and the supervisor removes what outlives processes."""
    cluster = RealCluster.start(api=False)
    os.kill(cluster.supervisor_info()["init"], signal.SIGKILL)
    cluster.wait_supervisor()
    machine.assert_clean(cluster.layout)


@pytest.mark.kubernetes
def test_a_killed_unshare_leaves_nothing_behind(machine: MachineBefore) -> None:
    """The process between supervisor and first process, which created the namespaces."""
    cluster = RealCluster.start(api=False)
    os.kill(parent_of(Path(f"/proc/{cluster.supervisor_info()['init']}")), signal.SIGKILL)
    cluster.wait_supervisor()
    machine.assert_clean(cluster.layout)


@pytest.mark.kubernetes
def test_a_killed_test_run_leaves_nothing_behind(machine: MachineBefore) -> None:
    """The supervisor notices that the process which started the cluster has ended."""
    start = "from tests.cluster.real import RealCluster; c = RealCluster.start(api=False)"
    script = f"import time; {start}; print(c.layout.state, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        place = layout_of(Path(starter.stdout.readline().strip()))
        assert machine.left(place), "traces of a running cluster are found"
        starter.kill()
    machine.assert_clean(place)


@pytest.mark.node
def test_two_clusters_run_at_once(node_cluster: RealCluster) -> None:
    """As from two checkouts: with the same addresses inside, and different ports outside."""
    other = RealCluster.start(node=True)
    try:
        assert node_cluster.supervisor_info()["port"] != other.supervisor_info()["port"]
        for cluster in (node_cluster, other):
            assert run_to_end(cluster, "twin", "echo $(cat /etc/hostname)").strip() == "twin"
    finally:
        other.stop()


def sample_output(state: Path) -> str:
    """Apply the sample pod as a user does, and return what it prints."""

    def kubectl(*arguments: str) -> str:
        command = [str(state / "bin/kubectl"), f"--kubeconfig={state / 'kubeconfig'}", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    kubectl("apply", "-f", "examples/pod.yaml")
    kubectl("wait", "--for=jsonpath={.status.phase}=Running", "pod/sample")
    eventually(lambda: kubectl("logs", "sample").endswith("+\n"), "the sample to print its GPUs", 60)
    return kubectl("logs", "sample")


@pytest.mark.node
@pytest.mark.timeout(400)
def test_make_cluster_and_cluster_down(machine: MachineBefore, tmp_path: Path) -> None:
    """Up, up again (an error, and the first cluster continues), down, down again (nothing to do).

    The sample pod prints what both READMEs show.
    """
    state = tmp_path / "cluster"

    def command(word: str) -> "subprocess.CompletedProcess[str]":
        made = [sys.executable, "-m", "tests.cluster", word, str(state)]
        return subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=False)

    started = command("up")
    assert started.returncode == 0, started.stderr
    place = layout_of(state)
    printed = sample_output(state)
    for text in (started.stderr, (ROOT / "README.md").read_text(), (ROOT / "README.zh.md").read_text()):
        assert printed in text
    again = command("up")
    assert again.returncode == 1
    assert "a cluster runs already" in again.stderr
    assert command("down").returncode == 0
    assert not state.exists()
    assert "no cluster ran" in command("down").stderr
    machine.assert_clean(place)


def test_a_folder_that_is_not_a_clusters_is_not_removed(tmp_path: Path) -> None:
    """A mistyped path must not delete other files."""
    other = tmp_path / "other"
    other.write_text("x")
    with pytest.raises(ClusterError, match="not the folder of a cluster"):
        sweep(tmp_path)
    assert other.exists()
    sweep(tmp_path / "none")
