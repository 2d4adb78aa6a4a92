"""The command line, as a newcomer meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from console.main import main
from tests.waiting import eventually
from vcuda.decision import Code


@pytest.fixture(autouse=True)
def own_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands configure logging for their process; here they share one."""
    monkeypatch.setattr("console.main.configure_logs", lambda *_: None)


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "200", **(env or {})})


def test_help_lists_every_command_and_where_to_start() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert "quotient local" in done.output
    context = click.Context(main)
    names = main.list_commands(context)
    assert names == [
        "admit",
        "arm",
        "certs",
        "config",
        "controller",
        "disarm",
        "doctor",
        "lint",
        "local",
        "nodeplugin",
        "quota",
        "scheduler",
        "simulate",
        "top",
        "webhook",
        "what-if",
        "why",
    ]
    for name in names:
        command = main.get_command(context, name)
        assert command is not None
        assert command.help, f"{name} has no help"
        assert command.short_help, f"{name} has no short help"
    assert "..." not in done.output.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "log.level=loud", "config"), "--set log.level: 'loud': must be one of debug, error, info, warning"),
        (("admit", "/none.yaml"), "/none.yaml: no such file"),
        (("quota",), "no kubeconfig found; set KUBECONFIG, or --set cluster.kubeconfig=FILE"),
        (
            ("--set", "cluster.kubeconfig=/none", "doctor"),
            "kubeconfig /none: missing or empty; set KUBECONFIG, or --set cluster.kubeconfig=FILE",
        ),
    ],
    ids=["configuration", "file", "no kubeconfig", "missing kubeconfig"],
)
def test_an_error_that_is_not_wrong_usage_prints_no_usage(arguments: tuple[str, ...], message: str) -> None:
    nowhere = {"KUBECONFIG": "/none", "KUBERNETES_SERVICE_HOST": "", "HOME": "/none"}
    done = run(*arguments, env=nowhere)
    assert done.exit_code == 2
    assert done.output == f"Error: {message}\n"


def test_version_is_that_of_the_package() -> None:
    assert run("--version").output == "quotient, version 0.1.0\n"


def test_config_shows_values_and_where_they_come_from() -> None:
    table = run("config", env={"QUOTIENT_LOG_LEVEL": "debug"})
    assert any({"log.level", "debug", "QUOTIENT_LOG_LEVEL"} <= set(line.split()) for line in table.output.splitlines())
    rows = {line.split()[0]: line.split() for line in table.output.splitlines()}
    assert rows["webhook.schedulerAliases"][1] == "[gpu-scheduler]"
    assert rows["webhook.binders"][1] == "[]"
    assert rows["webhook.shortPath"][1] == "true"
    values = json.loads(run("--set", "memoryUnitMiB=1", "config", "-o", "json").output)
    assert values["memoryUnitMiB"] == 1
    assert values["apiVersion"] == "quotient.dev/v1"


@pytest.mark.parametrize("arguments", [("--config", "/none.yaml", "config"), ("--set", "x", "config"), ("nonsense",)])
def test_wrong_usage_exits_with_2_and_one_message(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert "Error: " in done.output
    assert "Traceback" not in done.output


def test_local_shows_samples_of_every_vocabulary() -> None:
    """Invalid ones are refused with a remedy."""
    done = run("local", "--once")
    assert done.exit_code == 0, done.output
    for word in (
        "A100-SXM4-40GB",
        "half-a-card",
        "for-people",
        "tencent.com/vcuda",
        "k8s.amazonaws.com/vgpu",
        "7680 MiB",
        "gpu-a: GPU 0, 1",
    ):
        assert word in done.output
    assert "samples:" not in done.output, "every sample is taken"
    wrong = " ".join(done.output.split())
    assert "refused one-and-a-half: spec.containers[0].resources.limits[inspur.com/vcuda-core]: '150'" in wrong
    assert "ask for 100 or 200" in wrong


def test_local_uses_the_configured_domain() -> None:
    done = run("--set", "domain=gpu.example.org", "local", "--once")
    assert "gpu.example.org/vcuda" in done.output
    assert "inspur.com" not in done.output


def manifest(name: str, **limits: object) -> str:
    container = {"name": "c", "image": "i", "resources": {"limits": limits}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container]}}
    return json.dumps(pod)


def test_local_applies_manifests_and_reports_what_it_ignores(tmp_path: Path) -> None:
    """A file that cannot be read does not keep the others from being shown."""
    good, bad, other, binary = (tmp_path / name for name in ("good.yaml", "bad.yaml", "other.yaml", "binary"))
    binary.write_bytes(b"\x80\xff")
    good.write_text(manifest("mine", **{"nano-gpu/gpu-percent": 20}))
    bad.write_text("a: {")
    other.write_text(
        "kind: Deployment\n---\n- 1\n---\na: b\n---\n" + manifest("Not_A_Name") + "\n---\nkind: Pod\nmetadata: x\n"
    )
    done = run("local", "--once", *map(str, (good, bad, other, binary)))
    assert done.exit_code == 0, done.output
    assert "mine" in done.output
    assert "bad.yaml: line 1" in done.output
    assert "requested as" in done.output
    assert "other.yaml: Deployment is ignored" in done.output
    assert done.output.count("other.yaml: not a Kubernetes object: kind is missing") == 2
    assert "not a DNS name" in done.output
    assert "other.yaml: Pod in version v1 cannot be handled" in done.output
    assert "binary: not UTF-8 text" in done.output


def test_local_shows_names_unchanged(tmp_path: Path) -> None:
    """Brackets are not taken for markup, and two pods of one name in two namespaces are two."""
    file = tmp_path / "pods.yaml"
    odd = json.loads(manifest("p", **{"inspur.com/vcuda-core": 150}))
    odd["metadata"] |= {"namespace": "team"}
    right = json.loads(manifest("p", **{"inspur.com/vcuda-core": 100}))
    right["spec"]["containers"].append({"name": "[bold]", "resources": {"limits": {"nano-gpu/gpu-percent": 5}}})
    right["metadata"] |= {"finalizers": ["quotient.dev/test"]}
    broken = manifest("q", **{"inspur.com/vcuda-core": "[/red]"})
    file.write_text("\n---\n".join((json.dumps(odd), json.dumps(right), broken)))
    done = run("local", "--once", str(file))
    assert done.exit_code == 0, done.output
    assert "refused team/p: spec.containers[0].resources.limits[inspur.com/vcuda-core]: '150'" in done.output
    assert "spec.containers[0].resources.limits[inspur.com/vcuda-core]: '[/red]'" in done.output
    assert "[bold]" in done.output
    assert "all of 1 card" in done.output
    shown = run("--set", "cluster.kubeconfig=/home/[team]/x[/b]", "config")
    assert "/home/[team]/x[/b]" in shown.output


def test_local_runs_until_sigterm_and_applies_changed_files(tmp_path: Path) -> None:
    """A real process, which exits with 0."""
    file, log = tmp_path / "pod.yaml", tmp_path / "log"
    file.write_text(manifest("p", **{"inspur.com/vcuda-core": 150}))
    command = [sys.executable, "-m", "console.main", "local", str(file)]
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdout=output, env=os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"})
    try:
        eventually(lambda: "Running until Ctrl-C" in log.read_text(), "the first picture")
        assert "ask for 100 or 200" in log.read_text()
        file.write_text(manifest("p", **{"inspur.com/vcuda-core": 200}))
        os.utime(file, (1, 1))
        eventually(lambda: "all of 2 cards" in log.read_text(), "the second picture")
        file.unlink()
        eventually(lambda: f"{file}: no such file" in log.read_text(), "the missing file to be named")
        running.terminate()
        assert running.wait(20) == 0
    finally:
        running.kill()
        running.wait()


def test_codes_are_stable() -> None:
    """Programs compare them."""
    assert {code.value for code in Code} == {
        "QuantityInvalid",
        "QuotaInvalid",
        "LedgerNotOpen",
        "TooManyUnconfirmed",
        "CardUnknown",
        "CoreInvalid",
        "MemoryInvalid",
        "MemoryMissing",
        "CoreMissing",
        "RequestDiffersFromLimit",
        "LimitMissing",
        "VocabulariesMixed",
        "ContainerUnknown",
        "TooLarge",
        "ContainerDuplicate",
        "TooManyContainers",
        "CoreLimitInvalid",
        "ModelInvalid",
        "OptionInvalid",
        "NodeChosen",
        "SchedulerForeign",
        "AnnotationOwned",
        "AnnotationFrozen",
        "RequestFrozen",
        "NotRewritten",
        "MirrorForged",
        "PrivilegedNotGranted",
        "EnvFromSelectsGpus",
        "MountSelectsGpus",
        "BindingForeign",
        "QuotaExceeded",
        "ModelNotGranted",
        "PoolNotGranted",
        "TextExpected",
        "ApiVersionGone",
        "ObjectInvalid",
    }
