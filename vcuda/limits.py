"""What each container of a pod may use: computed by the webhook and written to the pod as an annotation.

The node plugin enforces these limits, so the two need not agree on how a request is read.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from vcuda.decoding import decoder_for
from vcuda.isolation import NO_ISOLATION, Isolation
from vcuda.namespace_policy import CoreLimitPolicy, NamespacePolicy
from vcuda.pod_options import PodOptions, read_pod_options
from vcuda.request import PodRequest
from vcuda.scheme import Scheme
from vcuda.vocabulary import CORES_PER_CARD, Share

VERSION = 1


class LimitSource(StrEnum):
    """What set a container's core limit: the pod's annotation, the namespace's policy, or neither."""

    USER = "user"
    POLICY = "policy"
    DEFAULT = "default"


class ContainerLimits(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The limits of one container.

    Memory is either in MiB, or in percent of each card: where it follows the cores, and 100 for whole cards.
    """

    cores: int
    core_limit: int
    limit_source: LimitSource
    memory_mib: int | None = msgspec.field(name="memoryMiB", default=None)
    memory_percent: int | None = None


class PodLimits(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The limits of all GPU containers of a pod, by name, and the models it may run on; no models means any.

    `min_isolation` is what its author and its namespace's policy require, whichever is stronger.
    """

    v: int
    models: tuple[str, ...]
    avoid_models: tuple[str, ...] = ()
    min_isolation: Isolation = NO_ISOLATION
    containers: dict[str, ContainerLimits]


DECODER = decoder_for(PodLimits)


def encode_limits(limits: PodLimits) -> str:
    return msgspec.json.encode(limits).decode()


def decode_limits(text: str) -> PodLimits | None:
    """Decode the annotation; None if it is invalid or of another version, since any user may write it."""
    try:
        limits = DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return limits if limits.v == VERSION else None


def admitted_options(annotations: Mapping[str, str], scheme: Scheme) -> PodOptions:
    """Return the options of a pod that exists, without its core limit, which is in its limits.

    For the models, the annotation that the webhook wrote takes precedence over those it was computed from.
    """
    options, _ = read_pod_options(annotations, scheme)
    limits = decode_limits(annotations.get(scheme.names.limits, ""))
    if limits is None:
        return replace(options, core_limit=None)
    return replace(
        options,
        core_limit=None,
        models=limits.models,
        avoided_models=limits.avoid_models,
        # Of pods admitted by older releases only the user's annotation has it.
        min_isolation=options.min_isolation.strongest(limits.min_isolation) or NO_ISOLATION,
    )


def limits_of(request: PodRequest, options: PodOptions, policy: NamespacePolicy, unit_mib: int) -> PodLimits:
    burst, minimum = policy.core_limit, options.min_isolation.strongest(policy.min_isolation or NO_ISOLATION)
    return PodLimits(
        v=VERSION,
        models=options.models,
        avoid_models=options.avoided_models,
        min_isolation=minimum or NO_ISOLATION,
        containers={
            each.name: container_limits(each.share, options.core_limit, burst, unit_mib) for each in request.containers
        },
    )


def container_limits(share: Share, user_limit: int | None, burst: CoreLimitPolicy, unit_mib: int) -> ContainerLimits:
    """Compute the limits of one container; `user_limit` is the pod's core limit annotation, if it has one."""
    # A whole card is exclusive: its container uses all of it, whatever burst is allowed.
    if share.whole_cards:
        return ContainerLimits(
            cores=share.cores, core_limit=share.cores, limit_source=LimitSource.DEFAULT, memory_percent=CORES_PER_CARD
        )
    core_limit, source = share.cores, LimitSource.DEFAULT
    if user_limit is not None:
        core_limit = max(min(user_limit, burst.max), share.cores)
        source = LimitSource.POLICY if core_limit < user_limit else LimitSource.USER
    elif isinstance(burst.default, int):
        core_limit, source = max(min(burst.default, burst.max), share.cores), LimitSource.POLICY
    memory = (
        {"memory_percent": share.cores} if share.memory_follows_cores else {"memory_mib": share.memory_units * unit_mib}
    )
    return ContainerLimits(cores=share.cores, core_limit=core_limit, limit_source=source, **memory)


def common_core_limit(limits: PodLimits) -> int | None:
    """Return the core limit of all containers that share a card; None if there are none, or they differ."""
    common: int | None = None
    for each in limits.containers.values():
        if each.cores < CORES_PER_CARD and each.core_limit != common:
            if common is not None:
                return None
            common = each.core_limit
    return common


def fractional_limits(limits: PodLimits) -> list[ContainerLimits]:
    """Return the limits of the containers that share a card."""
    return [each for each in limits.containers.values() if each.cores < CORES_PER_CARD]


def is_injected_core_limit(limits: PodLimits, core_limit: str) -> bool:
    """Whether a core limit annotation beside these limits was injected by the webhook, not written by a user."""
    parts = fractional_limits(limits)
    return bool(parts) and all(
        each.limit_source is not LimitSource.USER and str(each.core_limit) == core_limit for each in parts
    )
