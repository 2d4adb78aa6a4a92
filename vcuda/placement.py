"""Which cards of a node the containers of a pod get: one function for scheduler, node plugin and simulator.

A node is seen as rooms: what each card has left. A pod is placed as a whole or not at all. Init containers run one
after another and before the others, so what they take is counted where they run; a card is never filled beyond its size
at any moment. All cards of a pod are of one model, because that is what its quota is charged for. The same node and the
same pod give the same placement, wherever it is asked for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import combinations, islice
from math import comb

from msgspec import Struct

from vcuda.gpu_model import matches, parse_model
from vcuda.inventory import Gpu
from vcuda.placement_annotation import GpuSlice
from vcuda.pod_options import NO_OPTIONS, PodOptions
from vcuda.request import ContainerRequest, PodRequest, Role, share_memory_mib
from vcuda.vocabulary import CORES_PER_CARD

# How well two cards reach each other, worst first; NVLink is better the more links there are.
PATHS = ("sys", "node", "phb", "pxb", "pix", "board")
NVLINK = "nvlink"
# What is tried before a search gives up; a node answers within milliseconds.
MOST_SETS = 2000
MOST_STEPS = 2000

PlacedSlices = dict[str, tuple[GpuSlice, ...]]
GpuUsage = tuple[int, int]
NO_USAGE: GpuUsage = (0, 0)


class PlacementStrategy(StrEnum):
    """Where shares go: onto cards that are used already, or onto those that are used least."""

    BINPACK = "binpack"
    SPREAD = "spread"


class GpuAvailability(Struct, frozen=True):
    """A card and what is left of it. One that takes nothing new says why in `closed`."""

    gpu: Gpu
    cores: int
    memory_mib: int
    closed: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether nobody has anything of it."""
        return self.cores == CORES_PER_CARD and self.memory_mib == self.gpu.memory_mib

    def told(self) -> str:
        """Say how it stands."""
        state = self.closed or f"{self.cores} cores and {self.memory_mib} MiB free"
        return f"GPU {self.gpu.index} ({self.gpu.model}): {state}"


class InsufficientGpus(Exception):  # noqa: N818 - not a fault of the program
    """A pod does not fit; the message says what was looked for, and how every card stands."""


class TrialPlacement:
    """The rooms of a node while a pod is being put on them, at every moment of the pod's life."""

    def __init__(self, rooms: Iterable[GpuAvailability], request: PodRequest, unit_mib: int) -> None:
        self.rooms = {room.gpu.uuid: room for room in rooms}
        self.unit_mib = unit_mib
        self._moments = running_phases(request)
        last = max((max(each) for each in self._moments.values()), default=0)
        self._used: dict[str, list[GpuUsage]] = {uuid: [NO_USAGE] * (last + 1) for uuid in self.rooms}

    def slices(self, container: ContainerRequest, uuids: Sequence[str]) -> tuple[GpuSlice, ...]:
        """Say what a container gets of these cards."""
        share = container.share
        if share.whole_cards:
            return tuple(GpuSlice(uuid, CORES_PER_CARD, self.rooms[uuid].gpu.memory_mib) for uuid in uuids)
        return tuple(
            GpuSlice(uuid, share.cores, share_memory_mib(share, self.rooms[uuid].gpu.memory_mib, self.unit_mib))
            for uuid in uuids
        )

    def why_not(self, container: ContainerRequest, uuid: str) -> str:
        """Say why a container cannot have its share of a card; nothing if it can."""
        room, when = self.rooms[uuid], self._moments[container.name]
        if room.closed:
            return room.closed
        used = self._used[uuid]
        if container.share.whole_cards:
            is_free = room.is_whole and all(used[moment] == NO_USAGE for moment in when)
            return "" if is_free else "not free as a whole"
        if not room.gpu.memory_mib:
            return "its driver does not say how much memory it has, so it is given as a whole only"
        (wanted,) = self.slices(container, (uuid,))
        for moment in when:
            cores, mib = used[moment]
            if cores + wanted.cores > room.cores:
                return f"{max(0, room.cores - cores)} cores free"
            if mib + wanted.memory_mib > room.memory_mib:
                return f"{max(0, room.memory_mib - mib)} MiB free"
        return ""

    def size(self, container: ContainerRequest) -> tuple[float, float]:
        """Say how large a container is: the larger of its parts of a card's cores and memory, and both together."""
        share = container.share
        cores = memory = share.cores / CORES_PER_CARD
        card_mib = max((room.gpu.memory_mib for room in self.rooms.values()), default=0)
        if card_mib and not share.whole_cards:
            memory = share_memory_mib(share, card_mib, self.unit_mib) / card_mib
        return max(cores, memory), cores + memory

    def least_mib(self, container: ContainerRequest) -> int:
        """Say how much memory the whole cards of a container must have together."""
        share = container.share
        # The one unit for each card that every container carries asks for nothing.
        return share.memory_units * self.unit_mib if share.whole_cards and share.memory_units > share.whole_cards else 0

    def is_too_small(self, request: PodRequest) -> bool:
        """Tell whether all cards together have not enough cores at some moment: then no search is needed."""
        free = sum(room.cores for room in self.rooms.values() if not room.closed)
        wanted: dict[int, int] = {}
        for each in request.containers:
            for moment in self._moments[each.name]:
                wanted[moment] = wanted.get(moment, 0) + each.share.cores
        return max(wanted.values(), default=0) > free

    def put(self, container: ContainerRequest, uuids: Sequence[str]) -> None:
        """Give a container its cards."""
        self._change(container, uuids, 1)

    def take_back(self, container: ContainerRequest, uuids: Sequence[str]) -> None:
        """Undo that."""
        self._change(container, uuids, -1)

    def _change(self, container: ContainerRequest, uuids: Sequence[str], sign: int) -> None:
        for given in self.slices(container, uuids):
            used = self._used[given.uuid]
            for moment in self._moments[container.name]:
                cores, mib = used[moment]
                used[moment] = cores + sign * given.cores, mib + sign * given.memory_mib

    def peak(self, uuid: str) -> GpuUsage:
        """Give the most that the pod ever has of a card at once."""
        return max(cores for cores, _ in self._used[uuid]), max(mib for _, mib in self._used[uuid])

    def growth(self, container: ContainerRequest, uuid: str) -> int:
        """Say by how much the pod's hold on a card would grow: nothing where an earlier container leaves enough."""
        used = self._used[uuid]
        before = max(cores for cores, _ in used)
        after = max(used[moment][0] + container.share.cores for moment in self._moments[container.name])
        return max(0, after - before)


def running_phases(request: PodRequest) -> dict[str, tuple[int, ...]]:
    """Say at which moments of the pod's life each container runs.

    Every plain init container has a moment of its own; a sidecar runs from its turn on; all others at the last moment.
    """
    order = [each for each in request.containers if each.role is not Role.APP]
    last = sum(each.role is Role.INIT for each in order)
    found: dict[str, tuple[int, ...]] = {}
    turn = 0
    for each in order:
        if each.role is Role.INIT:
            found[each.name] = (turn,)
            turn += 1
        else:
            found[each.name] = tuple(range(turn, last + 1))
    return found | {each.name: (last,) for each in request.containers if each.role is Role.APP}


def place_pod(
    request: PodRequest,
    rooms: Sequence[GpuAvailability],
    *,
    unit_mib: int,
    options: PodOptions = NO_OPTIONS,
    policy: PlacementStrategy = PlacementStrategy.BINPACK,
) -> PlacedSlices:
    """Find cards for all containers of a pod, or raise NoRoom with the reasons."""
    if not any(may_use(options, room.gpu.model) for room in rooms):
        wanted = ", ".join(options.models) or "any model but " + ", ".join(options.avoided_models)
        raise InsufficientGpus(f"this node has no card of {wanted}" if rooms else "this node has no card")
    for model in models_in_order(rooms, options, policy):
        board = TrialPlacement([room for room in rooms if room.gpu.model == model], request, unit_mib)
        if board.is_too_small(request):
            continue
        # The largest first: they find the fewest cards. Among equals, in the pod's own order.
        order = sorted(request.containers, key=board.size, reverse=True)
        placed = PlacementSearch(board, policy).run(order)
        if placed is not None:
            return {each.name: board.slices(each, placed[each.name]) for each in request.containers}
    allowed = [room for room in rooms if may_use(options, room.gpu.model)]
    raise InsufficientGpus(
        f"no room for {describe_request(request, unit_mib)}: {'; '.join(room.told() for room in allowed)}"
    )


def models_in_order(rooms: Sequence[GpuAvailability], options: PodOptions, policy: PlacementStrategy) -> list[str]:
    """List the models a pod may use; to pack, the one with least room first, and to spread, the one with most."""
    free: dict[str, int] = {}
    for room in rooms:
        if may_use(options, room.gpu.model):
            free[room.gpu.model] = free.get(room.gpu.model, 0) + (0 if room.closed else room.cores)
    sign = 1 if policy is PlacementStrategy.BINPACK else -1
    return sorted(free, key=lambda model: (sign * free[model], model))


def may_use(options: PodOptions, model: str) -> bool:
    """Tell whether a pod may run on a model."""
    parsed = parse_model(model)
    if options.models and not any(matches(wanted, parsed) for wanted in options.models):
        return False
    return not any(matches(avoided, parsed) for avoided in options.avoided_models)


def describe_request(request: PodRequest, unit_mib: int) -> str:
    """Say what a pod asks for."""
    parts = []
    for each in request.containers:
        share = each.share
        memory = "" if share.whole_cards or share.memory_follows_cores else f" and {share.memory_units * unit_mib} MiB"
        parts.append(
            f"{each.name} ({share.whole_cards} whole card{'s' if share.whole_cards > 1 else ''})"
            if share.whole_cards
            else f"{each.name} ({share.cores} cores{memory})"
        )
    return ", ".join(parts)


class PlacementSearch:
    """Tries cards for one container after another, the best first, and goes back where the next finds none."""

    def __init__(self, board: TrialPlacement, policy: PlacementStrategy) -> None:
        self._board, self._policy, self._steps, self._connects = board, policy, 0, False

    def run(self, order: Sequence[ContainerRequest]) -> dict[str, tuple[str, ...]] | None:
        """Give each container its cards; None if there is no way, or none was found in bounded time."""
        if not order:
            return {}
        first, *rest = order
        self._connects = any(each.share.whole_cards for each in order)
        for uuids in self._choices(first):
            self._steps += 1
            if self._steps > MOST_STEPS:
                return None
            self._board.put(first, uuids)
            found = self.run(rest)
            if found is not None:
                return found | {first.name: uuids}
            self._board.take_back(first, uuids)
        return None

    def _choices(self, container: ContainerRequest) -> Iterator[tuple[str, ...]]:
        free = [room for uuid, room in self._board.rooms.items() if not self._board.why_not(container, uuid)]
        if container.share.whole_cards:
            yield from self._sets(container, free)
        else:
            tried: set[tuple[int | str, ...]] = set()
            for room in sorted(free, key=lambda room: self._worth(container, room)):
                # Of cards that stand alike one is as good as another, unless whole ones are still to be connected.
                alike = self._worth(container, room)[:3]
                if self._connects or alike not in tried:
                    tried.add(alike)
                    yield (room.gpu.uuid,)

    def _worth(self, container: ContainerRequest, room: GpuAvailability) -> tuple[int | str, ...]:
        """Rank a card for a share: where the pod is already; then the fullest or the emptiest."""
        uuid = room.gpu.uuid
        cores, mib = self._board.peak(uuid)
        left = room.cores - cores, room.memory_mib - mib
        sign = 1 if self._policy is PlacementStrategy.BINPACK else -1
        return self._board.growth(container, uuid), sign * left[0], sign * left[1], room.gpu.index, uuid

    def _sets(self, container: ContainerRequest, free: Sequence[GpuAvailability]) -> Iterator[tuple[str, ...]]:
        """Give sets of whole cards: those that the pod has already at another moment, then the best connected."""
        wanted, least_mib = container.share.whole_cards, self._board.least_mib(container)
        ordered = sorted(free, key=lambda room: (room.gpu.index, room.gpu.uuid))
        tried: set[tuple[str, ...]] = set()
        taken = [room for room in ordered if self._board.peak(room.gpu.uuid)[0]]
        for rooms in (taken, ordered):
            if len(rooms) < wanted:
                continue
            for chosen in best_sets([room.gpu for room in rooms], wanted):
                uuids = tuple(gpu.uuid for gpu in chosen)
                if sum(gpu.memory_mib for gpu in chosen) >= least_mib and uuids not in tried:
                    tried.add(uuids)
                    yield uuids


def best_sets(gpus: Sequence[Gpu], wanted: int) -> Iterable[tuple[Gpu, ...]]:
    """Order sets of cards: the best connected first; among equals, those that leave the others best connected."""
    web = GpuTopology(gpus)
    if web.is_even:
        # All alike, as behind NVSwitch: only memory can tell sets apart, the first indexes come first.
        return (tuple(chosen) for chosen in islice(combinations(gpus, wanted), MOST_SETS))
    numbers = range(len(gpus))
    if comb(len(gpus), wanted) <= MOST_SETS:
        found: Iterable[tuple[int, ...]] = combinations(numbers, wanted)
    else:
        found = {web.grown(seed, wanted) for seed in numbers}
    return (tuple(gpus[each] for each in chosen) for chosen in sorted(found, key=web.quality))


class GpuTopology:
    """How well each two of some cards reach each other."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._ranks = [
            [link_rank(link_between(one, other)) if one is not other else 0 for other in gpus] for one in gpus
        ]
        self._sums = [sum(row) for row in self._ranks]
        self._total = sum(self._sums) // 2

    @property
    def is_even(self) -> bool:
        """Whether all are connected alike."""
        ranks = {rank for number, row in enumerate(self._ranks) for rank in row[:number]}
        return len(ranks) <= 1

    def quality(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Rank a set, the smallest best: its worst link, its links together, and what is left."""
        inside = [self._ranks[one][other] for one, other in combinations(chosen, 2)]
        among = sum(inside)
        # Of all links, those of the chosen ones are gone; those among them were counted twice.
        left = self._total - sum(self._sums[each] for each in chosen) + among
        return (-min(inside, default=0), -among, -left, *chosen)

    def grown(self, seed: int, wanted: int) -> tuple[int, ...]:
        """Grow a set from one card: always by the one that is best connected to all before it."""
        chosen = [seed]
        while len(chosen) < wanted:
            rest = [each for each in range(len(self._ranks)) if each not in chosen]
            chosen.append(max(rest, key=lambda each: (*self._bonds(each, chosen), -each)))
        return tuple(sorted(chosen))

    def _bonds(self, one: int, chosen: Sequence[int]) -> tuple[int, int]:
        links = [self._ranks[one][other] for other in chosen]
        return min(links), sum(links)


def link_between(one: Gpu, other: Gpu) -> str:
    """Say how two cards reach each other; where nobody says, their NUMA nodes tell."""
    known = one.links.get(other.uuid) or other.links.get(one.uuid)
    if known:
        return known
    return "node" if one.numa is not None and one.numa == other.numa else "sys"


def link_rank(link: str) -> int:
    """Rank a kind of link."""
    if link.startswith(NVLINK):
        count = link.removeprefix(NVLINK)
        return len(PATHS) + (int(count) if count.isdecimal() else 1)
    return PATHS.index(link) if link in PATHS else 0


def placement_problem(
    request: PodRequest,
    placed: Mapping[str, Sequence[GpuSlice]],
    rooms: Sequence[GpuAvailability],
    *,
    unit_mib: int,
    options: PodOptions = NO_OPTIONS,
) -> str:
    """Say why a placement that somebody made cannot be obeyed; nothing if it can."""
    board = TrialPlacement(rooms, request, unit_mib)
    for each in request.containers:
        uuids = [given.uuid for given in placed.get(each.name, ())]
        if wrong := card_problem(board, each, uuids, options):
            return f"{each.name} {wrong}"
        board.put(each, uuids)
    models = {board.rooms[given.uuid].gpu.model for each in request.containers for given in placed[each.name]}
    return f"cards of several models were given: {', '.join(sorted(models))}" if len(models) > 1 else ""


def card_problem(board: TrialPlacement, container: ContainerRequest, uuids: Sequence[str], options: PodOptions) -> str:
    """Say why a container cannot have the cards that it was given; nothing if it can."""
    wanted = max(1, container.share.whole_cards)
    if len(set(uuids)) != wanted or len(uuids) != wanted:
        return f"asks for {wanted} card{'s' if wanted > 1 else ''}, and was given {len(uuids)}"
    for uuid in uuids:
        room = board.rooms.get(uuid)
        if room is None:
            return f"was given {uuid}, which this node does not have"
        if not may_use(options, room.gpu.model):
            return f"was given a {room.gpu.model}, which the pod may not use"
        if wrong := board.why_not(container, uuid):
            return f"was given GPU {room.gpu.index} ({uuid}): {wrong}"
    if sum(board.rooms[uuid].gpu.memory_mib for uuid in uuids) < (least := board.least_mib(container)):
        return f"asks for cards of {least} MiB together, and was given smaller ones"
    return ""


def slices_on_cards(
    request: PodRequest, cards: Mapping[str, Sequence[str]], gpus: Iterable[Gpu], unit_mib: int
) -> PlacedSlices:
    """Give what containers get of the cards they are on, as it follows from the request."""
    board = TrialPlacement(available_gpus(gpus, ()), request, unit_mib)
    return {each.name: board.slices(each, cards.get(each.name, ())) for each in request.containers}


def card_uuids(placed: Mapping[str, Sequence[GpuSlice]]) -> dict[str, list[str]]:
    """Name the cards of a placement, by container: amounts that somebody else wrote are not taken over."""
    return {name: [given.uuid for given in slices] for name, slices in placed.items()}


def promised_usage(
    request: PodRequest, placed: Mapping[str, Sequence[GpuSlice]], gpus: Sequence[Gpu], unit_mib: int
) -> dict[str, GpuUsage]:
    """Give what a pod will hold that was placed by somebody else: cards as he says, amounts as the pod asks.

    Nothing, if what he says makes no sense here.
    """
    known = {gpu.uuid for gpu in gpus}
    for each in request.containers:
        uuids = [given.uuid for given in placed.get(each.name, ())]
        if len(uuids) != max(1, each.share.whole_cards) or not known.issuperset(uuids):
            return {}
    return peak_usage(request, slices_on_cards(request, card_uuids(placed), gpus, unit_mib))


def peak_usage(request: PodRequest, placed: Mapping[str, Sequence[GpuSlice]]) -> dict[str, GpuUsage]:
    """Give the most that a pod ever has of each card at once."""
    when = running_phases(request)
    used: dict[str, dict[int, GpuUsage]] = {}
    for each in request.containers:
        for given in placed.get(each.name, ()):
            at = used.setdefault(given.uuid, {})
            for moment in when[each.name]:
                cores, mib = at.get(moment, NO_USAGE)
                at[moment] = cores + given.cores, mib + given.memory_mib
    return {
        uuid: (max(cores for cores, _ in at.values()), max(mib for _, mib in at.values())) for uuid, at in used.items()
    }


def sum_usage(held: Iterable[Mapping[str, GpuUsage]]) -> dict[str, GpuUsage]:
    """Add up what several hold, card by card."""
    total: dict[str, GpuUsage] = {}
    for each in held:
        for uuid, (cores, mib) in each.items():
            before = total.get(uuid, NO_USAGE)
            total[uuid] = before[0] + cores, before[1] + mib
    return total


def available_gpus(
    gpus: Iterable[Gpu], held: Iterable[Mapping[str, GpuUsage]], closed: Callable[[Gpu], str] = lambda _: ""
) -> list[GpuAvailability]:
    """Say what is left of each card by what pods hold."""
    taken = sum_usage(held)
    return [
        GpuAvailability(gpu, CORES_PER_CARD - cores, gpu.memory_mib - mib, closed(gpu))
        for gpu in gpus
        for cores, mib in [taken.get(gpu.uuid, NO_USAGE)]
    ]
