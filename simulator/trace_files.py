"""Reads nodes and tasks from CSV files in the format of the Alibaba trace gpu-v2023 ("openb")."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from vcuda.decision import printable
from vcuda.gpu_model import is_model, parse_model
from vcuda.isolation import NO_ISOLATION, Isolation
from vcuda.placement import peak_cores
from vcuda.pod_options import PodOptions
from vcuda.request import PodRequest
from vcuda.workload import TaskShape

Row = TypeVar("Row")
Cells = Mapping[str, str]
MILLI_PER_CORE, MILLI_PER_GPU = 10, 1000
# GPUs of a node or a task: the time to choose among those of one node grows faster than their number.
MAX_GPUS = 64
MAX_NUMBER = 2**30
# Seconds since 1970, or since the beginning of a trace.
MAX_TIME_S = 2**40
# What pandas writes into empty cells.
NOT_A_NUMBER = "nan"


class TraceError(Exception):
    """A file cannot be read as a trace; the message names file, line, column and remedy."""


class TraceNode(Struct, frozen=True):
    """A node with GPUs of one model."""

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    model: str
    gpu_memory_mib: int = 0
    pool: str = ""
    isolation: Isolation = NO_ISOLATION


class ClusterPod(Struct, frozen=True):
    """What a pod of a cluster requests. `shape` is what is learned of it: all containers as one, without long lists."""

    request: PodRequest
    options: PodOptions
    shape: TaskShape


class Task(Struct, frozen=True):
    """A pod with at most one container: a number of GPUs, and how many cores it takes of each.

    A task that has a `pod` is placed as that instead. `lifetime_s` is None for one that has not ended.
    """

    name: str
    cpu_milli: int
    memory_mib: int
    gpus: int
    cores: int
    models: tuple[str, ...] = ()
    gpu_memory_mib: int = 0
    namespace: str = ""
    created_s: float = 0.0
    lifetime_s: float | None = None
    # Whether the file asks for a part of a per cent.
    is_rounded: bool = False
    pod: ClusterPod | None = None

    @property
    def demand(self) -> int:
        return peak_cores(self.pod.request) if self.pod else self.gpus * self.cores


def read_nodes(path: Path) -> list[TraceNode]:
    """Read the nodes that have GPUs."""
    seen: set[str] = set()

    def read_node(cells: Cells) -> TraceNode:
        node = node_of(cells)
        if node.name in seen:
            raise ValueError(f"sn: {printable(node.name)!r} is listed twice; give each node a name of its own")
        seen.add(node.name)
        return node

    nodes = [node for node in read_rows(path, ("sn", "cpu_milli", "memory_mib", "gpu"), read_node) if node.gpus]
    if not nodes:
        raise TraceError(f"{path}: no node has GPUs; use a list of nodes whose column gpu is above 0")
    return nodes


def node_of(cells: Cells) -> TraceNode:
    return TraceNode(
        name=named(cells, "sn"),
        cpu_milli=number(cells, "cpu_milli"),
        memory_mib=number(cells, "memory_mib"),
        gpus=gpu_count(cells, "gpu"),
        model=model_named("model", text_in(cells, "model") or "GPU"),
        gpu_memory_mib=number(cells, "gpu_memory_mib", 0),
        pool=text_in(cells, "pool"),
    )


def read_tasks(path: Path, *, has_times: bool = True) -> list[Task]:
    """Read tasks; the columns of their times only if they are needed."""
    columns = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
    if not has_times:
        return list(read_rows(path, columns, task_of))
    rows = list(read_rows(path, columns, lambda cells: (task_of(cells), times_of(cells))))
    # A task that does not say when it began is there from the beginning.
    first = min((created for _, (created, _) in rows if created is not None), default=0)
    tasks = []
    for task, (created, deleted) in rows:
        began = first if created is None else created
        lifetime = None if deleted is None else max(0, deleted - began)
        tasks.append(replace(task, created_s=began, lifetime_s=lifetime))
    return tasks


def times_of(cells: Cells) -> tuple[int | None, int | None]:
    """Return when a task was created and deleted, in seconds; None where the cell is empty."""
    created, deleted = (
        number(cells, column, most=MAX_TIME_S) if text_in(cells, column) else None
        for column in ("creation_time", "deletion_time")
    )
    if created is not None and deleted is not None and deleted < created:
        raise ValueError(f"deletion_time: {deleted} is before the creation_time {created}; write a later time, or none")
    return created, deleted


def task_of(cells: Cells) -> Task:
    gpus = gpu_count(cells, "num_gpu")
    milli = number(cells, "gpu_milli", most=MILLI_PER_GPU) if gpus else 0
    # A share is rounded up to whole cores, as a tenant would have to write it.
    cores = -(-milli // MILLI_PER_CORE)
    if gpus and not cores:
        raise ValueError(f"gpu_milli: 0 with num_gpu {gpus}; write 1 to {MILLI_PER_GPU}")
    if gpus > 1 and milli != MILLI_PER_GPU:
        raise ValueError(f"gpu_milli: {milli} with num_gpu {gpus}; several GPUs are whole ones, write {MILLI_PER_GPU}")
    return Task(
        name=named(cells, "name"),
        cpu_milli=number(cells, "cpu_milli"),
        memory_mib=number(cells, "memory_mib"),
        gpus=gpus,
        cores=cores,
        models=tuple(model_named("gpu_spec", each) for each in text_in(cells, "gpu_spec").split("|") if each.strip()),
        gpu_memory_mib=number(cells, "gpu_memory_mib", 0) if gpus else 0,
        namespace=text_in(cells, "namespace"),
        is_rounded=milli % MILLI_PER_CORE != 0,
    )


def named(cells: Cells, column: str) -> str:
    if not (name := (cells.get(column) or "").strip()):
        raise ValueError(f"{column}: is empty; write a name in every row")
    return name


def text_in(cells: Cells, column: str) -> str:
    """Return a cell; empty if the column is missing."""
    text = (cells.get(column) or "").strip()
    return "" if text.lower() == NOT_A_NUMBER else text


def model_named(column: str, text: str) -> str:
    if not is_model(text):
        raise ValueError(
            f"{column}: {printable(text)!r} is not the name of a GPU model; write one such as A100, T4 or RTX-3090"
        )
    return parse_model(text).name


def number(cells: Cells, column: str, default: int | None = None, most: int = MAX_NUMBER) -> int:
    """Return a number, rounded up; without a default, the cell must not be empty."""
    text, remedy = text_in(cells, column), f"write a number from 0 to {most}"
    if not text:
        if default is None:
            raise ValueError(f"{column}: {printable(cells.get(column) or '')!r} is not a number; {remedy}")
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{column}: {printable(text)!r} is not a number; {remedy}")
    if value < 0:
        raise ValueError(f"{column}: {printable(text)} is below 0; {remedy}")
    if value > most:
        raise ValueError(f"{column}: {printable(text)} is above {most}; {remedy}")
    return math.ceil(value)


def gpu_count(cells: Cells, column: str) -> int:
    """Return a number of GPUs, which some files write as 2.0."""
    value = number(cells, column, most=MAX_GPUS)
    if value != float(text := text_in(cells, column)):
        part = f"; half a GPU is {column} 1 and gpu_milli 500" if column == "num_gpu" else ""
        raise ValueError(f"{column}: {printable(text)} is not a whole number; write one such as 2{part}")
    return value


def complete(row: dict[str, Any]) -> Cells:
    # Where csv puts what is left over.
    if None in row:
        raise ValueError("has more cells than the header has columns; put text with commas in quotes")
    return row


def read_rows(path: Path, columns: tuple[str, ...], convert: Callable[[Cells], Row]) -> Iterator[Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            missing = [each for each in columns if each not in reader.fieldnames]
            if missing:
                raise TraceError(f"{path}: column {missing[0]} is missing; the file needs {', '.join(columns)}")
            for row in reader:
                try:
                    yield convert(complete(row))
                except ValueError as error:
                    raise TraceError(f"{path}: line {reader.line_num}: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not a CSV file: {error}; write one in UTF-8, with a comma between cells") from None
