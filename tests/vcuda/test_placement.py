"""Placing pods on a node's cards: never too much of one, always the same way, and the best connected together."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from vcuda.inventory import Gpu
from vcuda.placement import (
    GpuAvailability,
    InsufficientGpus,
    PlacedSlices,
    PlacementStrategy,
    available_gpus,
    best_sets,
    card_uuids,
    peak_usage,
    place_pod,
    placement_problem,
    running_phases,
    slices_on_cards,
)
from vcuda.placement_annotation import GpuSlice
from vcuda.pod_options import PodOptions
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.vocabulary import Share

UNIT_MIB = 256
CARD_MIB = 40960
WHOLE = 100

Links = Mapping[tuple[int, int], str]


def uuid(index: int) -> str:
    return f"GPU-{index}"


def gpu(index: int, model: str = "A100", memory_mib: int = CARD_MIB, numa: int | None = None) -> Gpu:
    return Gpu(uuid=uuid(index), index=index, model=model, memory_mib=memory_mib, healthy=True, numa=numa)


def room(
    index: int, cores: int = WHOLE, free_mib: int | None = None, closed: str = "", model: str = "A100"
) -> GpuAvailability:
    """A card of which this much is free."""
    return GpuAvailability(gpu(index, model), cores, CARD_MIB if free_mib is None else free_mib, closed)


def cards(count: int, links: Links | None = None, numa: Sequence[int] = ()) -> list[Gpu]:
    """So many cards, with these links."""
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


def app(name: str, cores: int, units: int = 1, role: Role = Role.APP, *, follows: bool = False) -> ContainerRequest:
    """A container; it asks for one unit of memory unless it says otherwise."""
    return ContainerRequest(name, role, Share(cores, 0 if follows else units, memory_follows_cores=follows), "")


def init(name: str, cores: int, units: int = 1) -> ContainerRequest:
    return app(name, cores, units, Role.INIT)


def sidecar(name: str, cores: int, units: int = 1) -> ContainerRequest:
    return app(name, cores, units, Role.SIDECAR)


def pod(*containers: ContainerRequest) -> PodRequest:
    return PodRequest(containers)


def put(
    request: PodRequest,
    rooms: Sequence[GpuAvailability],
    options: PodOptions | None = None,
    policy: PlacementStrategy = PlacementStrategy.BINPACK,
) -> PlacedSlices:
    return place_pod(request, rooms, unit_mib=UNIT_MIB, options=options or PodOptions(), policy=policy)


def obeyed(
    request: PodRequest,
    placed: Mapping[str, Sequence[GpuSlice]],
    rooms: Sequence[GpuAvailability],
    options: PodOptions | None = None,
) -> str:
    return placement_problem(request, placed, rooms, unit_mib=UNIT_MIB, options=options or PodOptions())


def numbers(slices: Sequence[GpuSlice]) -> list[int]:
    """The indexes of a container's cards."""
    return [int(given.uuid.removeprefix("GPU-")) for given in slices]


def whole_on(gpus: Sequence[Gpu], wanted: int, free: Sequence[int] | None = None) -> list[int]:
    """Which cards a pod gets that asks for so many whole ones."""
    rooms = [GpuAvailability(each, WHOLE, each.memory_mib) for each in gpus if free is None or each.index in free]
    return numbers(put(pod(app("a", wanted * WHOLE, 0)), rooms)["a"])


# What a pod has at every moment, worked out without the code that is tested.


class Asked(Struct, frozen=True):
    """What a container takes of each of its cards."""

    cores: int
    memory_mib: int


def alive_together(request: PodRequest) -> Iterator[list[str]]:
    """Play a pod's life: each init container beside the sidecars before it, then all that stay."""
    sidecars: list[str] = []
    for each in request.containers:
        if each.role is Role.INIT:
            yield [*sidecars, each.name]
        elif each.role is Role.SIDECAR:
            sidecars.append(each.name)
    yield sidecars + [each.name for each in request.containers if each.role is Role.APP]


def takes(container: ContainerRequest, card_mib: int) -> Asked:
    share = container.share
    if share.cores >= WHOLE:
        return Asked(WHOLE, card_mib)
    return Asked(
        share.cores, share.cores * card_mib // WHOLE if share.memory_follows_cores else share.memory_units * UNIT_MIB
    )


def fits(request: PodRequest, chosen: Mapping[str, Sequence[str]], rooms: Sequence[GpuAvailability]) -> bool:
    """Tell whether no card is ever filled beyond what is free of it, and whole cards are free before."""
    by_uuid = {each.gpu.uuid: each for each in rooms}
    by_name = {each.name: each for each in request.containers}
    for names in alive_together(request):
        for card in {card for name in names for card in chosen[name]}:
            there = by_uuid[card]
            users = [by_name[name] for name in names if card in chosen[name]]
            asked = [takes(each, there.gpu.memory_mib) for each in users]
            wants_whole = any(each.share.cores >= WHOLE for each in users)
            if (
                there.closed
                or sum(each.cores for each in asked) > there.cores
                or sum(each.memory_mib for each in asked) > there.memory_mib
                or (wants_whole and (len(users) > 1 or (there.cores, there.memory_mib) != (WHOLE, CARD_MIB)))
            ):
                return False
    return True


def possible_somehow(request: PodRequest, rooms: Sequence[GpuAvailability]) -> bool:
    """Try every way to put a pod on cards of one model."""
    for model in {each.gpu.model for each in rooms}:
        there = [each.gpu.uuid for each in rooms if each.gpu.model == model]
        choices = [list(combinations(there, max(1, each.share.cores // WHOLE))) for each in request.containers]
        for chosen in product(*choices):
            if fits(request, dict(zip((each.name for each in request.containers), chosen, strict=True)), rooms):
                return True
    return False


# Random nodes and pods.

free_cores = st.sampled_from([0, 10, 30, 50, 70, 100, 100])
free_memory = st.sampled_from([0, 1024, 10240, 20480, CARD_MIB, CARD_MIB])


@st.composite
def nodes(draw: st.DrawFn, most: int = 4) -> list[GpuAvailability]:
    """Cards of two models, each with something free; some are closed."""
    return [
        room(
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
    """Containers of all kinds: parts with and without memory of their own, and whole cards."""
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
def test_no_card_is_ever_filled_beyond_its_size(
    request_: PodRequest, rooms: list[GpuAvailability], policy: PlacementStrategy
) -> None:
    """Whatever is placed fits at every moment of the pod's life, and what can be placed somehow is placed."""
    try:
        placed = put(request_, rooms, policy=policy)
    except InsufficientGpus:
        assert not possible_somehow(request_, rooms)
        return
    assert fits(request_, {name: [given.uuid for given in slices] for name, slices in placed.items()}, rooms)
    by_uuid = {each.gpu.uuid: each.gpu for each in rooms}
    for each in request_.containers:
        for given_ in placed[each.name]:
            asked = takes(each, by_uuid[given_.uuid].memory_mib)
            assert (given_.cores, given_.memory_mib) == (asked.cores, asked.memory_mib)


@given(pods(), nodes(), st.sampled_from(list(PlacementStrategy)))
def test_a_placement_is_obeyed_by_the_node_that_made_it(
    request_: PodRequest, rooms: list[GpuAvailability], policy: PlacementStrategy
) -> None:
    """Whoever places, whoever checks: they agree, and settling a placement changes nothing of it."""
    try:
        placed = put(request_, rooms, policy=policy)
    except InsufficientGpus:
        return
    assert obeyed(request_, placed, rooms) == ""
    assert slices_on_cards(request_, card_uuids(placed), [room.gpu for room in rooms], UNIT_MIB) == placed


@given(pods(), nodes(), st.data())
def test_a_foreign_placement_is_obeyed_just_when_it_fits(
    request_: PodRequest, rooms: list[GpuAvailability], data: st.DataObject
) -> None:
    """Cards of one model that are never filled beyond their size, and nothing else."""
    there = [each.gpu.uuid for each in rooms]
    chosen: dict[str, list[str]] = {}
    for each in request_.containers:
        wanted = max(1, each.share.cores // WHOLE)
        if wanted > len(there):
            return
        chosen[each.name] = data.draw(st.permutations(there))[:wanted]
    models = {each.gpu.model for each in rooms for uuids in chosen.values() if each.gpu.uuid in uuids}
    placed = {name: tuple(GpuSlice(card, 1, 1) for card in uuids) for name, uuids in chosen.items()}
    assert (obeyed(request_, placed, rooms) == "") == (len(models) == 1 and fits(request_, chosen, rooms))


@given(pods(), nodes(), st.sampled_from(list(PlacementStrategy)), st.randoms(use_true_random=False))
def test_the_same_pod_on_the_same_node_gets_the_same_cards(
    request_: PodRequest, rooms: list[GpuAvailability], policy: PlacementStrategy, chance: Random
) -> None:
    """In whatever order the cards are listed, the outcome is the same."""
    shuffled = list(rooms)
    chance.shuffle(shuffled)
    assert outcome(request_, rooms, policy) == outcome(request_, shuffled, policy)


def outcome(request: PodRequest, rooms: Sequence[GpuAvailability], policy: PlacementStrategy) -> PlacedSlices | str:
    try:
        return put(request, rooms, policy=policy)
    except InsufficientGpus as full:
        return str(full).partition(":")[0]


@given(pods(), nodes())
def test_what_a_pod_holds_is_what_the_next_one_finds_missing(
    request_: PodRequest, rooms: list[GpuAvailability]
) -> None:
    """The most that it has of a card at any moment is taken from the card, and never more than there was."""
    try:
        placed = put(request_, rooms)
    except InsufficientGpus:
        return
    before = [{each.gpu.uuid: (WHOLE - each.cores, CARD_MIB - each.memory_mib)} for each in rooms]
    after = available_gpus([each.gpu for each in rooms], [*before, peak_usage(request_, placed)])
    for old, new in zip(rooms, after, strict=True):
        together = [
            [given for name in names for given in placed[name] if given.uuid == new.gpu.uuid]
            for names in alive_together(request_)
        ]
        assert old.cores - new.cores == max(sum(given.cores for given in slices) for slices in together)
        assert old.memory_mib - new.memory_mib == max(sum(given.memory_mib for given in slices) for slices in together)
        assert new.cores >= 0
        assert new.memory_mib >= 0


# Moments.


def test_every_plain_init_container_has_a_moment_of_its_own() -> None:
    """Sidecars run from their turn on, and all others at the end."""
    request = pod(init("i1", 10), sidecar("s1", 10), init("i2", 10), sidecar("s2", 10), app("a", 10), app("b", 10))
    assert running_phases(request) == {"i1": (0,), "s1": (1, 2), "i2": (1,), "s2": (2,), "a": (2,), "b": (2,)}


FITTING = {
    "containers run side by side": (pod(app("a", 50), app("b", 50)), 100),
    "an init container is gone when the others start": (pod(init("i", 80), app("a", 80)), 80),
    "init containers come one after another": (pod(init("i", 60), init("j", 60), app("a", 10)), 60),
    "a sidecar runs beside later init containers": (pod(sidecar("s", 30), init("i", 50), app("a", 20)), 80),
    "a sidecar does not run beside earlier init containers": (pod(init("i", 70), sidecar("s", 30), app("a", 40)), 70),
    "a sidecar runs beside containers": (pod(sidecar("s", 30), app("a", 40)), 70),
    "a whole card of an init container is used again": (pod(init("i", 100, 0), app("a", 40), app("b", 60)), 100),
}


@pytest.mark.parametrize(("request_", "least"), FITTING.values(), ids=FITTING.keys())
def test_a_pod_needs_of_one_card_the_most_it_has_at_once(request_: PodRequest, least: int) -> None:
    """With just so much it fits, and with one less it does not."""
    placed = put(request_, [room(0, least)])
    assert peak_usage(request_, placed)[uuid(0)][0] == least
    with pytest.raises(InsufficientGpus):
        put(request_, [room(0, least - 1)])


@pytest.mark.parametrize("policy", PlacementStrategy)
def test_an_init_container_takes_the_room_of_later_containers(policy: PlacementStrategy) -> None:
    """A pod stays on the cards it has at another moment, however much is free elsewhere."""
    rooms = [room(0), room(1), room(2)]
    small = put(pod(init("i", 50), app("a", 50)), rooms, policy=policy)
    assert small["i"][0].uuid == small["a"][0].uuid
    large = put(pod(init("i", 100, 0), app("a", 200, 0)), rooms, policy=policy)
    assert {each.uuid for each in large["i"]} < {each.uuid for each in large["a"]}


def test_an_init_container_takes_a_card_of_its_pod_before_one_that_is_connected_worse() -> None:
    """Alone it would get the card that leaves a pair together."""
    rooms = [GpuAvailability(each, WHOLE, CARD_MIB) for each in cards(4, {(2, 3): "nvlink4"})]
    assert numbers(put(pod(app("a", 100, 0)), rooms)["a"]) == [0]
    assert numbers(put(pod(init("i", 100, 0), app("a", 200, 0)), rooms)["i"]) == [2]


# Amounts.


def test_memory_that_follows_is_the_same_part_of_the_card_rounded_down() -> None:
    """Of 15109 MiB, 33 cores have 4985."""
    odd = GpuAvailability(gpu(0, memory_mib=15109), WHOLE, 15109)
    assert put(pod(app("a", 33, follows=True)), [odd]) == {"a": (GpuSlice(uuid(0), 33, 4985),)}
    many = pod(*(app(f"c{number}", 20, follows=True) for number in range(5)))
    assert sum(given.memory_mib for (given,) in put(many, [odd]).values()) <= 15109


def test_memory_alone_can_fill_a_card() -> None:
    """A share with few cores goes where its memory is."""
    asking = pod(app("a", 1, 81))
    assert numbers(put(asking, [room(0, free_mib=80 * UNIT_MIB), room(1)])["a"]) == [1]
    with pytest.raises(InsufficientGpus):
        put(asking, [room(0, free_mib=80 * UNIT_MIB)])


def test_whole_cards_are_given_with_all_their_memory() -> None:
    """And to nobody else."""
    request = pod(app("a", 100, 0), app("b", 1))
    assert put(request, [room(0), room(1)]) == {
        "a": (GpuSlice(uuid(0), WHOLE, CARD_MIB),),
        "b": (GpuSlice(uuid(1), 1, UNIT_MIB),),
    }
    with pytest.raises(InsufficientGpus):
        put(request, [room(0)])


@pytest.mark.parametrize(
    "used",
    [room(0, 99), room(0, free_mib=CARD_MIB - 1), room(0, closed="cordoned")],
    ids=["someone has a core of it", "someone has memory of it", "it is closed"],
)
def test_a_card_that_is_used_is_not_given_as_a_whole(used: GpuAvailability) -> None:
    """One core or one MiB of somebody else's is enough."""
    with pytest.raises(InsufficientGpus):
        put(pod(app("a", 100, 0)), [used])
    assert numbers(put(pod(app("a", 100, 0)), [used, room(1)])["a"]) == [1]


def test_cards_of_unknown_memory_are_given_as_a_whole_only() -> None:
    """Nobody could say when such a card is full."""
    unknown = GpuAvailability(gpu(0, memory_mib=0), WHOLE, 0)
    for units in (0, 1):
        assert put(pod(app("a", 100, units)), [unknown]) == {"a": (GpuSlice(uuid(0), WHOLE, 0),)}
    for part in (app("a", 10), app("a", 10, follows=True)):
        with pytest.raises(InsufficientGpus):
            put(pod(part), [unknown])
    assert "as a whole only" in obeyed(pod(app("a", 10)), {"a": (GpuSlice(uuid(0), 10, 256),)}, [unknown])


def test_a_card_of_unknown_memory_that_is_held_is_not_given_again() -> None:
    """Its cores tell, where its memory cannot."""
    card = gpu(0, memory_mib=0)
    request = pod(app("a", 100, 0))
    (left,) = available_gpus([card], [peak_usage(request, {"a": (GpuSlice(uuid(0), WHOLE, 0),)})])
    with pytest.raises(InsufficientGpus):
        put(request, [left])


LARGE, SMALL = (
    GpuAvailability(gpu(0, "A100-80GB", 81920), WHOLE, 81920),
    GpuAvailability(gpu(1, "A100-40GB", 40960), WHOLE, 40960),
)


@pytest.mark.parametrize(
    ("units", "expected"),
    [(1, [1]), (160, [1]), (161, [0]), (320, [0])],
    ids=["the token asks for nothing", "just the small card", "more than the small card", "just the large card"],
)
def test_whole_cards_have_at_least_the_memory_that_is_asked_for(units: int, expected: list[int]) -> None:
    """Of two models the one that packs best is taken, if it is large enough."""
    # One core of the large card's sister is used, so that the small model has less room and is tried first.
    rooms = [LARGE, SMALL, GpuAvailability(gpu(2, "A100-80GB", 81920), 99, 81920)]
    assert numbers(put(pod(app("a", 100, units)), rooms)["a"]) == expected


def test_whole_cards_have_the_memory_together_that_is_asked_for() -> None:
    """Two cards of 40 GiB are enough for 80 GiB and not for more."""
    rooms = [room(0), room(1)]
    assert numbers(put(pod(app("a", 200, 320)), rooms)["a"]) == [0, 1]
    with pytest.raises(InsufficientGpus):
        put(pod(app("a", 200, 321)), rooms)


def test_a_foreign_placement_on_cards_that_are_too_small_is_not_obeyed() -> None:
    """What place() never gives, a placement by somebody else must not give either."""
    assert obeyed(pod(app("a", 100, 161)), {"a": (GpuSlice(uuid(1), WHOLE, 40960),)}, [SMALL]) != ""


# Models.


def test_all_cards_of_a_pod_are_of_one_model() -> None:
    """That is what its quota is charged for: two models with half the room each are not enough."""
    request = pod(app("a", 60), app("b", 60))
    with pytest.raises(InsufficientGpus):
        put(request, [room(0, model="A100"), room(1, model="T4")])
    rooms = [room(0, model="A100"), room(1, model="T4"), room(2, model="T4")]
    assert sorted(numbers(put(request, rooms)["a"]) + numbers(put(request, rooms)["b"])) == [1, 2]


WISHED = {
    "nothing wished, the model with least room": (PodOptions(), [2]),
    "a model is wished": (PodOptions(models=("A100",)), [0]),
    "a model is avoided": (PodOptions(avoided_models=("T4",)), [0]),
    "several models are wished": (PodOptions(models=("T4", "A100")), [2]),
    "one is wished and its product avoided": (PodOptions(models=("A100", "T4"), avoided_models=("T4",)), [0]),
}


@pytest.mark.parametrize(("options", "expected"), WISHED.values(), ids=WISHED.keys())
def test_wishes_decide_which_models_are_used(options: PodOptions, expected: list[int]) -> None:
    """Only what the pod may use is tried."""
    rooms = [room(0, model="A100-SXM4-40GB"), room(1, model="A100-SXM4-40GB"), room(2, model="T4")]
    placed = put(pod(app("a", 10)), rooms, options)
    assert numbers(placed["a"]) == expected
    assert obeyed(pod(app("a", 10)), placed, rooms, options) == ""


@given(pods(), nodes(), st.sampled_from([PodOptions(models=("T4",)), PodOptions(avoided_models=("A100",))]))
def test_no_pod_gets_a_model_that_it_may_not_use(
    request_: PodRequest, rooms: list[GpuAvailability], options: PodOptions
) -> None:
    """Neither one that it did not name, nor one that it excluded."""
    model_of = {each.gpu.uuid: each.gpu.model for each in rooms}
    try:
        placed = put(request_, rooms, options)
    except InsufficientGpus:
        return
    assert {model_of[given.uuid] for slices in placed.values() for given in slices} == {"T4"}


def test_a_node_without_cards_that_a_pod_may_use_says_so() -> None:
    """The message names what was looked for."""
    with pytest.raises(InsufficientGpus, match="no card of H100, L4"):
        put(pod(app("a", 10)), [room(0)], PodOptions(models=("H100", "L4")))
    with pytest.raises(InsufficientGpus, match="no card of any model but A100"):
        put(pod(app("a", 10)), [room(0)], PodOptions(avoided_models=("A100",)))
    with pytest.raises(InsufficientGpus, match=r"this node has no card$"):
        put(pod(app("a", 10)), [])


# Packing and spreading.


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(PlacementStrategy.BINPACK, [1]), (PlacementStrategy.SPREAD, [2])],
    ids=list(PlacementStrategy),
)
def test_shares_go_to_the_fullest_card_or_to_the_emptiest(policy: PlacementStrategy, expected: list[int]) -> None:
    """Where they fit."""
    rooms = [room(0, 20), room(1, 60), room(2, 90), room(3, 80)]
    assert numbers(put(pod(app("a", 30)), rooms, policy=policy)["a"]) == expected


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(PlacementStrategy.BINPACK, [1]), (PlacementStrategy.SPREAD, [0])],
    ids=list(PlacementStrategy),
)
def test_models_are_packed_or_spread_as_well(policy: PlacementStrategy, expected: list[int]) -> None:
    """The model with least room comes first, or the one with most."""
    rooms = [room(0, model="A100"), room(1, 50, model="T4")]
    assert numbers(put(pod(app("a", 30)), rooms, policy=policy)["a"]) == expected


def test_two_containers_are_spread_over_two_cards_or_packed_on_one() -> None:
    """The pod's own share counts as used."""
    request, rooms = pod(app("a", 40), app("b", 40)), [room(0), room(1)]
    packed, spread = put(request, rooms), put(request, rooms, policy=PlacementStrategy.SPREAD)
    assert numbers(packed["a"]) == numbers(packed["b"])
    assert numbers(spread["a"]) != numbers(spread["b"])


@pytest.mark.parametrize("policy", PlacementStrategy)
def test_where_the_first_choice_leaves_no_room_another_is_tried(policy: PlacementStrategy) -> None:
    """Two cards hold 40+30+30 each; whoever puts 40+40 on one of them and does not go back fails."""
    sizes = (40, 40, 30, 30, 30, 30)
    placed = put(
        pod(*(app(f"c{number}", cores) for number, cores in enumerate(sizes))), [room(0), room(1)], policy=policy
    )
    for card in (uuid(0), uuid(1)):
        assert sum(given.cores for (given,) in placed.values() if given.uuid == card) == WHOLE


def test_a_search_without_hope_ends() -> None:
    """Twelve containers of which no two fit on one card, and eleven cards."""
    request = pod(*(app(f"c{number}", 51 + number) for number in range(12)))
    with pytest.raises(InsufficientGpus):
        put(request, [room(index) for index in range(11)])


# Sets of cards.


def test_links_rank_nvlink_first_and_then_by_distance() -> None:
    """More NVLinks before fewer, then one board, one PCIe switch, several, one bridge, one socket, two sockets."""
    order = ["nvlink12", "nvlink2", "nvlink1", "board", "pix", "pxb", "phb", "node", "sys"]
    links = {(0, number + 1): kind for number, kind in enumerate(order)}
    chosen = best_sets(cards(len(order) + 1, links), 2)
    from_first = [pair[1].index for pair in chosen if pair[0].index == 0]
    assert from_first == list(range(1, len(order) + 1))


@pytest.mark.parametrize(
    ("better", "worse"),
    [("nvlink2", "nvlink1"), ("nvlink1", "board"), ("pix", "pxb"), ("pxb", "phb"), ("phb", "node"), ("node", "sys")],
)
def test_whole_cards_are_the_best_connected(better: str, worse: str) -> None:
    """Even where the first indexes are free."""
    links = dict.fromkeys(combinations(range(4), 2), worse) | {(1, 3): better}
    assert whole_on(cards(4, links), 2) == [1, 3]


@pytest.mark.parametrize("saying", [1, 3], ids=["the first says it", "the second says it"])
def test_a_link_that_one_of_two_cards_names_holds_for_both(saying: int) -> None:
    """A driver may answer on one side only."""
    wired, bare = cards(4, {(1, 3): "nvlink1"}), cards(4)
    assert whole_on([wired[index] if index == saying else bare[index] for index in range(4)], 2) == [1, 3]


def test_the_worst_link_of_a_set_counts_most() -> None:
    """A chain of fast links with a slow end is no better than its end."""
    links = {(0, 1): "nvlink4", (1, 2): "nvlink4", (0, 2): "sys", (3, 4): "pix", (3, 5): "pix", (4, 5): "pix"}
    assert whole_on(cards(6, links), 3) == [3, 4, 5]


# A hybrid cube mesh: two squares with diagonals, and an edge from each corner to the other square.
CUBE_MESH: Links = {
    (0, 1): "nvlink1",
    (0, 2): "nvlink1",
    (0, 3): "nvlink2",
    (0, 4): "nvlink2",
    (1, 2): "nvlink2",
    (1, 3): "nvlink1",
    (1, 5): "nvlink2",
    (2, 3): "nvlink2",
    (2, 6): "nvlink1",
    (3, 7): "nvlink1",
    (4, 5): "nvlink1",
    (4, 6): "nvlink1",
    (4, 7): "nvlink2",
    (5, 6): "nvlink2",
    (5, 7): "nvlink1",
    (6, 7): "nvlink2",
}

MESHED = {
    "a pair has two links": (2, None, [0, 3]),
    "four make a square": (4, None, [0, 1, 2, 3]),
    "four make the other square where one is begun": (4, [1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7]),
    "of two pairs that of which another pair is left": (2, [1, 4, 5, 2], [1, 2]),
    "all eight": (8, None, [0, 1, 2, 3, 4, 5, 6, 7]),
    "one card leaves a whole square": (1, [1, 4, 5, 6, 7], [1]),
}


@pytest.mark.parametrize(("wanted", "free", "expected"), MESHED.values(), ids=MESHED.keys())
def test_a_cube_mesh_is_used_along_its_edges(wanted: int, free: list[int] | None, expected: list[int]) -> None:
    """Cards in sets without a link between them would talk over the processors."""
    numa = (0, 0, 0, 0, 1, 1, 1, 1)
    assert whole_on(cards(8, CUBE_MESH, numa), wanted, free) == expected


def test_without_links_cards_of_one_numa_node_go_together() -> None:
    """Where nobody says how cards reach each other, their NUMA nodes tell."""
    gpus = cards(4, numa=(0, 1, 0, 1))
    assert whole_on(gpus, 2) == [0, 2]
    assert whole_on(gpus, 2, [0, 1, 3]) == [1, 3]


def test_a_single_card_is_taken_from_the_numa_node_that_is_begun() -> None:
    """A pair that is still together is left together."""
    assert whole_on(cards(4, numa=(0, 0, 1, 1)), 1, [0, 1, 3]) == [3]


def test_behind_a_switch_all_cards_are_alike() -> None:
    """The first that are free are taken."""
    links = dict.fromkeys(combinations(range(8), 2), "nvlink12")
    assert whole_on(cards(8, links), 4) == [0, 1, 2, 3]
    assert whole_on(cards(8, links), 2, [1, 4, 6]) == [1, 4]


SIXTEEN = {
    "all alike": (dict.fromkeys(combinations(range(16), 2), "nvlink6"), list(range(8))),
    "two islands, woven": (
        {(a, b): "nvlink6" if a % 2 == b % 2 else "sys" for a, b in combinations(range(16), 2)},
        list(range(0, 16, 2)),
    ),
    "four boards in two sockets": (
        {
            (a, b): "nvlink4" if a // 4 == b // 4 else "node" if a // 8 == b // 8 else "sys"
            for a, b in combinations(range(16), 2)
        },
        list(range(8)),
    ),
}


@pytest.mark.parametrize(
    ("links", "expected"),
    [pytest.param(*case, id=name) for name, case in SIXTEEN.items()],
)
def test_half_of_sixteen_cards_is_found_without_trying_all_sets(links: Links, expected: list[int]) -> None:
    """There are 12870 of them, which nobody waits for."""
    assert whole_on(cards(16, links), 8) == expected


def test_three_halves_of_sixteen_cards_are_refused() -> None:
    """The search ends, though each half can be chosen in thousands of ways."""
    rooms = [GpuAvailability(each, WHOLE, CARD_MIB) for each in cards(16)]
    with pytest.raises(InsufficientGpus):
        put(pod(*(app(name, 800, 0) for name in "abc")), rooms)


@given(st.integers(1, 6), st.dictionaries(st.sampled_from(list(combinations(range(6), 2))), st.just("nvlink1")))
def test_every_set_is_offered_once(wanted: int, links: dict[tuple[int, int], str]) -> None:
    """None is left out and none comes twice, or a pod might not find the only one that is free for it."""
    found = [tuple(each.index for each in chosen) for chosen in best_sets(cards(6, links), wanted)]
    assert sorted(found) == list(combinations(range(6), wanted))


# What is said.


def test_a_refusal_names_what_was_asked_for_and_how_every_card_stands() -> None:
    """Whoever reads it need not look anything up."""
    rooms = [room(0, 30, 1024), room(1, closed="XID 79"), room(2, model="T4")]
    request = pod(app("train", 50, 32), app("show", 20, follows=True), app("many", 200, 0))
    with pytest.raises(InsufficientGpus) as refused:
        put(request, rooms, PodOptions(models=("A100",)))
    assert str(refused.value) == (
        "no room for train (50 cores and 8192 MiB), show (20 cores), many (2 whole cards): "
        "GPU 0 (A100): 30 cores and 1024 MiB free; GPU 1 (A100): XID 79"
    )


def test_rooms_are_what_is_left_of_cards() -> None:
    """All that pods hold is taken away, and whoever closes a card says why."""
    gpus = [gpu(0), gpu(1), gpu(2)]
    held = [{uuid(0): (30, 1024)}, {uuid(0): (20, 512), uuid(1): (100, CARD_MIB)}, {"GPU-gone": (100, 1)}]
    found = available_gpus(gpus, held, lambda each: "cordoned" if each.index == 1 else "")
    assert [(each.cores, each.memory_mib, each.closed) for each in found] == [
        (50, CARD_MIB - 1536, ""),
        (0, 0, "cordoned"),
        (100, CARD_MIB, ""),
    ]


def test_the_amounts_of_a_foreign_placement_are_not_taken_over() -> None:
    """Which cards is the scheduler's to say; how much of them is the request's."""
    request = pod(app("a", 50, 8), app("b", 100, 0))
    foreign = {"a": (GpuSlice(uuid(0), 1, 1),), "b": (GpuSlice(uuid(1), 7, 7),), "stranger": (GpuSlice(uuid(2), 1, 1),)}
    assert slices_on_cards(request, card_uuids(foreign), [room(0).gpu, room(1).gpu], UNIT_MIB) == {
        "a": (GpuSlice(uuid(0), 50, 2048),),
        "b": (GpuSlice(uuid(1), WHOLE, CARD_MIB),),
    }


def on(*indexes: int) -> tuple[GpuSlice, ...]:
    return tuple(GpuSlice(uuid(index), 1, 1) for index in indexes)


NODE = [room(0, 40, 1024), room(1), room(2, closed="cordoned"), room(3, model="T4"), room(4)]
HALF, TWO = pod(app("a", 50)), pod(app("a", 200, 0))
REFUSED: dict[str, tuple[PodRequest, Mapping[str, Sequence[GpuSlice]], str]] = {
    "a container was forgotten": (HALF, {}, "a asks for 1 card, and was given 0"),
    "a container was given too many": (HALF, {"a": on(1, 4)}, "a asks for 1 card, and was given 2"),
    "a container was given too few": (TWO, {"a": on(1)}, "a asks for 2 cards, and was given 1"),
    "a container was given one card twice": (TWO, {"a": on(1, 1)}, "a asks for 2 cards, and was given 2"),
    "a card is not there": (HALF, {"a": on(9)}, "GPU-9, which this node does not have"),
    "a card is closed": (HALF, {"a": on(2)}, "GPU 2 (GPU-2): cordoned"),
    "a card has too few cores": (HALF, {"a": on(0)}, "GPU 0 (GPU-0): 40 cores free"),
    "a card has too little memory": (pod(app("a", 40, 5)), {"a": on(0)}, "GPU 0 (GPU-0): 1024 MiB free"),
    "a whole card is in use": (pod(app("a", 100, 0)), {"a": on(0)}, "GPU 0 (GPU-0): not free as a whole"),
    "two containers are given one whole card": (
        pod(app("a", 100, 0), app("b", 100, 0)),
        {"a": on(1), "b": on(1)},
        "b was given GPU 1 (GPU-1): not free as a whole",
    ),
    "cards are of two models": (pod(app("a", 50), app("b", 50)), {"a": on(1), "b": on(3)}, "several models"),
}


@pytest.mark.parametrize(("request_", "placed", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_a_placement_that_cannot_be_obeyed_is_named(
    request_: PodRequest, placed: Mapping[str, Sequence[GpuSlice]], expected: str
) -> None:
    """The message says which container, which card, and what is wrong."""
    assert expected in obeyed(request_, placed, NODE)


def test_a_placement_on_a_model_that_the_pod_may_not_use_is_not_obeyed() -> None:
    """The charge was for another."""
    assert "a was given a A100, which the pod may not use" in obeyed(
        HALF, {"a": on(1)}, NODE, PodOptions(avoided_models=("A100",))
    )
