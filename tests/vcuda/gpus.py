"""Builders of GPUs, of what is free of them, and of pods that request them: a test shows only what matters to it."""

from collections.abc import Mapping, Sequence

from vcuda.cost_ranking import RankingContext, ranking_for
from vcuda.gpu_availability import GpuAvailability
from vcuda.inventory import Gpu
from vcuda.placement import PlacedSlices, place_pod
from vcuda.placement_annotation import GpuSlice
from vcuda.placement_strategies import PlacementStrategy
from vcuda.pod_options import PodOptions
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.vocabulary import Share

UNIT_MIB = 256
CARD_MIB = 40960
WHOLE = 100

# Links by the indexes of the two GPUs.
Links = Mapping[tuple[int, int], str]


def uuid(index: int) -> str:
    return f"GPU-{index}"


def gpu(index: int, model: str = "A100", memory_mib: int = CARD_MIB, numa: int | None = None) -> Gpu:
    return Gpu(uuid=uuid(index), index=index, model=model, memory_mib=memory_mib, healthy=True, numa=numa)


def gpus(count: int, links: Links | None = None, numa: Sequence[int] = ()) -> list[Gpu]:
    made = []
    for index in range(count):
        known = {uuid(b if a == index else a): kind for (a, b), kind in (links or {}).items() if index in {a, b}}
        made.append(
            Gpu(
                uuid=uuid(index),
                index=index,
                model="A100",
                memory_mib=CARD_MIB,
                healthy=True,
                numa=numa[index] if numa else None,
                links=known,
            )
        )
    return made


def available(
    index: int, cores: int = WHOLE, free_mib: int = CARD_MIB, reason: str = "", model: str = "A100"
) -> GpuAvailability:
    """A GPU with this much free."""
    return GpuAvailability(gpu(index, model), cores, free_mib, reason)


def unused(gpus: Sequence[Gpu]) -> list[GpuAvailability]:
    return [GpuAvailability(each, WHOLE, each.memory_mib) for each in gpus]


def app(name: str, cores: int, units: int = 1, role: Role = Role.APP, *, follows: bool = False) -> ContainerRequest:
    """A container; it requests one unit of memory unless the test says otherwise."""
    return ContainerRequest(name, role, Share(cores, 0 if follows else units, memory_follows_cores=follows), "")


def init(name: str, cores: int, units: int = 1) -> ContainerRequest:
    return app(name, cores, units, Role.INIT)


def sidecar(name: str, cores: int, units: int = 1) -> ContainerRequest:
    return app(name, cores, units, Role.SIDECAR)


def pod(*containers: ContainerRequest) -> PodRequest:
    return PodRequest(containers)


def place(
    request: PodRequest,
    free: Sequence[GpuAvailability],
    options: PodOptions | None = None,
    strategy: PlacementStrategy = PlacementStrategy.BINPACK,
) -> PlacedSlices:
    ranking = ranking_for(strategy, RankingContext(unit_mib=UNIT_MIB))
    return place_pod(request, free, unit_mib=UNIT_MIB, options=options or PodOptions(), ranking=ranking)


def indexes(slices: Sequence[GpuSlice]) -> list[int]:
    return [int(given.uuid.removeprefix("GPU-")) for given in slices]
