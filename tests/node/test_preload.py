"""Shares of memory that the preloaded library enforces, in real containers on the fake CUDA driver."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeplugin import fake
from tests.cluster.layout import NODE_PLUGIN
from tests.cluster.real import RealCluster
from tests.node.driver import uuid
from tests.node.node import END, WAIT_S, GpuNode, container, placement, wait_until
from tests.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]

MIB, CONTEXT_MIB = 256, 100
SOURCE = Path(__file__).with_name("allocate.c")
# What a program needs that is linked dynamically: the image has no C library.
LOADER, LIBRARIES = "/lib64", "/lib/x86_64-linux-gnu"
OUT_OF_MEMORY = 2


class PreloadNode(GpuNode):
    """A node whose fake driver runs programs, and a folder with such a program."""

    def __init__(self, cluster: RealCluster, *kinds: str) -> None:
        super().__init__(cluster, *kinds)
        self.shared = cluster.layout.state / "programs"
        self.shared.mkdir()
        subprocess.run(["gcc", "-o", str(self.shared / "allocate"), str(SOURCE), "-ldl"], check=True)
        self.driver.change(set_context_size)

    def allocating(self, name: str, cores: int, units: int, *sizes_mib: int, **more: Any) -> dict[str, Any]:
        """Return a container that allocates memory."""
        # Not as process 1, which nothing in the container can kill.
        command = ["sh", "-c", f"/programs/allocate {' '.join(map(str, sizes_mib))} & wait $!; exit 1"]
        env = [
            {"name": "QUOTIENT_FAKE_STATE", "value": "/devices/fake-devices.state"},
            {"name": "QUOTIENT_FAKE_GPUS", "value": f"/devices/{fake.DESCRIPTION}"},
        ]
        mounts = [
            {"name": "programs", "mountPath": "/programs"},
            {"name": "devices", "mountPath": "/devices"},
            {"name": "loader", "mountPath": LOADER, "readOnly": True},
            {"name": "libraries", "mountPath": LIBRARIES, "readOnly": True},
        ]
        made = container(name, cores, units, **more) | {"command": command, "env": env, "volumeMounts": mounts}
        return made | more

    @property
    def volumes(self) -> list[dict[str, Any]]:
        devices = str(self.driver.libraries)
        paths = {"programs": str(self.shared), "devices": devices, "loader": LOADER, "libraries": LIBRARIES}
        return [{"name": name, "hostPath": {"path": path}} for name, path in paths.items()]

    def printed(self, pod: str, name: str = "c0") -> str:
        """Return what a container's program has printed since its last start."""
        text = ""

        def is_complete() -> bool:
            nonlocal text
            text = self.cluster.kubectl("logs", pod, "-c", name, check=False)
            return END in text

        eventually(is_complete, f"{pod}/{name} to allocate", WAIT_S)
        return text

    def results(self, pod: str, name: str = "c0") -> list[int]:
        print(self.printed(pod, name))
        return [int(code) for code in re.findall(r"^allocate \d+: (\d+)$", self.printed(pod, name), re.MULTILINE)]


def set_context_size(description: dict[str, Any]) -> None:
    for card in description["cards"]:
        card["contextMiB"] = CONTEXT_MIB


@pytest.fixture(scope="module", params=[False, True], ids=["native", "cdi"])
def preload_node(request: pytest.FixtureRequest, real_cluster_possible: None) -> Iterator[PreloadNode]:
    """A node with two cards, with each way to inject them."""
    cluster = RealCluster.start(node=True, cdi=request.param)
    try:
        node = PreloadNode(cluster, "A100", "A100")
        node.start()
        yield node
    finally:
        cluster.stop()


@pytest.fixture
def node(preload_node: PreloadNode) -> Iterator[PreloadNode]:
    """The node; afterwards its pods are deleted."""
    yield preload_node
    preload_node.clear()


def test_the_library_is_published_for_each_card(node: PreloadNode) -> None:
    """For memory; nothing limits compute yet."""
    wait_until("the inventory", lambda: [str(gpu.isolation.memory) for gpu in node.inventory()] == ["preload"] * 2)
    assert {str(gpu.isolation.compute) for gpu in node.inventory()} == {"none"}


def test_a_container_cannot_allocate_more_than_its_share(node: PreloadNode) -> None:
    """It sees its share as the whole; another container on the card has its own."""
    # What a context takes is charged as well: 300 MiB, and 100 as soon as that was measured.
    first = node.allocating("c0", 30, 4, 925, 700, 300)
    second = node.allocating("c1", 30, 8, 1700, 300)
    placed = placement(c0=[(uuid(1), 30, 4 * MIB)], c1=[(uuid(1), 30, 8 * MIB)])
    node.run("one", first, second, placed=placed, volumes=node.volumes)
    assert f"total {4 * MIB} free " in node.printed("one")
    assert node.results("one") == [OUT_OF_MEMORY, 0, OUT_OF_MEMORY]
    assert node.results("one", "c1") == [0, OUT_OF_MEMORY]


def test_a_whole_card_has_no_library(node: PreloadNode) -> None:
    """Its programs see all of its memory, and nothing is preloaded."""
    whole = node.allocating("c0", 100, 1, 30000)
    node.run("one", whole, placed=placement(c0=[(uuid(0), 100, 40960)]), volumes=node.volumes)
    assert node.results("one") == [0]
    assert "ld.so.preload" not in node.cluster.kubectl("exec", "one", "--", "/bin/busybox", "ls", "/etc")


def test_limits_hold_across_restarts(node: PreloadNode) -> None:
    """Of the container, the plugin, and the node, whose tmpfs are gone then."""
    placed = placement(c0=[(uuid(1), 30, 4 * MIB)])
    node.run("one", node.allocating("c0", 30, 4, 600, 400), placed=placed, volumes=node.volumes)
    expected = [0, OUT_OF_MEMORY]
    assert node.results("one") == expected
    node.cluster.restart(NODE_PLUGIN)
    node.wait_offered()
    node.kill_container("one")
    assert node.results("one") == expected


def test_it_is_known_from_outside_whether_a_limit_holds(node: PreloadNode) -> None:
    """By what NVML shows of the container's processes."""
    placed = placement(c0=[(uuid(1), 30, 4 * MIB)])
    node.run("one", node.allocating("c0", 30, 4, 600), placed=placed, volumes=node.volumes)
    assert node.results("one") == [0]
    wanted = re.compile(
        r'^quotient_container_limit_holds\{.*dimension="memory".*rung="preload".*\} 1\.0$', re.MULTILINE
    )
    wait_until("the metric", lambda: wanted.search(node.monitor("/metrics")))
