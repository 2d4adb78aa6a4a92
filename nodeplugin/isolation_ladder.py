"""Which rungs of isolation a card offers to containers that share it, and why not the others.

Pure functions of facts about the node, which `nodeplugin/share_enforcement.py` collects. What is published is what the
scheduler promises to pods.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from vcuda.injection_modes import InjectionMode
from vcuda.isolation import COMPUTE, EXCLUSIVE, MEMORY, NO_ISOLATION, Isolation, IsolationSetting, Rung
from vcuda.placement_annotation import GpuSlice
from vcuda.vocabulary import CORES_PER_CARD

# Of each dimension the rungs that can be offered, the strongest first.
CANDIDATES = {MEMORY: (Rung.DRIVER, Rung.MPS, Rung.PRELOAD), COMPUTE: (Rung.MPS, Rung.PRELOAD)}


class LadderFacts(Struct, frozen=True, kw_only=True):
    """What a node offers, and what its configuration allows.

    `driver_problem` says why NVML cannot limit the memory of a container's cgroup, and `preload_problem` why the
    preload libraries cannot be used; empty texts if they can.
    """

    setting: IsolationSetting
    injection: InjectionMode
    driver_problem: str
    preload_problem: str


class RungNotOffered(Struct, frozen=True):
    """A rung that a card does not offer in one dimension, and why."""

    dimension: str
    rung: Rung
    reason: str


class CardLadder(Struct, frozen=True):
    """What enforces shares of a card, and which other rungs it does not offer."""

    isolation: Isolation = NO_ISOLATION
    not_offered: tuple[RungNotOffered, ...] = ()


def card_ladder(facts: LadderFacts, *, is_mig: bool) -> CardLadder:
    """Return what enforces shares of a card, or of a MIG device: of each dimension the strongest rung on offer."""
    offered: dict[str, Rung] = {}
    not_offered: list[RungNotOffered] = []
    for dimension, rung, reason in problems_of_candidates(facts, is_mig=is_mig):
        if reason:
            not_offered.append(RungNotOffered(dimension, rung, reason))
        else:
            offered.setdefault(dimension, rung)
    isolation = Isolation(offered.get(MEMORY, Rung.NONE), offered.get(COMPUTE, Rung.NONE))
    return CardLadder(isolation or NO_ISOLATION, tuple(not_offered))


def problems_of_candidates(facts: LadderFacts, *, is_mig: bool) -> Iterator[tuple[str, Rung, str]]:
    """Yield every candidate with why it is not offered; an empty text if it is."""
    for dimension, rungs in CANDIDATES.items():
        for rung in rungs:
            yield dimension, rung, setting_problem(facts, rung) or rung_problem(facts, dimension, rung, is_mig=is_mig)


def setting_problem(facts: LadderFacts, rung: Rung) -> str:
    # A rung that was asked for by name is never replaced by a weaker one: the administrator would not notice.
    return "" if facts.setting in ("auto", rung.value) else f"nodePlugin.isolation is {facts.setting}"


def rung_problem(facts: LadderFacts, dimension: str, rung: Rung, *, is_mig: bool) -> str:
    if rung is Rung.MPS:
        return "this release does not run MPS"
    if rung is Rung.DRIVER:
        if is_mig:
            return "the driver has no memory limits for MIG devices"
        if facts.injection != "cdi":
            # The limit has to be on the container's cgroup before its first process starts, which takes a hook.
            return f"needs nodePlugin.injection cdi, and it is {facts.injection}"
        return facts.driver_problem
    if dimension == COMPUTE:
        return "the library of this release limits memory only"
    return facts.preload_problem


def applied_isolation(slices: Sequence[GpuSlice], isolation_of: Callable[[str], Isolation]) -> Isolation:
    """Return what enforces the limits of a container on its cards, given what each card (by UUID) offers to shares."""
    if not slices:
        return NO_ISOLATION
    # A container shares one card, or has whole ones.
    return EXCLUSIVE if slices[0].cores >= CORES_PER_CARD else isolation_of(slices[0].uuid) or NO_ISOLATION


def group_not_offered(ladders: Iterable[tuple[int, CardLadder]]) -> dict[RungNotOffered, list[int]]:
    """Return each rung and reason once, with the indices of the cards it is about. MIG devices share an index."""
    cards: dict[RungNotOffered, list[int]] = {}
    for index, ladder in ladders:
        for each in ladder.not_offered:
            indices = cards.setdefault(each, [])
            if index not in indices:
                indices.append(index)
    return cards
