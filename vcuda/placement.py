"""Which GPUs of a node the containers of a pod get: one function for the scheduler, the node plugin and the simulator.

A pod is placed as a whole or not at all, on GPUs of one model, because its quota is charged for one model. Init
containers run one after another and before the app containers, so a pod is placed in phases, and no GPU is ever filled
beyond its size in any of them. The same pod on the same node always gets the same placement.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from vcuda.allowed_gpus import may_use, may_use_model
from vcuda.gpu_availability import NO_USAGE, GpuAvailability, GpuUsage, available_gpus
from vcuda.gpu_model import parse_model
from vcuda.gpu_topology import best_sets
from vcuda.inventory import Gpu
from vcuda.isolation import NO_ISOLATION, Isolation
from vcuda.placement_annotation import GpuSlice
from vcuda.placement_strategies import BinPack, Ranking
from vcuda.pod_options import NO_OPTIONS, PodOptions
from vcuda.request import MAX_GPU_CONTAINERS, ContainerRequest, PodRequest, Role, share_memory_mib
from vcuda.vocabulary import CORES_PER_CARD, Share

# A search that is not over after this many steps is given up: packing is NP-hard, and the kubelet waits for the answer.
MAX_STEPS = 2000

BINPACK = BinPack()

# By container name.
PlacedSlices = dict[str, tuple[GpuSlice, ...]]


class InsufficientGpus(Exception):  # noqa: N818 - not an error of the program
    """A pod does not fit on a node; the message says what was requested and what is free of each GPU."""


def place_pod(
    request: PodRequest,
    gpus: Sequence[GpuAvailability],
    *,
    unit_mib: int,
    options: PodOptions = NO_OPTIONS,
    ranking: Ranking = BINPACK,
    budget: "SearchBudget | None" = None,
) -> PlacedSlices:
    """Choose GPUs for all containers of a pod. Raises InsufficientGpus if there is no placement, or none was found."""
    if len(request.containers) > MAX_GPU_CONTAINERS:
        raise InsufficientGpus(f"the pod has more than {MAX_GPU_CONTAINERS} containers with GPUs")
    allowed = [each for each in gpus if may_use(options, each.gpu)]
    if not allowed:
        raise InsufficientGpus(no_allowed_gpu(options, gpus) if gpus else "this node has no GPUs")
    if problem := isolation_problem(request, options, allowed):
        raise InsufficientGpus(problem)
    for candidates in group_by_model(allowed, request, ranking):
        trial = TrialPlacement(candidates, request, unit_mib, options.min_isolation)
        if trial.lacks_cores(request):
            continue
        # The largest containers first, because they fit on the fewest GPUs. Equal ones keep the order of the pod.
        order = sorted(request.containers, key=trial.relative_size, reverse=True)
        placed = PlacementSearch(trial, ranking, budget).run(order)
        if placed is not None:
            return {each.name: trial.slices(each, placed[each.name]) for each in request.containers}
    raise InsufficientGpus(
        f"insufficient GPUs for {describe_request(request, unit_mib)}: {'; '.join(each.describe() for each in allowed)}"
    )


def no_allowed_gpu(options: PodOptions, gpus: Sequence[GpuAvailability]) -> str:
    if any(may_use_model(options, each.gpu.model) for each in gpus):
        return "this node has no GPU that the pod's lists of UUIDs allow"
    if options.models:
        return f"this node has no GPU of the requested models: {', '.join(options.models)}"
    if any(parse_model(each.gpu.model).mig_profile for each in gpus):
        return "this node only has MIG slices, and the pod does not name one in use-gputype"
    return f"this node only has GPUs of excluded models: {', '.join(options.avoided_models)}"


def isolation_problem(request: PodRequest, options: PodOptions, gpus: Iterable[GpuAvailability]) -> str:
    """Return that no GPU isolates the pod's shares well enough, or an empty text if one does; whole ones always do."""
    minimum = options.min_isolation
    if not minimum or all(each.share.whole_cards for each in request.containers):
        return ""
    if any(each.gpu.isolation.is_at_least(minimum) for each in gpus):
        return ""
    return f"this node has no GPU with isolation {minimum} or stronger"


def group_by_model(
    gpus: Iterable[GpuAvailability], request: PodRequest, ranking: Ranking
) -> list[list[GpuAvailability]]:
    """Group GPUs by model, the models in the order in which they are tried."""
    by_model: dict[str, list[GpuAvailability]] = {}
    for each in sorted(gpus, key=lambda each: (each.gpu.index, each.gpu.uuid)):
        by_model.setdefault(each.gpu.model, []).append(each)
    if len(by_model) == 1:
        return list(by_model.values())
    share = largest_share(request)
    ranks = {name: ranking.rank_model(share, group) for name, group in by_model.items()}
    return [by_model[name] for name in sorted(by_model, key=lambda name: (ranks[name], name))]


def largest_share(request: PodRequest) -> Share:
    """Return the share with the most cores, by which the nodes for a pod are ranked."""
    return max((each.share for each in request.containers), key=lambda share: share.cores)


def describe_request(request: PodRequest, unit_mib: int) -> str:
    parts = []
    for each in request.containers:
        share = each.share
        memory = "" if share.whole_cards or share.memory_follows_cores else f" and {share.memory_units * unit_mib} MiB"
        parts.append(
            f"{each.name} ({share.whole_cards} whole GPU{'s' if share.whole_cards > 1 else ''})"
            if share.whole_cards
            else f"{each.name} ({share.cores} cores{memory})"
        )
    return ", ".join(parts)


def running_phases(request: PodRequest) -> dict[str, tuple[int, ...]]:
    """Return in which phases of the pod's life each container runs, by container name.

    Each init container has a phase of its own; a sidecar runs from its turn to the end; app containers run in the last
    phase.
    """
    order = [each for each in request.containers if each.role is not Role.APP]
    last = sum(each.role is Role.INIT for each in order)
    phases: dict[str, tuple[int, ...]] = {}
    turn = 0
    for each in order:
        if each.role is Role.INIT:
            phases[each.name] = (turn,)
            turn += 1
        else:
            phases[each.name] = tuple(range(turn, last + 1))
    return phases | {each.name: (last,) for each in request.containers if each.role is Role.APP}


def peak_cores(request: PodRequest) -> int:
    """Return the most cores that a pod needs in any phase."""
    phases = running_phases(request)
    needed: dict[int, int] = {}
    for each in request.containers:
        for phase in phases[each.name]:
            needed[phase] = needed.get(phase, 0) + each.share.cores
    return max(needed.values(), default=0)


def required_memory_mib(container: ContainerRequest, unit_mib: int) -> int:
    """Return how much memory the whole GPUs of a container must have together; 0 for part of a GPU."""
    share = container.share
    # The webhook adds one unit per GPU to containers that request no memory: that is no requirement.
    return share.memory_units * unit_mib if share.whole_cards and share.memory_units > share.whole_cards else 0


class TrialPlacement:
    """GPUs of a node while containers of one pod are added and removed, with what these take in each phase."""

    def __init__(
        self,
        gpus: Iterable[GpuAvailability],
        request: PodRequest,
        unit_mib: int,
        min_isolation: Isolation = NO_ISOLATION,
    ) -> None:
        self.gpus = {each.gpu.uuid: each for each in gpus}
        self.unit_mib, self._min_isolation = unit_mib, min_isolation
        self._phases = running_phases(request)
        last = max((max(each) for each in self._phases.values()), default=0)
        self._used: dict[str, list[GpuUsage]] = {uuid: [NO_USAGE] * (last + 1) for uuid in self.gpus}

    def slices(self, container: ContainerRequest, uuids: Sequence[str]) -> tuple[GpuSlice, ...]:
        """Return what a container takes of these GPUs; of whole ones all their memory."""
        share = container.share
        if share.whole_cards:
            return tuple(GpuSlice(uuid, CORES_PER_CARD, self.gpus[uuid].gpu.memory_mib) for uuid in uuids)
        return tuple(
            GpuSlice(uuid, share.cores, share_memory_mib(share, self.gpus[uuid].gpu.memory_mib, self.unit_mib))
            for uuid in uuids
        )

    def problem(self, container: ContainerRequest, uuid: str) -> str:
        """Return why a container cannot have its share of a GPU, or an empty text if it can."""
        free, phases = self.gpus[uuid], self._phases[container.name]
        if reason := free.unavailable_reason or self._isolation_problem(container, free.gpu):
            return reason
        used = self._used[uuid]
        if container.share.whole_cards:
            # Exclusive, also among the containers of the pod that run at the same time.
            is_free = free.is_unused and all(used[phase] == NO_USAGE for phase in phases)
            return "" if is_free else "in use, not available as a whole GPU"
        if not free.gpu.memory_mib:
            return "its driver does not report its memory, available only as a whole GPU"
        (wanted,) = self.slices(container, (uuid,))
        for phase in phases:
            cores, mib = used[phase]
            if cores + wanted.cores > free.free_cores:
                return f"{wanted.cores} cores requested, {max(0, free.free_cores - cores)} free"
            if mib + wanted.memory_mib > free.free_memory_mib:
                return f"{wanted.memory_mib} MiB requested, {max(0, free.free_memory_mib - mib)} free"
        return ""

    def _isolation_problem(self, container: ContainerRequest, gpu: Gpu) -> str:
        # Whole GPUs are exclusive: there is nothing to enforce.
        if container.share.whole_cards or gpu.isolation.is_at_least(self._min_isolation):
            return ""
        return f"isolation {gpu.isolation}, at least {self._min_isolation} required"

    def relative_size(self, container: ContainerRequest) -> tuple[float, float]:
        """Return the larger of a container's fractions of a GPU's cores and memory, and the sum of both."""
        share = container.share
        cores = memory = share.cores / CORES_PER_CARD
        card_mib = max((each.gpu.memory_mib for each in self.gpus.values()), default=0)
        if card_mib and not share.whole_cards:
            memory = share_memory_mib(share, card_mib, self.unit_mib) / card_mib
        return max(cores, memory), cores + memory

    def lacks_cores(self, request: PodRequest) -> bool:
        """Whether some phase needs more cores than all GPUs together have free. Saves a hopeless search."""
        return peak_cores(request) > sum(each.free_cores for each in self.gpus.values() if not each.unavailable_reason)

    def add(self, container: ContainerRequest, uuids: Sequence[str]) -> None:
        self._change(container, uuids, 1)

    def remove(self, container: ContainerRequest, uuids: Sequence[str]) -> None:
        self._change(container, uuids, -1)

    def _change(self, container: ContainerRequest, uuids: Sequence[str], sign: int) -> None:
        for each in self.slices(container, uuids):
            used = self._used[each.uuid]
            for phase in self._phases[container.name]:
                cores, mib = used[phase]
                used[phase] = cores + sign * each.cores, mib + sign * each.memory_mib

    def peak(self, uuid: str) -> GpuUsage:
        """Return the most that the pod takes of a GPU in any phase, for cores and memory each."""
        return max(cores for cores, _ in self._used[uuid]), max(mib for _, mib in self._used[uuid])

    def remaining(self, uuid: str) -> GpuAvailability:
        """Return what is free of a GPU beside this pod."""
        free, (cores, mib) = self.gpus[uuid], self.peak(uuid)
        return replace(free, free_cores=free.free_cores - cores, free_memory_mib=free.free_memory_mib - mib)

    def added_cores(self, container: ContainerRequest, uuid: str) -> int:
        """Return by how many cores the pod's peak on a GPU would grow.

        0 where a container of another phase takes as much already.
        """
        used = self._used[uuid]
        before = max(cores for cores, _ in used)
        after = max(used[phase][0] + container.share.cores for phase in self._phases[container.name])
        return max(0, after - before)


class SearchBudget:
    """How many steps a search may take."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def take_step(self) -> bool:
        """Whether there is a step left."""
        self.left -= 1
        return self.left >= 0


class PlacementSearch:
    """A depth-first search: adds one container after another to its best GPUs, and backtracks if one fits nowhere."""

    def __init__(self, trial: TrialPlacement, ranking: Ranking, budget: SearchBudget | None = None) -> None:
        self._trial, self._ranking, self._budget = trial, ranking, budget or SearchBudget(MAX_STEPS)

    def run(self, order: Sequence[ContainerRequest]) -> dict[str, tuple[str, ...]] | None:
        """Return the UUIDs for each container; None if there is no placement, or none within the budget."""
        if not order:
            return {}
        first, *rest = order
        for uuids in self._choices(first):
            if not self._budget.take_step():
                return None
            self._trial.add(first, uuids)
            placed = self.run(rest)
            if placed is not None:
                return placed | {first.name: uuids}
            self._trial.remove(first, uuids)
        return None

    def _choices(self, container: ContainerRequest) -> Iterator[tuple[str, ...]]:
        fitting = [each for uuid, each in self._trial.gpus.items() if not self._trial.problem(container, uuid)]
        if container.share.whole_cards:
            return self._whole_gpus(container, fitting)
        return self._single_gpus(container, fitting)

    def _single_gpus(
        self, container: ContainerRequest, fitting: Sequence[GpuAvailability]
    ) -> Iterator[tuple[str, ...]]:
        remaining = [self._trial.remaining(uuid) for uuid in self._trial.gpus]
        fits = {each.gpu.uuid for each in fitting}
        ranks = self._ranking.rank_gpus(container.share, remaining, [each.gpu.uuid in fits for each in remaining])
        ranked = []
        for each, gpu_rank in zip(remaining, ranks, strict=True):
            if each.gpu.uuid not in fits:
                continue
            # GPUs that the pod has in another phase come before all others, whatever the strategy: they cost nothing.
            added = self._trial.added_cores(container, each.gpu.uuid)
            rank = added, gpu_rank, each.gpu.index, each.gpu.uuid
            ranked.append((rank, (added, each.free_cores, each.free_memory_mib)))
        tried: set[tuple[int, ...]] = set()
        for (*_, uuid), state in sorted(ranked):
            # Where one GPU did not lead to a placement, another one with the same left does not either.
            if state not in tried:
                tried.add(state)
                yield (uuid,)

    def _whole_gpus(self, container: ContainerRequest, fitting: Sequence[GpuAvailability]) -> Iterator[tuple[str, ...]]:
        """Yield sets of whole GPUs: those that the pod has in another phase, then the best connected."""
        wanted, required_mib = container.share.whole_cards, required_memory_mib(container, self._trial.unit_mib)
        ordered = sorted((each.gpu for each in fitting), key=lambda gpu: (gpu.index, gpu.uuid))
        held = [gpu for gpu in ordered if self._trial.peak(gpu.uuid)[0]]
        tried: set[tuple[str, ...]] = set()
        # Whatever its links, a set that the pod holds in another phase takes nothing from other pods.
        for gpus in (held, ordered):
            if len(gpus) < wanted:
                continue
            for chosen in best_sets(gpus, wanted):
                uuids = tuple(gpu.uuid for gpu in chosen)
                if sum(gpu.memory_mib for gpu in chosen) >= required_mib and uuids not in tried:
                    tried.add(uuids)
                    yield uuids


def placement_problem(
    request: PodRequest,
    placed: Mapping[str, Sequence[GpuSlice]],
    gpus: Sequence[GpuAvailability],
    *,
    unit_mib: int,
    options: PodOptions = NO_OPTIONS,
) -> str:
    """Return why a placement made elsewhere is not possible on these GPUs, or an empty text if it is.

    Only the GPUs of the placement count, not its amounts: see `card_uuids`.
    """
    trial = TrialPlacement(gpus, request, unit_mib, options.min_isolation)
    for each in request.containers:
        uuids = [given.uuid for given in placed.get(each.name, ())]
        if problem := container_problem(trial, each, uuids, options):
            return f"container {each.name}: {problem}"
        trial.add(each, uuids)
    models = {trial.gpus[given.uuid].gpu.model for each in request.containers for given in placed[each.name]}
    return f"placed on GPUs of several models: {', '.join(sorted(models))}" if len(models) > 1 else ""


def container_problem(
    trial: TrialPlacement, container: ContainerRequest, uuids: Sequence[str], options: PodOptions
) -> str:
    wanted = max(1, container.share.whole_cards)
    if len(set(uuids)) != wanted or len(uuids) != wanted:
        return f"{wanted} GPU(s) requested, placed on {', '.join(uuids) or 'none'}"
    for uuid in uuids:
        free = trial.gpus.get(uuid)
        if free is None:
            return f"placed on {uuid}, which this node does not have"
        if not may_use(options, free.gpu):
            allows_model = may_use_model(options, free.gpu.model)
            excluded = "this UUID" if allows_model else f"the model {free.gpu.model}"
            return f"placed on GPU {free.gpu.index} ({uuid}), and the pod does not allow {excluded}"
        if problem := trial.problem(container, uuid):
            return f"placed on GPU {free.gpu.index} ({uuid}): {problem}"
    memory = sum(trial.gpus[uuid].gpu.memory_mib for uuid in uuids)
    if memory < (required := required_memory_mib(container, trial.unit_mib)):
        return f"{required} MiB requested, placed on GPUs with {memory} MiB in total"
    return ""


def slices_on_cards(
    request: PodRequest, cards: Mapping[str, Sequence[str]], gpus: Iterable[Gpu], unit_mib: int
) -> PlacedSlices:
    """Return what each container takes of the given GPUs (UUIDs by container name), as its request says.

    GPUs that the node does not have are left out, and those beyond the number that a container requests: what a pod
    holds of the others still counts.
    """
    # Slices depend on the size of the GPUs alone, not on what is free of them.
    trial = TrialPlacement(available_gpus(gpus, ()), request, unit_mib)
    return {
        each.name: trial.slices(
            each, [uuid for uuid in cards.get(each.name, ())[: max(1, each.share.whole_cards)] if uuid in trial.gpus]
        )
        for each in request.containers
    }


def card_uuids(placed: Mapping[str, Sequence[GpuSlice]]) -> dict[str, list[str]]:
    """Return the GPUs of a placement by container, without the amounts: those follow from the request alone."""
    return {name: [given.uuid for given in slices] for name, slices in placed.items()}


def promised_usage(
    request: PodRequest, placed: Mapping[str, Sequence[GpuSlice]], gpus: Sequence[Gpu], unit_mib: int
) -> dict[str, GpuUsage]:
    """Return what a pod placed elsewhere will hold of each GPU; nothing if the placement does not suit this node."""
    # Only the GPUs are taken from the annotation: with amounts below zero it would free what others hold.
    known = {gpu.uuid for gpu in gpus}
    for each in request.containers:
        uuids = [given.uuid for given in placed.get(each.name, ())]
        if len(uuids) != max(1, each.share.whole_cards) or not known.issuperset(uuids):
            return {}
    return peak_usage(request, slices_on_cards(request, card_uuids(placed), gpus, unit_mib))


def placed_model(placed: PlacedSlices, gpus: Iterable[Gpu]) -> tuple[str, int]:
    """Return the model of a placement, and the memory of its largest GPU; raises a KeyError if a GPU is not known."""
    known = {gpu.uuid: gpu for gpu in gpus}
    used = [known[each.uuid] for slices in placed.values() for each in slices]
    return used[0].model, max(gpu.memory_mib for gpu in used)


def peak_usage(request: PodRequest, placed: Mapping[str, Sequence[GpuSlice]]) -> dict[str, GpuUsage]:
    """Return the most that a pod takes of each GPU in any phase, for cores and memory each."""
    phases = running_phases(request)
    used: dict[str, dict[int, GpuUsage]] = {}
    for each in request.containers:
        for given in placed.get(each.name, ()):
            by_phase = used.setdefault(given.uuid, {})
            for phase in phases[each.name]:
                cores, mib = by_phase.get(phase, NO_USAGE)
                by_phase[phase] = cores + given.cores, mib + given.memory_mib
    return {
        uuid: (max(cores for cores, _ in by_phase.values()), max(mib for _, mib in by_phase.values()))
        for uuid, by_phase in used.items()
    }
