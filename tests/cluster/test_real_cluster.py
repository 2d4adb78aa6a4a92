"""The real cluster itself: it runs pods, and leaves nothing behind however it ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import traces
from tests.cluster.images import BUSYBOX
from tests.cluster.layout import Layout, placed
from tests.cluster.pods import run_to_end
from tests.cluster.real import ClusterError, RealCluster, sweep, why_no_cluster
from tests.cluster.supervisor import ROOT, parent_of
from tests.conftest import do_without
from tests.waiting import eventually

GONE_S = 30.0


class Watched:
    """The machine before a test, to be compared with what a cluster leaves."""

    def __init__(self) -> None:
        self._before = traces.machine()

    def left(self, place: Layout) -> dict[str, list[str]]:
        return traces.left(self._before, place)

    def assert_clean(self, place: Layout) -> None:
        """Nothing is left: at once, or as soon as the kernel has buried the last process."""
        assert self._before.mounts
        try:
            eventually(lambda: not self.left(place), "the machine to be as before", GONE_S)
        except AssertionError:
            assert self.left(place) == {}


@pytest.fixture
def machine(real_cluster_possible: None) -> Watched:
    return Watched()


def layout_of(state: Path) -> Layout:
    """Find out whose folder this is."""
    return placed(json.loads((state / "order.json").read_text()))


def start_sleeper(cluster: RealCluster) -> None:
    """Run a pod that goes on, so that there are containers, cgroups, mounts and links to leave behind."""
    cluster.kubectl("run", "sleeper", f"--image={BUSYBOX}", "--restart=Never", "--command", "--", "sleep", "600")
    running = "--output=jsonpath={.status.phase}"
    eventually(lambda: cluster.kubectl("get", "pod", "sleeper", running) == "Running", "the sleeper to run", 60)


def test_without_a_cluster_tests_are_skipped_and_in_ci_they_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody should believe that they ran."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    why = why_no_cluster()
    assert "needs" in why
    with pytest.raises(pytest.skip.Exception, match="needs"):
        do_without(why, in_ci=False)
    with pytest.raises(pytest.fail.Exception, match="needs"):
        do_without(why, in_ci=True)


@pytest.mark.node
def test_a_pod_runs_and_its_log_can_be_read(node_cluster: RealCluster) -> None:
    """The whole way: API server, scheduler, kubelet, containerd, network, and back."""
    assert run_to_end(node_cluster, "hello", "echo hello; ip addr show eth0").startswith("hello")


@pytest.mark.node
def test_a_pod_reaches_the_api_server_and_nothing_outside(node_cluster: RealCluster) -> None:
    """By the node's address; there is no way out of the cluster's own network."""
    script = "nc -w 3 10.88.0.1 6443 </dev/null && echo reached; ip route; nc -w 3 1.1.1.1 80 </dev/null || echo closed"
    log = run_to_end(node_cluster, "asker", script)
    assert "reached" in log
    assert "closed" in log


@pytest.mark.node
def test_every_program_killed_leaves_nothing_behind(machine: Watched) -> None:
    """Kill -9 of each, one after another, and of a container's shim; then an orderly end."""
    cluster = RealCluster.start(node=True)
    start_sleeper(cluster)
    shim = next(pid for pid, command in traces.processes(cluster.layout) if "containerd-shim" in command)
    assert {"processes", "cgroups", "state"} <= machine.left(cluster.layout).keys(), "what runs can be seen"
    os.kill(shim, signal.SIGKILL)
    for name in ("kubelet", "containerd", "kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
        cluster.kill(name)
    assert cluster.running() == {}
    cluster.stop()
    machine.assert_clean(cluster.layout)


@pytest.mark.node
def test_a_killed_keeper_leaves_nothing_behind(machine: Watched) -> None:
    """The cluster's first process cleans up after it."""
    cluster = RealCluster.start(node=True)
    start_sleeper(cluster)
    os.kill(cluster.kept()["keeper"], signal.SIGKILL)
    cluster.wait_keeper()
    machine.assert_clean(cluster.layout)


@pytest.mark.node
def test_keeper_and_first_process_killed_together_are_swept_up_after(machine: Watched) -> None:
    """Nobody is left to clean up: `cluster-down`, or the next start, does."""
    cluster = RealCluster.start(node=True)
    start_sleeper(cluster)
    kept = cluster.kept()
    for process in ("keeper", "init"):
        os.kill(kept[process], signal.SIGKILL)
    cluster.wait_keeper()
    sweep(cluster.layout.state)
    machine.assert_clean(cluster.layout)


@pytest.mark.kubernetes
def test_a_killed_first_process_leaves_nothing_behind(machine: Watched) -> None:
    """The kernel ends the rest, and the keeper removes what outlives processes."""
    cluster = RealCluster.start(api=False)
    os.kill(cluster.kept()["init"], signal.SIGKILL)
    cluster.wait_keeper()
    machine.assert_clean(cluster.layout)


@pytest.mark.kubernetes
def test_a_killed_wrapper_leaves_nothing_behind(machine: Watched) -> None:
    """The process that made the namespaces is a part like any other."""
    cluster = RealCluster.start(api=False)
    os.kill(parent_of(Path(f"/proc/{cluster.kept()['init']}")), signal.SIGKILL)
    cluster.wait_keeper()
    machine.assert_clean(cluster.layout)


@pytest.mark.kubernetes
def test_a_killed_test_run_leaves_nothing_behind(machine: Watched) -> None:
    """Whoever started the cluster is gone: its keeper notices."""
    start = "from tests.cluster.real import RealCluster; c = RealCluster.start(api=False)"
    script = f"import time; {start}; print(c.layout.state, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        place = layout_of(Path(starter.stdout.readline().strip()))
        assert machine.left(place), "a cluster runs, and it can be seen"
        starter.kill()
    machine.assert_clean(place)


@pytest.mark.node
def test_two_clusters_run_at_once(node_cluster: RealCluster) -> None:
    """As two checkouts would: same addresses inside, different ones outside."""
    other = RealCluster.start(node=True)
    try:
        assert node_cluster.kept()["port"] != other.kept()["port"]
        for cluster in (node_cluster, other):
            assert run_to_end(cluster, "twin", "echo $(cat /etc/hostname)").strip() == "twin"
    finally:
        other.stop()


@pytest.mark.node
@pytest.mark.timeout(300)
def test_the_commands_for_people(machine: Watched, tmp_path: Path) -> None:
    """Up, up again (refused, and the first goes on), down, down again (nothing to do)."""
    state = tmp_path / "cluster"

    def command(word: str) -> "subprocess.CompletedProcess[str]":
        made = [sys.executable, "-m", "tests.cluster", word, str(state)]
        return subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=False)

    started = command("up")
    assert started.returncode == 0, started.stderr
    assert "hello from a pod" in started.stderr
    assert (state / "kubeconfig").exists()
    assert "Quotient is installed" in started.stderr
    place = layout_of(state)
    again = command("up")
    assert again.returncode == 1
    assert "a cluster runs already" in again.stderr
    assert command("down").returncode == 0
    assert not state.exists()
    assert "no cluster ran" in command("down").stderr
    machine.assert_clean(place)


def test_a_folder_of_somebody_elses_is_spared(tmp_path: Path) -> None:
    """A slip of the pen must not cost a home."""
    precious = tmp_path / "precious"
    precious.write_text("x")
    with pytest.raises(ClusterError, match="something else"):
        sweep(tmp_path)
    assert precious.exists()
    sweep(tmp_path / "none")
