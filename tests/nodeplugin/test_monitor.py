"""The metrics and the monitor of a node: attribution of processes, gpu-manager's formats, and access."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.authorization import CachedAuthorizer
from cluster.in_memory import InMemoryCluster
from nodeplugin.cards import Card, NodeCards
from nodeplugin.checkpoint import ContainerAllocation, PodAllocation
from nodeplugin.http_server import Request
from nodeplugin.isolation_ladder import CardLadder, RungNotOffered
from nodeplugin.metrics import Metrics
from nodeplugin.monitor import MonitorServer, container_states, is_loopback, render_page, usage_by_pod
from nodeplugin.nvml import GpuProcess, MeasuredUsage
from nodeplugin.sampling import Sample, build_sample
from settings.configuration import MonitorSettings as Settings
from tests.nodeplugin.builders import app, bound, card, init
from vcuda.isolation import NO_ISOLATION, Isolation, Rung
from vcuda.memory_units import MIB
from vcuda.placement_annotation import GpuSlice

UID = "11111111-2222-3333-4444-555555555555"
APP_ID, INIT_ID = "a" * 64, "b" * 64
POD = bound("train", init("i", 50, 4), app("a", 50, 4), container_ids={APP_ID: "a", INIT_ID: "i"})
SHARE = (GpuSlice("GPU-0", 50, 1024),)
ALLOCATION = PodAllocation(
    uid=UID, namespace="team", name="train", placed={"i": SHARE, "a": SHARE}, usage={"GPU-0": (50, 1024)}
)


def sample(proc: Path, *processes: GpuProcess, **more: Any) -> Sample:
    """A sample of two cards, with these processes on the first."""
    node_cards = NodeCards()
    node_cards.update([card(0), card(1)])
    usages: list[tuple[Card, MeasuredUsage]] = [
        (card(0), MeasuredUsage(utilization=70, used_mib=5000, processes=processes)),
        (card(1), MeasuredUsage()),
    ]
    return build_sample(usages, node_cards, {UID: POD}, more.get("allocations", {UID: ALLOCATION}), proc)


def allocated_with(isolation: Isolation) -> dict[str, PodAllocation]:
    """The allocation, with this isolation recorded for its app container."""
    return {UID: replace(ALLOCATION, containers={"a": ContainerAllocation("t", isolation=isolation)})}


def add_process(proc: Path, pid: int, container: str = APP_ID, uid: str = UID) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cgroup").write_text(f"0::/kubepods/burstable/pod{uid}/{container}\n")


def series(measured: Sample) -> dict[tuple[str, ...], float]:
    """The scraped series: values by name and labels."""
    metrics = Metrics("n1", lambda: measured, lambda: {("GPU-0", 31): 2}, lambda: {"registered": 1.0})
    text = generate_latest(metrics.registry).decode()
    return {
        (each.name, *(f"{key}={value}" for key, value in sorted(each.labels.items()))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def test_usage_of_processes_is_attributed_to_their_container(tmp_path: Path) -> None:
    """gpu-manager's metrics are in MiB and percent, for each card and in total."""
    add_process(tmp_path, 10)
    add_process(tmp_path, 11)
    values = series(sample(tmp_path, GpuProcess(10, 300, 20), GpuProcess(11, 200, 15)))
    labels = ("container_name=a",)
    tail = ("namespace=team", "node=n1", "pod_name=train")
    for card_label in ("gpu0", "total"):
        assert values["container_gpu_utilization", *labels, f"gpu={card_label}", *tail] == 35
        assert values["container_gpu_memory_total", *labels, f"gpu_memory={card_label}", *tail] == 500
    assert values["container_request_gpu_utilization", *labels, *tail, "req_of_gpu=total"] == 0.5
    assert values["container_request_gpu_memory", *labels, *tail, "req_of_gpu_memory=total"] == 1024
    ours = ("container=a", "namespace=team", "node=n1", "pod=train", "uuid=GPU-0")
    assert values["quotient_container_memory_used_bytes", *ours] == 500 * MIB
    assert values["quotient_container_utilization_ratio", *ours] == 0.35
    isolated = ("container=a", "isolation=none", "namespace=team", "node=n1", "pod=train", "uuid=GPU-0")
    assert values["quotient_container_isolated", *isolated] == 0


LIMITS = {
    "enforced and kept": (Isolation(Rung.DRIVER, Rung.PRELOAD), 1024, "driver", 1, 0),
    "enforced and broken": (Isolation(Rung.PRELOAD, Rung.PRELOAD), 1030, "preload", 0, 6 * MIB),
    "not enforced and kept": (NO_ISOLATION, 10, "none", 1, 0),
    "not enforced and exceeded": (NO_ISOLATION, 1034, "none", 0, 10 * MIB),
    "not measured": (Isolation(Rung.DRIVER), None, "driver", None, None),
}


@pytest.mark.parametrize(("isolation", "used", "rung", "holds", "over"), LIMITS.values(), ids=LIMITS)
def test_metrics_tell_whether_limits_hold(
    tmp_path: Path, isolation: Isolation, used: int | None, rung: str, *, holds: int | None, over: int | None
) -> None:
    """By the rung with which the container was allocated; there is no series for what is not known."""
    add_process(tmp_path, 10)
    values = series(sample(tmp_path, GpuProcess(10, used, 20), allocations=allocated_with(isolation)))
    first, last = ("container=a",), ("namespace=team", "node=n1", "pod=train")
    key = ("quotient_container_limit_holds", *first, "dimension=memory", *last, f"rung={rung}", "uuid=GPU-0")
    assert values.get(key) == holds
    assert values.get(("quotient_container_memory_over_limit_bytes", *first, *last, "uuid=GPU-0")) == over
    assert not any("dimension=compute" in each for each in values), "not known of shares"
    enforced = float(rung != "none")
    assert values["quotient_container_isolated", *first, f"isolation={rung}", *last, "uuid=GPU-0"] == enforced


def test_usage_tells_share_usage_and_limits_of_each_container(tmp_path: Path) -> None:
    add_process(tmp_path, 10)
    allocations = allocated_with(Isolation(Rung.DRIVER, Rung.PRELOAD))
    (state,) = container_states("n1", sample(tmp_path, GpuProcess(10, 1034, 20), allocations=allocations))
    assert json.loads(msgspec.json.encode(state)) == {
        "node": "n1",
        "namespace": "team",
        "pod": "train",
        "podUID": POD.uid,
        "container": "a",
        "uuid": "GPU-0",
        "index": 0,
        "cores": 50,
        "memoryMiB": {"limit": 1024, "used": 1034},
        "utilization": 20,
        "limits": {
            "memory": {"rung": "driver", "enforced": True, "holds": False, "overMiB": 10},
            "compute": {"rung": "preload", "enforced": True, "holds": None, "overMiB": None},
        },
    }


def test_a_container_is_not_measured_while_a_process_of_its_pod_is_not_attributed(tmp_path: Path) -> None:
    """The status of a pod gets the IDs of its containers some time after they have started."""
    add_process(tmp_path, 10)
    add_process(tmp_path, 11, "c" * 64)
    (measured,) = sample(tmp_path, GpuProcess(10, 100, 20), GpuProcess(11, 2000, 20)).containers
    assert measured.measured_mib is None
    assert measured.used_mib == 100


def test_a_completed_init_container_is_not_listed(tmp_path: Path) -> None:
    """The app containers reuse its slice: listing both would allocate more than the card has."""
    measured = sample(tmp_path)
    assert [each.container for each in measured.containers] == ["a"]


def test_cards_have_metrics_of_allocation_usage_and_xids(tmp_path: Path) -> None:
    values = series(sample(tmp_path))
    first = ("index=0", "model=A100-SXM4-40GB", "node=n1", "uuid=GPU-0")
    assert values["quotient_gpu_cores_allocated", *first] == 50
    assert values["quotient_gpu_memory_allocated_bytes", *first] == 1024 * MIB
    assert values["quotient_gpu_memory_used_bytes", *first] == 5000 * MIB
    assert values["quotient_gpu_utilization_ratio", *first] == 0.7
    assert values["quotient_gpu_xid_errors_total", "node=n1", "uuid=GPU-0", "xid=31"] == 2
    unknown = [name for name, *labels in values if "uuid=GPU-1" in labels and name == "quotient_gpu_utilization_ratio"]
    assert unknown == [], "a value that the driver does not report is omitted, not 0"


@pytest.mark.parametrize(
    ("pid", "container", "uid"),
    [
        pytest.param(10, INIT_ID, UID, id="of a container of the pod without this card"),
        pytest.param(10, APP_ID, "99999999-2222-3333-4444-555555555555", id="of a pod without GPUs"),
        pytest.param(0, "", "", id="of no pod"),
    ],
)
def test_a_process_whose_container_does_not_have_the_card_is_foreign(
    tmp_path: Path, pid: int, container: str, uid: str
) -> None:
    if pid:
        add_process(tmp_path, pid, container, uid)
    allocations = {UID: PodAllocation(uid=UID, namespace="team", name="train", placed={"a": SHARE}, usage={})}
    measured = sample(tmp_path, GpuProcess(10, 300, 20), allocations=allocations)
    assert [process.pid for _, process in measured.foreign_processes] == [10]
    first = ("index=0", "model=A100-SXM4-40GB", "node=n1", "uuid=GPU-0")
    assert series(measured)["quotient_gpu_foreign_processes", *first] == 1


def test_usage_has_gpu_managers_format(tmp_path: Path) -> None:
    """With its keys; those whose value is zero are omitted."""
    add_process(tmp_path, 10)
    assert usage_by_pod(sample(tmp_path, GpuProcess(10, 300, 0))) == {
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


def test_the_page_escapes_names() -> None:
    assert "<script>" not in render_page("<script>alert(1)</script>", Sample())


def test_the_page_shows_state_and_isolation(tmp_path: Path) -> None:
    """Cards are healthy, and nothing enforces the limits of a fraction of a card."""
    text = render_page("n1", sample(tmp_path))
    assert "<td>healthy" in text
    assert "<td>not enforced" in text


def test_the_page_shows_limits_that_are_broken_and_rungs_that_are_not_offered(tmp_path: Path) -> None:
    add_process(tmp_path, 10)
    allocations = allocated_with(Isolation(Rung.PRELOAD, Rung.PRELOAD))
    measured = sample(tmp_path, GpuProcess(10, 1030, 20), allocations=allocations)
    missing = CardLadder(Isolation(Rung.PRELOAD), (RungNotOffered("memory", Rung.DRIVER, "too <old>"),))
    text = render_page("n1", replace(measured, cards=tuple(replace(each, ladder=missing) for each in measured.cards)))
    assert "<td class=bad>preload: broken, exceeded by 6 MiB" in text
    assert "<td>preload: unknown" in text
    assert "<tr><td>0, 1<td>memory<td>driver<td>too &lt;old&gt;" in text
    assert "<td>memory=preload" in text


@pytest.mark.parametrize(
    ("address", "expected"),
    {"127.0.0.1": True, "127.8.9.1": True, "::1": True, "::ffff:127.0.0.1": True, "10.0.0.1": False, "": False}.items(),
)
def test_loopback_addresses_are_recognized(address: str, *, expected: bool) -> None:
    """IPv4, IPv6, and IPv4 mapped to IPv6."""
    assert is_loopback(address) is expected


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[MonitorServer]:
    measured = sample(tmp_path)
    metrics = Metrics("n1", lambda: measured, dict, dict)
    made = MonitorServer(
        Settings(address="127.0.0.1", port=0),
        "n1",
        metrics.registry,
        lambda: measured,
        CachedAuthorizer(InMemoryCluster()),
        live=list,
        ready=lambda: ["not registered with the kubelet"],
    )
    made.start()
    yield made
    made.stop()


def get(monitor: MonitorServer, path: str, accept: str = "*/*") -> tuple[int, str, str]:
    """Status, content type and body of a request over loopback."""
    request = urllib.request.Request(f"http://127.0.0.1:{monitor.port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:  # noqa: S310
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.headers["Content-Type"], refused.read().decode()


def test_paths_of_the_monitor(monitor: MonitorServer) -> None:
    """gpu-manager's and our own, for programs and for browsers; any other is not found."""
    assert get(monitor, "/metric")[2].startswith("# HELP container_gpu_utilization")
    assert get(monitor, "/metrics")[2] == get(monitor, "/metric")[2]
    assert json.loads(get(monitor, "/usage")[2])["cards"][0]["uuid"] == "GPU-0"
    status, kind, text = get(monitor, "/usage", "text/html,application/xhtml+xml")
    assert (status, kind) == (200, "text/html; charset=utf-8")
    assert "team/train" in text
    assert get(monitor, "/livez")[0] == 200
    assert get(monitor, "/readyz") == (503, "text/plain; charset=utf-8", "not registered with the kubelet\n")
    assert get(monitor, "/graph")[0] == 404


def test_from_elsewhere_a_token_is_accepted_by_tls_only(monitor: MonitorServer) -> None:
    """Probes need neither; a token that came in the clear is refused before it is looked at."""
    token = {"authorization": "Bearer x"}

    def ask(path: str, headers: dict[str, str], *, is_tls: bool, peer: str = "10.0.0.1") -> tuple[int, str]:
        response = monitor.respond(Request("GET", path, headers, peer, is_tls))
        return response.status, response.body.decode()

    assert ask("/metrics", token, is_tls=False)[1].startswith("use https")
    assert ask("/metrics", {}, is_tls=True) == (401, "send a bearer token: Authorization: Bearer ...\n")
    assert ask("/metrics", token, is_tls=True)[1].startswith("the token cannot be checked")
    assert ask("/livez", {}, is_tls=False)[0] == 200
    assert ask("/usage", {}, is_tls=False, peer="127.0.0.1")[0] == 200


def test_an_open_monitor_answers_everybody(tmp_path: Path) -> None:
    """As gpu-manager's did: without TLS and without a token."""
    measured = sample(tmp_path)
    settings = Settings(address="127.0.0.1", port=0, open=True)
    registry = Metrics("n1", lambda: measured, dict, dict).registry
    authorizer = CachedAuthorizer(InMemoryCluster())
    made = MonitorServer(settings, "n1", registry, lambda: measured, authorizer, live=list, ready=list)
    made.start()
    assert made.respond(Request("GET", "/usage", {}, "10.0.0.1")).status == 200
    assert made.respond(Request("GET", "/metrics", {}, "10.0.0.1")).status == 200
    made.stop()
