"""Nodes and tasks from CSV files: what is read, and what each mistake is called."""

from pathlib import Path

import pytest

from simulator.trace_files import TraceError, TraceNode, read_nodes, read_tasks

HEADER = "name,cpu_milli,memory_mib,num_gpu,gpu_milli"


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
        ("a,x,1,1,500", "line 2: cpu_milli: 'x' is not a number; write a number from 0 to"),
        ("a,-5,1,1,500", "line 2: cpu_milli: -5 is below 0; write a number from 0 to"),
        ("a,1,1,2,500", "line 2: gpu_milli: 500 with num_gpu 2; several GPUs are whole ones, write 1000"),
        ("a,1,1,1,0", "line 2: gpu_milli: 0 with num_gpu 1; write 1 to 1000"),
        ("a,inf,1,1,500", "line 2: cpu_milli: 'inf' is not a number"),
        ("a,1,1,1000,1000", "line 2: num_gpu: 1000 is above 64; write a number from 0 to 64"),
        ("a,-0.5,1,1,500", "line 2: cpu_milli: -0.5 is below 0"),
        ("a,1,1,0.5,1000", "line 2: num_gpu: 0.5 is not a whole number; write one such as 2; half a GPU is num_gpu 1"),
        ("a,1,1,1,1500", "line 2: gpu_milli: 1500 is above 1000; write a number from 0 to 1000"),
        ("a,1,1,1,", "line 2: gpu_milli: '' is not a number; write a number from 0 to 1000"),
        ("a,1,1,,", "line 2: num_gpu: '' is not a number; write a number from 0 to 64"),
        ("a,1,1,1,500,6", "line 2: has more cells than the header has columns; put text with commas in quotes"),
        (",1,1,1,1000", "line 2: name: is empty; write a name in every row"),
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
        ("sn,cpu_milli,memory_mib,gpu\nn,1,1,65\n", "line 2: gpu: 65 is above 64; write a number from 0 to 64"),
        ("sn,cpu_milli,memory_mib,gpu\nn,1,1,1.5\n", "line 2: gpu: 1.5 is not a whole number; write one such as 2"),
        (
            "sn,cpu_milli,memory_mib,gpu\nn,1,1,1\nn,1,1,1\n",
            "line 3: sn: 'n' is listed twice; give each",
        ),
        (
            "sn,cpu_milli,memory_mib,gpu,model\nn,1,1,1,???\n",
            "line 2: model: '???' is not the name of a GPU model; write",
        ),
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


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "tasks.csv"
    file.write_bytes(text.encode())
    return file


ACCEPTED = {
    "a byte order mark": f"\ufeff{HEADER}\na,1000,1,1,500\n",
    "lines of another system": f"{HEADER}\r\na,1000,1,1,500\r\n",
    "a header with spaces": "name , cpu_milli, memory_mib,num_gpu ,gpu_milli\na,1000,1,1,500\n",
    "numbers as floats": f"{HEADER}\na,1000.0,1.0,1.0,500.0\n",
    "models that are not a number": f"{HEADER},gpu_spec\na,1000,1,1,500,NaN\n",
    "no model": f"{HEADER},gpu_spec,namespace,gpu_memory_mib\na,1000,1,1,500,,nan,nan\n",
    "times that are no times": f"{HEADER},creation_time,deletion_time\na,1000,1,1,500,yesterday,today\n",
    "cells that are left out": f"{HEADER},gpu_spec\na,1000,1,1,500\n",
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_files_as_other_programs_write_them_are_read(tmp_path: Path, text: str) -> None:
    (task,) = read_tasks(written(tmp_path, text), has_times=False)
    assert (task.name, task.cpu_milli, task.cores, task.models, task.namespace) == ("a", 1000, 50, (), "")


def test_a_task_without_gpus_needs_no_part_of_one(tmp_path: Path) -> None:
    tasks = read_tasks(written(tmp_path, f"{HEADER}\na,1000,1,0,\nb,1000,1,0,5000\n"))
    assert [(task.gpus, task.cores) for task in tasks] == [(0, 0), (0, 0)]


def test_parts_of_a_per_cent_are_rounded_up_and_counted(tmp_path: Path) -> None:
    tasks = read_tasks(written(tmp_path, f"{HEADER}\na,1,1,1,333\nb,1,1,1,330\nc,1,1,1,1\n"))
    assert [(task.cores, task.is_rounded) for task in tasks] == [(34, True), (33, False), (1, True)]


def test_times_may_be_seconds_since_1970(tmp_path: Path) -> None:
    """A task that does not say when it began is there from the beginning, one without an end has not ended."""
    rows = "a,1,1,1,500,1700000000,1700000060\nb,1,1,1,500,1700000010,\nc,1,1,1,500,,1700000030\n"
    tasks = read_tasks(written(tmp_path, f"{HEADER},creation_time,deletion_time\n{rows}"))
    assert [(task.created_s, task.lifetime_s) for task in tasks] == [
        (1_700_000_000, 60),
        (1_700_000_010, None),
        (1_700_000_000, 30),
    ]


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ("yesterday,", "creation_time: 'yesterday' is not a number; write a number from 0"),
        ("7,5", "deletion_time: 5 is before the creation_time 7; write a later time, or none"),
    ],
)
def test_an_invalid_time_is_named(tmp_path: Path, times: str, message: str) -> None:
    with pytest.raises(TraceError) as error:
        read_tasks(written(tmp_path, f"{HEADER},creation_time,deletion_time\na,1,1,1,500,{times}\n"))
    assert message in str(error.value)
