"""From a pod to the shape under which it is counted as a task."""

from vcuda.host import Host
from vcuda.placement import peak_cores
from vcuda.pod_options import PodOptions
from vcuda.request import PodRequest
from vcuda.vocabulary import CORES_PER_CARD
from vcuda.workload import TaskShape

MAX_MODELS = 4


def task_shape(request: PodRequest, options: PodOptions, host: Host, unit_mib: int) -> TaskShape:
    """Return the shape of a pod; several containers count as one that takes as much as all of them."""
    cores, shares = peak_cores(request), [each.share for each in request.containers]
    gpus, memory_mib = -(-cores // CORES_PER_CARD), 0
    if 0 < cores < CORES_PER_CARD and not any(share.memory_follows_cores for share in shares):
        memory_mib = sum(share.memory_units for share in shares) * unit_mib
    cores = cores if gpus == 1 else CORES_PER_CARD * bool(gpus)
    lists = (options.models, options.avoided_models)
    # The history is stored in a ConfigMap, and tenants write these lists.
    return TaskShape(
        host.cpu_milli, gpus, cores, memory_mib, *(each if len(each) <= MAX_MODELS else () for each in lists)
    )
