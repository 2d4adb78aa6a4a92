"""Deciding about all nodes at once: the same answer as placing the pod on each, and a reason for every refusal."""

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vcuda.gpus import UNIT_MIB, app, init, pod, sidecar
from vcuda.fit_query import FitQuery, place_on_node
from vcuda.gpu_availability import GpuUsage
from vcuda.gpu_table import GpuTable
from vcuda.inventory import Gpu
from vcuda.isolation import COMPUTE, MEMORY, NO_ISOLATION, RUNGS, Isolation, Rung
from vcuda.node_fit import MAX_STEPS, NodeFits, NodeFitter, fit_nodes
from vcuda.node_problem import TEXTS, NodeProblem
from vcuda.placement import InsufficientGpus, SearchBudget
from vcuda.placement_strategies import PlacementStrategy
from vcuda.pod_options import PodOptions
from vcuda.request import ContainerRequest, PodRequest
from vcuda.view_fit import BestFree

MODELS = {"A100-SXM4-40GB": 40960, "T4": 15360, "V100": 16384}
HALF = pod(app("a", 50, 40))


def card(
    node: str,
    index: int = 0,
    model: str = "T4",
    memory_mib: int | None = None,
    *,
    healthy: bool = True,
    isolation: Isolation = NO_ISOLATION,
) -> Gpu:
    size = MODELS[model] if memory_mib is None else memory_mib
    return Gpu(
        uuid=f"GPU-{node}-{index}", index=index, model=model, memory_mib=size, healthy=healthy, isolation=isolation
    )


def table_of(
    nodes: Mapping[str, list[Gpu]],
    usage: Mapping[str, Mapping[str, GpuUsage]] | None = None,
    pools: Mapping[str, str] | None = None,
) -> GpuTable:
    table = GpuTable()
    for name, gpus in nodes.items():
        table.set_node(name, gpus, (pools or {}).get(name, ""), lambda gpu: "" if gpu.healthy else "unhealthy")
        table.take(name, (usage or {}).get(name, {}))
    return table


def fits_of(table: GpuTable, query: FitQuery) -> NodeFits:
    return fit_nodes(table, sorted(table.names()), query)


def ranked(fits: NodeFits) -> list[str]:
    return [fits.names[at] for at in fits.ranked()]


def by_name(fits: NodeFits) -> dict[str, NodeProblem]:
    return {name: NodeProblem(code) for name, code in zip(fits.names, fits.problems.tolist(), strict=True)}


def problem_of(gpus: list[Gpu], query: FitQuery, usage: Mapping[str, GpuUsage] | None = None) -> NodeProblem:
    return NodeProblem(int(fits_of(table_of({"n": gpus}, {"n": usage or {}}), query).problems[0]))


def isolations() -> st.SearchStrategy[Isolation]:
    return st.builds(Isolation, st.sampled_from(RUNGS[MEMORY]), st.sampled_from(RUNGS[COMPUTE]))


@st.composite
def clusters(draw: st.DrawFn) -> GpuTable:
    table = GpuTable()
    for number in range(draw(st.integers(1, 4))):
        name = f"n{number}"
        gpus = [
            card(
                name,
                index,
                draw(st.sampled_from(sorted(MODELS))) if draw(st.booleans()) else "T4",
                draw(st.sampled_from([None, None, None, 0, 8192])),
                healthy=draw(st.integers(0, 5)) > 0,
                isolation=draw(isolations()),
            )
            for index in range(draw(st.integers(0, 5)))
        ]
        table.set_node(
            name, gpus, draw(st.sampled_from(["", "a", "b"])), lambda gpu: "" if gpu.healthy else "unhealthy"
        )
        table.take(
            name,
            {
                each.uuid: (draw(st.sampled_from([0, 10, 50, 100])), draw(st.sampled_from([0, 1024, 8192])))
                for each in gpus
                if draw(st.booleans())
            },
        )
    return table


@st.composite
def containers(draw: st.DrawFn, name: str) -> ContainerRequest:
    make = draw(st.sampled_from([app, app, app, init, sidecar]))
    whole = draw(st.integers(0, 3))
    if whole:
        return make(name, 100 * whole, draw(st.sampled_from([0, whole, 100 * whole])))
    if draw(st.booleans()):
        return app(name, draw(st.integers(1, 99)), follows=True)
    return make(name, draw(st.sampled_from([1, 10, 50, 60, 99])), draw(st.sampled_from([1, 28, 40, 70, 200])))


@st.composite
def queries(draw: st.DrawFn) -> FitQuery:
    request = PodRequest(tuple(draw(containers(f"c{number}")) for number in range(draw(st.integers(1, 3)))))
    options = PodOptions(
        models=draw(st.sampled_from([(), (), ("T4",), ("A100", "V100")])),
        avoided_models=draw(st.sampled_from([(), (), ("T4",)])),
        uuids=draw(st.sampled_from([(), (), ("GPU-n0-0", "GPU-n0-1", "GPU-n1-1")])),
        avoided_uuids=draw(st.sampled_from([(), ("GPU-n0-0", "GPU-n1-1")])),
        min_isolation=draw(st.one_of(st.just(NO_ISOLATION), isolations())),
    )
    return FitQuery(
        request,
        UNIT_MIB,
        options,
        draw(st.sampled_from([None, frozenset({"T4"}), frozenset({"T4", "V100"})])),
        excluded=draw(st.sampled_from([{}, {}, {"n0": None}, {"n0": ("GPU-n0-0",)}])),
        strategy=draw(st.sampled_from(list(PlacementStrategy))),
    )


def is_placed(table: GpuTable, name: str, query: FitQuery) -> bool:
    try:
        place_on_node(query, name, table.available_gpus(name))
    except InsufficientGpus:
        return False
    return True


@given(clusters(), queries())
def test_a_node_fits_exactly_if_the_pod_can_be_placed_there(table: GpuTable, query: FitQuery) -> None:
    """The scheduler decides by arrays, the node by searching: they must never differ."""
    fits = fits_of(table, query)
    placed = {name: is_placed(table, name, query) for name in fits.names}
    assert dict(zip(fits.names, fits.problems == NodeProblem.NONE, strict=True)) == placed


@given(clusters(), queries(), st.randoms(use_true_random=False))
def test_the_order_of_nodes_does_not_depend_on_the_order_in_which_they_are_asked_about(
    table: GpuTable, query: FitQuery, random: Random
) -> None:
    """kube-scheduler filters nodes in parallel, so they arrive in any order."""
    names = list(table.names())
    first = fit_nodes(table, names, query)
    random.shuffle(shuffled := names.copy())
    second = fit_nodes(table, shuffled, query)
    assert ranked(first) == ranked(second)


@given(clusters(), queries())
def test_taking_and_giving_back_leaves_no_trace(table: GpuTable, query: FitQuery) -> None:
    before = fits_of(table, query)
    for name in table.names():
        usage = {each.uuid: (7, 11) for each in table.gpus(name)}
        table.take(name, usage)
        table.give_back(name, usage)
    after = fits_of(table, query)
    assert (before.problems == after.problems).all()
    assert (before.keys == after.keys).all()


FULL = (100, 15360)

REFUSALS = {
    "no gpus": ([], FitQuery(HALF, UNIT_MIB), {}, NodeProblem.NO_GPUS),
    "another model": ([card("n")], FitQuery(HALF, UNIT_MIB, PodOptions(models=("A100",))), {}, NodeProblem.MODEL),
    "a model that the quota does not grant": (
        [card("n")],
        FitQuery(HALF, UNIT_MIB, granted=frozenset({"V100"})),
        {},
        NodeProblem.QUOTA,
    ),
    "another pool": ([card("n")], FitQuery(HALF, UNIT_MIB, pools=("training",)), {}, NodeProblem.POOL),
    "another uuid": ([card("n")], FitQuery(HALF, UNIT_MIB, PodOptions(uuids=("GPU-x",))), {}, NodeProblem.UUID),
    "an unhealthy gpu": ([card("n", healthy=False)], FitQuery(HALF, UNIT_MIB), {}, NodeProblem.UNAVAILABLE),
    "weak isolation": (
        [card("n")],
        FitQuery(HALF, UNIT_MIB, PodOptions(min_isolation=Isolation(memory=Rung.MPS))),
        {},
        NodeProblem.ISOLATION,
    ),
    "weak isolation of compute, and a strong one of memory": (
        [card("n", isolation=Isolation(Rung.DRIVER, Rung.PRELOAD))],
        FitQuery(HALF, UNIT_MIB, PodOptions(min_isolation=Isolation(Rung.PRELOAD, Rung.MPS))),
        {},
        NodeProblem.ISOLATION,
    ),
    "a small gpu": ([card("n")], FitQuery(pod(app("a", 50, 100)), UNIT_MIB), {}, NodeProblem.TOO_SMALL),
    "few gpus": ([card("n")], FitQuery(pod(app("a", 200)), UNIT_MIB), {}, NodeProblem.TOO_FEW),
    "gpus in use": ([card("n")], FitQuery(pod(app("a", 100)), UNIT_MIB), {"GPU-n-0": (10, 256)}, NodeProblem.IN_USE),
    "no free memory": ([card("n")], FitQuery(HALF, UNIT_MIB), {"GPU-n-0": (10, 10240)}, NodeProblem.MEMORY),
    "no free cores": ([card("n")], FitQuery(HALF, UNIT_MIB), {"GPU-n-0": (60, 256)}, NodeProblem.CORES),
    "free cores on one gpu and memory on another": (
        [card("n"), card("n", 1)],
        FitQuery(HALF, UNIT_MIB),
        {"GPU-n-0": (60, 256), "GPU-n-1": (10, 10240)},
        NodeProblem.CORES_AND_MEMORY,
    ),
    "containers that fit only one by one": (
        [card("n")],
        FitQuery(pod(app("a", 60), app("b", 60)), UNIT_MIB),
        {},
        NodeProblem.COMBINATION,
    ),
    "a member of the workload on the gpu": (
        [card("n")],
        FitQuery(HALF, UNIT_MIB, excluded={"n": ("GPU-n-0",)}),
        {},
        NodeProblem.MEMBERS,
    ),
    "a member of the workload on the node": (
        [card("n")],
        FitQuery(HALF, UNIT_MIB, excluded={"n": None}),
        {},
        NodeProblem.MEMBERS,
    ),
}


@pytest.mark.parametrize(("gpus", "query", "usage", "problem"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_names_the_problem(
    gpus: list[Gpu], query: FitQuery, usage: Mapping[str, GpuUsage], problem: NodeProblem
) -> None:
    assert problem_of(gpus, query, usage) is problem


def test_only_what_eviction_could_change_is_resolvable() -> None:
    """kube-scheduler evicts pods for nodes whose problem is resolvable."""
    resolvable = {each for each in NodeProblem if each.is_resolvable}
    assert resolvable == {
        NodeProblem.IN_USE,
        NodeProblem.MEMORY,
        NodeProblem.CORES,
        NodeProblem.CORES_AND_MEMORY,
        NodeProblem.COMBINATION,
        NodeProblem.NOT_SEARCHED,
    }


def test_every_problem_has_a_text_without_numbers() -> None:
    """A text that changes wakes the pod, which is filtered again, without end."""
    assert set(TEXTS) == set(NodeProblem)
    assert not [text for text in TEXTS.values() if any(letter.isdigit() for letter in text)]


def test_a_node_that_is_not_in_the_table_is_reported_as_unknown() -> None:
    fits = fit_nodes(table_of({"n": [card("n")]}), ["other", "n"], FitQuery(HALF, UNIT_MIB))
    assert by_name(fits) == {"other": NodeProblem.NODE_UNKNOWN, "n": NodeProblem.NONE}


def test_binpack_prefers_the_tightest_gpu_and_spread_the_emptiest() -> None:
    nodes = {name: [card(name)] for name in ("a", "b", "c")}
    table = table_of(nodes, {"a": {"GPU-a-0": (10, 256)}, "b": {"GPU-b-0": (40, 256)}})
    names = sorted(nodes)
    binpack = fit_nodes(table, names, FitQuery(HALF, UNIT_MIB))
    spread = fit_nodes(table, names, FitQuery(HALF, UNIT_MIB, strategy=PlacementStrategy.SPREAD))
    assert ranked(binpack) == ["b", "a", "c"]
    assert ranked(spread) == ["c", "a", "b"]


def test_whole_gpus_go_to_the_fullest_node_first() -> None:
    nodes = {name: [card(name, index) for index in range(4)] for name in ("a", "b")}
    table = table_of(nodes, {"b": {"GPU-b-0": FULL, "GPU-b-1": FULL}})
    fits = fit_nodes(table, ["a", "b"], FitQuery(pod(app("a", 200)), UNIT_MIB))
    assert ranked(fits) == ["b", "a"]


def test_the_table_grows_with_nodes_and_gpus_and_reuses_rows() -> None:
    table = GpuTable()
    for number in range(300):
        table.set_node(f"n{number:03}", [card(f"n{number:03}", index) for index in range(1 + number % 17)])
    table.remove_node("n007")
    table.set_node("other", [card("other")])
    fits = fit_nodes(table, ["n007", "other", "n016"], FitQuery(pod(app("a", 1700)), UNIT_MIB))
    assert by_name(fits) == {
        "n007": NodeProblem.NODE_UNKNOWN,
        "other": NodeProblem.TOO_FEW,
        "n016": NodeProblem.NONE,
    }
    assert len(table) == 300


def test_a_pod_with_several_containers_is_searched_on_all_nodes_in_the_end() -> None:
    """A few at a time: all other pods wait meanwhile."""
    table = table_of({f"n{number:04}": [card(f"n{number:04}", index) for index in (0, 1)] for number in range(1000)})
    query, fitter = FitQuery(pod(app("a", 60), app("b", 60), app("c", 60)), UNIT_MIB), NodeFitter(table)
    names = sorted(table.names())
    counts = [int(sum(fitter.fit(names, query).problems == NodeProblem.NOT_SEARCHED)) for _ in range(10)]
    assert counts[0] > 500
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


def test_a_node_that_is_free_all_the_time_is_searched_although_others_change_faster() -> None:
    table = table_of({f"n{number:04}": [card(f"n{number:04}")] for number in range(400)})
    table.set_node("zz", [card("zz"), card("zz", 1)])
    query, fitter = FitQuery(pod(app("a", 60), app("b", 60)), UNIT_MIB), NodeFitter(table)
    names = sorted(table.names())
    for number in range(20):
        for name in names[:-1]:
            table.take(name, {f"GPU-{name}-0": (1 if number % 2 else -1, 0)})
        if (fitter.fit(names, query).problems == NodeProblem.NONE).any():
            return
    raise AssertionError("never found")


@pytest.mark.parametrize("containers", [23, 60, 200])
def test_a_pod_of_many_containers_costs_a_bounded_number_of_steps(
    containers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing is NP-hard, and a tenant chooses the containers."""
    steps = [0]
    original = SearchBudget.take_step

    def count(self: SearchBudget) -> bool:
        steps[0] += 1
        return original(self)

    monkeypatch.setattr(SearchBudget, "take_step", count)
    nodes = {f"n{number}": [card(f"n{number}", index) for index in range(8)] for number in range(100)}
    request = pod(*(app(f"c{number}", 34, 1) for number in range(containers)))
    fit_nodes(table_of(nodes), sorted(nodes), FitQuery(request, UNIT_MIB))
    assert steps[0] <= 2 * MAX_STEPS


def test_what_is_free_at_best_is_counted_over_the_gpus_that_the_pod_may_use_and_the_nodes_with_the_problem() -> None:
    table = table_of(
        {"a": [card("a"), card("a", 1, "V100")], "b": [card("b")]},
        {"a": {"GPU-a-0": (60, 1024)}, "b": {"GPU-b-0": (10, 14336)}},
    )
    query, fitter = FitQuery(HALF, UNIT_MIB, PodOptions(models=("T4",))), NodeFitter(table)
    assert fitter.best_free(query, fitter.fit(["a", "b"], query)) == {
        NodeProblem.CORES: BestFree(cores=40, mib=14336),
        NodeProblem.MEMORY: BestFree(cores=90, mib=1024),
    }


def test_unhealthy_gpus_are_not_missing_ones() -> None:
    table = table_of({"a": [card("a"), card("a", 1, healthy=False)], "b": [card("b")]})
    fits = fits_of(table, FitQuery(pod(app("c", 200)), UNIT_MIB))
    assert {problem: list(names) for problem, names in fits.by_problem().items()} == {
        NodeProblem.UNAVAILABLE: ["a"],
        NodeProblem.TOO_FEW: ["b"],
    }


@given(clusters(), st.lists(queries(), min_size=1, max_size=3), st.data())
def test_results_that_are_kept_follow_every_change(
    table: GpuTable, queries_: list[FitQuery], data: st.DataObject
) -> None:
    """The same as a decision from scratch, whatever was decided and changed before."""
    fitter = NodeFitter(table)
    for number in range(6):
        name = data.draw(st.sampled_from([*sorted(table.names()), f"new{number}"]))
        if name not in table:
            table.set_node(name, [card(name, index) for index in range(3)])
        elif data.draw(st.integers(0, 5)) == 0:
            table.remove_node(name)
        else:
            table.take(name, {each.uuid: (10, 512) for each in table.gpus(name)})
        names, query = sorted(table.names()), data.draw(st.sampled_from(queries_))
        kept, fresh = fitter.fit(names, query), fit_nodes(table, names, query)
        assert by_name(kept) == by_name(fresh)
        assert ranked(kept) == ranked(fresh)


@given(clusters(), queries(), st.data())
def test_it_does_not_matter_how_many_nodes_are_asked_about(
    table: GpuTable, query: FitQuery, data: st.DataObject
) -> None:
    """Asking about all nodes, about nearly all and about a few takes different ways."""
    everything = by_name(fits_of(table, query))
    asked = data.draw(st.lists(st.sampled_from([*sorted(everything), "unknown"]), unique=True))
    expected = {name: everything.get(name, NodeProblem.NODE_UNKNOWN) for name in asked}
    assert by_name(fit_nodes(table, asked, query)) == expected
