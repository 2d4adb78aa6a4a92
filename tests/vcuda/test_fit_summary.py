"""Why a pod fits on no node, in one sentence with numbers."""

import pytest

from tests.vcuda.gpus import UNIT_MIB, app, pod
from tests.vcuda.test_node_fit import card, table_of
from vcuda.fit_query import FitQuery
from vcuda.fit_summary import describe_fits
from vcuda.gpu_availability import GpuUsage
from vcuda.isolation import Isolation, Rung
from vcuda.memory_units import describe_mib
from vcuda.node_fit import NodeFitter
from vcuda.pod_options import PodOptions
from vcuda.request import PodRequest


def summary(query: FitQuery, usage: dict[str, dict[str, GpuUsage]] | None = None) -> str:
    """Describe a query on two nodes, the first with two T4 and the second with a V100."""
    table = table_of({"a": [card("a"), card("a", 1)], "b": [card("b", 0, "V100")]}, usage)
    fitter = NodeFitter(table)
    fits = fitter.fit(["a", "b"], query)
    return describe_fits(query, fits, fitter.best_free(query, fits))


def query(request: PodRequest, **changes: object) -> FitQuery:
    return FitQuery(request, UNIT_MIB, PodOptions(**changes))  # type: ignore[arg-type]


BUSY: dict[str, dict[str, GpuUsage]] = {
    "a": {"GPU-a-0": (60, 6144), "GPU-a-1": (70, 1024)},
    "b": {"GPU-b-0": (80, 12288)},
}
HALF = app("c", 50, 48)

SUMMARIES = {
    "memory and model": (
        query(pod(app("c", 10, 60)), models=("T4",)),
        BUSY,
        "1 of 2 nodes: no T4; 1 of 2: no GPU with 15 GiB free, the best has 14 GiB",
    ),
    "cores": (query(pod(app("c", 50, 4))), BUSY, "2 of 2 nodes: no GPU with 50 cores free, the best has 40"),
    "cores on one gpu and memory on another": (
        query(pod(app("c", 35, 48)), models=("T4",)),
        BUSY,
        "1 of 2 nodes: no T4; 1 of 2: no GPU with 35 cores and 12 GiB free together",
    ),
    "a following share": (
        query(pod(app("c", 99, follows=True))),
        BUSY,
        "2 of 2 nodes: no GPU with 99 % of its memory free, the best has 14 GiB",
    ),
    "whole gpus": (
        query(pod(app("c", 200)), models=("T4",)),
        BUSY,
        "1 of 2 nodes: no T4; 1 of 2: no 2 unused GPUs, the best node has 0",
    ),
    "one whole gpu": (query(pod(app("c", 100))), BUSY, "2 of 2 nodes: no unused GPU"),
    "more gpus than a node has": (
        query(pod(app("c", 300))),
        {},
        "2 of 2 nodes: fewer than 3 GPUs of a model that the pod may use",
    ),
    "more memory than a card has": (query(pod(app("c", 10, 200))), {}, "2 of 2 nodes: no GPU has 50 GiB"),
    "excluded models": (
        query(pod(HALF), avoided_models=("T4", "V100")),
        {},
        "2 of 2 nodes: only T4 and V100, which the pod excludes",
    ),
    "isolation": (
        query(pod(HALF), min_isolation=Isolation(memory=Rung.MPS)),
        {},
        "2 of 2 nodes: no GPU with isolation memory=mps or stronger",
    ),
    "pools": (
        FitQuery(pod(HALF), UNIT_MIB, pools=("training",)),
        {},
        "2 of 2 nodes: not in a node pool of the namespace (training)",
    ),
}


@pytest.mark.parametrize(("asked", "usage", "expected"), SUMMARIES.values(), ids=SUMMARIES)
def test_the_summary_has_counts_and_what_is_free_at_best(
    asked: FitQuery, usage: dict[str, dict[str, GpuUsage]], expected: str
) -> None:
    assert summary(asked, usage) == expected


def test_without_nodes_the_other_filters_are_to_blame() -> None:
    table = table_of({})
    asked = query(pod(HALF))
    text = describe_fits(asked, NodeFitter(table).fit([], asked), {})
    assert text == "no node passed the scheduler's other filters"


@pytest.mark.parametrize(
    ("mib", "text"), [(512, "512 MiB"), (1024, "1 GiB"), (1536, "1.5 GiB"), (15104, "14.7 GiB"), (40960, "40 GiB")]
)
def test_memory_is_rounded_down(mib: int, text: str) -> None:
    """What is free must not look like enough."""
    assert describe_mib(mib) == text
