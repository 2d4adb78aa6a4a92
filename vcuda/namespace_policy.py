"""What a namespace's quotas say about its pods beside amounts: pools, bursting, and how strictly to hold to it."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta, Struct

from vcuda.vocabulary import CORES_PER_CARD


class Mode(StrEnum):
    """Refuse what is wrong, or allow it with a warning and count it."""

    ENFORCE = "enforce"
    AUDIT = "audit"


Cores = Annotated[int, Meta(ge=1, le=CORES_PER_CARD)]


class CoreLimitPolicy(Struct, frozen=True, forbid_unknown_fields=True):
    """How far containers with a fraction may burst: unless they say so themselves, and at the most.

    No default means as far as they ask for; but where another quota has one, that counts.
    """

    default: Literal["request"] | Cores | None = None
    max: Cores = CORES_PER_CARD


class NamespacePolicy(Struct, frozen=True):
    """The policy of one namespace. Pools None means all of them, an empty list none; no mode means the cluster's."""

    pools: tuple[str, ...] | None = None
    core_limit: CoreLimitPolicy = CoreLimitPolicy()
    mode: Mode | None = None

    def effective_mode(self, cluster_mode: Mode) -> Mode:
        """Return the mode in force: the namespace's own, or the cluster's where its quotas set none."""
        return self.mode or cluster_mode


def combine_policies(policies: Sequence[NamespacePolicy]) -> NamespacePolicy:
    """Apply several policies at once: the pools all of them allow, the lowest burst, the stricter mode."""
    if not policies:
        return NamespacePolicy()
    first, *others = policies
    for other in others:
        first = NamespacePolicy(
            pools=common_pools(first.pools, other.pools),
            core_limit=CoreLimitPolicy(
                lower_default(first.core_limit.default, other.core_limit.default),
                min(first.core_limit.max, other.core_limit.max),
            ),
            mode=stricter_mode(first.mode, other.mode),
        )
    return first


def common_pools(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Give the pools that two lists allow."""
    if one is None or other is None:
        return other if one is None else one
    return tuple(pool for pool in one if pool in other)


def stricter_mode(one: Mode | None, other: Mode | None) -> Mode | None:
    """Take the stricter of two modes; one that is not said is the cluster's, and looking on needs both to say so."""
    if Mode.ENFORCE in (one, other):
        return Mode.ENFORCE
    return Mode.AUDIT if one is other is Mode.AUDIT else None


Default = Literal["request"] | int | None


def lower_default(one: Default, other: Default) -> Default:
    """Take the stricter of two defaults; one that is not said does not count."""
    if one is None or other is None:
        return other if one is None else one
    return "request" if "request" in (one, other) else min(int(one), int(other))
