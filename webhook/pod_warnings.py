"""Warnings about pods that are valid, but probably not what the user intended."""

from collections.abc import Iterator

from vcuda.decision import printable
from vcuda.request import ContainerRequest
from webhook.admission_config import AdmissionConfig
from webhook.mutating import containers_of
from webhook.objects import AdmittedMetadata, Pod
from webhook.patching import field_of
from webhook.pod_parsing import ParsedPod

# A CUDA context takes about this much before the program allocates anything.
MIN_USEFUL_MIB = 512
# No card has that much: the user counted MiB where the resource counts memory units.
MAX_PLAUSIBLE_MIB = 512 * 1024


def pod_warnings(pod: Pod, parsed: ParsedPod, config: AdmissionConfig) -> list[str]:
    if not parsed.request.is_gpu:
        return []
    warnings = [memory_warning(each, config) for each in parsed.request.containers]
    if parsed.options.core_limit is not None and all(each.share.whole_cards for each in parsed.request.containers):
        warnings.append(
            f"metadata.annotations[{config.names.core_limit}] has no effect: it limits fractions of a GPU, and this "
            "pod requests whole GPUs"
        )
    for pointer, container in containers_of(pod.spec):
        if container.security_context is not None and container.security_context.privileged:
            warnings.append(
                f"{field_of(pointer)}.securityContext.privileged: a privileged container can access every GPU of its "
                "node, and its GPU limits are not enforced"
            )
    if pod.spec.resource_claims:
        warnings.append("spec.resourceClaims: GPUs allocated by resource claims are not charged to any Quotient quota")
    return [each for each in warnings if each]


def memory_warning(request: ContainerRequest, config: AdmissionConfig) -> str:
    """Return a warning about a container's amount of memory, or an empty string."""
    unit_mib, share = config.scheme.unit_mib, request.share
    memory_mib = share.memory_units * unit_mib
    if share.whole_cards:
        # One unit per card is what the webhook itself adds to whole cards.
        if share.memory_units <= share.whole_cards:
            return ""
        problem = "is a minimum, not a limit: whole GPUs come with all of their memory"
    elif share.memory_follows_cores or MIN_USEFUL_MIB <= memory_mib <= MAX_PLAUSIBLE_MIB:
        return ""
    else:
        size = "less than a CUDA context needs" if memory_mib < MIN_USEFUL_MIB else "more than any GPU has"
        problem = f"is {size}; 1 {config.names.memory} is {unit_mib} MiB"
    return f"container {printable(request.name)}: {memory_mib} MiB of GPU memory {problem}"


def misplaced_annotations(metadata: AdmittedMetadata, config: AdmissionConfig, field_prefix: str) -> Iterator[str]:
    """Warn about pod options on a workload itself: they count on its pod template only."""
    for key in config.frozen_annotations:
        if key in metadata.annotations_or_empty:
            yield f"metadata.annotations[{key}] has no effect here: move it to {field_prefix}metadata.annotations"
