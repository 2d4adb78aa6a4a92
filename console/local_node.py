"""Simulated nodes for `quotient local`: each has a simulated driver, a small kubelet and the real node plugin."""

import tempfile
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from cluster.in_memory import InMemoryCluster
from cluster.objects import NODES, PODS
from console.local_kubelet import LocalKubelet
from nodeplugin import fake
from nodeplugin.nvml import Driver, load_bindings
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
    """A machine with cards of one product; with `nvlinks`, each two of them are connected by that many NVLinks."""

    name: str
    product: str
    memory_mib: int
    count: int
    nvlinks: int = 0

    def uuid(self, index: int) -> str:
        return f"GPU-{self.name}-{index}"

    def description(self) -> dict[str, Any]:
        """Return the file that the simulated driver reads."""
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
    """The driver, kubelet and plugin of one machine, with all their files in a temporary folder."""

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
            # No program runs in these containers, and nothing is mounted on a visitor's machine.
            isolation="none",
        )
        own = replace(configuration, node_plugin=settings, monitor=MonitorSettings(address="127.0.0.1", port=0))
        self.plugin = Service(own, cluster, Driver(bindings=load_bindings()))

    def start(self) -> None:
        self.plugin.start()

    @property
    def ready(self) -> bool:
        """Whether the kubelet has the devices of both resources, and the plugin has seen its Node."""
        published = self.plugin.publisher.nodes.get(self.machine.name)
        return len(self.kubelet.offered) > 1 and all(self.kubelet.offered.values()) and published is not None

    def sync(self) -> None:
        """Let the kubelet admit and release the pods of this node."""
        pods = self._cluster.list(PODS).items
        self.kubelet.sync(pod for pod in pods if pod.spec.node_name == self.machine.name)

    def begin_stop(self) -> None:
        """Tell the plugin to end, without waiting for it."""
        self.plugin.ending.set()

    def stop(self) -> None:
        self.plugin.stop()
        self.kubelet.stop()
        self._folder.cleanup()


def lay_out_driver(root: Path, machine: SimulatedMachine) -> None:
    """Create a driver's folder. Plain files stand for device nodes, which only root can create."""
    fake.install(root / LIBRARIES, machine.description())
    (root / "dev").mkdir()
    for name in (*CONTROL_NODES, *(f"nvidia{index}" for index in range(machine.count))):
        (root / "dev" / name).touch()
    (root / LIBRARIES / f"libcuda.so.{VERSION}").touch()


def inventory_of(machine: SimulatedMachine) -> tuple[Gpu, ...]:
    """Return the inventory that the plugin of a machine would publish."""
    model = parse_model(machine.product).name
    return tuple(
        Gpu(uuid=machine.uuid(index), index=index, model=model, memory_mib=machine.memory_mib, healthy=True)
        for index in range(machine.count)
    )


def node_object(machine: SimulatedMachine, names: Names, unit_mib: int) -> dict[str, Any]:
    """Return the Node of a machine on which no plugin runs."""
    cards = inventory_of(machine)
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
