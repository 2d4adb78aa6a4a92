"""Reads nodes and tasks from CSV files in the format of the Alibaba trace gpu-v2023 ("openb")."""

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from vcuda.gpu_model import is_model, parse_model
from vcuda.vocabulary import CORES_PER_CARD

Row = TypeVar("Row")
MILLI_PER_CORE = 10
# More than any node has.
MAX_GPUS = 128


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


class Task(Struct, frozen=True):
    """A pod with at most one container: a number of GPUs, and how many cores it takes of each."""

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

    @property
    def demand(self) -> int:
        return self.gpus * self.cores


def read_nodes(path: Path) -> list[TraceNode]:
    """Read the nodes that have GPUs."""
    seen: set[str] = set()

    def read_node(row: Mapping[str, str]) -> TraceNode:
        node = node_of(row)
        if node.name in seen:
            raise ValueError(f"sn: {node.name!r} is listed twice; nodes have names of their own")
        seen.add(node.name)
        return node

    nodes = [node for node in read_rows(path, ("sn", "cpu_milli", "memory_mib", "gpu"), read_node) if node.gpus]
    if not nodes:
        raise TraceError(f"{path}: no node has GPUs; use a list of nodes whose column gpu is above 0")
    return nodes


def node_of(row: Mapping[str, str]) -> TraceNode:
    return TraceNode(
        name=named(row, "sn"),
        cpu_milli=number(row, "cpu_milli"),
        memory_mib=number(row, "memory_mib"),
        gpus=number(row, "gpu", most=MAX_GPUS),
        model=model_named("model", row.get("model") or "GPU"),
        gpu_memory_mib=number(row, "gpu_memory_mib", 0),
        pool=row.get("pool") or "",
    )


def read_tasks(path: Path) -> list[Task]:
    return list(read_rows(path, ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"), task_of))


def task_of(row: Mapping[str, str]) -> Task:
    gpus, milli = number(row, "num_gpu", most=MAX_GPUS), number(row, "gpu_milli")
    created, deleted = number(row, "creation_time", 0), number(row, "deletion_time", 0)
    # A share is rounded up to whole cores, as a tenant would have to write it.
    cores = min(CORES_PER_CARD, -(-milli // MILLI_PER_CORE)) if gpus else 0
    if gpus and not cores:
        raise ValueError("gpu_milli: 0 with num_gpu above 0; write 1 to 1000")
    if gpus > 1 and cores != CORES_PER_CARD:
        raise ValueError(f"gpu_milli: {milli} with num_gpu {gpus}; several GPUs are whole ones, write 1000")
    return Task(
        name=named(row, "name"),
        cpu_milli=number(row, "cpu_milli"),
        memory_mib=number(row, "memory_mib"),
        gpus=gpus,
        cores=cores,
        models=tuple(model_named("gpu_spec", each) for each in (row.get("gpu_spec") or "").split("|") if each.strip()),
        gpu_memory_mib=number(row, "gpu_memory_mib", 0),
        namespace=row.get("namespace") or "",
        created_s=created,
        lifetime_s=deleted - created if deleted > created else None,
    )


def named(row: Mapping[str, str], column: str) -> str:
    if not (name := (row.get(column) or "").strip()):
        raise ValueError(f"{column}: is empty; every row needs a name")
    return name


def model_named(column: str, text: str) -> str:
    if not is_model(text):
        raise ValueError(f"{column}: {text!r} is not the name of a GPU model")
    return parse_model(text).name


def number(row: Mapping[str, str], column: str, default: int | None = None, most: int = 2**30) -> int:
    text = row.get(column) or ""
    if not text and default is not None:
        return default
    try:
        # Some files have 12000.0.
        value = int(float(text))
    except (ValueError, OverflowError):
        raise ValueError(f"{column}: {text!r} is not a number") from None
    if value < 0:
        raise ValueError(f"{column}: {text} is below 0")
    if value > most:
        raise ValueError(f"{column}: {text} is above {most}")
    return value


def read_rows(path: Path, columns: tuple[str, ...], convert: Callable[[Mapping[str, str]], Row]) -> Iterator[Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [each for each in columns if each not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"{path}: column {missing[0]} is missing; the file needs {', '.join(columns)}")
            for row in reader:
                try:
                    yield convert(row)
                except ValueError as error:
                    raise TraceError(f"{path}: line {reader.line_num}: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: not a CSV file: {error}") from None
