"""Placing pods on the GPUs of a node: never more than a GPU has, and always the same way."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from tests.vcuda.gpus import (
    CARD_MIB,
    UNIT_MIB,
    WHOLE,
    app,
    available,
    gpu,
    indexes,
    init,
    place,
    pod,
    sidecar,
    uuid,
)
from vcuda.gpu_availability import GpuAvailability, available_gpus
from vcuda.placement import (
    InsufficientGpus,
    PlacedSlices,
    card_uuids,
    peak_usage,
    placement_problem,
    running_phases,
    slices_on_cards,
)
from vcuda.placement_annotation import GpuSlice
from vcuda.placement_strategies import PlacementStrategy
from vcuda.pod_options import PodOptions
from vcuda.request import ContainerRequest, PodRequest, Role


def problem(
    request: PodRequest,
    placed: Mapping[str, Sequence[GpuSlice]],
    free: Sequence[GpuAvailability],
    options: PodOptions | None = None,
) -> str:
    return placement_problem(request, placed, free, unit_mib=UNIT_MIB, options=options or PodOptions())


# What a pod takes in each phase, computed without the code under test.


class Taken(Struct, frozen=True):
    """What a container takes of each of its GPUs."""

    cores: int
    memory_mib: int


def running_together(request: PodRequest) -> Iterator[list[str]]:
    """Yield who runs in each phase: each init container with the sidecars before it, then all that stay."""
    sidecars: list[str] = []
    for each in request.containers:
        if each.role is Role.INIT:
            yield [*sidecars, each.name]
        elif each.role is Role.SIDECAR:
            sidecars.append(each.name)
    yield sidecars + [each.name for each in request.containers if each.role is Role.APP]


def taken_by(container: ContainerRequest, card_mib: int) -> Taken:
    share = container.share
    if share.cores >= WHOLE:
        return Taken(WHOLE, card_mib)
    return Taken(
        share.cores, share.cores * card_mib // WHOLE if share.memory_follows_cores else share.memory_units * UNIT_MIB
    )


def fits(request: PodRequest, chosen: Mapping[str, Sequence[str]], free: Sequence[GpuAvailability]) -> bool:
    """Whether no GPU is filled beyond what is free of it in any phase, and whole GPUs are unused."""
    by_uuid = {each.gpu.uuid: each for each in free}
    by_name = {each.name: each for each in request.containers}
    for names in running_together(request):
        for card in {card for name in names for card in chosen[name]}:
            existing = by_uuid[card]
            users = [by_name[name] for name in names if card in chosen[name]]
            taken = [taken_by(each, existing.gpu.memory_mib) for each in users]
            wants_whole = any(each.share.cores >= WHOLE for each in users)
            is_unused = (existing.free_cores, existing.free_memory_mib) == (WHOLE, CARD_MIB)
            if (
                existing.unavailable_reason
                or sum(each.cores for each in taken) > existing.free_cores
                or sum(each.memory_mib for each in taken) > existing.free_memory_mib
                or (wants_whole and (len(users) > 1 or not is_unused))
            ):
                return False
    return True


def is_possible(request: PodRequest, free: Sequence[GpuAvailability]) -> bool:
    """Try every way to place a pod on GPUs of one model."""
    for model in {each.gpu.model for each in free}:
        uuids = [each.gpu.uuid for each in free if each.gpu.model == model]
        choices = [list(combinations(uuids, max(1, each.share.cores // WHOLE))) for each in request.containers]
        for chosen in product(*choices):
            if fits(request, dict(zip((each.name for each in request.containers), chosen, strict=True)), free):
                return True
    return False


# Random nodes and pods.

free_cores = st.sampled_from([0, 10, 30, 50, 70, 100, 100])
free_memory = st.sampled_from([0, 1024, 10240, 20480, CARD_MIB, CARD_MIB])


@st.composite
def nodes(draw: st.DrawFn, most: int = 4) -> list[GpuAvailability]:
    """GPUs of two models, each with something free; some are unavailable."""
    return [
        available(
            index,
            draw(free_cores),
            draw(free_memory),
            draw(st.sampled_from(["", "", "", "cordoned"])),
            draw(st.sampled_from(["A100", "A100", "T4"])),
        )
        for index in range(draw(st.integers(1, most)))
    ]


@st.composite
def pods(draw: st.DrawFn, most: int = 3) -> PodRequest:
    """Containers of all kinds: fractions with and without memory of their own, and whole GPUs."""
    roles = sorted(
        (draw(st.sampled_from(list(Role))) for _ in range(draw(st.integers(1, most)))),
        key=lambda role: role is Role.APP,
    )
    return pod(
        *(
            app(
                f"c{number}",
                cores := draw(st.sampled_from([10, 20, 30, 50, 70, 99, 100, 200])),
                0 if cores >= WHOLE else draw(st.sampled_from([1, 4, 40, 80, 160])),
                role,
                follows=cores < WHOLE and draw(st.booleans()),
            )
            for number, role in enumerate(roles)
        )
    )


@given(pods(), nodes(), st.sampled_from(list(PlacementStrategy)))
def test_no_gpu_is_filled_beyond_its_size(
    request_: PodRequest, free: list[GpuAvailability], strategy: PlacementStrategy
) -> None:
    """A placement fits in every phase of the pod's life, and a pod that can be placed is placed."""
    try:
        placed = place(request_, free, strategy=strategy)
    except InsufficientGpus:
        assert not is_possible(request_, free)
        return
    assert fits(request_, {name: [given.uuid for given in slices] for name, slices in placed.items()}, free)
    by_uuid = {each.gpu.uuid: each.gpu for each in free}
    for each in request_.containers:
        for given_ in placed[each.name]:
            taken = taken_by(each, by_uuid[given_.uuid].memory_mib)
            assert (given_.cores, given_.memory_mib) == (taken.cores, taken.memory_mib)


@given(pods(), nodes(), st.sampled_from(list(PlacementStrategy)))
def test_a_placement_is_possible_on_the_node_it_was_made_for(
    request_: PodRequest, free: list[GpuAvailability], strategy: PlacementStrategy
) -> None:
    """Scheduler and node plugin agree, and computing the slices again changes nothing."""
    try:
        placed = place(request_, free, strategy=strategy)
    except InsufficientGpus:
        return
    assert problem(request_, placed, free) == ""
    assert slices_on_cards(request_, card_uuids(placed), [each.gpu for each in free], UNIT_MIB) == placed


@given(pods(), nodes(), st.data())
def test_a_placement_made_elsewhere_is_possible_exactly_if_it_fits(
    request_: PodRequest, free: list[GpuAvailability], data: st.DataObject
) -> None:
    """GPUs of one model that are never filled beyond their size, and nothing else."""
    uuids = [each.gpu.uuid for each in free]
    chosen: dict[str, list[str]] = {}
    for each in request_.containers:
        wanted = max(1, each.share.cores // WHOLE)
        if wanted > len(uuids):
            return
        chosen[each.name] = data.draw(st.permutations(uuids))[:wanted]
    models = {each.gpu.model for each in free for cards in chosen.values() if each.gpu.uuid in cards}
    placed = {name: tuple(GpuSlice(card, 1, 1) for card in cards) for name, cards in chosen.items()}
    assert (problem(request_, placed, free) == "") == (len(models) == 1 and fits(request_, chosen, free))


@given(pods(), nodes(), st.sampled_from(list(PlacementStrategy)), st.randoms(use_true_random=False))
def test_the_order_in_which_gpus_are_listed_does_not_matter(
    request_: PodRequest, free: list[GpuAvailability], strategy: PlacementStrategy, random: Random
) -> None:
    shuffled = list(free)
    random.shuffle(shuffled)
    assert outcome(request_, free, strategy) == outcome(request_, shuffled, strategy)


def outcome(request: PodRequest, free: Sequence[GpuAvailability], strategy: PlacementStrategy) -> PlacedSlices | str:
    try:
        return place(request, free, strategy=strategy)
    except InsufficientGpus as error:
        return str(error).partition(":")[0]


@given(pods(), nodes())
def test_the_peak_of_a_pod_is_what_is_no_longer_free(request_: PodRequest, free: list[GpuAvailability]) -> None:
    """The most that it has of a GPU in any phase is subtracted, and nothing becomes negative."""
    try:
        placed = place(request_, free)
    except InsufficientGpus:
        return
    before = [{each.gpu.uuid: (WHOLE - each.free_cores, CARD_MIB - each.free_memory_mib)} for each in free]
    after = available_gpus([each.gpu for each in free], [*before, peak_usage(request_, placed)])
    for old, new in zip(free, after, strict=True):
        phases = [
            [given for name in names for given in placed[name] if given.uuid == new.gpu.uuid]
            for names in running_together(request_)
        ]
        assert old.free_cores - new.free_cores == max(sum(given.cores for given in slices) for slices in phases)
        assert old.free_memory_mib - new.free_memory_mib == max(
            sum(given.memory_mib for given in slices) for slices in phases
        )
        assert new.free_cores >= 0
        assert new.free_memory_mib >= 0


# Phases.


def test_each_init_container_has_a_phase_of_its_own() -> None:
    """Sidecars run from their turn on, and app containers in the last phase."""
    request = pod(init("i1", 10), sidecar("s1", 10), init("i2", 10), sidecar("s2", 10), app("a", 10), app("b", 10))
    assert running_phases(request) == {"i1": (0,), "s1": (1, 2), "i2": (1,), "s2": (2,), "a": (2,), "b": (2,)}


FITTING = {
    "containers run side by side": (pod(app("a", 50), app("b", 50)), 100),
    "an init container has ended when the others start": (pod(init("i", 80), app("a", 80)), 80),
    "init containers run one after another": (pod(init("i", 60), init("j", 60), app("a", 10)), 60),
    "a sidecar runs beside later init containers": (pod(sidecar("s", 30), init("i", 50), app("a", 20)), 80),
    "a sidecar does not run beside earlier init containers": (pod(init("i", 70), sidecar("s", 30), app("a", 40)), 70),
    "a sidecar runs beside app containers": (pod(sidecar("s", 30), app("a", 40)), 70),
    "a whole GPU of an init container is used again": (pod(init("i", 100, 0), app("a", 40), app("b", 60)), 100),
}


@pytest.mark.parametrize(("request_", "least"), FITTING.values(), ids=FITTING.keys())
def test_a_pod_needs_the_most_that_it_has_in_any_phase(request_: PodRequest, least: int) -> None:
    """With exactly this much free it fits, and with one core less it does not."""
    placed = place(request_, [available(0, least)])
    assert peak_usage(request_, placed)[uuid(0)][0] == least
    with pytest.raises(InsufficientGpus):
        place(request_, [available(0, least - 1)])


@pytest.mark.parametrize("strategy", PlacementStrategy)
def test_init_containers_and_app_containers_share_gpus(strategy: PlacementStrategy) -> None:
    """A pod stays on the GPUs that it has in another phase, however much is free elsewhere."""
    free = [available(0), available(1), available(2)]
    small = place(pod(init("i", 50), app("a", 50)), free, strategy=strategy)
    assert small["i"][0].uuid == small["a"][0].uuid
    large = place(pod(init("i", 100, 0), app("a", 200, 0)), free, strategy=strategy)
    assert {each.uuid for each in large["i"]} < {each.uuid for each in large["a"]}


# Amounts.


def test_memory_that_follows_the_cores_is_rounded_down() -> None:
    """33 cores of a GPU with 15109 MiB get 4985 MiB, so that all shares together never exceed the GPU."""
    odd = GpuAvailability(gpu(0, memory_mib=15109), WHOLE, 15109)
    assert place(pod(app("a", 33, follows=True)), [odd]) == {"a": (GpuSlice(uuid(0), 33, 4985),)}
    many = pod(*(app(f"c{number}", 20, follows=True) for number in range(5)))
    assert sum(given.memory_mib for (given,) in place(many, [odd]).values()) <= 15109


def test_memory_alone_can_fill_a_gpu() -> None:
    request = pod(app("a", 1, 81))
    assert indexes(place(request, [available(0, free_mib=80 * UNIT_MIB), available(1)])["a"]) == [1]
    with pytest.raises(InsufficientGpus):
        place(request, [available(0, free_mib=80 * UNIT_MIB)])


def test_whole_gpus_are_exclusive_and_have_all_their_memory() -> None:
    request = pod(app("a", 100, 0), app("b", 1))
    assert place(request, [available(0), available(1)]) == {
        "a": (GpuSlice(uuid(0), WHOLE, CARD_MIB),),
        "b": (GpuSlice(uuid(1), 1, UNIT_MIB),),
    }
    with pytest.raises(InsufficientGpus):
        place(request, [available(0)])


@pytest.mark.parametrize(
    "used",
    [available(0, 99), available(0, free_mib=CARD_MIB - 1), available(0, reason="cordoned")],
    ids=["one core is in use", "one MiB is in use", "it is unavailable"],
)
def test_a_gpu_in_use_is_not_given_as_a_whole(used: GpuAvailability) -> None:
    with pytest.raises(InsufficientGpus):
        place(pod(app("a", 100, 0)), [used])
    assert indexes(place(pod(app("a", 100, 0)), [used, available(1)])["a"]) == [1]


def test_gpus_of_unknown_memory_are_only_given_as_a_whole() -> None:
    """It could not be checked whether a fraction of their memory is free."""
    unknown = GpuAvailability(gpu(0, memory_mib=0), WHOLE, 0)
    for units in (0, 1):
        assert place(pod(app("a", 100, units)), [unknown]) == {"a": (GpuSlice(uuid(0), WHOLE, 0),)}
    for fraction in (app("a", 10), app("a", 10, follows=True)):
        with pytest.raises(InsufficientGpus):
            place(pod(fraction), [unknown])
    assert "only as a whole GPU" in problem(pod(app("a", 10)), {"a": (GpuSlice(uuid(0), 10, 256),)}, [unknown])


def test_a_gpu_of_unknown_memory_is_not_given_twice() -> None:
    """Its cores show that it is in use."""
    card = gpu(0, memory_mib=0)
    request = pod(app("a", 100, 0))
    (left,) = available_gpus([card], [peak_usage(request, {"a": (GpuSlice(uuid(0), WHOLE, 0),)})])
    with pytest.raises(InsufficientGpus):
        place(request, [left])


LARGE, SMALL = (
    GpuAvailability(gpu(0, "A100-80GB", 81920), WHOLE, 81920),
    GpuAvailability(gpu(1, "A100-40GB", 40960), WHOLE, 40960),
)


@pytest.mark.parametrize(
    ("units", "expected"),
    [(1, [1]), (160, [1]), (161, [0]), (320, [0])],
    ids=["the unit added by the webhook", "exactly the small GPU", "more than the small GPU", "exactly the large GPU"],
)
def test_a_whole_gpu_has_at_least_the_requested_memory(units: int, expected: list[int]) -> None:
    """The model that packs best is taken, if it is large enough."""
    # One core of another large GPU is in use, so that the small model has less free and is tried first.
    free = [LARGE, SMALL, GpuAvailability(gpu(2, "A100-80GB", 81920), 99, 81920)]
    assert indexes(place(pod(app("a", 100, units)), free)["a"]) == expected


def test_several_whole_gpus_have_the_requested_memory_together() -> None:
    """Two GPUs of 40 GiB are enough for 80 GiB and not for more."""
    free = [available(0), available(1)]
    assert indexes(place(pod(app("a", 200, 320)), free)["a"]) == [0, 1]
    with pytest.raises(InsufficientGpus):
        place(pod(app("a", 200, 321)), free)


def test_a_placement_made_elsewhere_on_gpus_that_are_too_small_is_not_possible() -> None:
    assert "41216 MiB requested, placed on GPUs with 40960 MiB in total" in problem(
        pod(app("a", 100, 161)), {"a": (GpuSlice(uuid(1), WHOLE, 40960),)}, [SMALL]
    )


# Models.


def test_all_gpus_of_a_pod_are_of_one_model() -> None:
    """Its quota is charged for one model: two models with half of what is needed are not enough."""
    request = pod(app("a", 60), app("b", 60))
    with pytest.raises(InsufficientGpus):
        place(request, [available(0, model="A100"), available(1, model="T4")])
    free = [available(0, model="A100"), available(1, model="T4"), available(2, model="T4")]
    assert sorted(indexes(place(request, free)["a"]) + indexes(place(request, free)["b"])) == [1, 2]


ALLOWED = {
    "no model requested, the one with least free": (PodOptions(), [2]),
    "a model is requested": (PodOptions(models=("A100",)), [0]),
    "a model is excluded": (PodOptions(avoided_models=("T4",)), [0]),
    "several models are requested": (PodOptions(models=("T4", "A100")), [2]),
    "one of the requested models is excluded": (PodOptions(models=("A100", "T4"), avoided_models=("T4",)), [0]),
}


@pytest.mark.parametrize(("options", "expected"), ALLOWED.values(), ids=ALLOWED.keys())
def test_only_models_that_the_pod_allows_are_used(options: PodOptions, expected: list[int]) -> None:
    free = [available(0, model="A100-SXM4-40GB"), available(1, model="A100-SXM4-40GB"), available(2, model="T4")]
    placed = place(pod(app("a", 10)), free, options)
    assert indexes(placed["a"]) == expected
    assert problem(pod(app("a", 10)), placed, free, options) == ""


@given(pods(), nodes(), st.sampled_from([PodOptions(models=("T4",)), PodOptions(avoided_models=("A100",))]))
def test_no_pod_gets_a_model_that_it_does_not_allow(
    request_: PodRequest, free: list[GpuAvailability], options: PodOptions
) -> None:
    model_of = {each.gpu.uuid: each.gpu.model for each in free}
    try:
        placed = place(request_, free, options)
    except InsufficientGpus:
        return
    assert {model_of[given.uuid] for slices in placed.values() for given in slices} == {"T4"}


def test_a_node_without_an_allowed_model_says_so() -> None:
    with pytest.raises(InsufficientGpus, match="no GPU of the requested models: H100, L4"):
        place(pod(app("a", 10)), [available(0)], PodOptions(models=("H100", "L4")))
    with pytest.raises(InsufficientGpus, match="only has GPUs of excluded models: A100"):
        place(pod(app("a", 10)), [available(0)], PodOptions(avoided_models=("A100",)))
    with pytest.raises(InsufficientGpus, match=r"this node has no GPUs$"):
        place(pod(app("a", 10)), [])


# Strategies.


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [(PlacementStrategy.BINPACK, [1]), (PlacementStrategy.SPREAD, [2])],
    ids=["binpack", "spread"],
)
def test_fractions_go_to_the_fullest_gpu_or_to_the_emptiest(strategy: PlacementStrategy, expected: list[int]) -> None:
    """Among those on which they fit."""
    free = [available(0, 20), available(1, 60), available(2, 90), available(3, 80)]
    assert indexes(place(pod(app("a", 30)), free, strategy=strategy)["a"]) == expected


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [(PlacementStrategy.BINPACK, [1]), (PlacementStrategy.SPREAD, [0])],
    ids=["binpack", "spread"],
)
def test_the_model_with_least_free_comes_first_or_the_one_with_most(
    strategy: PlacementStrategy, expected: list[int]
) -> None:
    free = [available(0, model="A100"), available(1, 50, model="T4")]
    assert indexes(place(pod(app("a", 30)), free, strategy=strategy)["a"]) == expected


def test_two_containers_are_spread_over_two_gpus_or_packed_on_one() -> None:
    """What the pod's other containers take does not count as free."""
    request, free = pod(app("a", 40), app("b", 40)), [available(0), available(1)]
    packed, spread = place(request, free), place(request, free, strategy=PlacementStrategy.SPREAD)
    assert indexes(packed["a"]) == indexes(packed["b"])
    assert indexes(spread["a"]) != indexes(spread["b"])


@pytest.mark.parametrize("strategy", PlacementStrategy)
def test_the_search_backtracks(strategy: PlacementStrategy) -> None:
    """Each of two GPUs holds 40+30+30; with 40+40 on one of them, the rest does not fit."""
    sizes = (40, 40, 30, 30, 30, 30)
    placed = place(
        pod(*(app(f"c{number}", cores) for number, cores in enumerate(sizes))),
        [available(0), available(1)],
        strategy=strategy,
    )
    for card in (uuid(0), uuid(1)):
        assert sum(given.cores for (given,) in placed.values() if given.uuid == card) == WHOLE


def test_a_hopeless_search_ends() -> None:
    """Eleven GPUs, and twelve containers that need a GPU each."""
    request = pod(*(app(f"c{number}", 51 + number) for number in range(12)))
    with pytest.raises(InsufficientGpus):
        place(request, [available(index) for index in range(11)])


# Messages.


def test_a_refusal_names_the_request_and_what_is_free_of_each_gpu() -> None:
    free = [available(0, 30, 1024), available(1, reason="XID 79"), available(2, model="T4")]
    request = pod(app("train", 50, 32), app("show", 20, follows=True), app("many", 200, 0))
    with pytest.raises(InsufficientGpus) as refused:
        place(request, free, PodOptions(models=("A100",)))
    assert str(refused.value) == (
        "insufficient GPUs for train (50 cores and 8192 MiB), show (20 cores), many (2 whole GPUs): "
        "GPU 0 (A100): 30 cores and 1024 MiB free; GPU 1 (A100): XID 79"
    )


def test_what_pods_hold_is_not_free() -> None:
    """Usage of a GPU that the node does not have is ignored."""
    gpus = [gpu(0), gpu(1), gpu(2)]
    held = [{uuid(0): (30, 1024)}, {uuid(0): (20, 512), uuid(1): (100, CARD_MIB)}, {"GPU-gone": (100, 1)}]
    free = available_gpus(gpus, held, lambda each: "cordoned" if each.index == 1 else "")
    assert [(each.free_cores, each.free_memory_mib, each.unavailable_reason) for each in free] == [
        (50, CARD_MIB - 1536, ""),
        (0, 0, "cordoned"),
        (100, CARD_MIB, ""),
    ]


def test_the_amounts_of_a_placement_made_elsewhere_are_ignored() -> None:
    """The scheduler decides which GPUs; how much of them follows from the request."""
    request = pod(app("a", 50, 8), app("b", 100, 0))
    foreign = {"a": (GpuSlice(uuid(0), 1, 1),), "b": (GpuSlice(uuid(1), 7, 7),), "stranger": (GpuSlice(uuid(2), 1, 1),)}
    assert slices_on_cards(request, card_uuids(foreign), [gpu(0), gpu(1)], UNIT_MIB) == {
        "a": (GpuSlice(uuid(0), 50, 2048),),
        "b": (GpuSlice(uuid(1), WHOLE, CARD_MIB),),
    }


def on(*cards: int) -> tuple[GpuSlice, ...]:
    return tuple(GpuSlice(uuid(index), 1, 1) for index in cards)


NODE = [
    available(0, 40, 1024),
    available(1),
    available(2, reason="cordoned"),
    available(3, model="T4"),
    available(4),
]
HALF, TWO = pod(app("a", 50)), pod(app("a", 200, 0))
IMPOSSIBLE: dict[str, tuple[PodRequest, Mapping[str, Sequence[GpuSlice]], str]] = {
    "a container is missing": (HALF, {}, "container a: 1 GPU(s) requested, placed on none"),
    "too many GPUs": (HALF, {"a": on(1, 4)}, "container a: 1 GPU(s) requested, placed on GPU-1, GPU-4"),
    "too few GPUs": (TWO, {"a": on(1)}, "container a: 2 GPU(s) requested, placed on GPU-1"),
    "one GPU twice": (TWO, {"a": on(1, 1)}, "container a: 2 GPU(s) requested, placed on GPU-1, GPU-1"),
    "an unknown GPU": (HALF, {"a": on(9)}, "placed on GPU-9, which this node does not have"),
    "an unavailable GPU": (HALF, {"a": on(2)}, "GPU 2 (GPU-2): cordoned"),
    "too few cores": (HALF, {"a": on(0)}, "GPU 0 (GPU-0): 50 cores requested, 40 free"),
    "too little memory": (pod(app("a", 40, 5)), {"a": on(0)}, "GPU 0 (GPU-0): 1280 MiB requested, 1024 free"),
    "a whole GPU that is in use": (
        pod(app("a", 100, 0)),
        {"a": on(0)},
        "GPU 0 (GPU-0): in use, not available as a whole GPU",
    ),
    "one whole GPU for two containers": (
        pod(app("a", 100, 0), app("b", 100, 0)),
        {"a": on(1), "b": on(1)},
        "container b: placed on GPU 1 (GPU-1): in use, not available as a whole GPU",
    ),
    "GPUs of two models": (pod(app("a", 50), app("b", 50)), {"a": on(1), "b": on(3)}, "several models: A100, T4"),
}


@pytest.mark.parametrize(("request_", "placed", "expected"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_the_problem_of_an_impossible_placement_is_named(
    request_: PodRequest, placed: Mapping[str, Sequence[GpuSlice]], expected: str
) -> None:
    """The message names the container, the GPU and what is wrong."""
    assert expected in problem(request_, placed, NODE)


def test_a_placement_on_a_model_that_the_pod_does_not_allow_is_not_possible() -> None:
    """Its quota was charged for another model."""
    assert problem(HALF, {"a": on(1)}, NODE, PodOptions(avoided_models=("A100",))) == (
        "container a: placed on GPU 1 (GPU-1), and the pod does not allow the model A100"
    )
