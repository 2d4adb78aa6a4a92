"""What is legal but probably not meant: told as a warning, never refused."""

from collections.abc import Iterator

from vcuda.decision import shown
from vcuda.request import ContainerRequest
from webhook.mutating import containers_of, dotted
from webhook.objects import Metadata, Pod
from webhook.reading import Asked
from webhook.rules import Rules

# A CUDA context alone takes about this much.
LITTLE_MIB = 512
# More than any card has: somebody counted MiB where units are counted.
MUCH_MIB = 512 * 1024


def advice(pod: Pod, asked: Asked, rules: Rules) -> Iterator[str]:
    """Say what an author of such a pod should know."""
    if not asked.request.is_gpu:
        return
    for each in asked.request.containers:
        yield from about_memory(each, rules)
    fractions = [each for each in asked.request.containers if not each.share.cards]
    if asked.wishes.core_limit is not None and not fractions:
        yield f"metadata.annotations[{rules.names.core_limit}] has no effect: whole cards are used without limit"
    for place, container in containers_of(pod.spec):
        if container.security_context is not None and container.security_context.privileged:
            yield f"{dotted(place)} is privileged: it sees every GPU of its node, and no limit holds for it"
    if pod.spec.resource_claims:
        yield "spec.resourceClaims: GPUs that come with a claim count in no quota of Quotient's"


def about_memory(each: ContainerRequest, rules: Rules) -> Iterator[str]:
    """Say what is odd about an amount of memory."""
    unit, share = rules.language.unit_mib, each.share
    asked_mib = share.memory_units * unit
    name = f"container {shown(each.name)}"
    if share.cards:
        if share.memory_units > share.cards:
            yield (
                f"{name}: whole cards come with all of their memory; {asked_mib} MiB is only the least they must have"
            )
        return
    if not share.follows and asked_mib < LITTLE_MIB:
        yield (
            f"{name}: {asked_mib} MiB of GPU memory is less than CUDA itself takes; "
            f"1 of {rules.names.memory} is {unit} MiB"
        )
    if asked_mib > MUCH_MIB:
        yield (
            f"{name}: {asked_mib} MiB of GPU memory is more than any card has; 1 of {rules.names.memory} is {unit} MiB"
        )


def misplaced(metadata: Metadata, rules: Rules, where: str) -> Iterator[str]:
    """Say that wishes stand on a workload, where nobody reads them, instead of on its template."""
    for key in rules.frozen:
        if key in metadata.noted:
            yield f"metadata.annotations[{key}] has no effect here: it belongs to {where}metadata.annotations"
