"""`quotient what-if`, on dumps of a cluster."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from console.main import main
from tests.scheduler.world import NAMES, gpu
from vcuda.inventory import encode_inventory
from vcuda.placement_annotation import GpuSlice, encode_placement

QUOTA = "types: {T4: {cores: 200}, A100: {cores: 800}}"


def node(name: str, model: str, gpus: int, cpu: str = "64") -> dict[str, Any]:
    listed = tuple(gpu(name, index, model) for index in range(gpus))
    return {
        "kind": "Node",
        "metadata": {"name": name, "annotations": {NAMES.inventory: encode_inventory(listed)}},
        "status": {"allocatable": {"cpu": cpu, "memory": "256Gi"}},
    }


def running(name: str, on: str, cores: int, namespace: str = "team", model: str = "T4") -> dict[str, Any]:
    amounts = {NAMES.core: str(cores), NAMES.memory: "8"}
    placed = {"c": [GpuSlice(f"GPU-{on}-0", cores, 2048)]}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"705ab4f5-6393-11e8-b7cc-{int.from_bytes(name.encode(), 'big') % 10**12:012}",
            "annotations": {NAMES.placement: encode_placement(placed), NAMES.use_models: model},
        },
        "spec": {"nodeName": on, "containers": [{"name": "c", "resources": {"limits": amounts, "requests": amounts}}]},
        "status": {"phase": "Running"},
    }


def quota(text: str = QUOTA) -> dict[str, Any]:
    metadata = {"name": "q", "namespace": "team", "labels": {NAMES.quota_label: "true"}}
    return {"kind": "ConfigMap", "metadata": metadata, "data": {"quota.yaml": text}}


def manifest(cores: int, memory: int | None = 8, kind: str = "Pod", **options: Any) -> dict[str, Any]:
    limits = {NAMES.core: cores, **({} if memory is None else {NAMES.memory: memory}), **options.get("requests", {})}
    spec = {"containers": [{"name": "c", "image": "i", "resources": {"limits": limits}}]}
    annotations = {f"{NAMES.domain}/{key}": value for key, value in options.get("annotations", {}).items()}
    metadata = {"name": "asked", "namespace": options.get("namespace", "team")}
    if kind == "Pod":
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "annotations": annotations}, "spec": spec}
    template = {"metadata": {"labels": {"a": "b"}, "annotations": annotations}, "spec": spec}
    selected = {"selector": {"matchLabels": {"a": "b"}}}
    body = {"replicas": options.get("replicas", 2), **selected, "template": template}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": body}


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    """Asks about a manifest on a cluster of these objects."""

    def run(asked: dict[str, Any], *objects: dict[str, Any], options: tuple[str, ...] = ()) -> Result:
        dump, file = tmp_path / "dump.yaml", tmp_path / "asked.yaml"
        dump.write_text(yaml.safe_dump({"kind": "List", "items": list(objects)}))
        file.write_text(yaml.safe_dump(asked))
        return CliRunner().invoke(main, ["what-if", str(file), "--cluster", str(dump), *options])

    return run


def answer(result: Result) -> Any:
    return json.loads(result.stdout)


JSON = ("-o", "json")
T4, A100 = node("t", "T4", 1), node("a", "A100-SXM4-40GB", 2)


def test_a_pod_that_fits_would_run(ask: Any) -> None:
    result = ask(manifest(50), T4, running("p", "t", 50), quota(), options=JSON)
    assert result.exit_code == 0, result.output
    found = answer(result)
    assert (found["possible"], found["admitted"]) == (True, 1)
    assert found["placed"] == [{"node": "t", "gpus": {"c": [{"uuid": "GPU-t-0", "cores": 50, "memoryMiB": 2048}]}}]


def test_the_quota_is_missing(ask: Any) -> None:
    """What running pods hold counts."""
    result = ask(
        manifest(60), node("t", "T4", 8), running("p", "t", 50), quota("types: {T4: {cores: 100}}"), options=JSON
    )
    assert result.exit_code == 1
    found = answer(result)
    assert (found["missing"], found["admitted"]) == ("quota", 0)
    assert "asked 60 cores (100 = one GPU) of T4; used 50, reserved 0, hard 100: short by 10" in found["message"]
    assert found["reasons"][0]["code"] == "QuotaExceeded"


@pytest.mark.parametrize(
    ("asked", "missing", "message"),
    [
        (manifest(60, annotations={"use-gputype": "T4"}), "room", "no GPU with 60 cores free, the best has 50"),
        (manifest(50, annotations={"use-gputype": "H100"}, namespace="free"), "model", "no H100"),
        (manifest(400, None, namespace="free"), "room", "fewer than 4 GPUs of a model that the pod may use"),
        (manifest(50, annotations={"min-isolation": "mps"}), "isolation", "no GPU with isolation mps or stronger"),
        (manifest(10, requests={"cpu": "65"}), "host", "not enough CPU or memory on this node"),
    ],
    ids=["room", "model", "count", "isolation", "CPU"],
)
def test_what_is_missing_is_named(ask: Any, asked: dict[str, Any], missing: str, message: str) -> None:
    result = ask(asked, T4, A100, running("p", "t", 50), quota(), options=JSON)
    assert result.exit_code == 1, result.output
    found = answer(result)
    assert found["missing"] == missing
    assert message in found["message"]


def test_replicas_are_tried_together(ask: Any) -> None:
    asked = manifest(60, kind="Deployment", replicas=5, annotations={"use-gputype": "A100"})
    found = answer(ask(asked, T4, A100, quota("types: {A100: {cores: 200}}"), options=JSON))
    assert (found["replicas"], found["admitted"], len(found["placed"])) == (5, 3, 2)
    assert found["missing"] == "room"
    text = ask(asked, T4, A100, quota("types: {A100: {cores: 200}}")).stdout
    assert "Deployment/asked in namespace team (5 replicas): 2 of 5 would run, 3 would be admitted" in text
    more = answer(ask(asked, T4, A100, options=(*JSON, "--replicas", "1")))
    assert more["possible"]


def test_a_pod_that_no_quota_could_admit_is_refused(ask: Any) -> None:
    result = ask(manifest(150, 1), T4)
    assert result.exit_code == 1
    assert "Pod/asked in namespace team: would be refused" in result.stdout
    assert "ask for 100 or 200" in result.stdout


def test_pods_of_other_vocabularies_are_understood(ask: Any) -> None:
    asked = manifest(0, None)
    asked["spec"]["containers"][0]["resources"]["limits"] = {
        "tencent.com/vcuda-core": 30,
        "tencent.com/vcuda-memory": 4,
    }
    assert ask(asked, T4).exit_code == 0


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"kind": "Service", "metadata": {"name": "s"}}, "no pod or workload in it"),
        (manifest(50, kind="Deployment", replicas=0), "no pod or workload in it that would have a replica"),
    ],
)
def test_a_file_without_pods_is_an_error(ask: Any, asked: dict[str, Any], message: str) -> None:
    result = ask(asked, T4)
    assert result.exit_code == 2
    assert message in result.output


def test_an_invalid_quota_in_the_dump_is_named(ask: Any) -> None:
    result = ask(manifest(50), T4, quota("types: {T4: {cores: -1}}"))
    assert result.exit_code == 2
    assert "types.T4.cores" in result.output


def test_nothing_fits_on_a_cluster_without_gpus(ask: Any) -> None:
    found = answer(ask(manifest(50), options=JSON))
    assert not found["possible"]
    assert found["missing"] == "nodes"


def test_nodes_that_take_no_pods_do_not_count(ask: Any) -> None:
    cordoned, lost = node("c", "T4", 1), node("l", "T4", 1)
    cordoned["spec"] = {"unschedulable": True}
    lost["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    assert not answer(ask(manifest(50), cordoned, lost, options=JSON))["possible"]


@pytest.mark.parametrize(("spread", "fitting"), [("node", 2), ("gpu", 3)])
def test_replicas_are_spread(ask: Any, spread: str, fitting: int) -> None:
    asked = manifest(10, kind="Deployment", replicas=4, annotations={"spread-members": spread}, namespace="free")
    found = answer(ask(asked, T4, A100, options=JSON))
    assert len(found["placed"]) == fitting
    assert found["missing"] == "room"


def test_whole_gpus_with_more_memory_than_they_have(ask: Any) -> None:
    found = answer(ask(manifest(200, 1000, namespace="free"), node("t", "T4", 2), options=JSON))
    assert not found["possible"]


def test_too_many_replicas_are_an_error(ask: Any) -> None:
    result = ask(manifest(50, kind="Deployment", replicas=20_000), T4)
    assert result.exit_code == 2
    assert "more than 10000 replicas; ask about fewer with --replicas" in result.output


def test_a_pod_without_gpus_is_an_error(ask: Any) -> None:
    asked = manifest(50)
    asked["spec"]["containers"][0]["resources"] = {}
    result = ask(asked, T4)
    assert result.exit_code == 2
    assert "requests no GPUs" in result.output
