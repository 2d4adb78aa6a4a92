"""What a node shows: whose processes they are, gpu-manager's numbers and ours, and who may see them."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.authorization import CachedAuthorizer
from cluster.in_memory import InMemoryCluster
from nodeplugin.cards import Card, NodeCards
from nodeplugin.checkpoint import PodAllocation
from nodeplugin.metrics import Metrics
from nodeplugin.monitor import MonitorServer, is_loopback, page, usage
from nodeplugin.nvml import GpuProcess, MeasuredUsage
from nodeplugin.sampling import Sample, put_together
from settings.configuration import MonitorSettings as Settings
from tests.nodeplugin.builders import app, bound, card, init
from vcuda.memory_units import MIB
from vcuda.placement_annotation import GpuSlice

UID = "11111111-2222-3333-4444-555555555555"
RUNS, PREPARED = "a" * 64, "b" * 64
POD = bound("train", init("i", 50, 4), app("a", 50, 4), container_ids={RUNS: "a", PREPARED: "i"})
SHARE = (GpuSlice("GPU-0", 50, 1024),)
HOLD = PodAllocation(
    uid=UID, namespace="team", name="train", placed={"i": SHARE, "a": SHARE}, usage={"GPU-0": (50, 1024)}
)


def sample(proc: Path, *processes: GpuProcess, **more: Any) -> Sample:
    """Measure a card on which these processes run."""
    node_cards = NodeCards()
    node_cards.found([card(0), card(1)])
    usages: list[tuple[Card, MeasuredUsage]] = [
        (card(0), MeasuredUsage(utilization=70, used_mib=5000, processes=processes)),
        (card(1), MeasuredUsage()),
    ]
    return put_together(usages, node_cards, {UID: POD}, more.get("holds", {UID: HOLD}), proc)


def running(proc: Path, pid: int, container: str = RUNS, uid: str = UID) -> None:
    """Have a process run in a container."""
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cgroup").write_text(f"0::/kubepods/burstable/pod{uid}/{container}\n")


def series(found: Sample) -> dict[tuple[str, ...], float]:
    """Read what Prometheus would: names with their labels, and values."""
    metrics = Metrics("n1", lambda: found, lambda: {("GPU-0", 31): 2}, lambda: {"registered": 1.0})
    text = generate_latest(metrics.registry).decode()
    return {
        (each.name, *(f"{key}={value}" for key, value in sorted(each.labels.items()))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def test_processes_are_counted_for_their_container(tmp_path: Path) -> None:
    """Memory in MiB and percent of the card's time, for each card and in all, as gpu-manager showed them."""
    running(tmp_path, 10)
    running(tmp_path, 11)
    found = series(sample(tmp_path, GpuProcess(10, 300, 20), GpuProcess(11, 200, 15)))
    labels = ("container_name=a",)
    tail = ("namespace=team", "node=n1", "pod_name=train")
    for card_label in ("gpu0", "total"):
        assert found["container_gpu_utilization", *labels, f"gpu={card_label}", *tail] == 35
        assert found["container_gpu_memory_total", *labels, f"gpu_memory={card_label}", *tail] == 500
    assert found["container_request_gpu_utilization", *labels, *tail, "req_of_gpu=total"] == 0.5
    assert found["container_request_gpu_memory", *labels, *tail, "req_of_gpu_memory=total"] == 1024
    ours = ("container=a", "namespace=team", "node=n1", "pod=train", "uuid=GPU-0")
    assert found["quotient_container_memory_used_bytes", *ours] == 500 * MIB
    assert found["quotient_container_utilization_ratio", *ours] == 0.35
    isolated = ("container=a", "isolation=none", "namespace=team", "node=n1", "pod=train", "uuid=GPU-0")
    assert found["quotient_container_isolated", *isolated] == 0


def test_init_containers_are_not_counted_when_their_turn_is_over(tmp_path: Path) -> None:
    """What they had is the others' now: all that is given of a card is never more than the card."""
    found = sample(tmp_path)
    assert [each.container for each in found.containers] == ["a"]


def test_cards_show_what_pods_hold_and_what_is_used(tmp_path: Path) -> None:
    """And errors, by card and number."""
    found = series(sample(tmp_path))
    first = ("index=0", "model=A100-SXM4-40GB", "node=n1", "uuid=GPU-0")
    assert found["quotient_gpu_cores_allocated", *first] == 50
    assert found["quotient_gpu_memory_allocated_bytes", *first] == 1024 * MIB
    assert found["quotient_gpu_memory_used_bytes", *first] == 5000 * MIB
    assert found["quotient_gpu_utilization_ratio", *first] == 0.7
    assert found["quotient_gpu_xid_errors_total", "node=n1", "uuid=GPU-0", "xid=31"] == 2
    unknown = [name for name, *labels in found if "uuid=GPU-1" in labels and name == "quotient_gpu_utilization_ratio"]
    assert unknown == [], "what the driver does not say is not shown as zero"


@pytest.mark.parametrize(
    ("pid", "container", "uid"),
    [
        pytest.param(10, PREPARED, UID, id="of the pod, in no container that is known"),
        pytest.param(10, RUNS, "99999999-2222-3333-4444-555555555555", id="of a pod without GPUs"),
        pytest.param(0, "", "", id="of no pod"),
    ],
)
def test_processes_of_others_are_foreign(tmp_path: Path, pid: int, container: str, uid: str) -> None:
    """Somebody uses a card that he was not given."""
    if pid:
        running(tmp_path, pid, container, uid)
    holds = {UID: PodAllocation(uid=UID, namespace="team", name="train", placed={"a": SHARE}, usage={})}
    found = sample(tmp_path, GpuProcess(10, 300, 20), holds=holds)
    assert [process.pid for _, process in found.strangers] == [10]
    first = ("index=0", "model=A100-SXM4-40GB", "node=n1", "uuid=GPU-0")
    assert series(found)["quotient_gpu_foreign_processes", *first] == 1


def test_usage_is_gpu_managers(tmp_path: Path) -> None:
    """With its keys; what is zero is left out."""
    running(tmp_path, 10)
    assert usage(sample(tmp_path, GpuProcess(10, 300, 0))) == {
        POD.uid: {
            "project": "team",
            "pod": "train",
            "stat": {
                "a": {
                    "dev": [
                        {"card_idx": "0", "uuid": "GPU-0", "mem": 300, "pids": [10], "device_mem": 40960}
                        | ({"id": card(0).bus_id} if card(0).bus_id else {})
                    ]
                }
            },
            "spec": {"a": {"gpu": 0.5, "mem": 1024}},
        }
    }


def test_the_page_escapes_what_it_shows() -> None:
    """Names come from whoever made them."""
    assert "<script>" not in page("<script>alert(1)</script>", Sample())


@pytest.mark.parametrize(
    ("address", "expected"),
    {"127.0.0.1": True, "127.8.9.1": True, "::1": True, "::ffff:127.0.0.1": True, "10.0.0.1": False, "": False}.items(),
)
def test_who_asks_from_this_machine(address: str, *, expected: bool) -> None:
    """However it writes its address."""
    assert is_loopback(address) is expected


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[MonitorServer]:
    found = sample(tmp_path)
    metrics = Metrics("n1", lambda: found, dict, dict)
    made = MonitorServer(
        Settings(address="127.0.0.1", port=0),
        "n1",
        metrics.registry,
        lambda: found,
        CachedAuthorizer(InMemoryCluster()),
        live=list,
        ready=lambda: ["the kubelet does not listen yet"],
    )
    made.start()
    yield made
    made.stop()


def ask(monitor: MonitorServer, path: str, accept: str = "*/*") -> tuple[int, str, str]:
    """Ask over HTTP, from this machine."""
    request = urllib.request.Request(f"http://127.0.0.1:{monitor.port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.headers["Content-Type"], refused.read().decode()


def test_paths_of_the_monitor(monitor: MonitorServer) -> None:
    """Old and new ones, for programs and for people; and what there is instead of what there is not."""
    assert ask(monitor, "/metric")[2].startswith("# HELP container_gpu_utilization")
    assert ask(monitor, "/metrics")[2] == ask(monitor, "/metric")[2]
    assert json.loads(ask(monitor, "/usage")[2])["cards"][0]["uuid"] == "GPU-0"
    status, kind, text = ask(monitor, "/usage", "text/html,application/xhtml+xml")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "team/train" in text
    assert ask(monitor, "/livez")[0] == 200
    assert ask(monitor, "/readyz") == (503, "text/plain; charset=utf-8", "the kubelet does not listen yet\n")
    assert ask(monitor, "/graph")[0] == 404
