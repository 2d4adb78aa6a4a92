"""What a namespace's quotas set for its pods besides amounts: node pools, bursting, privileges, mode of enforcement."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from vcuda.isolation import Isolation
from vcuda.placement_strategies import PlacementStrategy
from vcuda.vocabulary import CORES_PER_CARD


class Mode(StrEnum):
    """Enforce rejects what violates a rule; audit allows it with a warning and counts it."""

    ENFORCE = "enforce"
    AUDIT = "audit"


class PrivilegedPolicy(StrEnum):
    """Whether the containers of pods with GPUs may be privileged, and so use every GPU of their node."""

    ALLOW = "allow"
    DENY = "deny"


Cores = Annotated[int, Meta(ge=1, le=CORES_PER_CARD)]


class CoreLimitPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """How far containers that share a card may burst: without an annotation of their own, and at most.

    The default `request` means no burst. None is not set: the default of another quota applies, or no burst.
    """

    default: Literal["request"] | Cores | None = None
    max: Cores = CORES_PER_CARD


class NamespacePolicy(Struct, frozen=True):
    """The policy of one namespace. Pools None means any pool, an empty tuple no pool; mode None the cluster's mode."""

    pools: tuple[str, ...] | None = None
    core_limit: CoreLimitPolicy = CoreLimitPolicy()
    mode: Mode | None = None
    # Which nodes and GPUs are preferred; unset means as the cluster's configuration says. Ledgers store it only where
    # it is set, because older releases wrote none.
    placement: PlacementStrategy | UnsetType = UNSET
    # Unset, and stored, likewise.
    privileged: PrivilegedPolicy | UnsetType = UNSET
    # What has to enforce the shares of its pods, at least. Unset, and stored, likewise.
    min_isolation: Isolation | UnsetType = UNSET

    def effective_mode(self, cluster_mode: Mode) -> Mode:
        """Return the mode in force: the namespace's own, or the cluster's where its quotas set none."""
        return self.mode or cluster_mode

    def allows_privileged(self, cluster_policy: PrivilegedPolicy) -> bool:
        """Whether containers of GPU pods may be privileged; where the quotas do not say, the cluster's policy does."""
        return (self.privileged or cluster_policy) is PrivilegedPolicy.ALLOW


def combine_policies(policies: Sequence[NamespacePolicy]) -> NamespacePolicy:
    """Return the policy of a namespace with several quotas: in every point the strictest one applies."""
    if not policies:
        return NamespacePolicy()
    combined, *others = policies
    for other in others:
        combined = NamespacePolicy(
            pools=common_pools(combined.pools, other.pools),
            core_limit=CoreLimitPolicy(
                stricter_default(combined.core_limit.default, other.core_limit.default),
                min(combined.core_limit.max, other.core_limit.max),
            ),
            mode=stricter_mode(combined.mode, other.mode),
            # None is stricter than another: the first quota that sets one applies.
            placement=combined.placement or other.placement,
            privileged=stricter_privileged(combined.privileged, other.privileged),
            min_isolation=stricter_isolation(combined.min_isolation, other.min_isolation),
        )
    return combined


def common_pools(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the pools that both lists allow; None allows every pool."""
    if one is None or other is None:
        return other if one is None else one
    return tuple(pool for pool in one if pool in other)


def stricter_mode(one: Mode | None, other: Mode | None) -> Mode | None:
    if Mode.ENFORCE in (one, other):
        return Mode.ENFORCE
    # A quota without a mode follows the cluster, which may enforce: audit needs both quotas to set it.
    return Mode.AUDIT if one is other is Mode.AUDIT else None


Privileged = PrivilegedPolicy | UnsetType


def stricter_privileged(one: Privileged, other: Privileged) -> Privileged:
    if PrivilegedPolicy.DENY in (one, other):
        return PrivilegedPolicy.DENY
    # A quota that does not say follows the cluster, which may deny.
    return one if one is other else UNSET


def stricter_isolation(one: Isolation | UnsetType, other: Isolation | UnsetType) -> Isolation | UnsetType:
    if isinstance(one, UnsetType) or isinstance(other, UnsetType):
        return other if isinstance(one, UnsetType) else one
    return one.strongest(other)


Default = Literal["request"] | int | None


def stricter_default(one: Default, other: Default) -> Default:
    """Return the lower of two defaults; None is not set and does not count."""
    if one is None or other is None:
        return other if one is None else one
    return "request" if "request" in (one, other) else min(int(one), int(other))
