"""What each container of a pod may use, as the webhook writes it on the pod for everybody after it."""

from enum import StrEnum

import msgspec
from msgspec import Struct

from vcuda.decoding import decoder_for
from vcuda.namespace_policy import CoreLimitPolicy
from vcuda.pod_options import PodOptions
from vcuda.request import PodRequest
from vcuda.vocabulary import CORES_PER_CARD, Share

VERSION = 1


class LimitSource(StrEnum):
    """Who set how far a container may burst."""

    USER = "user"
    POLICY = "policy"
    DEFAULT = "default"


class ContainerLimits(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One container: memory in MiB, or in percent of each of its cards where it follows the cores or is all of them."""

    cores: int
    core_limit: int
    limit_source: LimitSource
    memory_mib: int | None = msgspec.field(name="memoryMiB", default=None)
    memory_percent: int | None = None


class PodLimits(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """All GPU containers of a pod, and the models it may run on; none named means any."""

    v: int
    models: tuple[str, ...]
    avoid_models: tuple[str, ...] = ()
    containers: dict[str, ContainerLimits]


DECODER = decoder_for(PodLimits)


def encode_limits(limits: PodLimits) -> str:
    """Write the annotation."""
    return msgspec.json.encode(limits).decode()


def decode_limits(text: str) -> PodLimits | None:
    """Read the annotation; None if it is not one of ours."""
    try:
        found = DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return found if found.v == VERSION else None


def limits_of(request: PodRequest, options: PodOptions, burst: CoreLimitPolicy, unit_mib: int) -> PodLimits:
    """Compute what a pod's containers may use."""
    return PodLimits(
        v=VERSION,
        models=options.models,
        avoid_models=options.avoided,
        containers={
            each.name: container_limits(each.share, options.core_limit, burst, unit_mib) for each in request.containers
        },
    )


def container_limits(share: Share, wished: int | None, burst: CoreLimitPolicy, unit_mib: int) -> ContainerLimits:
    """Compute what one container may use. A whole card is its own limit, in cores and in memory."""
    if share.cards:
        return ContainerLimits(
            cores=share.cores, core_limit=share.cores, limit_source=LimitSource.DEFAULT, memory_percent=CORES_PER_CARD
        )
    core_limit, source = share.cores, LimitSource.DEFAULT
    if wished is not None:
        core_limit, source = max(min(wished, burst.max), share.cores), LimitSource.USER
    elif isinstance(burst.default, int):
        core_limit, source = max(min(burst.default, burst.max), share.cores), LimitSource.POLICY
    memory = {"memory_percent": share.cores} if share.follows else {"memory_mib": share.memory_units * unit_mib}
    return ContainerLimits(cores=share.cores, core_limit=core_limit, limit_source=source, **memory)


def common_core_limit(limits: PodLimits) -> int | None:
    """Give the core limit on which all containers with a fraction agree, if they do."""
    common: int | None = None
    for each in limits.containers.values():
        if each.cores < CORES_PER_CARD and each.core_limit != common:
            if common is not None:
                return None
            common = each.core_limit
    return common


def fractional_limits(limits: PodLimits) -> list[ContainerLimits]:
    """Give the containers that share a card."""
    return [each for each in limits.containers.values() if each.cores < CORES_PER_CARD]


def is_injected_core_limit(limits: PodLimits, core_limit: str) -> bool:
    """Tell whether the core limit beside these limits is one that was injected with them, not one that a user wrote."""
    parts = fractional_limits(limits)
    return bool(parts) and all(
        each.limit_source is not LimitSource.USER and str(each.core_limit) == core_limit for each in parts
    )
