"""Simulations: the same as the scheduler decides, counted the way the figures are published."""

from pathlib import Path

import pytest

from simulator.arrivals import draw_arrivals, total_demand
from simulator.experiment import EXPONENTIAL, FROM_TRACE, Scenario, run_scenario
from simulator.plotting import comparison_svg
from simulator.replay import table_of
from simulator.synthetic import synthetic_nodes, synthetic_tasks
from simulator.trace_files import Task, TraceError, TraceNode, read_nodes, read_tasks
from vcuda.placement_strategies import PlacementStrategy
from vcuda.quota import parse_quota
from vcuda.quota_usage import QuotaUsage

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


def test_nodes_and_tasks_are_read_from_csv(tmp_path: Path) -> None:
    nodes, tasks = tmp_path / "nodes.csv", tmp_path / "tasks.csv"
    nodes.write_text("sn,cpu_milli,memory_mib,gpu,model\nn0,64000,262144,2,P100\ncpu,1,1,0,\n")
    tasks.write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\n"
        "a,12000,16384,1,460,V100M16|V100M32,0,60\nb,6000,12288,2,1000,,0,\nc,1000,1000,0,0,,5,5\n"
    )
    assert read_nodes(nodes) == [TraceNode("n0", 64000, 262144, 2, "P100")]
    first, second, third = read_tasks(tasks)
    assert (first.gpus, first.cores, first.models, first.lifetime_s) == (1, 46, ("V100M16", "V100M32"), 60.0)
    assert (second.demand, second.lifetime_s) == (200, None)
    assert third.demand == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,x,1,1,500", "line 2: cpu_milli: 'x' is not a number"),
        ("a,-5,1,1,500", "line 2: cpu_milli: -5 is below 0"),
        ("a,1,1,2,500", "line 2: gpu_milli: 500 with num_gpu 2; several GPUs are whole ones, write 1000"),
        ("a,1,1,1,0", "line 2: gpu_milli: 0 with num_gpu above 0"),
        ("a,inf,1,1,500", "line 2: cpu_milli: 'inf' is not a number"),
        ("a,1,1,1000,1000", "line 2: num_gpu: 1000 is above 128"),
        (",1,1,1,1000", "line 2: name: is empty"),
    ],
)
def test_an_invalid_task_is_named(tmp_path: Path, row: str, message: str) -> None:
    file = tmp_path / "tasks.csv"
    file.write_text(f"name,cpu_milli,memory_mib,num_gpu,gpu_milli\n{row}\n")
    with pytest.raises(TraceError) as error:
        read_tasks(file)
    assert str(error.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column sn is missing"),
        ("sn,cpu_milli,memory_mib\n", "column gpu is missing; the file needs sn, cpu_milli, memory_mib, gpu"),
        ("sn,cpu_milli,memory_mib,gpu\nn,1,1,0\n", "no node has GPUs"),
        ("sn,cpu_milli,memory_mib,gpu\nn,1,1,1\nn,1,1,1\n", "line 3: sn: 'n' is listed twice"),
        ("sn,cpu_milli,memory_mib,gpu,model\nn,1,1,1,???\n", "line 2: model: '???' is not the name of a GPU model"),
    ],
)
def test_an_invalid_list_of_nodes_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "nodes.csv"
    file.write_text(text)
    with pytest.raises(TraceError) as error:
        read_nodes(file)
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv: No such file or directory"):
        read_tasks(tmp_path / "none.csv")


def test_a_cluster_that_holds_more_than_the_demand_takes_nothing_more() -> None:
    table = table_of([node()])
    table.take("n", {f"GPU-n-{index}": (100, 16384) for index in range(4)})
    outcome = run_scenario(Scenario(table, [task("t")], demand=0.5), FRAGMENTATION, 1)
    assert outcome.placed == 0
    assert outcome.allocated_percent == {"50": 100.0}


def test_tasks_larger_than_the_cluster_have_departures_too() -> None:
    scenario = Scenario(table_of([node(gpus=1)]), [task("t", 8)], lifetimes=EXPONENTIAL)
    assert run_scenario(scenario, FRAGMENTATION, 1).placed == 0
