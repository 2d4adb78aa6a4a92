"""Simulated nodes for `quotient local`: each with a fake driver, a small kubelet, and the real node plugin."""

import tempfile
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from cluster.in_memory import InMemoryCluster
from cluster.objects import NODES, PODS
from console.local_kubelet import LocalKubelet
from nodeplugin import fake
from nodeplugin.nvml import Driver, own_bindings
from nodeplugin.service import Service
from settings.configuration import Configuration, MonitorSettings
from vcuda.gpu_model import parse_model
from vcuda.inventory import Gpu, encode_inventory
from vcuda.memory_units import units_for
from vcuda.names import Names

LIBRARIES = "usr/lib/x86_64-linux-gnu"
VERSION = "550.54.15"
CONTROL_NODES = ("nvidiactl", "nvidia-uvm")
READY = [{"type": "Ready", "status": "True"}]


class SimulatedMachine(Struct, frozen=True):
    """A node with cards of one product, in pairs that NVLink connects."""

    name: str
    product: str
    memory_mib: int
    count: int
    nvlinks: int = 0

    def uuid(self, index: int) -> str:
        """Name a card."""
        return f"GPU-{self.name}-{index}"

    def description(self) -> dict[str, Any]:
        """Describe it to the fake driver."""
        cards = [
            {
                "uuid": self.uuid(index),
                "minor": index,
                "product": self.product,
                "memoryMiB": self.memory_mib,
                "numa": index * 2 // self.count,
            }
            for index in range(self.count)
        ]
        links = [{"a": index, "b": index + 1, "nvlink": self.nvlinks} for index in range(0, self.count - 1, 2)]
        return {"driver": VERSION, "cards": cards, **({"links": links} if self.nvlinks else {})}


SIMULATED_MACHINES = (
    SimulatedMachine("gpu-a", "NVIDIA A100-SXM4-40GB", 40960, 4, nvlinks=4),
    SimulatedMachine("gpu-b", "Tesla T4", 15360, 2),
    SimulatedMachine("gpu-c", "NVIDIA GeForce RTX 3090", 24576, 2),
)


class SimulatedNode:
    """One machine: its driver, its kubelet, its plugin; everything below a folder that goes with it."""

    def __init__(self, cluster: InMemoryCluster, machine: SimulatedMachine, configuration: Configuration) -> None:
        self._cluster, self.machine = cluster, machine
        self._folder = tempfile.TemporaryDirectory(prefix="quotient-")
        root = Path(self._folder.name)
        lay_out_driver(root / "driver", machine)
        cluster.create(NODES, {"metadata": {"name": machine.name}, "status": {"conditions": READY}})
        self.kubelet = LocalKubelet(cluster, machine.name, root / "kubelet")
        settings = replace(
            configuration.node_plugin,
            node_name=machine.name,
            folder=str(root / "state"),
            device_plugins=str(self.kubelet.plugins),
            pod_resources=str(self.kubelet.pod_resources),
            host_root="/",
            driver_root=str(root / "driver"),
            injection="native",
            health=replace(configuration.node_plugin.health, poll_s=0.5),
        )
        own = replace(configuration, node_plugin=settings, monitor=MonitorSettings(address="127.0.0.1", port=0))
        self.plugin = Service(own, cluster, Driver(bindings=own_bindings()))

    def start(self) -> None:
        """Begin."""
        self.plugin.start()

    @property
    def ready(self) -> bool:
        """Whether the kubelet knows all cards, and the Node says so."""
        published = self.plugin.publisher.nodes.get(self.machine.name)
        return len(self.kubelet.offered) > 1 and all(self.kubelet.offered.values()) and published is not None

    def sync(self) -> None:
        """Have the kubelet look at the pods of this node."""
        pods = self._cluster.list(PODS).items
        self.kubelet.sync(pod for pod in pods if pod.spec.node_name == self.machine.name)

    def end(self) -> None:
        """Begin to end."""
        self.plugin.ending.set()

    def stop(self) -> None:
        """End, and leave nothing."""
        self.plugin.stop()
        self.kubelet.stop()
        self._folder.cleanup()


def lay_out_driver(root: Path, machine: SimulatedMachine) -> None:
    """Write what a driver's folder holds; files stand for device nodes, which only root could make."""
    fake.install(root / LIBRARIES, machine.description())
    (root / "dev").mkdir()
    for name in (*CONTROL_NODES, *(f"nvidia{index}" for index in range(machine.count))):
        (root / "dev" / name).touch()
    (root / LIBRARIES / f"libcuda.so.{VERSION}").touch()


def inventory(machine: SimulatedMachine) -> tuple[Gpu, ...]:
    """List a machine's cards, as its plugin would."""
    model = parse_model(machine.product).name
    return tuple(
        Gpu(uuid=machine.uuid(index), index=index, model=model, memory_mib=machine.memory_mib, healthy=True)
        for index in range(machine.count)
    )


def node(machine: SimulatedMachine, names: Names, unit_mib: int) -> dict[str, Any]:
    """Write a machine as a Node object, for where no plugin runs."""
    cards = inventory(machine)
    resources = {
        names.core: str(100 * machine.count),
        names.memory: str(units_for(machine.memory_mib, unit_mib) * machine.count),
    }
    return {
        "metadata": {
            "name": machine.name,
            "labels": {names.model_label: cards[0].model},
            "annotations": {names.inventory: encode_inventory(cards)},
        },
        "status": {"capacity": resources, "allocatable": resources, "conditions": READY},
    }
