"""Simulated nodes for `quotient local`: what the node plugin of a real node would have published."""

from typing import Any

from msgspec import Struct

from vcuda.inventory import Gpu, encode_inventory
from vcuda.memory import units
from vcuda.model import parse_model
from vcuda.names import Names


class Machine(Struct, frozen=True):
    """A node with cards of one product."""

    name: str
    product: str
    memory_mib: int
    count: int


MACHINES = (
    Machine("gpu-a", "NVIDIA A100-SXM4-40GB", 40960, 4),
    Machine("gpu-b", "Tesla T4", 15360, 2),
    Machine("gpu-c", "NVIDIA GeForce RTX 3090", 24576, 2),
)


def inventory(machine: Machine) -> tuple[Gpu, ...]:
    """List a machine's cards."""
    model = parse_model(machine.product).name
    return tuple(
        Gpu(
            uuid=f"GPU-{machine.name}-{index}",
            index=index,
            model=model,
            memory_mib=machine.memory_mib,
            healthy=True,
            numa=index * 2 // machine.count,
        )
        for index in range(machine.count)
    )


def node(machine: Machine, names: Names, unit_mib: int) -> dict[str, Any]:
    """Write a machine as a Node object."""
    cards = inventory(machine)
    resources = {
        names.core: str(100 * machine.count),
        names.memory: str(units(machine.memory_mib, unit_mib) * machine.count),
        "cpu": "32",
        "memory": "256Gi",
        "pods": "110",
    }
    return {
        "metadata": {
            "name": machine.name,
            "labels": {names.model_label: cards[0].model},
            "annotations": {names.inventory: encode_inventory(cards)},
        },
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
