"""`quotient admit` and `quotient lint`: the webhook's decisions, without a cluster."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from console.lint import repair_text
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


def admit(*documents: Any, arguments: tuple[str, ...] = ()) -> tuple[int, list[dict[str, Any]]]:
    text = "\n---\n".join(json.dumps(document) for document in documents)
    done = run("admit", "-", "-o", "json", *arguments, stdin=text)
    return done.exit_code, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_document_is_decided_as_in_a_cluster() -> None:
    """One object per document, in the shape that programs expect."""
    code, (result,) = admit(pod(container(limits={CARDS: "0.3"})))
    assert code == 0
    assert sorted(result) == ["allowed", "object", "patch", "reasons", "warnings"]
    assert result["allowed"]
    assert result["reasons"] == []
    assert {"op": "add", "path": "/spec/schedulerName", "value": "quotient-scheduler"} in result["patch"]
    assert result["object"]["spec"]["containers"][0]["resources"]["limits"] == {CORE: "30", MEMORY: "1"}
    assert result["object"]["metadata"]["annotations"][NAMES.memory_follows_core] == "c0"


def test_refusals_have_code_field_value_message_and_remedy() -> None:
    code, (fine, result) = admit(pod(gpu()), pod(gpu(core=150), nodeName="n"))
    assert code == 1
    assert fine["allowed"]
    assert not result["allowed"]
    assert result["patch"] == []
    assert result["reasons"][0] == {
        "code": "CoreInvalid",
        "field": f"spec.containers[0].resources.limits[{CORE}]",
        "value": "150",
        "message": "must be 1 to 99 (part of one GPU) or a multiple of 100 (whole GPUs)",
        "remedy": "ask for 100 or 200",
    }
    assert result["reasons"][1]["code"] == "NodeChosen"


def test_workloads_lists_and_other_kinds_are_accepted() -> None:
    listed = {"apiVersion": "v1", "kind": "List", "items": [pod(gpu()), workload(pod(gpu(core=150)))]}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}
    code, results = admit(listed, service)
    assert code == 1
    assert [result["allowed"] for result in results] == [True, False, True]
    assert results[1]["reasons"][0]["field"].startswith("spec.template.spec.containers[0]")


def test_text_output_shows_refusal_remedy_warnings_and_changes() -> None:
    text = json.dumps(pod(gpu(core=150))) + "\n---\n" + json.dumps(pod(gpu(), hostIPC=True))
    done = run("admit", "-", stdin=text)
    assert done.exit_code == 1
    assert "Pod p: refused" in done.output
    assert "ask for 100 or 200" in done.output
    assert "Pod p: allowed" in done.output
    assert "warning spec.hostIPC is removed" in done.output
    assert "remove /spec/hostIPC" in done.output


def test_yaml_output_is_the_documents_as_they_would_be_stored() -> None:
    done = run("admit", "-", "-o", "yaml", stdin=json.dumps(pod(gpu())))
    assert yaml.safe_load(done.output)["spec"]["schedulerName"] == "quotient-scheduler"


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (("admit", "/none.yaml"), None, "/none.yaml: no such file"),
        (("admit", "-"), "a: {", "invalid YAML"),
        (("admit", "-"), "", "no document in it"),
        (("admit", "-"), "- 1", "is not a Kubernetes object"),
        (("admit", "-"), "a: b", "-: not a Kubernetes object: kind is missing"),
        (("admit",), None, "FILE"),
        (("admit", "-", "--quota", "/none.yaml"), "a: b", "/none.yaml: no such file"),
        (("lint", "/none.yaml"), None, "/none.yaml: no such file"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_the_file(
    arguments: tuple[str, ...], stdin: str | None, expected: str
) -> None:
    done = run(*arguments, stdin=stdin)
    assert done.exit_code == 2
    assert expected in done.output
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


def test_documents_are_charged_to_quotas_one_after_another(tmp_path: Path) -> None:
    """The refusal has all numbers, and the quota's policy applies."""
    on_a100 = {NAMES.use_models: "A100"}
    documents = [named(pod(gpu()), name, **on_a100) for name in ("first", "second", "third")]
    code, results = admit(*documents, arguments=quota_file(tmp_path, QUOTA))
    assert code == 1
    assert [result["allowed"] for result in results] == [True, True, False]
    assert "affinity" in results[0]["object"]["spec"]
    assert results[0]["object"]["metadata"]["annotations"][NAMES.core_limit] == "90"
    (cores, memory) = results[2]["reasons"]
    assert cores["code"] == memory["code"] == "QuotaExceeded"
    assert cores["numbers"] == {"asked": 50, "used": 100, "reserved": 0, "hard": 100, "short": 50}
    assert "asked 50 cores (100 = one GPU) of A100; used 100, reserved 0, hard 100: short by 50" in cores["message"]


def test_a_pod_without_a_model_is_charged_to_the_first_model_with_enough_free_quota(tmp_path: Path) -> None:
    documents = [named(pod(gpu(core="30", memory="8")), str(number)) for number in range(5)]
    _, results = admit(*documents, arguments=quota_file(tmp_path, QUOTA))
    assert [result["allowed"] for result in results] == [True, True, True, True, False]


def test_a_model_that_the_quota_does_not_name_is_refused(tmp_path: Path) -> None:
    """The remedy lists the models that it names."""
    _, (result,) = admit(named(pod(gpu()), "p", **{NAMES.use_models: "H100"}), arguments=quota_file(tmp_path, QUOTA))
    assert result["reasons"][0]["code"] == "ModelNotGranted"
    assert "A100 or T4" in result["reasons"][0]["remedy"]


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
    """As a ConfigMap of a cluster, or its content alone."""
    code, (result, elsewhere) = admit(
        pod(gpu()),
        {**pod(gpu()), "metadata": {"name": "p", "namespace": "other"}},
        arguments=quota_file(tmp_path, text),
    )
    assert code == 1
    assert [reason["code"] for reason in result["reasons"]] == ["QuotaExceeded"]
    assert elsewhere["allowed"]


def test_an_invalid_quota_is_wrong_usage_with_path_and_remedy(tmp_path: Path) -> None:
    done = run("admit", "-", *quota_file(tmp_path, "types: {A100: {core: 1}}"), stdin=json.dumps(pod(gpu())))
    assert done.exit_code == 2
    assert "types.A100.core: unknown field; did you mean cores?" in " ".join(done.output.split())


def test_lint_names_file_and_line(tmp_path: Path) -> None:
    """Also for what the API server rejects before any webhook."""
    file = tmp_path / "pod.yaml"
    file.write_text(README.replace("vcuda-core: 50", "vcuda-core: 150"))
    done = run("lint", str(file))
    assert done.exit_code == 1
    first, second = done.output.splitlines()
    assert first.startswith(
        f"{file}:7: metadata.annotations[tencent.com/vcuda-core-limit]: '50': YAML reads this as a number"
    )
    assert first.endswith('write it in quotes: "50" [TextExpected]')
    assert second.startswith(f"{file}:19: spec.containers[0].resources.limits[tencent.com/vcuda-core]: '150'")
    assert second.endswith("[CoreInvalid]")


def test_lint_repairs_what_is_certain_and_changes_nothing_else(tmp_path: Path) -> None:
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
    assert repair_text(text) == text


def test_lint_repairs_only_what_it_reports() -> None:
    for text in (json.dumps(pod(gpu())), "a: {", "kind: Pod\nmetadata: {annotations: {a: null, b: x}}\n", "- 1\n"):
        assert repair_text(text) == text


def test_lint_ignores_other_kinds(tmp_path: Path) -> None:
    """A folder may hold any manifests; warnings do not fail a pipeline."""
    (tmp_path / "service.yaml").write_text("apiVersion: v1\nkind: Service\nmetadata: {name: s}\nspec: {ports: []}\n")
    (tmp_path / "pod.yaml").write_text(json.dumps(pod(gpu(memory="1"))))
    (tmp_path / "notes.txt").write_text("a: {")
    done = run("lint", str(tmp_path))
    assert done.exit_code == 0
    assert "warning: container c0: 256 MiB of GPU memory is less than a CUDA context needs" in done.output


def test_lint_writes_one_json_finding_per_line() -> None:
    done = run("lint", "-", "-o", "json", stdin=README)
    (finding,) = [json.loads(line) for line in done.output.splitlines()]
    assert finding["file"] == "-"
    assert finding["line"] == 7
    assert finding["code"] == "TextExpected"


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("a: {\n", 2, "invalid YAML"),
        ("kind: Pod\nkind: Pod\n", 2, "duplicate key 'kind'; remove one [ObjectInvalid]"),
        ("apiVersion: v1\nkind: Pod\nspec: {containers: []}\n", 1, "metadata: is required"),
        (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers: {a: b}\n",
            5,
            "spec.containers: must be a list, not an object; check it with: kubectl explain pod.spec.containers",
        ),
    ],
)
def test_a_file_without_a_valid_object_is_reported_with_its_line(text: str, line: int, expected: str) -> None:
    done = run("lint", "-", stdin=text)
    assert done.exit_code == 1
    assert done.output.startswith(f"-:{line}: ")
    assert expected in done.output


def quota_config_map(text: str, namespace: str | None = None) -> str:
    labels = {NAMES.quota_label: "true"}
    metadata = {"name": "q", "labels": labels, **({"namespace": namespace} if namespace else {})}
    document = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"quota.yaml": text}}
    return yaml.safe_dump(document, sort_keys=False)


@pytest.mark.parametrize("namespace", [None, "team"])
def test_quotas_are_checked_like_pods(namespace: str | None) -> None:
    invalid = quota_config_map("types: {A100: {core: 1}}", namespace)
    done = run("admit", "-", stdin=invalid)
    assert done.exit_code == 1
    assert "ConfigMap q: refused" in done.output
    assert f"{namespace or 'default'}/q: types.A100.core: invalid quota" in done.output
    done = run("lint", "-", stdin=invalid)
    assert done.exit_code == 1
    line = next(number for number, text in enumerate(invalid.splitlines(), 1) if "quota.yaml" in text)
    assert done.output.startswith(f"-:{line}: ")
    done = run("admit", "-", stdin=quota_config_map("types: {A100: {cores: 1}}", namespace))
    assert (done.exit_code, done.output) == (0, "ConfigMap q: allowed\n")


@pytest.mark.parametrize("kind", ["Service", "ConfigMap"])
def test_other_kinds_are_named_as_not_checked(kind: str) -> None:
    done = run("admit", "-", stdin=f"apiVersion: v1\nkind: {kind}\nmetadata: {{name: x}}\n")
    assert done.exit_code == 0
    assert done.output == f"{kind} x: not checked (Quotient checks Pods, workloads and quotas)\n"


@pytest.mark.parametrize(("written", "read"), [("ON", "true"), ("yes", "true"), ("off", "false"), ("0x10", "a number")])
def test_a_value_without_quotes_is_shown_as_it_is_written(written: str, read: str) -> None:
    text = OLD.replace("apiVersion: extensions/v1beta1", "apiVersion: apps/v1").replace("name: ON", f"name: {written}")
    done = run("lint", "-", stdin=text)
    field = "spec.template.spec.containers[0].env[1].name"
    message = f"YAML reads this as {read}, and the API server accepts only a string here"
    assert f"{field}: '{written}': {message}; write it in quotes: \"{written}\" [TextExpected]" in done.output
    done = run("admit", "-", stdin=text)
    assert f"{field}: '{written}': {message}\n    write it in quotes: \"{written}\"\n" in done.output


def test_a_value_that_a_merge_adds_is_shown_as_it_is_read() -> None:
    text = README.replace("    tencent.com/vcuda-core-limit: 50   # no quotes\n", "    <<: {a: yes}\n")
    done = run("admit", "-", stdin=text)
    assert "metadata.annotations[a]: 'true': YAML reads this as true" in done.output
    assert "write the original text in quotes" in done.output


@pytest.mark.parametrize(
    ("document", "field"),
    [
        (pod(container(limits={CORE: True})), "spec.containers[0]"),
        (workload(pod(container(limits={CORE: True}))), "spec.template.spec.containers[0]"),
        (
            workload(pod(container(limits={CORE: True})), "CronJob", "batch/v1", schedule="x"),
            "spec.jobTemplate.spec.template.spec.containers[0]",
        ),
    ],
    ids=["Pod", "Deployment", "CronJob"],
)
def test_an_amount_that_is_no_quantity_is_named_by_its_key(document: dict[str, Any], field: str) -> None:
    done = run("lint", "-", stdin=json.dumps(document))
    expected = f"{field}.resources.limits[{CORE}]: 'true': is not a quantity; write a number such as 50 [ObjectInvalid]"
    assert expected in done.output


@pytest.mark.parametrize("items", ["", "{}", "[]"])
def test_an_empty_list_has_no_findings(items: str) -> None:
    done = run("lint", "-", stdin=f"apiVersion: v1\nkind: List\nitems: {items}\n")
    assert (done.exit_code, done.output) == (0, "")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("apiVersion: v1\nkind: Pod\nmetadata: hello\nspec: {}\n", 1),
        ("apiVersion: v1\nkind: List\nitems: 3\n", 2),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {containers: [], x: .inf}\n", 1),
        ("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [a]\n", 0),
        (json.dumps(workload(pod(gpu()), "CronJob", "batch/v1", schedule="x")), 0),
        ("apiVersion: v1\nkind: Pod\nmetadata: {labels: !!set {a, b}}\n", 2),
        ("apiVersion: v1\nkind: Pod\nspec: !!binary aGVs\n", 2),
        ("apiVersion: v1\nkind: Pod\nspec: {containers: !!pairs [a: b]}\n", 2),
    ],
    ids=[
        "metadata that is a text",
        "items that are a number",
        "an infinite number",
        "a kind of others",
        "a usual CronJob",
        "a set",
        "bytes",
        "pairs",
    ],
)
def test_unusual_documents_cause_no_traceback(text: str, code: int) -> None:
    done = run("admit", "-", stdin=text)
    assert done.exit_code == code, done.output
    for each in (done, run("lint", "-", stdin=text)):
        assert each.exception is None or isinstance(each.exception, SystemExit)


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
def test_a_repair_changes_nothing_else_or_is_not_made(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    done = run("lint", "--fix", str(file))
    after = file.read_text()
    assert after == text or done.exit_code == 0, done.output
    assert done.exit_code == (1 if after == text else 0)
    for document in yaml.safe_load_all(after):
        if document["kind"] == "Deployment" and after != text:
            assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]


MANIFEST = """\
apiVersion: v1
kind: Pod
metadata: {{name: p{metadata}}}
spec:{spec}
  containers:
  - name: c
    image: i{container}
    resources: {{limits: {{inspur.com/vcuda-core: {core}, inspur.com/vcuda-memory: 30}}}}
"""
REJECTED_BY_THE_API: dict[str, tuple[dict[str, str], str]] = {
    "a number among the arguments": (
        {"container": "\n    command: [sleep, 1000]"},
        "8: spec.containers[0].command[1]: '1000': YAML reads this as a number",
    ),
    "text instead of a list": (
        {"container": "\n    command: sleep 1000"},
        "8: spec.containers[0].command: must be a list, not text; check it with: kubectl explain pod.spec.containers.",
    ),
    "a list instead of text": (
        {"container": "\n    args: [[a]]"},
        "8: spec.containers[0].args[0]: must be text, not a list; check it with: kubectl explain pod.spec.containers.",
    ),
    "a list instead of a mapping": (
        {"spec": "\n  securityContext: []"},
        "5: spec.securityContext: must be an object, not a list; check it with: kubectl explain pod.spec.",
    ),
    "an exponent in a command": (
        {"container": "\n    args: [1e3]"},
        "8: spec.containers[0].args[0]: '1e3': YAML reads this as a number",
    ),
    "an unknown field": (
        {"container": "\n    imagePullPolcy: Always"},
        "8: spec.containers[0].imagePullPolcy: the API has no such field, and kubectl rejects it; write imagePull",
    ),
    "an unknown field in metadata": (
        {"metadata": ", labelz: {a: b}"},
        "3: metadata.labelz: the API has no such field, and kubectl rejects it; write labels",
    ),
    "text instead of a number": (
        {"spec": '\n  terminationGracePeriodSeconds: "30"'},
        "5: spec.terminationGracePeriodSeconds: '30': the API server accepts only a whole number here",
    ),
    "text instead of a boolean": (
        {"container": '\n    stdin: "true"'},
        "8: spec.containers[0].stdin: 'true': the API server accepts only true or false here",
    ),
    "a number of more than 32 bits": (
        {"container": "\n    ports: [{containerPort: 99999999999}]"},
        "8: spec.containers[0].ports[0].containerPort: '99999999999': the API server accepts only a whole number",
    ),
    "a number of more than 64 bits": (
        {"spec": "\n  terminationGracePeriodSeconds: 99999999999999999999"},
        "5: spec.terminationGracePeriodSeconds: '99999999999999999999': the API server accepts only a whole number",
    ),
    "a short boolean": (
        {"container": "\n    env: [{name: A, value: y}]"},
        "8: spec.containers[0].env[0].value: 'y': YAML reads this as true",
    ),
    "cores in base 60": (
        {"core": "1:30"},
        "8: spec.containers[0].resources.limits[inspur.com/vcuda-core]: '1:30': not a",
    ),
    "two containers with one name": (
        {"container": "\n  - name: c\n    image: i"},
        "8: spec.containers[1].name: 'c': another container of the pod has this name; rename one of them",
    ),
}


@pytest.mark.parametrize(("fields", "finding"), REJECTED_BY_THE_API.values(), ids=REJECTED_BY_THE_API.keys())
def test_what_the_api_server_rejects_is_an_error_with_its_line(
    tmp_path: Path, fields: dict[str, str], finding: str
) -> None:
    """Otherwise a file that passes the pipeline fails at `kubectl apply`."""
    file = tmp_path / "pod.yaml"
    file.write_text(MANIFEST.format(**{"metadata": "", "spec": "", "container": "", "core": "50", **fields}))
    linted = run("lint", str(file))
    assert linted.exit_code == 1
    assert linted.output.startswith(f"{file}:{finding}")
    assert len(linted.output.splitlines()) == 1
    assert run("admit", str(file)).exit_code == 1


@pytest.mark.parametrize(
    "field",
    [
        "ports: [{containerPort: 80}]",
        "ports: [{containerPort: 80.0}]",
        "env: [{name: A, value: 2026-01-01}]",
        "args: [1:30, =, null]",
        "livenessProbe: {httpGet: {port: http}}",
        "livenessProbe: {httpGet: {port: 80}}",
        "securityContext: {runAsUser: 4294967295}",
    ],
)
def test_what_the_api_server_accepts_is_no_error(field: str) -> None:
    """Dates and numbers in base 60 are text to Kubernetes."""
    manifest = MANIFEST.format(metadata="", spec="\n  volumes: []", container=f"\n    {field}", core="50")
    assert (linted := run("lint", "-", stdin=manifest)).exit_code == 0, linted.output


@pytest.mark.parametrize("replicas", [-1, 99999999999999999999, 2**31])
def test_replicas_that_the_api_server_rejects_are_an_error(replicas: int) -> None:
    text = json.dumps(workload(pod(gpu()), replicas=replicas))
    for command in ("admit", "lint"):
        done = run(command, "-", stdin=text)
        assert done.exit_code == 1
        assert f"'{replicas}': the API server accepts only a whole number from 0 to 2147483647" in done.output


@pytest.mark.parametrize(
    ("fields", "finding"),
    [
        ("metadata: {name: x, labels: {inspur.com/gpu-quota: true}}", "metadata.labels[inspur.com/gpu-quota]: 'true'"),
        ("metadata: 3", "metadata: must be an object, not a whole number"),
        ("metadata: {name: x}\ndata: []", "data: must be an object, not a list"),
        ("metadata: {name: x}\ndata: {a: 1}", "data[a]: '1': YAML reads this as a number"),
    ],
)
def test_a_config_map_that_the_api_server_rejects_is_an_error(fields: str, finding: str) -> None:
    """Also one that would be a quota if its label were text."""
    for command in ("admit", "lint"):
        done = run(command, "-", stdin=f"apiVersion: v1\nkind: ConfigMap\n{fields}\n")
        assert done.exit_code == 1, done.output
        assert finding in done.output


def test_a_date_in_a_quota_is_an_error_with_its_place(tmp_path: Path) -> None:
    """JSON has no dates, but quotas may come as bare YAML."""
    quota = tmp_path / "quota.yaml"
    quota.write_text("types:\n  A100: {cores: 2026-01-01}\n")
    done = run("admit", "-", "--quota", str(quota), stdin=json.dumps(pod(gpu())))
    assert done.exit_code == 2
    assert "types.A100.cores: 2026-01-01: write a whole number of cores" in done.output
