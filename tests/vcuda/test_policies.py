"""Which node each placement policy prefers, and where its name may be written."""

import pytest
from msgspec.structs import replace

from tests.vcuda.gpus import gpus
from vcuda.compiled_workload import CompiledWorkload
from vcuda.fit_query import FitQuery
from vcuda.gpu_table import GpuTable
from vcuda.host import Host
from vcuda.inventory import Gpu
from vcuda.node_fit import NodeFitter
from vcuda.placement_costs import WorkloadEstimate
from vcuda.placement_strategies import PlacementStrategy
from vcuda.pod_options import read_pod_options
from vcuda.quota import QuotaError, parse_quota
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.scheme import build_scheme
from vcuda.vocabulary import Share
from vcuda.workload import TaskShape, given_history

SCHEME = build_scheme()


def query(cores: int, strategy: PlacementStrategy, **changes: object) -> FitQuery:
    share = Share(cores, 4 if cores < 100 else cores // 100)
    made = FitQuery(PodRequest((ContainerRequest("c", Role.APP, share, "vcuda"),)), 256, strategy=strategy)
    return replace(made, **changes)


def cluster(**nodes: list[int]) -> GpuTable:
    """Nodes by name: how many cores of each GPU are in use."""
    table = GpuTable()
    for name, used in nodes.items():
        cards = [
            Gpu(uuid=f"{name}-{at}", index=at, model="T4", memory_mib=16384, healthy=True) for at in range(len(used))
        ]
        table.set_node(name, cards)
        for card, cores in zip(cards, used, strict=True):
            table.take(name, {card.uuid: (cores, 160 * cores)})
        table.set_host(name, 64_000, 256_000)
    return table


def learned(*tasks: TaskShape) -> WorkloadEstimate:
    return WorkloadEstimate(CompiledWorkload(given_history((task, 0) for task in tasks).typical()))


def best(table: GpuTable, asked: FitQuery, *tasks: TaskShape) -> tuple[str, str]:
    """Return the node and the GPU that a pod would get."""
    fitter = NodeFitter(table, learned(*tasks) if tasks else None)
    name = fitter.best_node(asked)
    return name, fitter.place(asked, name)["c"][0].uuid


def test_binpack_prefers_the_fullest_gpu_and_spread_the_emptiest() -> None:
    table = cluster(a=[0, 0], b=[60, 20])
    assert best(table, query(30, PlacementStrategy.BINPACK)) == ("b", "b-0")
    assert best(table, query(30, PlacementStrategy.SPREAD)) == ("a", "a-0")


def test_fragmentation_leaves_what_is_likely_to_come() -> None:
    """The fullest GPU that fits would be left with 20 cores, which no task of this workload can use."""
    halves, thirties = TaskShape(1000, 1, 50), TaskShape(1000, 1, 30)
    table = cluster(a=[50], b=[40])
    assert best(table, query(30, PlacementStrategy.BINPACK)) == ("a", "a-0")
    assert best(table, query(30, PlacementStrategy.FRAGMENTATION), halves, thirties)[0] == "b"


def test_fragmentation_keeps_whole_nodes_for_tasks_of_several_gpus() -> None:
    table = cluster(a=[0] * 8, b=[100] * 7 + [0])
    eight, one = TaskShape(1000, 8, 100), TaskShape(1000, 1, 100)
    assert best(table, query(100, PlacementStrategy.FRAGMENTATION), eight, one)[0] == "b"


def test_fragmentation_leaves_gpus_where_cpu_is_left() -> None:
    """A GPU on a node without CPU is of no use for the tasks to come."""
    table = cluster(a=[0], b=[0])
    table.set_host("a", 64_000, 256_000)
    table.set_host("b", 2_000, 256_000)
    asked = query(100, PlacementStrategy.FRAGMENTATION, host=Host(1000, 0))
    assert best(table, asked, TaskShape(8000, 1, 100))[0] == "b"


def test_fragmentation_spares_models_that_are_named() -> None:
    table = cluster(a=[0], b=[0])
    rare = Gpu(uuid="a-0", index=0, model="A100", memory_mib=16384, healthy=True)
    table.set_node("a", [rare])
    named = TaskShape(1000, 1, 100, models=("A100",))
    asked = query(100, PlacementStrategy.FRAGMENTATION)
    assert best(table, asked, named, TaskShape(1000, 1, 100))[0] == "b"


@pytest.mark.parametrize("strategy", PlacementStrategy)
def test_a_policy_always_decides_the_same(strategy: PlacementStrategy) -> None:
    table = cluster(a=[10, 70, 0], b=[50, 50, 0], c=[0, 0, 0])
    for cores in (10, 50, 100):
        asked = query(cores, strategy, seed="x" if strategy is PlacementStrategy.RANDOM else "")
        assert len({best(table, asked) for _ in range(3)}) == 1


def test_random_depends_on_its_seed_alone() -> None:
    table = cluster(**{f"n{number}": [0] for number in range(20)})
    chosen = {best(table, query(50, PlacementStrategy.RANDOM, seed=str(seed)))[0] for seed in range(30)}
    assert len(chosen) > 10


def test_topology_prefers_the_node_with_the_fastest_links() -> None:
    """Two pairs: on node a across sockets, on node b by NVLink; a is first by name and fuller."""
    table = GpuTable()
    for name, kind in (("a", "sys"), ("b", "nvlink4")):
        linked = [replace(each, uuid=f"{name}-{each.index}") for each in gpus(2)]
        links = [{linked[1].uuid: kind}, {linked[0].uuid: kind}]
        table.set_node(name, [replace(each, links=of) for each, of in zip(linked, links, strict=True)])
    pair = query(200, PlacementStrategy.TOPOLOGY)
    assert NodeFitter(table).best_node(pair) == "b"
    assert NodeFitter(table).best_node(replace(pair, strategy=PlacementStrategy.BINPACK)) == "a"
    assert NodeFitter(table).best_node(query(50, PlacementStrategy.TOPOLOGY)) == "a", "one GPU has no links"


def test_more_gpus_than_the_kernel_looks_at_are_still_used() -> None:
    table = cluster(a=[100] * 19 + [0])
    assert best(table, query(100, PlacementStrategy.FRAGMENTATION)) == ("a", "a-19")
    assert best(table, query(30, PlacementStrategy.FRAGMENTATION)) == ("a", "a-19")


@pytest.mark.parametrize(("value", "is_valid"), [("spread", True), ("topology", True), ("random", False), ("", False)])
def test_pods_and_quotas_name_a_policy(value: str, *, is_valid: bool) -> None:
    options, reasons = read_pod_options({SCHEME.names.placement_policy: value}, SCHEME, 1)
    assert bool(reasons) != is_valid
    assert options.placement_policy == (value if is_valid else None)
    text = f"types: {{T4: {{cores: 100}}}}\nplacement: {value or '~'}"
    if is_valid:
        assert parse_quota(text, "team/q").policy.placement == value
    else:
        with pytest.raises(QuotaError, match="fragmentation"):
            parse_quota(text, "team/q")


def test_a_quota_without_a_policy_leaves_it_to_the_cluster() -> None:
    assert not parse_quota("types: {T4: {cores: 100}}", "team/q").policy.placement
