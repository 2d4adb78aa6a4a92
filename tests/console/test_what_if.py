"""`quotient what-if`, on dumps of a cluster."""

from typing import Any

import pytest

from tests.console.dumps import A100, JSON, T4, answer, manifest, node, quota, running
from tests.scheduler.world import NAMES


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
        (
            manifest(50, annotations={"min-isolation": "mps"}),
            "isolation",
            "no GPU with isolation memory=mps or stronger",
        ),
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


def test_nothing_fits_on_a_cluster_without_gpus(ask: Any) -> None:
    found = answer(ask(manifest(50), options=JSON))
    assert not found["possible"]
    assert found["missing"] == "nodes"
    assert found["message"].startswith("no node with GPUs takes pods")


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


def test_pods_with_several_containers_are_searched_on_all_nodes(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One attempt of the scheduler searches some nodes only; the answer must not depend on that."""
    monkeypatch.setattr("vcuda.node_fit.MAX_STEPS", 30)
    nodes = [node(f"n{number:03}", "T4", 2) for number in range(90)]
    in_use = [held(f"p{number:03}{index}", f"n{number:03}", index) for number in range(89) for index in (0, 1)]
    result = ask(containers(60, 60, 20), *nodes, *in_use, options=JSON)
    assert [each["node"] for each in answer(result)["placed"]] == ["n089"]


def test_what_was_not_searched_is_not_known_to_be_missing(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vcuda.trial_cluster.MAX_CONTINUED", 0)
    monkeypatch.setattr("vcuda.node_fit.MAX_STEPS", 3)
    nodes = [node(f"n{number:03}", "T4", 2) for number in range(9)]
    in_use = [held(f"p{number:03}{index}", f"n{number:03}", index) for number in range(9) for index in (0, 1)]
    assert answer(ask(containers(60, 60, 20), *nodes, *in_use, options=JSON))["missing"] == "unsearched"


def held(name: str, on: str, index: int) -> dict[str, Any]:
    """Return a pod that holds 30 cores of one GPU: 140 are free of two, but not as 60, 60 and 20."""
    return running(name, on, 30, "free", index=index)


def containers(*cores: int) -> dict[str, Any]:
    made = manifest(cores[0], 2, namespace="free")
    (first,) = made["spec"]["containers"]
    for number, each in enumerate(cores[1:]):
        limits = {**first["resources"]["limits"], NAMES.core: each}
        made["spec"]["containers"].append({**first, "name": f"c{number}", "resources": {"limits": limits}})
    return made


def test_what_requests_no_gpus_is_left_out_with_a_note(ask: Any) -> None:
    web = manifest(50, kind="Deployment")
    web["metadata"]["name"] = "web"
    web["spec"]["template"]["spec"]["containers"][0]["resources"] = {}
    result = ask([web, manifest(50)], T4, options=JSON)
    assert result.exit_code == 0, result.output
    assert answer(result)["object"] == "Pod/asked"
    assert "note: Deployment/web: requests no GPUs, and is left out" in result.stderr


def test_one_pod_of_a_daemon_set_is_answered_and_noted(ask: Any) -> None:
    asked = manifest(10, kind="DaemonSet")
    del asked["spec"]["replicas"]
    result = ask(asked, T4, A100)
    assert "this is the answer for one of them" in result.stdout


def test_documents_are_tried_beside_those_before_them(ask: Any) -> None:
    first, second = ask([manifest(60), manifest(60)], T4, options=JSON).stdout.splitlines()
    assert '"possible":true' in first
    assert '"possible":false' in second


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uid": "abc"}, "Pod team/p: 'abc' is not the UID of a pod"),
        ({"deletionTimestamp": "soon"}, "Pod team/p: Invalid isoformat string: 'soon'"),
    ],
    ids=["UID", "time"],
)
def test_a_pod_that_no_cluster_has_is_named(ask: Any, changes: dict[str, str], message: str) -> None:
    pod = running("p", "t", 50)
    pod["metadata"].update(changes)
    result = ask(manifest(50), T4, pod)
    assert result.exit_code == 2
    assert message in result.output


def test_pods_that_were_written_by_hand_count_each(ask: Any) -> None:
    """Without a UID, one must not replace another."""
    pods = running("a", "t", 30), running("b", "t", 30)
    for pod in pods:
        del pod["metadata"]["uid"]
    found = answer(ask(manifest(50), T4, *pods, quota(), options=JSON))
    assert "no GPU with 50 cores free, the best has 40" in found["message"]
