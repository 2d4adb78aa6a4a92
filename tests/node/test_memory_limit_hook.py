"""The hook of the driver's memory limit on a real runc, with real cgroups; only the driver is a fake one."""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodeplugin import fake
from nodeplugin.leaf_cgroups import find_cgroup2
from nodeplugin.memory_limit_hook import MemoryLimitHook
from nodeplugin.memory_limit_server import MemoryLimitServer
from nodeplugin.memory_limits import LimitedContainer, MemoryLimiter
from nodeplugin.nvml import Driver, load_bindings
from tests.node.runc import Runc, real_runc
from tests.nodeplugin.limit_bench import HELD, ID, LIMIT_MIB, OTHER_ID, OTHER_UID, TOKEN, UID, description
from tests.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(120)]

HOST = Path("/")


class LimitedNode:
    """The plugin's part of a node: hook, socket, limiter, and a fake driver of r615."""

    def __init__(self, folder: Path, runc: Runc) -> None:
        self.runc, self.hook, self.library = runc, MemoryLimitHook(folder / "plugin"), folder / "driver"
        self.hook.install()
        fake.install(self.library, description())
        self.driver = Driver(self.library / "libnvidia-ml.so.1", load_bindings()).open()
        self.driver.read_cards(self.driver.count_cards())
        self.containers = {TOKEN: LimitedContainer(UID, "team/train", "a", {"GPU-0": LIMIT_MIB})}
        self.server: MemoryLimitServer | None = None
        self.asked: list[tuple[str, int, str]] = []

    def start(self) -> "LimitedNode":
        limiter = MemoryLimiter(self.driver, HOST, lambda: self.containers)

        def apply(token: str, pid: int, container_id: str) -> None:
            self.asked.append((token, pid, container_id))
            limiter.apply(token, pid, container_id)

        self.server = MemoryLimitServer(self.hook.socket, apply).start()
        return self

    def create(self, container_id: str = ID, uid: str = UID) -> tuple[int, str, Path]:
        """Create a container; returns runc's exit code and messages, and the container's root file system."""
        described = self.hook.hook(TOKEN)
        hooks = {described["hookName"]: [{key: value for key, value in described.items() if key != "hookName"}]}
        bundle = self.runc.bundle(container_id, uid, hooks)
        done = self.runc.run("create", "--bundle", str(bundle), container_id)
        return done.returncode, done.stdout, bundle / "rootfs"

    def limited_cgroups(self) -> list[str]:
        """Return what the driver was told, without inodes."""
        file = self.library / "memory-limits.txt"
        return [re.sub(r" (\d+) /", " /", line) for line in file.read_text().splitlines()] if file.exists() else []

    def close(self) -> None:
        if self.server is not None:
            self.server.stop()
        self.driver.close()


@pytest.fixture
def node(real_cluster_possible: None) -> Iterator[LimitedNode]:
    """A node whose containers end with the test; a socket's path may have 107 characters only."""
    if find_cgroup2(HOST) is None:
        pytest.skip("this machine has no cgroup v2")
    with tempfile.TemporaryDirectory(prefix="quotient-") as folder, real_runc(Path(folder)) as runc:
        made = LimitedNode(Path(folder), runc)
        try:
            yield made
        finally:
            made.close()


def leaf_of(node: LimitedNode, container_id: str = ID) -> Path:
    root = find_cgroup2(HOST)
    assert root is not None
    return root / node.runc.cgroup_path(container_id, UID)[1:]


def test_the_limit_is_on_the_containers_leaf_before_its_first_program_runs(node: LimitedNode) -> None:
    """The runtime passes the first process, whose cgroup exists; the program starts only later."""
    code, messages, rootfs = node.start().create()
    assert code == 0, messages
    leaf = leaf_of(node)
    assert node.limited_cgroups() == [f"GPU-0 0 {HELD.hard_bytes} {leaf}"]
    assert node.driver.memory_limits("GPU-0", leaf) == HELD
    ((token, pid, container_id),) = node.asked
    assert (token, container_id) == (TOKEN, ID)
    assert (leaf / "cgroup.procs").read_text().split() == [str(pid)]
    assert not (rootfs / "started").exists()
    assert node.runc.run("start", ID).returncode == 0
    eventually((rootfs / "started").exists, "the container's program to start")


def test_a_container_that_starts_again_is_limited_again(node: LimitedNode) -> None:
    """In its new cgroup; the limit of the old one went with it."""
    assert node.start().create()[0] == 0
    assert node.runc.run("delete", "--force", ID).returncode == 0
    assert not leaf_of(node).exists()
    assert node.create(OTHER_ID)[0] == 0
    assert node.driver.memory_limits("GPU-0", leaf_of(node, OTHER_ID)) == HELD


def check_aborted(node: LimitedNode, created: tuple[int, str, Path], reason: str) -> None:
    """The container was not created, and runc says why; nothing of it runs."""
    code, messages, rootfs = created
    assert code != 0
    assert reason in messages
    assert not (rootfs / "started").exists()
    assert node.runc.run("start", ID).returncode != 0
    leaf = leaf_of(node)
    assert not leaf.exists() or (leaf / "cgroup.procs").read_text() == ""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "the driver refuses": ({"failures": {"setMemoryLimits": "no_permission"}}, "Insufficient Permissions"),
    "the driver ignores the limit": ({"ignoresMemoryLimits": True}, "the driver has the hard limit none"),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_limit_that_is_not_in_force_aborts_the_start(node: LimitedNode, changes: dict[str, Any], reason: str) -> None:
    """The reason is in runc's message, and so in the events of the pod."""
    fake.describe(node.library, description(**changes))
    check_aborted(node.start(), node.create(), reason)


def test_the_token_of_another_pod_aborts_the_start(node: LimitedNode) -> None:
    """The process tells to which pod it belongs."""
    code, messages, _ = node.start().create(uid=OTHER_UID)
    assert code != 0
    assert f"is of pod {OTHER_UID}" in messages
    assert node.limited_cgroups() == []


def test_without_a_plugin_the_start_is_aborted(node: LimitedNode) -> None:
    """After five seconds."""
    check_aborted(node, node.create(), "did not accept a connection within 5 s")
