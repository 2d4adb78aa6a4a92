"""What is free of each GPU of a node: its size minus what pods hold of it."""

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from vcuda.inventory import Gpu
from vcuda.vocabulary import CORES_PER_CARD

# Cores and MiB of one GPU.
GpuUsage = tuple[int, int]
NO_USAGE: GpuUsage = (0, 0)


class GpuAvailability(Struct, frozen=True):
    """A GPU and what is free of it. One with an `unavailable_reason` takes no new containers, whatever is free."""

    gpu: Gpu
    free_cores: int
    free_memory_mib: int
    unavailable_reason: str = ""
    # Whether its pods use it so much that others should rather not be added; only set where that is measured.
    is_busy: bool = False

    @property
    def is_unused(self) -> bool:
        # Both: on a GPU whose driver does not report its memory, only the cores show that it is in use.
        return self.free_cores == CORES_PER_CARD and self.free_memory_mib == self.gpu.memory_mib

    def describe(self) -> str:
        state = self.unavailable_reason or f"{self.free_cores} cores and {self.free_memory_mib} MiB free"
        return f"GPU {self.gpu.index} ({self.gpu.model}): {state}"


def sum_usage(held: Iterable[Mapping[str, GpuUsage]]) -> dict[str, GpuUsage]:
    """Add up what several pods hold of each GPU, by UUID."""
    total: dict[str, GpuUsage] = {}
    for each in held:
        for uuid, (cores, mib) in each.items():
            before = total.get(uuid, NO_USAGE)
            total[uuid] = before[0] + cores, before[1] + mib
    return total


def available_gpus(
    gpus: Iterable[Gpu],
    held: Iterable[Mapping[str, GpuUsage]],
    unavailable_reason: Callable[[Gpu], str] = lambda _: "",
) -> list[GpuAvailability]:
    """Return what is free of each GPU, given what each pod holds.

    Free amounts are negative where pods hold more than the GPU has. Usage of a GPU that is not listed is ignored: it
    may have left the node.
    """
    used = sum_usage(held)
    return [
        GpuAvailability(gpu, CORES_PER_CARD - cores, gpu.memory_mib - mib, unavailable_reason(gpu))
        for gpu in gpus
        for cores, mib in [used.get(gpu.uuid, NO_USAGE)]
    ]
