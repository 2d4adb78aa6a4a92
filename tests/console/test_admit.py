"""`quotient admit` and `quotient lint`: the webhook's own words, without a cluster."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from console.lint import repaired
from console.main import main
from tests.webhook.pods import CARDS, CORE, MEMORY, NAMES, container, gpu, pod, workload

README = """\
# from gpu-manager's README
apiVersion: v1
kind: Pod
metadata:
  name: vcuda
  annotations:
    tencent.com/vcuda-core-limit: 50   # no quotes
spec:
  restartPolicy: Never
  containers:
  - image: some-image
    name: nvidia
    command: ["/usr/local/nvidia/bin/nvidia-smi", "pmon", "-d", "10"]
    resources:
      requests:
        tencent.com/vcuda-core: 50
        tencent.com/vcuda-memory: 30
      limits:
        tencent.com/vcuda-core: 50
        tencent.com/vcuda-memory: 30
"""
OLD = """\
apiVersion: extensions/v1beta1
kind: Deployment
metadata:
  labels: {k8s-app: vcuda-test}
  name: vcuda-test
spec:
  replicas: 1
  template:
    metadata:
      labels: {k8s-app: vcuda-test, version: 2}
    spec:
      containers:
      - name: vcuda-test
        image: some-image
        env: [{name: N, value: 3}, {name: ON, value: true}]
        resources:
          limits: {tencent.com/vcuda-core: 50, tencent.com/vcuda-memory: 32}
"""


@pytest.fixture(autouse=True)
def own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.main.configure_logs", lambda *_: None)


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin, env={"COLUMNS": "200"})


def judged(*documents: Any, arguments: tuple[str, ...] = ()) -> tuple[int, list[dict[str, Any]]]:
    text = "\n---\n".join(json.dumps(document) for document in documents)
    done = run("admit", "-", "-o", "json", *arguments, stdin=text)
    return done.exit_code, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_document_is_judged_as_the_cluster_would() -> None:
    """One object per document, in the shape that programs expect."""
    code, (verdict,) = judged(pod(container(limits={CARDS: "0.3"})))
    assert code == 0
    assert sorted(verdict) == ["allowed", "object", "patch", "reasons", "warnings"]
    assert verdict["allowed"]
    assert verdict["reasons"] == []
    assert {"op": "add", "path": "/spec/schedulerName", "value": "quotient-scheduler"} in verdict["patch"]
    assert verdict["object"]["spec"]["containers"][0]["resources"]["limits"] == {CORE: "30", MEMORY: "1"}
    assert verdict["object"]["metadata"]["annotations"][NAMES.memory_follows_core] == "c0"


def test_refusals_have_code_field_value_message_and_remedy() -> None:
    """And the exit code says that there is one."""
    code, (fine, verdict) = judged(pod(gpu()), pod(gpu(core=150), nodeName="n"))
    assert code == 1
    assert fine["allowed"]
    assert not verdict["allowed"]
    assert verdict["patch"] == []
    assert verdict["reasons"][0] == {
        "code": "CoreInvalid",
        "field": f"spec.containers[0].resources.limits[{CORE}]",
        "value": "150",
        "message": "neither a part of one GPU (1 to 99) nor whole GPUs (multiples of 100)",
        "remedy": "ask for 100 or 200",
    }
    assert verdict["reasons"][1]["code"] == "NodeChosen"


def test_workloads_lists_and_other_kinds_are_taken_too() -> None:
    """Whatever a manifest holds."""
    listed = {"apiVersion": "v1", "kind": "List", "items": [pod(gpu()), workload(pod(gpu(core=150)))]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}
    code, verdicts = judged(listed, service)
    assert code == 1
    assert [verdict["allowed"] for verdict in verdicts] == [True, False, True]
    assert verdicts[1]["reasons"][0]["field"].startswith("spec.template.spec.containers[0]")


def test_people_read_what_would_happen() -> None:
    """Refusal, remedy, warnings, changes."""
    text = json.dumps(pod(gpu(core=150))) + "\n---\n" + json.dumps(pod(gpu(), hostIPC=True))
    done = run("admit", "-", stdin=text)
    assert done.exit_code == 1
    assert "Pod p: refused" in done.output
    assert "ask for 100 or 200" in done.output
    assert "Pod p: allowed" in done.output
    assert "warning spec.hostIPC is removed" in done.output
    assert "remove /spec/hostIPC" in done.output


def test_yaml_gives_the_documents_as_they_would_be_stored() -> None:
    """To look at, or to apply elsewhere."""
    done = run("admit", "-", "-o", "yaml", stdin=json.dumps(pod(gpu())))
    assert yaml.safe_load(done.output)["spec"]["schedulerName"] == "quotient-scheduler"


@pytest.mark.parametrize(
    ("arguments", "stdin", "told"),
    [
        (("admit", "/none.yaml"), None, "/none.yaml: cannot be read"),
        (("admit", "-"), "a: {", "not YAML"),
        (("admit", "-"), "", "no document in it"),
        (("admit", "-"), "- 1", "is no object"),
        (("admit",), None, "FILE"),
        (("admit", "-", "--quota", "/none.yaml"), "a: b", "/none.yaml: cannot be read"),
        (("lint", "/none.yaml"), None, "/none.yaml: cannot be read"),
    ],
)
def test_bad_usage_exits_with_2(arguments: tuple[str, ...], stdin: str | None, told: str) -> None:
    """And names the file."""
    done = run(*arguments, stdin=stdin)
    assert done.exit_code == 2
    assert told in done.output
    assert "Traceback" not in done.output


QUOTA = """
types:
  A100: {cores: 100, memory: 16Gi}
  T4: {cores: 30}
pools: [training]
coreLimit: {default: 90}
"""


def quota_file(tmp_path: Path, text: str) -> tuple[str, str]:
    file = tmp_path / "quota.yaml"
    file.write_text(text)
    return "--quota", str(file)


def named(made: dict[str, Any], name: str, **notes: str) -> dict[str, Any]:
    return {**made, "metadata": {"name": name, "annotations": notes}}


def test_quotas_are_held_to_one_document_after_another(tmp_path: Path) -> None:
    """With all numbers in the refusal, and with the quota's policy in force."""
    on_a100 = {NAMES.use_models: "A100"}
    documents = [named(pod(gpu()), name, **on_a100) for name in ("first", "second", "third")]
    code, verdicts = judged(*documents, arguments=quota_file(tmp_path, QUOTA))
    assert code == 1
    assert [verdict["allowed"] for verdict in verdicts] == [True, True, False]
    assert "affinity" in verdicts[0]["object"]["spec"]
    assert verdicts[0]["object"]["metadata"]["annotations"][NAMES.core_limit] == "90"
    (cores, memory) = verdicts[2]["reasons"]
    assert cores["code"] == memory["code"] == "QuotaExceeded"
    assert cores["numbers"] == {"asked": 50, "used": 100, "reserved": 0, "hard": 100, "short": 50}
    assert "asked 50 cores (100 = one GPU) of A100; used 100, reserved 0, hard 100: short by 50" in cores["message"]


def test_a_pod_that_names_no_model_finds_the_one_with_room(tmp_path: Path) -> None:
    """And is refused where none has."""
    documents = [named(pod(gpu(core="30", memory="8")), str(number)) for number in range(5)]
    _, verdicts = judged(*documents, arguments=quota_file(tmp_path, QUOTA))
    assert [verdict["allowed"] for verdict in verdicts] == [True, True, True, True, False]


def test_a_model_that_the_quota_does_not_name_is_refused(tmp_path: Path) -> None:
    """With those that it does name."""
    _, (verdict,) = judged(named(pod(gpu()), "p", **{NAMES.use_models: "H100"}), arguments=quota_file(tmp_path, QUOTA))
    assert verdict["reasons"][0]["code"] == "ModelNotGranted"
    assert "A100 or T4" in verdict["reasons"][0]["remedy"]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"default": {"quota": {"A100": 0}, "pool": ["public"]}}),
        yaml.safe_dump(
            {
                "kind": "ConfigMap",
                "metadata": {"name": "gpuquota", "namespace": "kube-system"},
                "data": {"gpu_quota": json.dumps({"default": {"quota": {"A100": 0}}})},
            }
        ),
        yaml.safe_dump(
            {
                "kind": "ConfigMap",
                "metadata": {"name": "quota", "namespace": "default"},
                "data": {"quota.yaml": "types: {A100: {cores: 0}}"},
            }
        ),
    ],
    ids=["older JSON", "its ConfigMap", "a namespace's ConfigMap"],
)
def test_quotas_are_read_in_every_form(tmp_path: Path, text: str) -> None:
    """As they would stand in a cluster, or bare."""
    code, (verdict, elsewhere) = judged(
        pod(gpu()),
        {**pod(gpu()), "metadata": {"name": "p", "namespace": "other"}},
        arguments=quota_file(tmp_path, text),
    )
    assert code == 1
    assert [reason["code"] for reason in verdict["reasons"]] == ["QuotaExceeded"]
    assert elsewhere["allowed"]


def test_a_quota_that_cannot_be_meant_is_bad_usage(tmp_path: Path) -> None:
    """With path and remedy."""
    done = run("admit", "-", *quota_file(tmp_path, "types: {A100: {core: 1}}"), stdin=json.dumps(pod(gpu())))
    assert done.exit_code == 2
    assert "types.A100.core: core: there is no such field; there are cores, memory, pods" in " ".join(
        done.output.split()
    )


def test_lint_names_file_and_line(tmp_path: Path) -> None:
    """Also of what dies before any webhook."""
    file = tmp_path / "pod.yaml"
    file.write_text(README.replace("vcuda-core: 50", "vcuda-core: 150"))
    done = run("lint", str(file))
    assert done.exit_code == 1
    first, second = done.output.splitlines()
    assert first.startswith(f"{file}:7: metadata.annotations[tencent.com/vcuda-core-limit]: '50': not a text")
    assert first.endswith('put it in quotes: "50" [TextExpected]')
    assert second.startswith(f"{file}:19: spec.containers[0].resources.limits[tencent.com/vcuda-core]: '150'")
    assert second.endswith("[CoreInvalid]")


def test_lint_repairs_what_is_certain_and_touches_nothing_else(tmp_path: Path) -> None:
    """Comments, order and spelling stay."""
    file = tmp_path / "pod.yaml"
    file.write_text(README + "---\n" + OLD)
    done = run("lint", "--fix", str(file))
    assert done.exit_code == 0, done.output
    text = file.read_text()
    assert '    tencent.com/vcuda-core-limit: "50"   # no quotes\n' in text
    assert "apiVersion: apps/v1\n" in text
    _, deployment = yaml.safe_load_all(text)
    assert deployment["spec"]["selector"] == {"matchLabels": {"k8s-app": "vcuda-test", "version": "2"}}
    assert deployment["spec"]["template"]["metadata"]["labels"]["version"] == "2"
    assert [each["value"] for each in deployment["spec"]["template"]["spec"]["containers"][0]["env"]] == ["3", "true"]
    assert len(text.splitlines()) == len((README + "---\n" + OLD).splitlines()) + 1
    assert repaired(text) == text


def test_what_lint_repairs_is_what_it_complains_of() -> None:
    """Nothing that is right is changed."""
    for text in (json.dumps(pod(gpu())), "a: {", "kind: Pod\nmetadata: {annotations: {a: null, b: x}}\n", "- 1\n"):
        assert repaired(text) == text


def test_lint_passes_over_what_is_not_ours(tmp_path: Path) -> None:
    """A folder holds more than pods; warnings do not fail a pipeline."""
    (tmp_path / "service.yaml").write_text("apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec: {ports: []}\n")
    (tmp_path / "pod.yaml").write_text(json.dumps(pod(gpu(memory="1"))))
    (tmp_path / "notes.txt").write_text("a: {")
    done = run("lint", str(tmp_path))
    assert done.exit_code == 0
    assert "warning: container c0: 256 MiB of GPU memory is less than a CUDA context needs" in done.output


def test_lint_speaks_to_programs() -> None:
    """One finding a line."""
    done = run("lint", "-", "-o", "json", stdin=README)
    (finding,) = [json.loads(line) for line in done.output.splitlines()]
    assert finding["file"] == "-"
    assert finding["line"] == 7
    assert finding["code"] == "TextExpected"


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("a: {\n", 2, "not YAML"),
        ("kind: Pod\nkind: Pod\n", 2, "a second time"),
        ("apiVersion: v1\nkind: Pod\nspec: {containers: []}\n", 1, "metadata: '': is missing, or no mapping"),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers: {a: b}\n",
            5,
            "Expected `array | null`, got `object`",
        ),
    ],
)
def test_a_file_that_holds_no_object_is_said_to(text: str, line: int, told: str) -> None:
    """With the line."""
    done = run("lint", "-", stdin=text)
    assert done.exit_code == 1
    assert done.output.startswith(f"-:{line}: ")
    assert told in done.output


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("apiVersion: v1\nkind: Pod\nmetadata: hello\nspec: {}\n", 1),
        ("apiVersion: v1\nkind: List\nitems: 3\n", 2),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [], x: .inf}\n", 1),
        ("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [a]\n", 0),
        (json.dumps(workload(pod(gpu()), "CronJob", "batch/v1", schedule="x")), 0),
    ],
    ids=[
        "metadata that is a text",
        "items that are a number",
        "an infinite number",
        "a kind of others",
        "a usual CronJob",
    ],
)
def test_odd_documents_are_answered_without_a_traceback(text: str, code: int) -> None:
    """As what they are."""
    done = run("admit", "-", stdin=text)
    assert done.exit_code == code, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


BROKEN_BY_A_CARELESS_EDIT = {
    "an anchor used twice": OLD.replace("labels: {k8s-app: vcuda-test}", "labels: &l {k8s-app: x, version: 2}").replace(
        "labels: {k8s-app: vcuda-test, version: 2}", "labels: *l"
    ),
    "JSON": json.dumps(yaml.safe_load(OLD)),
    "JSON on many lines": json.dumps(yaml.safe_load(OLD), indent=2),
    "values that YAML reads as others": OLD.replace("version: 2", "gpu: true, n: 0x10"),
    "a merged mapping": README.replace("  annotations:\n", "  annotations:\n    <<: {a: b}\n"),
}


@pytest.mark.parametrize("text", BROKEN_BY_A_CARELESS_EDIT.values(), ids=BROKEN_BY_A_CARELESS_EDIT.keys())
def test_a_repair_means_what_was_meant_or_is_not_made(tmp_path: Path, text: str) -> None:
    """Whatever the file looks like."""
    file = tmp_path / "x.yaml"
    file.write_text(text)
    done = run("lint", "--fix", str(file))
    after = file.read_text()
    assert after == text or done.exit_code == 0, done.output
    assert done.exit_code == (1 if after == text else 0)
    for document in yaml.safe_load_all(after):
        if document["kind"] == "Deployment" and after != text:
            assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]
