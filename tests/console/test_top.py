"""`quotient top`: what containers use, and whether their limits hold, from the node plugins' /usage."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from cluster.errors import Rejected
from cluster.in_memory import InMemoryCluster
from cluster.objects import NAMESPACES, PODS
from console.main import main
from console.top import RIGHTS, LimitState, describe_limit
from vcuda.decision import Unavailable

SYSTEM = "quotient-system"
LABELS = {"app.kubernetes.io/name": "quotient", "app.kubernetes.io/component": "nodeplugin"}
UNKNOWN = {"rung": "none", "enforced": False, "holds": None, "overMiB": None}

Reports = dict[str, bytes | Exception]


def container(name: str = "a", *, node: str = "n1", used: int | None = 100, **memory: Any) -> dict[str, Any]:
    """A container of pod team/train as /usage describes it; `memory` is its limit of memory."""
    limit = {"rung": "driver", "enforced": True, "holds": True, "overMiB": 0} | memory
    return {
        "node": node,
        "namespace": "team",
        "pod": "train",
        "podUID": "u",
        "container": name,
        "uuid": "GPU-0",
        "index": 0,
        "cores": 50,
        "memoryMiB": {"limit": 1024, "used": used},
        "utilization": 20,
        "limits": {"memory": limit, "compute": UNKNOWN},
    }


def report(*containers: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"usage": {}, "cards": [], "containers": containers})


@pytest.fixture
def top(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command against node plugins with these reports, by node."""

    def run(reports: Reports, *arguments: str) -> Result:
        cluster = InMemoryCluster()
        cluster.create(NAMESPACES, {"metadata": {"name": SYSTEM}})
        for node in reports:
            metadata = {"name": f"plugin-{node}", "namespace": SYSTEM, "labels": LABELS}
            spec = {"nodeName": node, "containers": [{"name": "nodeplugin"}]}
            cluster.create(PODS, {"metadata": metadata, "spec": spec})

        def read(pod: str) -> bytes:
            answer = reports[pod.removeprefix("plugin-")]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr("console.top.connect_cluster", lambda _: cluster)
        monkeypatch.setattr("console.top.usage_reader", lambda _: read)
        monkeypatch.setattr("console.main.configure_logs", lambda *_: None)
        return CliRunner().invoke(main, ["top", *arguments])

    return run


def test_each_container_has_a_row_with_share_usage_and_limits(top: Callable[..., Result]) -> None:
    done = top({"n2": report(container("b", node="n2", used=None)), "n1": report(container())})
    assert done.exit_code == 0, done.output
    assert [" ".join(line.split()) for line in done.output.splitlines()] == [
        "node GPU namespace pod container cores used % MiB used MiB memory compute",
        "n1 0 team train a 50 20 1024 100 driver: holds not enforced",
        "n2 0 team train b 50 20 1024 unknown driver: holds not enforced",
    ]


@pytest.mark.parametrize("enforced", [True, False])
def test_a_limit_that_is_exceeded_is_shown_and_sets_the_exit_code(
    top: Callable[..., Result], *, enforced: bool
) -> None:
    """Whether anything enforces it or not."""
    broken = container(used=1030, holds=False, overMiB=6, enforced=enforced)
    done = top({"n1": report(broken)})
    assert done.exit_code == 1
    assert ("driver: broken, 6 MiB over" if enforced else "not enforced, 6 MiB over") in done.output


def test_programs_get_the_values_of_the_node_plugins(top: Callable[..., Result]) -> None:
    (found,) = json.loads(top({"n1": report(container())}, "-o", "json").output)
    assert found == {key: value for key, value in container().items() if key != "podUID"}


def test_containers_are_chosen_by_namespace_and_node(top: Callable[..., Result]) -> None:
    reports = {"n1": report(container()), "n2": report(container(node="n2") | {"namespace": "other"})}
    assert [each["node"] for each in json.loads(top(reports, "-n", "other", "-o", "json").output)] == ["n2"]
    assert [each["node"] for each in json.loads(top(reports, "--node", "n1", "-o", "json").output)] == ["n1"]
    missing = top(reports, "--node", "n3")
    assert (missing.exit_code, missing.output) == (2, "Error: no node plugin runs on a node n3\n")


UNREAD = {
    "not permitted": (
        Rejected("forbidden", code=403),
        f"node n2: forbidden; {RIGHTS} quotient-system",
    ),
    "no answer": (Unavailable("timed out"), "node n2: timed out"),
    "of another release": (b'{"usage":{},"cards":[]}', "its node plugin plugin-n2 is of another release"),
    "no JSON": (b"<html>", "its node plugin plugin-n2 is of another release"),
}


@pytest.mark.parametrize(("answer", "warning"), UNREAD.values(), ids=UNREAD)
def test_a_node_that_cannot_be_read_is_named_and_the_others_are_shown(
    top: Callable[..., Result], answer: bytes | Exception, warning: str
) -> None:
    done = top({"n1": report(container()), "n2": answer})
    assert done.exit_code == 1
    assert "n1" in done.stdout
    assert warning in done.stderr


def test_without_the_right_to_list_pods_the_missing_right_is_named(
    top: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(*_: Any) -> None:
        raise Rejected("pods is forbidden", code=403)

    monkeypatch.setattr(InMemoryCluster, "list", forbid)
    done = top({})
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: pods is forbidden; it takes the rights to list pods")


def test_no_container_is_said_so(top: Callable[..., Result]) -> None:
    done = top({"n1": report()})
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "no container uses a GPU\n")


def test_a_limit_of_which_nothing_is_known_is_not_said_to_hold() -> None:
    assert describe_limit(None) == "unknown"
    assert describe_limit(LimitState("preload", enforced=True)) == "preload: unknown"
