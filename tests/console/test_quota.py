"""`quotient quota` from files, and `quotient quota lint`."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from console.main import main
from tests.webhook.pods import NAMES, gpu, pod, workload


def config_map(text: str, name: str = "q", namespace: str = "team") -> str:
    metadata = {"name": name, "namespace": namespace, "labels": {NAMES.quota_label: "true"}}
    return json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"quota.yaml": text}})


def node(*models: tuple[str, int]) -> str:
    gpus = [
        {"uuid": f"GPU-{index}", "index": index, "model": model, "memoryMiB": mib, "healthy": True}
        for index, (model, mib) in enumerate(models)
    ]
    notes = {NAMES.inventory: json.dumps({"v": 1, "gpus": gpus})}
    return json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n", "annotations": notes}})


def run(tmp_path: Path, *arguments: str, documents: tuple[str, ...]) -> Result:
    file = tmp_path / "all.yaml"
    file.write_text("\n---\n".join(documents))
    return CliRunner().invoke(main, ["quota", *[str(file) if each == "FILE" else each for each in arguments]])


def deployment(replicas: int) -> str:
    made = workload(pod(gpu(), annotations={NAMES.use_models: "A100"}), replicas=replicas)
    made["metadata"] = {"name": "web", "namespace": "team"}
    return json.dumps(made)


def test_pods_of_files_are_charged_to_the_quotas_in_them(tmp_path: Path) -> None:
    """A workload is charged by its replicas; pods that do not fit are named."""
    documents = (config_map("types: {A100: {cores: 120}}"), deployment(3))
    done = run(tmp_path, "team", "-f", "FILE", "-o", "json", documents=documents)
    assert done.exit_code == 0, done.output
    status = json.loads(done.output)["team"]
    assert status["quotas"][0]["types"]["A100"]["cores"] == {"hard": 120, "used": 100, "reserved": 0, "free": 20}
    assert status["holders"][0]["name"] == "Deployment/web"
    assert "short by 30" in status["waiting"][0]["reason"]
    shown = run(tmp_path, "-f", "FILE", documents=documents).output
    for part in ("team/q", "A100", "120", "held by Deployment/web: 100 cores", "refused web-2"):
        assert part in shown


def test_no_quota_to_show_exits_with_1(tmp_path: Path) -> None:
    done = run(tmp_path, "elsewhere", "-f", "FILE", documents=(config_map("unlisted: allow"),))
    assert done.exit_code == 1
    assert "no GPU quota in namespace elsewhere" in done.output


@pytest.mark.parametrize("text", ["types: {A100: {core: 1}}", "types: [", "types: {A100: 4}"])
def test_an_invalid_quota_is_an_error(tmp_path: Path, text: str) -> None:
    """Wrong usage of `quota`, a finding of `quota lint`."""
    documents = (config_map(text), config_map("types: {T4: {cores: 1}}", "good"))
    assert run(tmp_path, "-f", "FILE", documents=documents).exit_code == 2
    done = run(tmp_path, "lint", "FILE", documents=documents)
    assert done.exit_code == 1
    assert "team/q" in done.output


LINTED = {
    "more than there is": (
        ("types: {A100: {cores: 300}}",),
        "the limit of 300 cores is more than the cluster has: 200",
    ),
    "no such model": (("types: {H100: {cores: 100}}",), "no node has a GPU of this model"),
    "a product beyond its family": (
        ("types: {A100: {cores: 50}, A100-SXM4-40GB: {cores: 100}}",),
        "the limit of 100 can never be reached: types.A100.cores is 50",
    ),
    "a line beyond all types": (('types: {A100: {cores: 100}, "*": {cores: 50}}',), "types.*.cores is 50"),
    "memory for no card": (("types: {A100: {cores: 100, memory: 1Gi}}",), "no pod with a whole GPU fits"),
    "quotas that exclude each other": (
        ("types: {A100: {cores: 100}}", "types: {T4: {cores: 100}}"),
        "this model cannot be used",
    ),
    "pools that exclude each other": (("pools: [a]", "pools: [b]"), "no node pool in common"),
    "modes that differ": (("mode: audit", "mode: enforce"), "the stricter mode applies to all"),
    "a mode that is not said": (("mode: audit", "types: {T4: {cores: 100}}"), "has no mode and follows the cluster's"),
    "privileges that differ": (("privileged: allow", "privileged: deny"), "set to allow, but team/q1 denies it"),
    "privileges that are not said": (("privileged: allow", "pools: [training]"), "and follows the cluster's"),
    "a pool that there is not": (("pools: [training]",), "no node with GPUs is in pool training"),
}


@pytest.mark.parametrize(("quotas", "expected"), LINTED.values(), ids=LINTED.keys())
def test_problems_of_valid_quotas_are_warnings(tmp_path: Path, quotas: tuple[str, ...], expected: str) -> None:
    maps = tuple(config_map(text, f"q{index}") for index, text in enumerate(quotas))
    nodes = node(("NVIDIA A100-SXM4-40GB", 40960), ("NVIDIA A100-SXM4-40GB", 40960), ("Tesla T4", 15360))
    done = run(tmp_path, "lint", "FILE", documents=(*maps, nodes))
    assert done.exit_code == 0
    assert expected in done.output
    rows = [
        json.loads(line)
        for line in run(tmp_path, "lint", "FILE", "-o", "json", documents=(*maps, nodes)).output.splitlines()
    ]
    assert {row["level"] for row in rows} == {"warning"}


def test_a_pool_without_nodes_is_reported_once(tmp_path: Path) -> None:
    """Every line would only repeat it."""
    text = 'types: {A100: {cores: 100}, T4: {cores: 100}, "*": {cores: 100}}\npools: [nope]'
    documents = config_map(text), node(("Tesla T4", 15360))
    rows = run(tmp_path, "lint", "FILE", "-o", "json", documents=documents).output.splitlines()
    assert len(rows) == 1
    assert "no node with GPUs is in pool nope" in rows[0]


def test_nodes_are_counted_as_an_api_server_writes_them(tmp_path: Path) -> None:
    """1000 is "1k" there, and a file may leave the quotes out."""

    def labelled(name: str, cores: str | int) -> str:
        metadata = {"name": name, "labels": {NAMES.model_label: "A100-SXM4-40GB"}}
        status = {"capacity": {NAMES.core: cores}}
        return json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status})

    nodes = labelled("a", "800"), labelled("b", "1k"), labelled("c", 400)
    done = run(tmp_path, "lint", "FILE", documents=(config_map("types: {A100: {cores: 2300}}"), *nodes))
    assert "2300 cores is more than the cluster has: 2200" in done.output


def test_pods_read_from_a_cluster_are_charged_by_their_status(tmp_path: Path) -> None:
    """A terminated pod holds nothing, a running one does, and the pods of a workload are not charged twice."""

    def dumped(number: int, phase: str, **more: Any) -> dict[str, Any]:
        uid = f"00000000-0000-4000-8000-00000000000{number}"
        limits = {NAMES.core: "100", NAMES.memory: "1"}
        container = {"name": "c", "image": "i", "resources": {"limits": limits}}
        owners = [{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": uid, "controller": True}]
        metadata = {"name": f"p{number}", "namespace": "team", "uid": uid, "ownerReferences": owners}
        spec = {"containers": [container], **more}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": {"phase": phase}}

    pods = dumped(1, "Succeeded", nodeName="n"), dumped(2, "Running", nodeName="n"), dumped(3, "Pending")
    template = {"spec": {"containers": pods[0]["spec"]["containers"]}}
    job: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j", "namespace": "team"}}
    job["spec"] = {"parallelism": 2, "template": template}
    quotas = config_map("types: {A100: {cores: 150}}")
    done = run(tmp_path, "-f", "FILE", "-o", "json", documents=(quotas, *map(json.dumps, (*pods, job))))
    status = json.loads(done.output)["team"]
    assert status["quotas"][0]["types"]["A100"]["cores"]["used"] == 100
    assert [each["name"] for each in status["waiting"]] == ["p3"]
    assert "nodeName" not in done.output


def test_a_quota_in_a_file_is_recognized_as_in_a_cluster(tmp_path: Path) -> None:
    """The older form is read only under its own name."""
    metadata = {"name": "other", "namespace": "team", "labels": {NAMES.quota_label: "true"}}
    legacy = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"gpu_quota": "{}"}}
    done = run(tmp_path, "lint", "FILE", documents=(json.dumps(legacy),))
    assert done.exit_code == 1
    assert "team/other: data: has no key quota.yaml" in done.output
    metadata = {"name": "gpuquota", "namespace": "kube-system"}
    modern = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"quota.yaml": "unlisted: allow"}}
    assert run(tmp_path, "lint", "FILE", documents=(json.dumps(modern),)).exit_code == 0


LABELS = {
    "missing": ({}, 'not in force without its label; add inspur.com/gpu-quota: "true"'),
    "a boolean": (
        {NAMES.quota_label: True},
        'not in force: the label inspur.com/gpu-quota must be the text "true", not true; write',
    ),
    "another word": (
        {NAMES.quota_label: "yes"},
        'not in force: the label inspur.com/gpu-quota must be the text "true", not "yes"; write',
    ),
}


@pytest.mark.parametrize(("labels", "expected"), LABELS.values(), ids=LABELS.keys())
def test_a_quota_without_its_label_is_not_in_force(tmp_path: Path, labels: dict[str, Any], expected: str) -> None:
    document = json.loads(config_map("types: {T4: {cores: 1}}"))
    document["metadata"]["labels"] = labels
    done = run(tmp_path, "lint", "FILE", documents=(json.dumps(document),))
    assert done.exit_code == 0
    assert expected in done.output


def test_counts_are_worded_by_their_number(tmp_path: Path) -> None:
    quotas = config_map("types: {A100: {cores: 120}}")
    assert (
        "50 cores, 7680 MiB of A100 in 1 pod\n" in run(tmp_path, "-f", "FILE", documents=(quotas, deployment(1))).output
    )
    assert run(tmp_path, "lint", "FILE", documents=(quotas,)).output == "1 quota, no problems\n"
    empty = run(tmp_path, "lint", "FILE", documents=(deployment(1),))
    assert (empty.exit_code, empty.output) == (0, f"no quota in {tmp_path / 'all.yaml'}\n")


def test_quotas_of_several_namespaces_are_added_up(tmp_path: Path) -> None:
    """Overcommitment is a warning: it may be intended."""
    maps = tuple(config_map("types: {T4: {cores: 100}}", namespace=name) for name in ("a", "b"))
    done = run(tmp_path, "lint", "FILE", documents=(*maps, node(("Tesla T4", 15360))))
    assert "2 namespaces are allowed 200 cores together, and the cluster has 100" in done.output


def test_a_quota_without_problems_prints_nothing(tmp_path: Path) -> None:
    documents = (config_map('types: {A100: {cores: 100, memory: 40Gi}, "*": {cores: 200, pods: 3}}'),)
    done = run(tmp_path, "lint", "FILE", documents=(*documents, node(("A100-SXM4-40GB", 40960), ("T4", 15360))))
    assert done.exit_code == 0
    assert "warning" not in done.output
