"""The quota of a pod's namespace, as `quotient why` shows it: what the pod takes, and how much is in use."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.gpu_nodes import gpu_node_of
from cluster.object_details import PodDetails
from cluster.objects import Node
from console.quota_status_view import QuotaStatus
from vcuda.dimensions import CORES, MEMORY
from vcuda.gpu_model import is_model, matches, parse_model
from vcuda.inventory import Gpu
from vcuda.placement_annotation import placed_uuids
from vcuda.pod_options import PodOptions
from vcuda.quota import ALL_TYPES
from vcuda.request import PodRequest
from vcuda.scheme import Scheme

STATUS_UNITS = {"cores": "cores", "memoryMiB": "MiB", "pods": "pods"}
MAX_LINES_SHOWN = 4


def placed_gpus(pod: PodDetails, node: Node | None, scheme: Scheme) -> list[Gpu]:
    """Return the GPUs of the pod's placement that its node's inventory lists."""
    uuids = placed_uuids(pod.metadata.annotations.get(scheme.names.placement, ""))
    return [gpu for gpu in gpu_node_of(node, scheme).gpus if gpu.uuid in uuids] if node else []


def waiting_reason(status: QuotaStatus, pod: str) -> str:
    """Return why a pod is not charged yet; empty if the controller does not list it."""
    return next((str(each["reason"]) for each in status.get("waiting", []) if each["name"] == pod), "")


def charged_text(
    request: PodRequest, options: PodOptions, gpus: Sequence[Gpu], status: QuotaStatus, unit_mib: int
) -> str:
    """Describe a charge. Memory that depends on the size of a GPU is left out until the pod is placed."""
    amounts = request.demand(max((gpu.memory_mib for gpu in gpus), default=0), unit_mib)
    memory = f", {amounts[MEMORY]} MiB" if amounts[MEMORY] else ""
    models = sorted({gpu.model for gpu in gpus}) or list(options.models)
    text = f"{amounts[CORES]} cores{memory}" + (f" of {' or '.join(models)}" if models else "")
    lines = list(usage_lines(status, models, options.avoided_models))
    usage = "; ".join(lines[:MAX_LINES_SHOWN]) + ("; ..." if len(lines) > MAX_LINES_SHOWN else "")
    mode = ", in audit mode" if status.get("mode") == "audit" else ""
    return f"{text} to the quota of the namespace{mode}" + (f" ({usage})" if usage else "")


def usage_lines(status: QuotaStatus, models: Sequence[str], avoided: Sequence[str]) -> Iterator[str]:
    """Describe the lines of the quotas under which the pod may be charged."""
    for quota in status.get("quotas", []):
        for line, dimensions in quota["types"].items():
            if line == ALL_TYPES or (covers(line, models) and not is_avoided(line, avoided)):
                yield f"{line}: {', '.join(map(describe_usage, dimensions, dimensions.values()))}"


def covers(line: str, models: Sequence[str]) -> bool:
    """Whether a line is about one of these models, or about products of a family among them; no models are any."""
    named = [model for model in models if is_model(model)]
    about_product = is_model(line) and any(matches(model, parse_model(line)) for model in named)
    return not models or about_product or any(matches(line, parse_model(model)) for model in named)


def is_avoided(line: str, avoided: Sequence[str]) -> bool:
    return is_model(line) and any(matches(pattern, parse_model(line)) for pattern in avoided)


def describe_usage(dimension: str, numbers: Mapping[str, Any]) -> str:
    reserved = f" and {numbers['reserved']} reserved" if numbers["reserved"] else ""
    return f"{numbers['used']} used{reserved} of {numbers['hard']} {STATUS_UNITS.get(dimension, dimension)}"
