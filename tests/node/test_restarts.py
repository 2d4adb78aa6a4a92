"""What survives when parts of a node end and begin again, in every order: each container keeps the GPU it was given."""

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


def pairs_in_a_row(steps: Sequence[str]) -> list[str]:
    """Give a walk on which every step is followed once by every other, and by itself."""
    left = {step: list(steps) for step in steps}
    walk, path = [steps[0]], list[str]()
    while walk:
        if left[walk[-1]]:
            walk.append(left[walk[-1]].pop())
        else:
            path.append(walk.pop())
    return path[::-1]


def test_the_walk_holds_every_ordered_pair() -> None:
    """Else a test would not try what it says it tries."""
    walk = pairs_in_a_row(STEPS)
    assert len(walk) == len(STEPS) ** 2 + 1
    assert {(one, other) for one, other in itertools.pairwise(walk)} == {
        (one, other) for one in STEPS for other in STEPS
    }


class Tenants:
    """Three pods that share cards, each on a card of its own choice; one is moved at every step of its kind."""

    def __init__(self, node: GpuNode) -> None:
        self.node = node
        self.cards = {"left": 0, "right": 1, "pair": 2}
        self.reborn = 0

    def placed(self, name: str) -> dict[str, tuple[GpuSlice, ...]]:
        if name == "pair":
            return placement(c0=[(uuid(2), 100, 40960), (uuid(3), 100, 40960)])
        return placement(c0=[(uuid(self.cards[name]), 40, 8 * MIB)])

    def run(self, name: str) -> None:
        asked = container("c0", 200, 2) if name == "pair" else container("c0", 40, 8)
        self.node.run(name, asked, placed=self.placed(name))

    def run_all(self) -> None:
        for name in self.cards:
            self.run(name)

    def step(self, what: str) -> None:
        """Have something end and begin again."""
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
                # The API server says for a while what was before.
                for name, old in before.items():
                    wait_until(f"{name} to be taken up again", lambda: self._is_another(name, old))  # noqa: B023
            case _:
                self.node.restart(what)
        self.settle()

    def _is_another(self, name: str, old: str) -> bool:
        """Tell whether a pod has another container than before, or was refused."""
        return self.node.pod(name).status.phase == "Failed" or self.node.container_id(name) not in {"", old}

    def settle(self) -> None:
        """Wait until all run; a kubelet may refuse pods after a reboot, and then somebody makes them again."""
        for name in self.cards:
            wait_until(f"{name} to be decided on", lambda: self.node.pod(name).status.phase in {"Running", "Failed"})  # noqa: B023
            if self.node.pod(name).status.phase == "Failed":
                self.reborn += 1
                self.node.delete(name)
                self.run(name)

    def check(self, after: str) -> None:
        """Each sees its own cards, and the book says the same."""
        for name in self.cards:
            wanted = {each.uuid for each in self.placed(name)["c0"]}
            seen = self.node.seen(name)
            minors = {f"/dev/nvidia{3 - int(each[-1])}" for each in wanted}
            assert seen.devices.keys() - CONTROL == minors, f"{name} after {after}"
            assert set(seen.visible.split(",")) == wanted, f"{name} after {after}"
            assert seen.limits is not None, f"{name} after {after}"
            assert seen.limits.pod == name
        held = {each["name"]: set(each["held"]) for each in self.node.book().values()}
        assert held == {name: {each.uuid for each in self.placed(name)["c0"]} for name in self.cards}, after


@pytest.fixture
def tenants(node: GpuNode) -> Tenants:
    found = Tenants(node)
    found.run_all()
    return found


def walk(tenants: Tenants, steps: Sequence[str]) -> None:
    """Take one step after another, and look after each."""
    before = ""
    for step in pairs_in_a_row(steps):
        tenants.step(step)
        tenants.check(f"{before} and then {step}")
        before = step


def test_restarts_of_container_kubelet_and_plugin_in_every_order(tenants: Tenants) -> None:
    """The three that happen every day."""
    walk(tenants, ("container", "kubelet", "plugin"))
    assert tenants.reborn == 0


@pytest.mark.long
def test_a_reboot_leaves_everybody_his_own(tenants: Tenants) -> None:
    """Everything on the node is gone, and /run is empty."""
    tenants.step("node")
    tenants.check("a reboot")
    tenants.step("pod")
    tenants.check("a reboot and a new pod")


@pytest.mark.long
def test_restarts_of_everything_in_every_order(tenants: Tenants, record_property: pytest.FixtureRequest) -> None:
    """All six, each after each."""
    walk(tenants, STEPS)
    record_property("pods_made_again", tenants.reborn)  # type: ignore[operator]
