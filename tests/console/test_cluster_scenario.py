"""`quotient simulate --from-cluster`: a simulation that begins with what a cluster has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from cluster.gpu_nodes import gpu_node_of
from console.cluster_snapshot import ClusterSnapshot
from console.main import main
from console.simulate import added_nodes
from settings.configuration import Configuration
from simulator.experiment import Outcome, Scenario, run_scenario
from simulator.trace_files import TraceNode
from tests.console.dumps import manifest, node, quota, running, waiting
from tests.scheduler.world import NAMES, gpu
from vcuda.dimensions import CORES
from vcuda.inventory import encode_inventory
from vcuda.isolation import Isolation, Rung
from vcuda.namespace_policy import Mode
from vcuda.placement_strategies import PlacementStrategy

FOUR = node("t", "T4", 4)


def snapshot(*objects: dict[str, Any], **configuration: Any) -> ClusterSnapshot:
    return ClusterSnapshot([("dump", each) for each in objects], Configuration(**configuration))


def scenario(*objects: dict[str, Any], added: Sequence[TraceNode] = (), **configuration: Any) -> Scenario:
    return snapshot(*objects, **configuration).scenario(lambda _: added)


def first_arrivals(of: Scenario) -> Outcome:
    """Have only those arrive that wait."""
    return run_scenario(replace(of, demand=0.01), PlacementStrategy.FRAGMENTATION, 1)


def cores_used(of: Scenario, namespace: str = "team") -> int:
    usage = of.usages[namespace]
    return sum(usage.taken[key] for key in usage.hard if key[-1] == CORES)


def test_pods_that_wait_are_charged_when_they_arrive() -> None:
    """They would be charged twice, if they counted from the beginning."""
    made = scenario(FOUR, running("p", "t", 50), waiting("a", 50), waiting("b", 50), quota("types: {T4: {cores: 150}}"))
    assert cores_used(made) == 50
    assert [row.node for row in first_arrivals(made).rows] == ["t", "t"]


@pytest.mark.parametrize(
    "annotations",
    [
        {"nouse_gputype": "T4"},
        {"use_gputype": "A100,H100,H200,L40,A10"},
        {"min_isolation": "mps"},
    ],
    ids=["avoided model", "five models", "isolation"],
)
def test_constraints_of_pods_are_kept(annotations: dict[str, str]) -> None:
    made = scenario(FOUR, waiting("p", 50, "free", **annotations))
    assert first_arrivals(made).rows[0].node == ""


def test_containers_of_a_pod_are_placed_as_they_are() -> None:
    """60 and 60 cores share two GPUs, of which 20 cores each are used by another pod."""
    pod = waiting("p", 60, "free")
    (container,) = pod["spec"]["containers"]
    pod["spec"]["containers"].append({**container, "name": "d"})
    others = (running("a", "t", 20, "free"), running("b", "t", 20, "free", index=1))
    row, *_ = first_arrivals(scenario(node("t", "T4", 2), pod, *others)).rows
    assert set(row.gpus) == {"GPU-t-0", "GPU-t-1"}


@pytest.mark.parametrize(
    ("text", "mode", "placed"),
    [("", Mode.ENFORCE, 0), ("\nmode: audit", Mode.ENFORCE, 1), ("", Mode.AUDIT, 1)],
    ids=["enforced", "quota audits", "cluster audits"],
)
def test_quotas_refuse_only_where_they_are_enforced(text: str, mode: Mode, placed: int) -> None:
    made = scenario(FOUR, waiting("p", 50), quota(f"types: {{T4: {{cores: 10}}}}{text}"), mode=mode)
    assert first_arrivals(made).placed == placed


def test_the_default_quota_limits_namespaces_without_one() -> None:
    made = scenario(FOUR, waiting("p", 50, "free"), default_quota="types: {T4: {cores: 10}}")
    assert first_arrivals(made).placed == 0


def test_each_node_is_read_once_however_many_namespaces_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to read a cluster grew with namespaces times nodes."""
    read = Mock(wraps=gpu_node_of)
    monkeypatch.setattr("console.existing_pods.gpu_node_of", read)
    nodes = [node(f"n{number}", "T4", 1) for number in range(5)]
    quotas = [quota(namespace=f"team-{number}") for number in range(20)]
    pods = [running(f"p{number}", "n0", 10, f"team-{number}") for number in range(20)]
    snapshot(*nodes, *quotas, *pods).trial()
    assert read.call_count == len(nodes)


@pytest.fixture
def simulate_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Simulates from a cluster of these objects."""

    def run(*objects: dict[str, Any], options: Sequence[str] = (), quotas: str = "") -> Result:
        listed = [("dump", each) for each in objects]
        monkeypatch.setattr("console.cluster_snapshot.read_cluster_objects", lambda _: listed)
        (tmp_path / "quotas.yaml").write_text(quotas)
        given = ["--quota", str(tmp_path / "quotas.yaml")] if quotas else []
        arguments = ["simulate", "--from-cluster", "--demand", "1", "-j", "1", "-o", "json", *given, *options]
        return CliRunner().invoke(main, arguments)

    return run


def quota_file(text: str, namespace: str) -> str:
    metadata = f"{{name: q, namespace: {namespace}}}"
    return f"kind: ConfigMap\nmetadata: {metadata}\ndata: {{quota.yaml: '{text}'}}\n"


LIMITED = quota("types: {T4: {cores: 50}}")
FILES = {
    "no file": ("", 0),
    "another namespace": (quota_file("types: {T4: {cores: 400}}", "other"), 0),
    "the namespace": (quota_file("types: {T4: {cores: 100}}", "team"), 1),
    "all namespaces": ("types: {T4: {cores: 100}}", 1),
}


@pytest.mark.parametrize(("text", "placed"), FILES.values(), ids=FILES.keys())
def test_quotas_of_a_file_replace_those_of_the_namespaces_that_it_names(
    simulate_cluster: Any, text: str, placed: int
) -> None:
    """What pods use of them already counts; all other namespaces keep the quotas that they have."""
    done = simulate_cluster(FOUR, running("p", "t", 50), LIMITED, quotas=text)
    assert done.exit_code == 0, done.output
    assert f'"placed":{placed},' in done.stdout


def test_pods_on_nodes_that_take_none_use_quotas_of_a_file(simulate_cluster: Any) -> None:
    cordoned = node("c", "T4", 1)
    cordoned["spec"] = {"unschedulable": True}
    done = simulate_cluster(FOUR, cordoned, running("p", "c", 50), quotas="types: {T4: {cores: 100}}")
    assert '"placed":1,' in done.stdout


def test_an_invalid_quota_of_the_cluster_is_a_warning(simulate_cluster: Any) -> None:
    done = simulate_cluster(FOUR, running("p", "t", 50), quota("types: {T4: {cores: -1}}", "other"))
    assert done.exit_code == 0, done.output
    assert "warning: the quota other/q is invalid" in done.stderr


def test_added_nodes_are_isolated_as_those_of_the_same_model() -> None:
    isolated = replace(gpu("t", 0, "T4"), isolation=Isolation(memory=Rung.MPS))
    full = node("t", "T4", 1)
    full["metadata"]["annotations"][NAMES.inventory] = encode_inventory((isolated,))
    pods = running("p", "t", 100, "free"), waiting("w", 50, "free", min_isolation="mps")
    made = snapshot(full, *pods).scenario(lambda nodes: added_nodes([(1, "T4", 2)], nodes))
    assert first_arrivals(made).rows[0].node == "added-0-0"


def test_a_cluster_without_pods_of_gpus_says_so(simulate_cluster: Any) -> None:
    done = simulate_cluster(FOUR, manifest(0, None) | {"kind": "Other"})
    assert done.exit_code == 2
    assert "no task requests GPUs" in done.output
