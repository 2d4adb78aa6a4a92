"""Pods of every kind, from `kubectl apply` to their end: webhook, scheduler, kubelet and node plugin together."""

import base64
import json
import random
import threading
import time
import uuid as uuids
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from msgspec import Struct

from tests.cluster.layout import NODE_NAME, kube_scheduler_name
from tests.cluster.quotient import SYSTEM, run_beside, run_scheduler, scheduler_metric
from tests.cluster.real import RealCluster
from tests.node.driver import PRODUCTS, uuid
from tests.node.gpu_checker import GpuChecker, PhysicalCard
from tests.node.node import CONTROL, LOOK, NAMES, WAIT_FOR_EVER, GpuNode, container
from tests.waiting import eventually
from vcuda.names import SCHEDULER
from vcuda.placement_annotation import GpuSlice, encode_placement

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

MODELS = ("A100", "A100", "T4", "T4")
CARDS = {
    uuid(index): PhysicalCard(model, PRODUCTS[model][1], len(MODELS) - 1 - index) for index, model in enumerate(MODELS)
}
QUOTA = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "gpu-quota", "namespace": "default", "labels": {"inspur.com/gpu-quota": "true"}},
    "data": {"quota.yaml": "types:\n  A100: {cores: 4000, memory: 4000Gi}\n  T4: {cores: 4000}\n"},
}
AT_ONCE = 10
RUN_S = 100.0
RELEASED_S = 60.0
# A pod that ends by itself runs for this long, so that its processes can be inspected.
SHORT = LOOK + "sleep 2"


class StreamedPod(Struct, frozen=True):
    """A pod of the stream. It ends by itself, or is deleted while it runs."""

    name: str
    init: list[dict[str, Any]]
    containers: list[dict[str, Any]]
    model: str
    ends: bool

    def manifest(self) -> dict[str, Any]:
        annotations = {NAMES.use_models: self.model} if self.model else {}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "namespace": "default", "annotations": annotations},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 5,
                "initContainers": self.init,
                "containers": self.containers,
                "automountServiceAccountToken": False,
            },
        }


class Stream:
    """Generates pods. Each requests what some single card, or the two of one model, can hold."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pods(self, count: int) -> list[StreamedPod]:
        return [self._pod(number) for number in range(count)]

    def _pod(self, number: int) -> StreamedPod:
        kinds: list[Callable[[str], tuple[list[Any], list[Any]]]] = [
            self._fraction,
            self._fraction,
            self._two_containers,
            self._after_init_container,
            self._beside_sidecar,
            self._whole,
            self._pair,
        ]
        # Every kind ends by itself in one round and is deleted in the next.
        kind, ends = kinds[number % len(kinds)], number // len(kinds) % 2 == 0
        init, containers = kind(SHORT if ends else WAIT_FOR_EVER)
        model = self._random.choice(["", "", "T4", "A100"])
        name = f"{kind.__name__.strip('_').replace('_', '-')}-{number}"
        return StreamedPod(name, init, containers, model, ends)

    def _amounts(self, largest: int = 95) -> tuple[int, int]:
        return self._random.randint(5, largest), self._random.randint(1, 25)

    def _fraction(self, script: str) -> tuple[list[Any], list[Any]]:
        return [], [container("c0", *self._amounts(), script)]

    def _two_containers(self, script: str) -> tuple[list[Any], list[Any]]:
        return [], [container("c0", *self._amounts(60), script), container("c1", *self._amounts(), script)]

    def _after_init_container(self, script: str) -> tuple[list[Any], list[Any]]:
        return [container("first", *self._amounts(), LOOK)], [container("c0", *self._amounts(), script)]

    def _beside_sidecar(self, script: str) -> tuple[list[Any], list[Any]]:
        sidecar = container("side", *self._amounts(40), WAIT_FOR_EVER, restartPolicy="Always")
        return [sidecar], [container("c0", *self._amounts(50), script)]

    def _whole(self, script: str) -> tuple[list[Any], list[Any]]:
        return [], [container("c0", 100, 0, script)]

    def _pair(self, script: str) -> tuple[list[Any], list[Any]]:
        return [], [container("c0", 200, 0, script)]


class Path:
    """A cluster with one GPU node and all of Quotient, and one pod's way through it."""

    def __init__(self, node: GpuNode) -> None:
        self.node, self.cluster = node, node.cluster
        # Set when a pod failed, so that the others are not waited for.
        self._failed = threading.Event()

    def charges(self) -> dict[str, dict[str, Any]]:
        """Read the charges of the namespace from its ledger, by the key of the pod."""
        text = self.cluster.kubectl("get", "configmap", "ledger.default", "-n", SYSTEM, "-o=json")
        (ledger,) = [json.loads(each) for each in json.loads(text)["data"].values()]
        return {
            group["pods"][at : at + 22]: group["charge"]
            for group in ledger.get("groups", [])
            for at in range(0, len(group["pods"]), 22)
        }

    def follow(self, pod: StreamedPod, checker: GpuChecker) -> None:
        try:
            self._follow(pod, checker)
        except BaseException:
            self._failed.set()
            raise

    def _follow(self, pod: StreamedPod, checker: GpuChecker) -> None:
        """Apply a pod, wait until it runs, compare what it sees with its placement, and let it end or delete it."""
        self.cluster.kubectl("apply", "-f-", stdin=json.dumps(pod.manifest()))
        self._wait(pod, checker, {"Running", "Succeeded"})
        raw = checker.pod_named(pod.name)
        assert raw is not None
        placed = checker.placements[raw["metadata"]["uid"]]
        if checker.phase(pod.name) == "Running" and not pod.ends:
            self._check_charge(raw["metadata"]["uid"], placed)
        for each in [*pod.init, *pod.containers]:
            self._check_view(pod.name, each["name"], placed[each["name"]])
        models = {CARDS[card].model for slices in placed.values() for card, _, _ in slices}
        assert len(models) == 1, f"{pod.name} got cards of {models}"
        assert pod.model in {"", *models}, f"{pod.name} asks for {pod.model} and got {models}"
        if pod.ends:
            self._wait(pod, checker, {"Succeeded"})
        self.cluster.kubectl("delete", "pod", pod.name, "--wait=false")
        eventually(lambda: checker.pod_named(pod.name) is None, f"{pod.name} to be gone", RUN_S)

    def _wait(self, pod: StreamedPod, checker: GpuChecker, phases: set[str]) -> None:
        def reached() -> bool:
            assert not self._failed.is_set(), "another pod failed"
            phase = checker.phase(pod.name)
            assert phase != "Failed", self.cluster.kubectl("describe", "pod", pod.name)[-2000:]
            return phase in phases

        try:
            eventually(reached, f"{pod.name} to be in one of {sorted(phases)}", RUN_S)
        except AssertionError as error:
            description = self.cluster.kubectl("describe", "pod", pod.name, check=False)[-2000:]
            raise AssertionError(f"{error}\n{description}") from None

    def bind_as_scheduler(self, name: str, placed: dict[str, list[GpuSlice]]) -> None:
        """Write a Binding that the scheduler could have written, without asking it."""
        annotations = {NAMES.placement: encode_placement(placed)}
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "annotations": annotations},
            "target": {"kind": "Node", "name": NODE_NAME},
        }
        user = (f"--as=system:serviceaccount:{SYSTEM}:{SCHEDULER}", "--as-group=system:masters")
        url = f"/api/v1/namespaces/default/pods/{name}/binding"
        self.cluster.kubectl("create", "--raw", url, "-f-", *user, stdin=json.dumps(binding))

    def _check_charge(self, uid: str, placed: dict[str, Any]) -> None:
        """A running pod is charged for the model of its cards."""
        key = base64.b64encode(uuids.UUID(uid).bytes).decode().rstrip("=")
        charge = self.charges()[key]
        product = PRODUCTS[CARDS[next(iter(placed.values()))[0][0]].model][0]
        assert charge["model"] in product, (charge, product)
        assert "movedFrom" not in charge

    def _check_view(self, pod: str, name: str, slices: tuple[tuple[str, int, int], ...]) -> None:
        """What the container printed about itself is its placement."""
        seen = self.node.seen(pod, name)
        assert seen.devices.keys() - CONTROL == {f"/dev/nvidia{CARDS[card].minor}" for card, _, _ in slices}
        assert seen.visible == ",".join(card for card, _, _ in slices)
        assert seen.limits is not None
        assert tuple((each.uuid, each.cores, each.memory_mib) for each in seen.limits.cards) == slices
        assert (seen.limits.pod, seen.limits.container, seen.writable) == (pod, name, False)

    def wait_empty(self) -> None:
        """Wait until nothing is left of any pod."""
        eventually(lambda: not self.node.allocations(), "all allocations to be released", RELEASED_S)
        eventually(lambda: not self.charges(), "all charges to be released", RELEASED_S)
        for name, value in {"claims": 0.0, "waiting_pods": 0.0, "free_cores": 100.0 * len(MODELS)}.items():
            self._wait_metric(name, value)

    def _wait_metric(self, name: str, value: float) -> None:
        eventually(lambda: scheduler_metric(self.cluster, name) == value, f"{name} to be {value}", RELEASED_S)


@pytest.fixture(scope="module")
def path(real_cluster_possible: None) -> Iterator[Path]:
    """A node with two A100 and two T4, on which the scheduler places pods."""
    cluster = RealCluster.start(node=True)
    try:
        made = Path(GpuNode(cluster, *MODELS).start())
        run_beside(cluster)
        run_scheduler(cluster)
        cluster.kubectl("apply", "-f-", stdin=json.dumps(QUOTA))
        yield made
    finally:
        cluster.stop()


def run_stream(path: Path, count: int) -> GpuChecker:
    pods = Stream(count).pods(count)
    with GpuChecker(path.cluster, CARDS) as checker, ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda pod: path.follow(pod, checker), pods))
        path.wait_empty()
    assert checker.violations == []
    # Otherwise the checker would have checked nothing.
    assert len(checker.placements) == count
    long_lived = {each["name"] for pod in pods for each in pod.containers}
    running = {(uid, name) for uid, placed in checker.placements.items() for name in placed if name in long_lived}
    assert running <= checker.seen
    assert checker.pod_states > count * 4
    return checker


def test_placements_that_overlap_are_settled_by_the_node(
    path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A Binding in flight when the Lease was lost: one of the two pods gets the card, the other one says why not."""
    node, only_a100 = path.node, {NAMES.use_models: "A100"}
    with GpuChecker(path.cluster, CARDS) as checker:
        ours: dict[str, Any] = {"annotations": only_a100, "schedulerName": SCHEDULER}
        node.create("whole", container("c0", 100, 0, WAIT_FOR_EVER), **ours)
        eventually(lambda: checker.phase("whole") == "Running", "a pod on one A100", RUN_S)
        ((used, _, _),) = next(iter(checker.placements.values()))["c0"]
        (card,) = (each for each, its in CARDS.items() if its.model == "A100" and each != used)
        path.cluster.kill(kube_scheduler_name("a"))
        for name in ("one", "two"):
            node.create(name, container("c0", 60, 8, WAIT_FOR_EVER), **ours)
        for name in ("one", "two"):
            path.bind_as_scheduler(name, {"c0": [GpuSlice(card, 60, 2048)]})
        began = time.monotonic()
        phases = {"Running", "Failed"}
        eventually(lambda: {checker.phase(name) for name in ("one", "two")} == phases, "a winner and a loser", RUN_S)
        record_property("settled_after_s", round(time.monotonic() - began, 1))
        (loser,) = (name for name in ("one", "two") if checker.phase(name) == "Failed")
        status = json.loads(path.cluster.kubectl("get", "pod", loser, "-o=json"))["status"]
        assert "its placement cannot be followed" in status["message"]
        path.cluster.kubectl("delete", "pod", "whole", "one", "two")
        path.cluster.run(kube_scheduler_name("a"))
        path.wait_empty()


def test_thirty_pods_of_every_kind_get_what_their_placement_says(path: Path) -> None:
    """More than fit at once, so that some wait; the checker follows pods, checkpoint and processes."""
    run_stream(path, 30)


@pytest.mark.long
def test_three_hundred_pods_of_every_kind_get_what_their_placement_says(
    path: Path, record_property: pytest.FixtureRequest
) -> None:
    checker = run_stream(path, 300)
    for name in ("pod_states", "process_states", "checkpoint_states"):
        record_property(name, getattr(checker, name))  # type: ignore[operator]
