"""Simulations: the same as the scheduler decides, counted the way the figures are published."""

from typing import Any

import pytest

from simulator.arrivals import TooManyArrivalsError, draw_arrivals, total_demand
from simulator.experiment import EXPONENTIAL, FROM_TRACE, Scenario, relative_lifetimes, run_scenario
from simulator.plotting import comparison_svg
from simulator.replay import request_of, table_of
from simulator.synthetic import synthetic_nodes, synthetic_tasks
from simulator.trace_files import ClusterPod, Task, TraceNode
from vcuda.isolation import Isolation, Rung
from vcuda.namespace_policy import Mode
from vcuda.placement_strategies import PlacementStrategy
from vcuda.pod_options import PodOptions
from vcuda.quota import parse_quota
from vcuda.quota_usage import QuotaUsage
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.vocabulary import Share
from vcuda.workload import TaskShape

FRAGMENTATION, FGD, RANDOM = PlacementStrategy.FRAGMENTATION, PlacementStrategy.FGD, PlacementStrategy.RANDOM


def task(name: str, gpus: int = 1, cores: int = 100, **changes: object) -> Task:
    return Task(name, 1000, 1000, gpus, cores, **changes)  # type: ignore[arg-type]


def node(name: str = "n", gpus: int = 4, model: str = "T4") -> TraceNode:
    return TraceNode(name, 64_000, 256_000, gpus, model)


def test_arrivals_have_the_demand_that_was_asked_for() -> None:
    tasks = [task("one"), task("two", 2), task("half", cores=50)]
    for wanted in (250, 1000, 5000):
        arrivals = draw_arrivals(tasks, wanted, seed=1)
        assert wanted - 200 < total_demand(arrivals) <= wanted
        assert arrivals == draw_arrivals(tasks, wanted, seed=1)
    assert draw_arrivals(tasks, 5000, seed=1) != draw_arrivals(tasks, 5000, seed=2)


def test_a_run_fills_the_cluster() -> None:
    scenario = Scenario(table_of([node("a"), node("b")]), [task("t")], demand=1.5)
    outcome = run_scenario(scenario, FRAGMENTATION, 42)
    assert outcome.allocated_percent == {"100": 100.0, "150": 100.0}
    assert (outcome.placed, outcome.refused) == (8, 4)
    assert [sample.arrived for sample in outcome.samples] == list(range(151))
    assert outcome.samples[50].allocated == 50
    assert outcome.summary().keys() == {"policy", "seed", "allocated_percent", "placed", "refused", "seconds"}


def test_a_run_is_always_the_same() -> None:
    scenario = Scenario(table_of(synthetic_nodes()[:20]), synthetic_tasks(0))
    for policy in PlacementStrategy:
        first, second = (run_scenario(scenario, policy, 7) for _ in range(2))
        assert first.rows == second.rows, policy
        assert first.allocated_percent == second.allocated_percent


def test_no_gpu_is_ever_allocated_beyond_its_size() -> None:
    scenario = Scenario(table_of(synthetic_nodes()[::5]), synthetic_tasks(3), lifetimes=EXPONENTIAL, load=1.2)
    before = scenario.table.free_cores()
    outcome = run_scenario(scenario, FRAGMENTATION, 1)
    assert outcome.refused
    assert all(sample.allocated <= 100 for sample in outcome.samples)
    assert scenario.table.free_cores() == before, "the scenario is shared by all runs"


def test_a_task_that_names_a_model_gets_it() -> None:
    tasks = [task(f"t{number}", models=("A100",)) for number in range(9)]
    scenario = Scenario(table_of([node("t4"), node("a100", 4, "A100-SXM4-40GB")]), tasks, demand=1)
    outcome = run_scenario(scenario, FRAGMENTATION, 1)
    assert {row.node for row in outcome.rows} == {"a100", ""}
    assert outcome.placed == 4


def test_quotas_hold() -> None:
    quota = parse_quota("types: {T4: {cores: 150}}", "team/q")
    scenario = Scenario(table_of([node()]), [task("t", namespace="team")], usages={"team": QuotaUsage([quota])})
    outcome = run_scenario(scenario, FRAGMENTATION, 1)
    assert (outcome.placed, outcome.refused) == (1, 4)
    assert run_scenario(scenario, FRAGMENTATION, 1).placed == 1, "the usage is not shared by runs"


def test_tasks_leave_again() -> None:
    scenario = Scenario(table_of([node()]), [task("t")], lifetimes=EXPONENTIAL, load=0.5)
    outcome = run_scenario(scenario, FRAGMENTATION, 1)
    assert outcome.placed > 4
    assert outcome.accepted_percent is not None
    assert outcome.accepted_percent > 60
    assert outcome.allocated_percent.keys() == {"mean"}


def test_lifetimes_of_the_file_are_kept_in_proportion() -> None:
    tasks = [task("short", lifetime_s=1.0), task("long", lifetime_s=9.0)]
    scenario = Scenario(table_of([node(f"n{number}") for number in range(10)]), tasks, lifetimes=FROM_TRACE, load=0.5)
    outcome = run_scenario(scenario, FRAGMENTATION, 1)
    assert outcome.allocated_percent["mean"] == pytest.approx(50, abs=12)


def test_what_a_policy_learns_takes_effect() -> None:
    """With the same arrivals, a policy that knows the workload places some tasks elsewhere."""
    scenario = Scenario(table_of(synthetic_nodes()[::3]), synthetic_tasks(0))
    learned = run_scenario(scenario, FRAGMENTATION, 7)
    given = run_scenario(Scenario(scenario.table, scenario.tasks, is_given=True), FRAGMENTATION, 7)
    assert learned.rows != given.rows


def test_the_default_policy_allocates_more_than_others() -> None:
    """A small form of the comparison in docs/placement.md."""
    scenario = Scenario(table_of(synthetic_nodes()[::2]), synthetic_tasks(0))
    means = {
        policy: sum(run_scenario(scenario, policy, seed).allocated_percent["100"] for seed in (1, 2, 3)) / 3
        for policy in (FRAGMENTATION, FGD, PlacementStrategy.BINPACK, RANDOM)
    }
    assert means[FRAGMENTATION] > max(means[FGD], means[PlacementStrategy.BINPACK])
    assert means[RANDOM] < min(means[FGD], means[PlacementStrategy.BINPACK])


def test_a_plot_has_a_curve_for_each_policy() -> None:
    scenario = Scenario(table_of([node()]), [task("t")])
    runs = {policy: [run_scenario(scenario, PlacementStrategy(policy), 1)] for policy in ("fragmentation", "fgd")}
    text = comparison_svg(runs, "<title> & more")
    assert text.count("<polyline") == 4
    assert "&lt;title&gt; &amp; more" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_cluster_that_holds_more_than_the_demand_takes_nothing_more() -> None:
    table = table_of([node()])
    table.take("n", {f"GPU-n-{index}": (100, 16384) for index in range(4)})
    outcome = run_scenario(Scenario(table, [task("t")], demand=0.5), FRAGMENTATION, 1)
    assert outcome.placed == 0
    assert outcome.allocated_percent == {"50": 100.0}


def test_tasks_larger_than_the_cluster_have_departures_too() -> None:
    scenario = Scenario(table_of([node(gpus=1)]), [task("t", 8)], lifetimes=EXPONENTIAL)
    assert run_scenario(scenario, FRAGMENTATION, 1).placed == 0


def test_a_task_that_has_not_ended_runs_until_the_end_of_the_trace() -> None:
    tasks = [task("a", lifetime_s=10.0), task("b", created_s=5.0, lifetime_s=45.0), task("c", created_s=20.0)]
    assert relative_lifetimes(tasks, FROM_TRACE) == [10.0, 45.0, 30.0]
    assert relative_lifetimes(tasks, EXPONENTIAL) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("lifetimes", ["", EXPONENTIAL])
def test_arrivals_without_end_are_refused_with_the_cause(lifetimes: str) -> None:
    """One GPU task among very many without GPUs: the demand would be reached after billions of arrivals."""
    tasks = [task("gpu", cores=1), *(task(f"cpu-{number}", 0, 0) for number in range(10_000))]
    scenario = Scenario(table_of([node(f"n{number}") for number in range(100)]), tasks, lifetimes=lifetimes)
    with pytest.raises(TooManyArrivalsError, match=r"they request 0\.0001 cores .* use a lower --demand or --load"):
        run_scenario(scenario, FRAGMENTATION, 1)
    with pytest.raises(TooManyArrivalsError):
        draw_arrivals(tasks, 40_000, seed=1)


@pytest.mark.parametrize(("text", "placed"), [("mode: audit", 5), ("mode: enforce", 1), ("", 1)])
def test_a_quota_in_audit_mode_refuses_no_task(text: str, placed: int) -> None:
    quota = parse_quota(f"types: {{T4: {{cores: 150}}}}\n{text}", "team/q")
    usages = {"team": QuotaUsage([quota])}
    scenario = Scenario(table_of([node(gpus=5)]), [task("t", namespace="team")], demand=1, usages=usages)
    assert run_scenario(scenario, FRAGMENTATION, 1).placed == placed


def test_quotas_without_a_mode_follow_the_cluster() -> None:
    usages = {"team": QuotaUsage([parse_quota("types: {T4: {cores: 150}}", "team/q")])}
    scenario = Scenario(
        table_of([node()]), [task("t", namespace="team")], demand=1, usages=usages, cluster_mode=Mode.AUDIT
    )
    assert run_scenario(scenario, FRAGMENTATION, 1).placed == 4


def test_whole_gpus_have_at_least_the_memory_that_a_task_requests() -> None:
    small, large = node("small"), TraceNode("large", 64_000, 256_000, 2, "A100", 40_960)
    tasks = [task("t", 2, gpu_memory_mib=20_000)]
    outcome = run_scenario(Scenario(table_of([small, large]), tasks, demand=1), FRAGMENTATION, 1)
    assert {row.node for row in outcome.rows} == {"large", ""}
    (container,) = request_of(tasks[0], 256).containers
    assert (container.share.cores, container.share.memory_units) == (200, 158)


def real(*cores: int, **options: Any) -> Task:
    """Return a task that is a pod of a cluster with these containers."""
    containers = tuple(
        ContainerRequest(f"c{number}", Role.APP, Share(each, memory_follows_cores=True), "vcuda")
        for number, each in enumerate(cores)
    )
    pod = ClusterPod(PodRequest(containers), PodOptions(**options), TaskShape(0, 2, 100))
    return task("real", 2, pod=pod)


@pytest.mark.parametrize(
    ("options", "placed"),
    [
        ({"models": ("A100",)}, 0),
        ({"avoided_models": ("T4",)}, 0),
        ({"min_isolation": Isolation(memory=Rung.MPS)}, 0),
        ({}, 1),
    ],
    ids=["models", "avoided models", "isolation", "none"],
)
def test_a_pod_of_a_cluster_keeps_its_constraints(options: dict[str, Any], placed: int) -> None:
    scenario = Scenario(table_of([node()]), [task("t")], first=[real(50, **options)], demand=0.13)
    assert run_scenario(scenario, FRAGMENTATION, 1).placed == placed


def test_a_pod_of_a_cluster_takes_what_its_containers_request() -> None:
    """60 and 60 cores share two GPUs; they are not two whole ones."""
    scenario = Scenario(table_of([node(gpus=2)]), [task("t")], first=[real(60, 60), task("half", cores=40)], demand=0.8)
    outcome = run_scenario(scenario, FRAGMENTATION, 1)
    assert outcome.placed == 2
    assert outcome.allocated_percent == {"80": 80.0}
