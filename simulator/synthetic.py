"""A cluster and a workload of our own, for simulations without files: several models, fractions and whole GPUs."""

import random

from simulator.trace_files import Task, TraceNode
from vcuda.vocabulary import CORES_PER_CARD

# Nodes, model, GPUs of each, memory of a GPU in MiB, and CPU and memory of the node for each of its GPUs.
POOLS = (
    (40, "T4", 4, 15_360, 12_000, 48_000),
    (30, "A10", 4, 23_028, 16_000, 64_000),
    (20, "V100-SXM2-32GB", 8, 32_768, 12_000, 48_000),
    (10, "A100-SXM4-80GB", 8, 81_920, 16_000, 128_000),
)
# GPUs, cores of each, and how often of a hundred.
SIZES = (
    (1, 10, 12),
    (1, 25, 18),
    (1, 50, 20),
    (1, 75, 4),
    (1, 100, 28),
    (2, 100, 7),
    (4, 100, 5),
    (8, 100, 2),
    (0, 0, 4),
)
# Which models a task names, and how often of a hundred; most name none.
MODELS = (((), 70), (("T4",), 8), (("A10",), 6), (("V100",), 6), (("A100",), 6), (("V100", "A100"), 4))
NAMESPACES = ("research", "inference", "training")
TASKS = 2000
CPU_MILLI_PER_GPU, MIB_PER_GPU, MIN_GPU_MIB = 8000, 32_000, 512


def synthetic_nodes() -> list[TraceNode]:
    return [
        TraceNode(f"{model.lower()}-{number:03}", gpus * cpu, gpus * mib, gpus, model, gpu_mib)
        for count, model, gpus, gpu_mib, cpu, mib in POOLS
        for number in range(count)
    ]


def synthetic_tasks(seed: int, count: int = TASKS) -> list[Task]:
    """Draw tasks; the same for the same seed."""
    choose = random.Random(seed)
    return [synthetic_task(choose, number) for number in range(count)]


def synthetic_task(choose: random.Random, number: int) -> Task:
    ((gpus, cores, _),) = choose.choices(SIZES, [each[-1] for each in SIZES])
    ((models, _),) = choose.choices(MODELS, [each[-1] for each in MODELS])
    part = gpus * cores / CORES_PER_CARD or 0.25
    # Memory follows the cores or is somewhat more or less, as people write it.
    gpu_mib = max(MIN_GPU_MIB, round(cores * choose.choice((60, 100, 150)) / 256) * 256)
    return Task(
        name=f"task-{number:05}",
        cpu_milli=round(part * CPU_MILLI_PER_GPU * choose.choice((0.5, 1, 1, 1.5))),
        memory_mib=round(part * MIB_PER_GPU * choose.choice((0.5, 1, 1, 1.5))),
        gpus=gpus,
        cores=cores,
        models=models if gpus else (),
        gpu_memory_mib=gpu_mib if 0 < cores < CORES_PER_CARD else 0,
        namespace=choose.choice(NAMESPACES),
        lifetime_s=choose.lognormvariate(8, 1.5),
    )
