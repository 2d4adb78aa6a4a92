"""`quotient simulate`."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from console.main import main

NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(f"n{number},64000,262144,4,T4\n" for number in range(5))
TASKS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n" + "".join(
    f"t{number},4000,8192,1,{(500, 1000, 250)[number % 3]},\n" for number in range(30)
)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The options that name a list of nodes and one of tasks."""
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "tasks.csv").write_text(TASKS)
    return ["--nodes", str(tmp_path / "nodes.csv"), "--pods", str(tmp_path / "tasks.csv")]


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def as_json(*arguments: str) -> Any:
    result = simulate(*arguments, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_one_run_is_one_object(files: list[str]) -> None:
    outcome = as_json(*files, "--policy", "fragmentation", "--demand", "1.3", "--seed", "42")
    assert list(outcome) == ["policy", "seed", "allocated_percent", "placed", "refused", "seconds"]
    assert (outcome["policy"], outcome["seed"]) == ("fragmentation", 42)
    assert outcome["allocated_percent"].keys() == {"100", "130"}
    assert outcome["allocated_percent"]["130"] > 90


def test_several_policies_and_seeds_side_by_side(files: list[str]) -> None:
    outcomes = as_json(*files, "--policy", "fgd,random", "--policy", "spread", "--seeds", "42-43", "-j", "2")
    assert [(each["policy"], each["seed"]) for each in outcomes] == [
        (policy, seed) for policy in ("fgd", "random", "spread") for seed in (42, 43)
    ]
    table = simulate(*files, "--policy", "fgd,random", "--seeds", "1,2", "-j", "1").stdout
    assert re.search(r"fgd +\d+\.\d\d % ± ", table)
    assert table.splitlines()[0].split()[:3] == ["POLICY", "ALLOCATED", "AT"]


def test_placements_and_a_plot_are_written(files: list[str], tmp_path: Path) -> None:
    plot, placements = tmp_path / "plot.svg", tmp_path / "placed.csv"
    assert simulate(*files, "--plot", str(plot), "--placements", str(placements)).exit_code == 0
    assert plot.read_text().startswith("<svg")
    rows = list(csv.DictReader(placements.read_text().splitlines()))
    assert {row["node"] for row in rows} <= {*(f"n{number}" for number in range(5)), ""}
    assert all(row["gpus"].startswith(f"GPU-{row['node']}-") for row in rows if row["node"])


def test_more_nodes_take_more(files: list[str]) -> None:
    few = as_json(*files, "--demand", "3")
    many = as_json(*files, "--demand", "3", "--add-nodes", "5:T4:4", "--add-nodes", "1:A100:8")
    assert many["placed"] > few["placed"]


def test_quotas_of_a_file_hold(files: list[str], tmp_path: Path) -> None:
    quota = tmp_path / "quota.yaml"
    quota.write_text("types: {T4: {cores: 400}}\n")
    free, limited = as_json(*files), as_json(*files, "--quota", str(quota))
    assert limited["placed"] < free["placed"]
    assert limited["allocated_percent"]["130"] <= 20


def test_departures(files: list[str]) -> None:
    outcome = as_json(*files, "--lifetimes", "exponential", "--load", "0.5")
    assert outcome["accepted_percent"] > 80
    result = simulate(*files, "--lifetimes", "trace")
    assert result.exit_code == 2
    assert "no task has a lifetime; add the columns creation_time and deletion_time" in result.output


def test_without_files_there_is_a_workload_of_our_own() -> None:
    outcome = as_json("--demand", "0.2")
    assert outcome["allocated_percent"]["20"] == pytest.approx(20, abs=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "'best' is none of fragmentation, binpack, spread, topology, fgd, bestfit, random"),
        (["--seeds", "5-1"], "'5-1' are 0 seeds"),
        (["--seeds", "x"], "'x' is neither a number nor a range such as 42-51"),
        (["--add-nodes", "T4"], "'T4' is not of the form NODES:MODEL:GPUS, as in 10:T4:4"),
        (["--seeds", "1-50000000"], "'1-50000000' are 50000000 seeds; write 1 to 1000"),
        (["--seeds", "9" * 5000], "is neither a number nor a range"),
        (["--add-nodes", "10:NVIDIA:4"], "'NVIDIA' is not a GPU model; write one such as T4 or RTX-3090"),
        (["--add-nodes", "10:---:4"], "'---' is not a GPU model"),
        (["--add-nodes", "1:T4:65"], "'1:T4:65': a node with 65 GPUs; write 1 to 64"),
        (["--add-nodes", f"{'9' * 5000}:T4:4"], "is not of the form NODES:MODEL:GPUS"),
        (["--demand", "nan"], "nan is not a number; write one from 0.01 to 10"),
        (["--demand", "inf"], "inf is not in the range"),
        (["--lifetimes", "exponential", "--load", "nan"], "nan is not a number; write one from 0.05 to 3"),
        (["--plot", "x.png"], "the plot is written as SVG; write a name that ends in .svg, such as x.svg"),
        (["--add-nodes", "1000000:T4:8"], "adds 8000000 GPUs; write 1 to 10000"),
        (["--demand", "0"], "0 is not in the range"),
        (["--nodes", "/none.csv"], "/none.csv: No such file or directory"),
        (["--from-cluster", "--nodes", "x"], "--from-cluster reads nodes and pods: leave out --nodes and --pods"),
        (["--plot", "/none/x.svg", "--demand", "0.01"], "/none/x.svg: No such file or directory"),
    ],
)
def test_wrong_usage_is_named(arguments: list[str], message: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_a_plot_of_another_format_is_refused_before_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("console.simulate.run_all", lambda *_: pytest.fail("simulated"))
    assert simulate("--plot", str(tmp_path / "x.png")).exit_code == 2
    assert not (tmp_path / "x.png").exists()


def test_a_quota_in_audit_mode_refuses_nothing(files: list[str], tmp_path: Path) -> None:
    quota = tmp_path / "quota.yaml"
    quota.write_text("types: {T4: {cores: 400}}\nmode: audit\n")
    done = simulate(*files, "--quota", str(quota), "-o", "json")
    assert json.loads(done.stdout)["placed"] == as_json(*files)["placed"]
    assert "is in audit mode: alone it refuses nothing" in done.stderr


def test_a_quota_of_namespaces_that_no_task_has_is_a_warning(files: list[str], tmp_path: Path) -> None:
    quota = tmp_path / "quota.yaml"
    quota.write_text(
        "kind: ConfigMap\nmetadata: {name: q, namespace: team}\ndata: {quota.yaml: 'types: {T4: {cores: 1}}'}\n"
    )
    done = simulate(*files, "--quota", str(quota))
    assert done.exit_code == 0
    assert "no task is in a namespace with a quota (team): the quotas have no effect" in done.stderr


WARNINGS = {
    "rounded": ("gpu_milli", "a,1,1,1,333", [], "gpu_milli of 1 task was rounded up to whole per cents of a GPU"),
    "memory": (
        "gpu_milli,gpu_memory_mib",
        "a,1,1,1,500,1000",
        [],
        "their GPUs count as 16,384 MiB each; add the column",
    ),
    "demand": (
        "gpu_milli",
        "a,1,1,1,500",
        ["--lifetimes", "exponential", "--demand", "1"],
        "--demand has no effect with",
    ),
    "load": ("gpu_milli", "a,1,1,1,500", ["--load", "0.5"], "--load has no effect without --lifetimes"),
}


@pytest.mark.parametrize(("columns", "row", "options", "message"), WARNINGS.values(), ids=WARNINGS.keys())
def test_what_is_not_simulated_as_it_is_written_is_a_warning(
    files: list[str], columns: str, row: str, options: list[str], message: str
) -> None:
    Path(files[3]).write_text(f"name,cpu_milli,memory_mib,num_gpu,{columns}\n{row}\n")
    done = simulate(*files, *options, "-o", "json")
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("warning: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nothing_is_warned_of_without_a_cause(files: list[str]) -> None:
    assert simulate(*files).stderr == ""


def test_times_are_read_only_for_lifetimes(files: list[str]) -> None:
    Path(files[3]).write_text(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time\na,1,1,1,500,monday,tuesday\n"
    )
    assert simulate(*files).exit_code == 0
    assert "creation_time: 'monday' is not a number" in simulate(*files, "--lifetimes", "trace").output


@pytest.mark.parametrize(
    ("rows", "is_possible"),
    [
        ("a,1,1,1,500,0,\nb,1,1,0,,0,9\n", True),
        ("a,1,1,1,500,3,\nb,1,1,1,500,7,\n", False),
        ("a,1,1,1,500,5,5\n", False),
    ],
    ids=["only a task without GPUs ends", "none ends", "none runs"],
)
def test_lifetimes_need_a_task_that_ends(files: list[str], rows: str, *, is_possible: bool) -> None:
    Path(files[3]).write_text(f"name,cpu_milli,memory_mib,num_gpu,gpu_milli,creation_time,deletion_time\n{rows}")
    done = simulate(*files, "--lifetimes", "trace")
    assert done.exit_code == (0 if is_possible else 2), done.output
    assert ("no task has a lifetime" in done.output) is not is_possible


def test_arrivals_without_end_are_an_error(files: list[str]) -> None:
    rows = "".join(f"c{number},1,1,0,\n" for number in range(20_000))
    Path(files[3]).write_text(f"name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,1,10\n{rows}")
    done = simulate(*files, "--demand", "10")
    assert done.exit_code == 2
    assert "tasks would have to arrive, above 3000000" in done.output
