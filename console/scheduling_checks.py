"""Checks of `quotient doctor`: whether the scheduler works, and nodes offer their GPUs."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from console.check_results import ERROR, OK, WARNING, CheckResult, limit_results
from console.printing import count_of
from console.why_steps import age_s, format_age
from settings.configuration import Configuration
from vcuda.names import SCHEDULER, names_for
from vcuda.quantity import QuantityError, parse_quantity
from vcuda.scheme import Scheme, build_scheme

if TYPE_CHECKING:
    from cluster.objects import Node
    from vcuda.inventory import Gpu

LEADERSHIP, KUBE_SCHEDULER, GPU_NODES = "scheduler lease", "kube-scheduler", "gpu nodes"
# kube-scheduler renews its Lease every two seconds; the clock of this machine may differ, see the check of clocks.
LEASE_MARGIN_S = 30
IMAGE_NAME = "kube-scheduler"
LOGS = "kubectl -n {namespace} logs deploy/" + SCHEDULER + " --all-containers"


def check_lease(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Find out whether a kube-scheduler leads: the extender beside it is the only one that answers."""
    from cluster.errors import NotFound  # noqa: PLC0415 - only loaded where a cluster is used
    from cluster.objects import LEASES  # noqa: PLC0415

    name, namespace = configuration.scheduler.lease, configuration.system_namespace
    if not name:
        return
    remedy = LOGS.format(namespace=namespace)
    try:
        spec = cluster.get(LEASES, name, namespace).spec
    except NotFound:
        yield CheckResult(ERROR, LEADERSHIP, f"Lease {namespace}/{name} does not exist: no scheduler leads", remedy)
        return
    seconds = age_s(datetime.now(UTC), spec.renew_time)
    if not spec.holder_identity:
        yield CheckResult(ERROR, LEADERSHIP, f"Lease {namespace}/{name} has no holder: no scheduler leads", remedy)
    elif seconds is None or seconds > (spec.lease_duration_seconds or 0) + LEASE_MARGIN_S:
        since = "was never renewed" if seconds is None else f"was not renewed for {format_age(seconds)}"
        yield CheckResult(ERROR, LEADERSHIP, f"held by {spec.holder_identity}, but {since}", remedy)
    else:
        yield CheckResult(OK, LEADERSHIP, f"held by {spec.holder_identity}")


def check_kube_scheduler(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Compare its version with the API server's: Kubernetes supports the same minor version, and one before it."""
    from cluster.errors import NotFound  # noqa: PLC0415
    from cluster.objects import DEPLOYMENTS  # noqa: PLC0415

    try:
        deployment = cluster.get(DEPLOYMENTS, SCHEDULER, configuration.system_namespace)
    except NotFound:
        return  # reported by another check
    server = cluster.version()
    for container in deployment.spec.template.spec.containers:
        if (tag := image_tag(container.image)) and IMAGE_NAME in container.image:
            yield compare_versions(tag, server)


def compare_versions(tag: str, server: str) -> CheckResult:
    ours, theirs = minor_version(tag), minor_version(server)
    message = f"kube-scheduler is {tag}, the API server {server}"
    remedy = f"use the image of version {server} in the chart's values"
    if ours is None or theirs is None:
        return CheckResult(OK, KUBE_SCHEDULER, message)
    if ours > theirs:
        return CheckResult(ERROR, KUBE_SCHEDULER, f"{message}: it must not be newer", remedy)
    if ours[0] < theirs[0] or ours[1] < theirs[1] - 1:
        return CheckResult(WARNING, KUBE_SCHEDULER, f"{message}: more than one minor version older", remedy)
    return CheckResult(OK, KUBE_SCHEDULER, message)


def image_tag(image: str) -> str:
    """Return the tag of an image; empty if it has none, or only a digest."""
    name, _, _ = image.partition("@")
    # A colon before the last slash belongs to the registry's port.
    return name.rpartition("/")[2].partition(":")[2]


def minor_version(version: str) -> tuple[int, int] | None:
    """Return major and minor of a version such as v1.36.4; None if it is not one."""
    parts = version.removeprefix("v").split(".")
    numbers = ["".join(char for char in part if char.isdecimal()) for part in parts[:2]]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) > 1 and all(numbers) else None


def check_gpu_nodes(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Find nodes that should offer GPUs and offer none."""
    from cluster.objects import NODES  # noqa: PLC0415

    names = names_for(configuration.domain)
    scheme = build_scheme(names, configuration.memory_unit_mib, configuration.vocabularies)
    problems = [(node.metadata.name, gpu_node_problem(node, scheme)) for node in cluster.list(NODES).items]
    pods = f"kubectl -n {configuration.system_namespace} get pods -o wide --field-selector spec.nodeName="
    results = (
        CheckResult(WARNING, GPU_NODES, f"{name}: {problem}", f"see the log of its node plugin: {pods}{name}")
        for name, problem in problems
        if problem
    )
    yield from limit_results(results, GPU_NODES)


def gpu_node_problem(node: "Node", scheme: Scheme) -> str:
    """Return why a node that should have GPUs offers none; empty if it does, or should not."""
    from cluster.gpu_nodes import gpu_node_of, model_in_labels  # noqa: PLC0415

    has_inventory = scheme.names.inventory in node.metadata.annotations
    gpus = gpu_node_of(node, scheme).gpus
    if not gpus and not has_inventory:
        model = model_in_labels(node.metadata.labels, scheme)
        return f"labelled with GPUs ({model}), but no node plugin has published any" if model else ""
    if not gpus:
        return "the node plugin found no GPU"
    return "" if offers_any(node, scheme.names.core) else describe_unoffered(gpus, scheme.names.core)


def offers_any(node: "Node", resource: str) -> bool:
    try:
        return parse_quantity(node.status.allocatable.get(resource, "0")).whole > 0
    except QuantityError:
        return False


def describe_unoffered(gpus: "tuple[Gpu, ...]", resource: str) -> str:
    if not any(gpu.healthy for gpu in gpus):
        return f"none of its {count_of(len(gpus), 'GPU')} is healthy: {gpus[0].reason or 'no reason given'}"
    return f"its inventory has {count_of(len(gpus), 'GPU')}, but allocatable {resource} is 0: the kubelet offers none"
