"""Warnings about valid quotas that probably do not do what was intended.

Limits beyond what the cluster has, limits that can never be reached, and quotas that contradict each other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from vcuda.dimensions import CORES, MEMORY, UNITS
from vcuda.gpu_model import matches, parse_model
from vcuda.namespace_policy import Mode, PrivilegedPolicy, combine_policies
from vcuda.quota import ALL_TYPES, Quota
from vcuda.vocabulary import CORES_PER_CARD


class CardCapacity(Struct, frozen=True):
    """The GPUs of one model in one node pool: how many, and the memory of each. A value that is not known is 0."""

    model: str
    cards: int
    memory_mib: int
    pool: str = ""


class QuotaWarning(Struct, frozen=True):
    """Something questionable in a quota: where, what, and what to do."""

    quota: str
    path: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.quota}: {self.path}: {self.message}; {self.remedy}"


def lint_quotas(
    by_namespace: Mapping[str, Sequence[Quota]], capacity: Sequence[CardCapacity] | None
) -> list[QuotaWarning]:
    """Return all warnings; without a capacity, those that do not depend on the cluster."""
    warnings: list[QuotaWarning] = []
    for quotas in by_namespace.values():
        for quota in quotas:
            warnings += unreachable_limits(quota)
            warnings += limits_beyond_cluster(quota, capacity) if capacity is not None else ()
        warnings += conflicting_quotas(quotas)
    warnings += overcommitted_models(by_namespace, capacity) if capacity is not None else ()
    return warnings


def matching_capacity(capacity: Iterable[CardCapacity], line: str) -> list[CardCapacity]:
    return [each for each in capacity if line == ALL_TYPES or matches(line, parse_model(each.model))]


def unreachable_limits(quota: Quota) -> Iterator[QuotaWarning]:
    """Find limits above that of a wider line of the same quota: a family, or "*"."""
    for line, limits in quota.types.items():
        wider = [
            other
            for other in quota.types
            if other != line and (other == ALL_TYPES or (line != ALL_TYPES and matches(other, parse_model(line))))
        ]
        for dimension, hard in limits.items():
            for other in wider:
                lower = quota.types[other].get(dimension)
                if lower is not None and lower < hard:
                    yield QuotaWarning(
                        quota.name,
                        f"types.{line}.{dimension}",
                        f"the limit of {hard} can never be reached: types.{other}.{dimension} is {lower}",
                        f"lower it to {lower}, or raise types.{other}.{dimension}",
                    )


def limits_beyond_cluster(quota: Quota, capacity: Sequence[CardCapacity]) -> Iterator[QuotaWarning]:
    """Find pools, models and amounts that the cluster does not have, in the pools that the namespace may use."""
    pools = quota.policy.pools
    if pools is not None:
        for pool in pools:
            if all(each.pool != pool for each in capacity):
                yield QuotaWarning(
                    quota.name, "pools", f"no node with GPUs is in pool {pool}", "name another pool, or add nodes to it"
                )
        capacity = [each for each in capacity if each.pool in pools]
        if not capacity:
            # Every line would only repeat that the pools have no GPUs.
            return
    where = "the cluster" if pools is None else f"pool {', '.join(pools)}"
    for line in quota.types:
        matching = matching_capacity(capacity, line)
        if matching:
            yield from amounts_beyond_cluster(quota, line, matching, where)
            yield from memory_below_one_card(quota, line, matching)
            continue
        available = ", ".join(sorted({each.model for each in capacity})) or "none"
        yield QuotaWarning(
            quota.name,
            f"types.{line}",
            "no node has a GPU of this model" if pools is None else f"no node of {where} has a GPU of this model",
            f"name a model that is available ({available}), or add nodes",
        )


def amounts_beyond_cluster(
    quota: Quota, line: str, matching: Sequence[CardCapacity], where: str
) -> Iterator[QuotaWarning]:
    total: dict[str, int] = {}
    # What some node does not report cannot be added up.
    if all(each.cards for each in matching):
        total[CORES] = sum(each.cards for each in matching) * CORES_PER_CARD
        if all(each.memory_mib for each in matching):
            total[MEMORY] = sum(each.cards * each.memory_mib for each in matching)
    for dimension, hard in quota.types[line].items():
        if dimension in total and hard > total[dimension]:
            yield QuotaWarning(
                quota.name,
                f"types.{line}.{dimension}",
                f"the limit of {hard} {UNITS[dimension]} is more than {where} has: {total[dimension]}",
                "lower it, or add nodes",
            )


def memory_below_one_card(quota: Quota, line: str, matching: Sequence[CardCapacity]) -> Iterator[QuotaWarning]:
    """Find lines that allow the cores of a whole GPU, but not its memory."""
    # As for amounts: what some node does not report may change the result.
    if not all(each.cards for each in matching):
        return
    limits, smallest = quota.types[line], min(each.memory_mib for each in matching)
    # A limit of 0 is deliberate.
    if CORES in limits and MEMORY in limits and limits[CORES] >= CORES_PER_CARD and 0 < limits[MEMORY] < smallest:
        yield QuotaWarning(
            quota.name,
            f"types.{line}.{MEMORY}",
            f"the limit of {limits[MEMORY]} MiB is less than the memory of one GPU ({smallest} MiB), although "
            f"{limits[CORES]} cores are allowed: no pod with a whole GPU fits",
            f"raise it, or limit cores to less than {CORES_PER_CARD} if only fractions are intended",
        )


def conflicting_quotas(quotas: Sequence[Quota]) -> Iterator[QuotaWarning]:
    """Find what several quotas of one namespace rule out together, because all of them apply."""
    for quota in quotas:
        for line in quota.types:
            if line == ALL_TYPES:
                continue
            for other in quotas:
                if other is not quota and not other.grants(parse_model(line)) and not lists_product_of(other, line):
                    yield QuotaWarning(
                        quota.name,
                        f"types.{line}",
                        f"this model cannot be used: {other.name} does not list it, and denies models that it does not "
                        "list",
                        f"list it in {other.name} too, or set unlisted: allow there",
                    )
    if len(quotas) > 1 and combine_policies([quota.policy for quota in quotas]).pools == ():
        yield QuotaWarning(
            quotas[0].name,
            "pools",
            "the namespace's quotas have no node pool in common, so its pods cannot run on any node",
            "list a common pool in all of them",
        )
    yield from contradicting_privileges(quotas)
    # No mode means the cluster's, which may be audit or enforce: it differs from an explicit one either way.
    modes = {quota.policy.mode for quota in quotas}
    if Mode.AUDIT in modes and len(modes) > 1:
        audited = next(quota for quota in quotas if quota.policy.mode is Mode.AUDIT)
        other = next(quota for quota in quotas if quota.policy.mode is not Mode.AUDIT)
        its_mode = "is set to enforce" if other.policy.mode is Mode.ENFORCE else "has no mode and follows the cluster's"
        yield QuotaWarning(
            audited.name,
            "mode",
            f"set to audit, but {other.name} {its_mode}; the stricter mode applies to all quotas of the namespace",
            "set the same mode in all of them",
        )


def contradicting_privileges(quotas: Sequence[Quota]) -> Iterator[QuotaWarning]:
    """Find a quota that allows privileged containers where another one does not."""
    other = next((quota for quota in quotas if quota.policy.privileged is not PrivilegedPolicy.ALLOW), None)
    for quota in quotas:
        if other is not None and quota.policy.privileged is PrivilegedPolicy.ALLOW:
            yield QuotaWarning(
                quota.name,
                "privileged",
                f"set to allow, but {other.name} "
                + ("denies it" if other.policy.privileged else "does not say, and follows the cluster's configuration"),
                "set privileged: allow in all of them",
            )


def lists_product_of(quota: Quota, line: str) -> bool:
    """Whether a quota lists a product of a family: then a part of the family can be used."""
    return any(other != ALL_TYPES and matches(line, parse_model(other)) for other in quota.types)


def overcommitted_models(
    by_namespace: Mapping[str, Sequence[Quota]], capacity: Sequence[CardCapacity]
) -> Iterator[QuotaWarning]:
    """Find lines that allow all namespaces together more cores than the cluster has."""
    allowed: dict[str, dict[str, int]] = {}
    for namespace, quotas in by_namespace.items():
        for line in {line for quota in quotas for line in quota.types if CORES in quota.types[line]}:
            # Several quotas of one namespace all apply, so the lowest limit counts.
            hard = min(quota.types[line][CORES] for quota in quotas if CORES in quota.types.get(line, {}))
            allowed.setdefault(line, {})[namespace] = hard
    for line, by_name in sorted(allowed.items()):
        total = sum(each.cards for each in matching_capacity(capacity, line)) * CORES_PER_CARD
        if total and len(by_name) > 1 and sum(by_name.values()) > total:
            yield QuotaWarning(
                "all namespaces",
                f"types.{line}.{CORES}",
                f"{len(by_name)} namespaces are allowed {sum(by_name.values())} cores together, and the cluster has "
                f"{total}",
                "fine if not all of them need their quota at once; otherwise lower some, or add nodes",
            )
