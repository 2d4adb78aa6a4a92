"""A small scheduler for `quotient local`: finds a node and GPUs for a pod with the function that the scheduler uses."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from cluster.objects import Node, Pod
from console.local_kubelet import FAILED
from vcuda.gpu_availability import GpuAvailability, GpuUsage, available_gpus
from vcuda.inventory import decode_inventory
from vcuda.placement import InsufficientGpus, PlacedSlices, peak_usage, place_pod
from vcuda.placement_annotation import decode_placement
from vcuda.pod_options import read_pod_options
from vcuda.request import request_held_by
from vcuda.scheme import Scheme


def choose_node(
    pod: Pod, nodes: Sequence[Node], pods: Sequence[Pod], scheme: Scheme, granted: Callable[[str], bool]
) -> tuple[str, PlacedSlices] | str:
    """Return a node and the GPUs of each container, or the reasons why no node fits."""
    request = request_held_by(pod.spec, pod.metadata.annotations, scheme)
    options, _ = read_pod_options(pod.metadata.annotations, scheme)
    candidates: list[tuple[str, list[GpuAvailability]]] = []
    for node in nodes:
        with suppress(ValueError):
            inventory = decode_inventory(node.metadata.annotations.get(scheme.names.inventory, ""))
            gpus = [gpu for gpu in inventory if granted(gpu.model)]
            usage = usage_on(node.metadata.name, pods, scheme)
            candidates.append((node.metadata.name, available_gpus(gpus, usage, lambda gpu: gpu.reason)))
    problems = []
    # The fullest node first, so that empty nodes stay free for large pods.
    for name, available in sorted(candidates, key=lambda each: (sum(gpu.free_cores for gpu in each[1]), each[0])):
        try:
            return name, place_pod(request, available, unit_mib=scheme.unit_mib, options=options)
        except InsufficientGpus as error:
            problems.append(f"{name}: {error}")
    return "; ".join(problems)


def usage_on(node: str, pods: Sequence[Pod], scheme: Scheme) -> list[dict[str, GpuUsage]]:
    """Return what each pod of a node uses of its cards."""
    usage = []
    for pod in pods:
        placed = decode_placement(pod.metadata.annotations.get(scheme.names.placement, ""))
        if placed and pod.spec.node_name == node and pod.status.phase != FAILED:
            usage.append(peak_usage(request_held_by(pod.spec, pod.metadata.annotations, scheme), placed))
    return usage
