"""A node whose driver limits memory: a tree of cgroups and processes in a folder, and the fake driver of r615."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nodeplugin import fake
from nodeplugin.memory_limits import LimitedContainer, MemoryLimiter
from nodeplugin.nvml import Driver, MemoryLimits, load_bindings
from vcuda.memory_units import MIB

UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
OTHER_UID = "11111111-2222-3333-4444-555555555555"
ID, OTHER_ID = "0123456789abcdef" * 4, "fedcba9876543210" * 4
TOKEN, OTHER_TOKEN = "a" * 16, "b" * 16
PID = 4711
LIMIT_MIB = 8192
HELD = MemoryLimits(0, LIMIT_MIB * MIB)


def pod_path(uid: str = UID, container_id: str = ID) -> str:
    return f"/kubepods/burstable/pod{uid}/{container_id}"


def description(**changes: Any) -> dict[str, Any]:
    """Two cards of r615; changes are of the first."""
    cards = [{"uuid": f"GPU-{index}", "product": "NVIDIA A100-SXM4-40GB", "memoryMiB": 40960} for index in range(2)]
    return {"driver": "615.20.01", "cards": [cards[0] | changes, cards[1]]}


class LimitBench:
    """Containers of two pods, of which the first has a process that is about to start."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.host, self.proc, self.library = folder / "host", folder / "proc", folder / "driver"
        self.root = self.host / "sys/fs/cgroup"
        self.root.mkdir(parents=True)
        (self.root / "cgroup.controllers").write_text("cpu memory dmem\n")
        (self.root / "cgroup.subtree_control").write_text("cpu dmem\n")
        fake.install(self.library, description(**changes))
        self.driver = Driver(self.library / "libnvidia-ml.so.1", load_bindings()).open()
        self.driver.read_cards(self.driver.count_cards())
        self.containers = {
            TOKEN: LimitedContainer(UID, "team/train", "a", {"GPU-0": LIMIT_MIB}),
            OTHER_TOKEN: LimitedContainer(OTHER_UID, "other/train", "a", {"GPU-1": 1024}),
        }
        self.limiter = MemoryLimiter(self.driver, self.host, lambda: self.containers, self.proc)
        self.leaf = self.start_process()

    def start_process(self, pid: int = PID, path: str = "") -> Path:
        """Put a process into a cgroup, which is created; returns its folder."""
        path = path or pod_path()
        leaf = self.root / path[1:]
        leaf.mkdir(parents=True, exist_ok=True)
        for each in (leaf, *leaf.parents):
            if each == self.root:
                break
            for name in ("cgroup.controllers", "cgroup.subtree_control"):
                if not (each / name).exists():
                    (each / name).write_text("cpu dmem\n")
        self.write_process(pid, f"0::{path}\n")
        return leaf

    def write_process(self, pid: int, text: str) -> None:
        (self.proc / str(pid)).mkdir(parents=True, exist_ok=True)
        (self.proc / str(pid) / "cgroup").write_text(text)

    def change(self, **changes: Any) -> None:
        fake.describe(self.library, description(**changes))

    def limits(self, uuid: str = "GPU-0", leaf: Path | None = None) -> MemoryLimits:
        return self.driver.memory_limits(uuid, leaf or self.leaf)

    def close(self) -> None:
        self.driver.close()


def state(**changes: Any) -> str:
    """What a runtime passes to its hooks."""
    made: Mapping[str, Any] = {"ociVersion": "1.0.2", "id": ID, "status": "creating", "pid": PID, "bundle": "/run/b"}
    return json.dumps({key: value for key, value in {**made, **changes}.items() if value is not None})
