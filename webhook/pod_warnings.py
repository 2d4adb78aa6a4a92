"""What is legal but probably not meant: told as a warning, never refused."""

from collections.abc import Iterator

from vcuda.decision import printable
from vcuda.request import ContainerRequest
from webhook.admission_config import AdmissionConfig
from webhook.mutating import containers_of, dotted
from webhook.objects import Metadata, Pod
from webhook.pod_parsing import ParsedPod

# A CUDA context alone takes about this much.
LITTLE_MIB = 512
# More than any card has: somebody counted MiB where units are counted.
MUCH_MIB = 512 * 1024


def pod_warnings(pod: Pod, parsed: ParsedPod, config: AdmissionConfig) -> list[str]:
    """Say what an author of such a pod should know."""
    if not parsed.request.is_gpu:
        return []
    told = [memory_warning(each, config) for each in parsed.request.containers]
    if parsed.options.core_limit is not None and all(each.share.whole_cards for each in parsed.request.containers):
        told.append(
            f"metadata.annotations[{config.names.core_limit}] has no effect: whole cards are used without limit"
        )
    for place, container in containers_of(pod.spec):
        if container.security_context is not None and container.security_context.privileged:
            told.append(f"{dotted(place)} is privileged: it sees every GPU of its node, and no limit holds for it")
    if pod.spec.resource_claims:
        told.append("spec.resourceClaims: GPUs that come with a claim count in no quota of Quotient's")
    return [each for each in told if each]


def memory_warning(each: ContainerRequest, config: AdmissionConfig) -> str:
    """Say what is odd about an amount of memory, if anything is."""
    unit, share = config.scheme.unit_mib, each.share
    asked_mib = share.memory_units * unit
    if share.whole_cards:
        odd = f"whole cards come with all of their memory; {asked_mib} MiB is only the least they must have"
        return f"container {printable(each.name)}: {odd}" if share.memory_units > share.whole_cards else ""
    if share.memory_follows_cores or LITTLE_MIB <= asked_mib <= MUCH_MIB:
        return ""
    than = "less than CUDA itself takes" if asked_mib < LITTLE_MIB else "more than any card has"
    counted = f"1 of {config.names.memory} is {unit} MiB"
    return f"container {printable(each.name)}: {asked_mib} MiB of GPU memory is {than}; {counted}"


def misplaced_annotations(metadata: Metadata, config: AdmissionConfig, where: str) -> Iterator[str]:
    """Say that wishes stand on a workload, where nobody reads them, instead of on its template."""
    for key in config.frozen:
        if key in metadata.noted:
            yield f"metadata.annotations[{key}] has no effect here: it belongs to {where}metadata.annotations"
