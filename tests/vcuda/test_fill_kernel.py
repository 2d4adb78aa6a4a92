"""The compiled kernel computes what the reference in Python says, on any cluster and workload."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vcuda.compiled_workload import CompiledWorkload, Prices
from vcuda.cost_terms import CostArrays, Demand, Factors
from vcuda.fill_kernel import FillKernel, load_kernel
from vcuda.fill_reference import FillReference
from vcuda.gpu_table import GpuTable
from vcuda.inventory import Gpu
from vcuda.workload import TaskShape, given_history

MODELS = ("T4", "A100-SXM4-40GB", "V100")
SIZES = {"T4": 15360, "A100-SXM4-40GB": 40960, "V100": 0}

cores = st.sampled_from([1, 10, 25, 30, 50, 75, 99, 100])
shapes = st.builds(
    lambda cpu, gpus, share, mib, models: TaskShape(
        cpu, gpus, 0 if not gpus else share if gpus == 1 else 100, mib if gpus == 1 and share < 100 else 0, models
    ),
    st.sampled_from([0, 1000, 8000, 33_333, 700_000]),
    st.sampled_from([0, 1, 1, 1, 2, 4, 8]),
    cores,
    st.sampled_from([0, 100, 4096, 20_000]),
    st.sampled_from([(), (), ("T4",), ("A100",), ("T4", "V100")]),
)
nodes = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(MODELS), st.integers(-20, 100), st.booleans()), max_size=9),
        st.integers(-1000, 200_000),
        st.integers(-1000, 3_000_000),
    ),
    min_size=1,
    max_size=4,
)
demands = st.builds(
    lambda gpus, share, mib, follows, cpu, host: Demand(
        gpus, 0 if not gpus else share if gpus == 1 else 100, mib, follows or share == 100, cpu, host
    ),
    st.sampled_from([0, 1, 1, 1, 2, 4]),
    cores,
    st.sampled_from([0, 64, 5000]),
    st.booleans(),
    st.sampled_from([0, 4000]),
    st.sampled_from([0, 16_000]),
)


def reason_of(usable: dict[str, bool], gpu: Gpu) -> str:
    return "" if usable[gpu.uuid] else "cordoned"


def table_of(described: list[tuple[list[tuple[str, int, bool]], int, int]]) -> GpuTable:
    table = GpuTable()
    for number, (cards, cpu, mib) in enumerate(described):
        gpus = [
            Gpu(uuid=f"{number}-{index}", index=index, model=model, memory_mib=SIZES[model], healthy=True)
            for index, (model, _, _) in enumerate(cards)
        ]
        usable = {gpu.uuid: is_usable for gpu, (_, _, is_usable) in zip(gpus, cards, strict=True)}
        table.set_node(f"n{number}", gpus, "", partial(reason_of, usable))
        for gpu, (_, free, _) in zip(gpus, cards, strict=True):
            table.take(f"n{number}", {gpu.uuid: (100 - free, gpu.memory_mib * (100 - free) // 100)})
        table.set_host(f"n{number}", cpu, mib)
    return table


@pytest.fixture(scope="module")
def kernel() -> FillKernel:
    loaded = load_kernel()
    assert loaded is not None, "the C sources were not compiled: run `make`"
    return loaded


@settings(deadline=None)
@given(
    described=nodes,
    tasks=st.lists(st.tuples(shapes, st.integers(0, 64_000)), min_size=1, max_size=8),
    demand=demands,
    factors=st.sampled_from([Factors(), Factors(fragmentation=0.7), Factors(0.0, 0.0, 0.0, 0.0, 1.0)]),
)
def test_the_kernel_computes_what_the_reference_does(
    kernel: FillKernel,
    described: list[tuple[list[tuple[str, int, bool]], int, int]],
    tasks: list[tuple[TaskShape, int]],
    demand: Demand,
    factors: Factors,
) -> None:
    table, reference = table_of(described), FillReference()
    workload = CompiledWorkload(given_history(tasks).typical())
    prices, arrays = Prices(workload, table.models()), table.kernel_arrays()
    columns = np.arange(len(table), dtype=np.int64)
    slots = [each.cluster_slots(arrays, prices, columns).tolist() for each in (kernel, reference)]
    assert slots[0] == slots[1]
    prices.set_prices(np.array(slots[0]), table.free_gpus_by_model())
    free, usable = arrays[0][:, columns], arrays[4][:, columns]
    fitting = np.ascontiguousarray(usable & (free >= demand.cores) if demand.count else np.zeros_like(usable))
    results = []
    for each in (kernel, reference):
        unknown = np.full((2, *arrays[0].shape), np.nan, np.float32)
        given_arrays = CostArrays(columns, fitting, *unknown)
        results.append((each.placement_costs(arrays, prices, demand, factors, given_arrays), unknown))
    (costs, fills), (expected, expected_fills) = results
    np.testing.assert_array_equal(np.isfinite(costs), np.isfinite(expected))
    np.testing.assert_allclose(costs[np.isfinite(costs)], expected[np.isfinite(costs)], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(fills, expected_fills)
    fragmentation = [each.cluster_fragmentation(arrays, prices, columns) for each in (kernel, reference)]
    assert fragmentation[0] == pytest.approx(fragmentation[1], rel=1e-12)
