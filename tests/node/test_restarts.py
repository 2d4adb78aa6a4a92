"""Restarts of every part of a node, in every order: each container keeps its GPUs."""

import itertools
from collections.abc import Sequence

import pytest

from tests.cluster.layout import NODE_PLUGIN
from tests.node.driver import uuid
from tests.node.node import CONTROL, GpuNode, container, placement, wait_until
from vcuda.placement_annotation import GpuSlice

pytestmark = [pytest.mark.node, pytest.mark.timeout(1800)]

MIB = 256
STEPS = ("container", "pod", "kubelet", "containerd", "plugin", "node")


def every_ordered_pair(steps: Sequence[str]) -> list[str]:
    """Return a sequence in which every step is followed once by each step, itself included."""
    left = {step: list(steps) for step in steps}
    # An Eulerian circuit of the complete graph, by Hierholzer's algorithm.
    stack, path = [steps[0]], list[str]()
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            path.append(stack.pop())
    return path[::-1]


def test_the_sequence_has_every_ordered_pair() -> None:
    """Or the tests below would not cover every order."""
    sequence = every_ordered_pair(STEPS)
    assert len(sequence) == len(STEPS) ** 2 + 1
    assert {(one, other) for one, other in itertools.pairwise(sequence)} == {
        (one, other) for one in STEPS for other in STEPS
    }


class RunningPods:
    """Three pods, each with a placement; the step "pod" recreates one of them on another card."""

    def __init__(self, node: GpuNode) -> None:
        self.node = node
        self.cards = {"left": 0, "right": 1, "pair": 2}
        self.recreated = 0

    def placed(self, name: str) -> dict[str, tuple[GpuSlice, ...]]:
        if name == "pair":
            return placement(c0=[(uuid(2), 100, 40960), (uuid(3), 100, 40960)])
        return placement(c0=[(uuid(self.cards[name]), 40, 8 * MIB)])

    def run(self, name: str) -> None:
        manifest = container("c0", 200, 2) if name == "pair" else container("c0", 40, 8)
        self.node.run(name, manifest, placed=self.placed(name))

    def run_all(self) -> None:
        for name in self.cards:
            self.run(name)

    def step(self, what: str) -> None:
        """Restart a part of the node, or a pod, and wait until all pods run."""
        match what:
            case "container":
                self.node.kill_container("left")
            case "pod":
                self.node.delete("right")
                self.cards["right"] = 1 - self.cards["right"]
                self.run("right")
            case "plugin":
                self.node.restart(NODE_PLUGIN)
            case "node":
                before = {name: self.node.container_id(name) for name in self.cards}
                self.node.reboot()
                # The API server has the status from before the reboot for a while.
                for name, old in before.items():
                    wait_until(f"{name} to be admitted again", lambda: self._was_restarted(name, old))  # noqa: B023
            case _:
                self.node.restart(what)
        self.recreate_failed()

    def _was_restarted(self, name: str, old: str) -> bool:
        """Whether a pod has another container than before, or was rejected."""
        return self.node.pod(name).status.phase == "Failed" or self.node.container_id(name) not in {"", old}

    def recreate_failed(self) -> None:
        """Wait until all pods run; those that the kubelet rejected are recreated, as their controller would."""
        for name in self.cards:
            wait_until(f"{name} to run or fail", lambda: self.node.pod(name).status.phase in {"Running", "Failed"})  # noqa: B023
            if self.node.pod(name).status.phase == "Failed":
                self.recreated += 1
                self.node.delete(name)
                self.run(name)

    def check(self, after: str) -> None:
        """Each pod sees its own cards, and the allocation checkpoint has the same."""
        for name in self.cards:
            wanted = {each.uuid for each in self.placed(name)["c0"]}
            seen = self.node.seen(name)
            minors = {f"/dev/nvidia{3 - int(each[-1])}" for each in wanted}
            assert seen.devices.keys() - CONTROL == minors, f"{name} after {after}"
            assert set(seen.visible.split(",")) == wanted, f"{name} after {after}"
            assert seen.limits is not None, f"{name} after {after}"
            assert seen.limits.pod == name
        allocated = {each["name"]: set(each["held"]) for each in self.node.allocations().values()}
        assert allocated == {name: {each.uuid for each in self.placed(name)["c0"]} for name in self.cards}, after


@pytest.fixture
def running_pods(node: GpuNode) -> RunningPods:
    pods = RunningPods(node)
    pods.run_all()
    return pods


def run_every_pair(running_pods: RunningPods, steps: Sequence[str]) -> None:
    """Take the steps in every order, and check all pods after each."""
    before = ""
    for step in every_ordered_pair(steps):
        running_pods.step(step)
        running_pods.check(f"{before} and then {step}")
        before = step


def test_restarts_of_container_kubelet_and_plugin_in_every_order(running_pods: RunningPods) -> None:
    """The three that are common in operation."""
    run_every_pair(running_pods, ("container", "kubelet", "plugin"))
    assert running_pods.recreated == 0


@pytest.mark.long
def test_every_pod_keeps_its_cards_after_a_reboot(running_pods: RunningPods) -> None:
    """All processes are gone, and /run is empty."""
    running_pods.step("node")
    running_pods.check("a reboot")
    running_pods.step("pod")
    running_pods.check("a reboot and a new pod")


@pytest.mark.long
def test_restarts_of_everything_in_every_order(
    running_pods: RunningPods, record_property: pytest.FixtureRequest
) -> None:
    """All six parts."""
    run_every_pair(running_pods, STEPS)
    record_property("pods_recreated", running_pods.recreated)  # type: ignore[operator]
