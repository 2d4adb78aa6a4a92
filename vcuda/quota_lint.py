"""What is questionable about quotas that can be read: beyond what the cluster has, or against one another."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from vcuda.dimensions import CORES, MEMORY
from vcuda.gpu_model import GpuModel, matches, parse_model
from vcuda.namespace_policy import Mode, combine_policies
from vcuda.quota import ALL_TYPES, Quota
from vcuda.vocabulary import CORES_PER_CARD


class CardCapacity(Struct, frozen=True):
    """How many cards of a model a pool of the cluster has, and the memory of each."""

    model: str
    cards: int
    memory_mib: int
    pool: str = ""


class QuotaWarning(Struct, frozen=True):
    """Something about a quota that is probably not meant: where, what, and what to do."""

    quota: str
    path: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.quota}: {self.path}: {self.message}; {self.remedy}"


def lint_quotas(
    by_namespace: Mapping[str, Sequence[Quota]], stocks: Sequence[CardCapacity] | None
) -> list[QuotaWarning]:
    """Find everything questionable; without stocks, what does not depend on the cluster."""
    found: list[QuotaWarning] = []
    for quotas in by_namespace.values():
        for quota in quotas:
            found += within(quota)
            found += beyond(quota, stocks) if stocks is not None else ()
        found += between(quotas)
    found += oversold(by_namespace, stocks) if stocks is not None else ()
    return found


def having(stocks: Iterable[CardCapacity], line: str) -> list[CardCapacity]:
    """Give the stocks that a line is about."""
    return [stock for stock in stocks if line == ALL_TYPES or matches(line, parse_model(stock.model))]


def within(quota: Quota) -> Iterator[QuotaWarning]:
    """Find lines of one quota of which a part can never be reached, because another line is stricter."""
    for line, limits in quota.types.items():
        wider = [
            other
            for other in quota.types
            if other != line and (other == ALL_TYPES or (line != ALL_TYPES and matches(other, parse_model(line))))
        ]
        for dimension, most in limits.items():
            for other in wider:
                least = quota.types[other].get(dimension)
                if least is not None and least < most:
                    yield QuotaWarning(
                        quota.name,
                        f"types.{line}.{dimension}",
                        f"{most} can never be reached: the line {other} allows {least} of everything it matches",
                        f"lower it to {least}, or raise types.{other}.{dimension}",
                    )


def beyond(quota: Quota, stocks: Sequence[CardCapacity]) -> Iterator[QuotaWarning]:
    """Find lines that no node can serve, or not in full; in the pools that the namespace may use."""
    pools = quota.policy.pools
    if pools is not None:
        for pool in pools:
            if all(stock.pool != pool for stock in stocks):
                yield QuotaWarning(
                    quota.name, "pools", f"no node with GPUs is in pool {pool}", "name another, or add nodes"
                )
        stocks = [stock for stock in stocks if stock.pool in pools]
    where = "the cluster" if pools is None else f"pool {', '.join(pools)}"
    for line, limits in quota.types.items():
        matching = having(stocks, line)
        if not matching:
            known = ", ".join(sorted({stock.model for stock in stocks})) or "none at all"
            yield QuotaWarning(
                quota.name,
                f"types.{line}",
                "no node has such a card" if pools is None else f"no node of {where} has such a card",
                f"name a model that there is ({known}), or add the nodes",
            )
            continue
        there = {
            CORES: sum(stock.cards for stock in matching) * CORES_PER_CARD,
            MEMORY: sum(stock.cards * stock.memory_mib for stock in matching),
        }
        # Of cards that nobody counted, or whose memory nobody said, nothing can be added up.
        if not all(stock.cards for stock in matching):
            continue
        if not all(stock.memory_mib for stock in matching):
            del there[MEMORY]
        for dimension, most in limits.items():
            if dimension in there and most > there[dimension]:
                yield QuotaWarning(
                    quota.name,
                    f"types.{line}.{dimension}",
                    f"{most} is more than {where} has: {there[dimension]}",
                    "lower it, or add nodes",
                )
        yield from starved(quota, line, matching)


def starved(quota: Quota, line: str, matching: Sequence[CardCapacity]) -> Iterator[QuotaWarning]:
    """Find lines whose memory does not go with their cores."""
    limits, smallest = quota.types[line], min(stock.memory_mib for stock in matching)
    if CORES in limits and MEMORY in limits and limits[CORES] >= CORES_PER_CARD and 0 < limits[MEMORY] < smallest:
        yield QuotaWarning(
            quota.name,
            f"types.{line}.{MEMORY}",
            f"{limits[MEMORY]} MiB is less than one whole card has ({smallest} MiB), though {limits[CORES]} cores are "
            "allowed: no pod with a whole card fits",
            "raise it, or allow less than 100 cores if only parts of cards are meant",
        )


def between(quotas: Sequence[Quota]) -> Iterator[QuotaWarning]:
    """Find what several quotas of one namespace make impossible together: all of them apply."""
    for quota in quotas:
        for line in quota.types:
            if line == ALL_TYPES:
                continue
            model: GpuModel = parse_model(line)
            for other in quotas:
                if other is not quota and not other.grants(model) and not narrower(other, line):
                    yield QuotaWarning(
                        quota.name,
                        f"types.{line}",
                        f"nothing of it can be used: {other.name} does not name it, and denies what it does not name",
                        f"name it in {other.name} too, or write unlisted: allow there",
                    )
    if len(quotas) > 1 and combine_policies([quota.policy for quota in quotas]).pools == ():
        yield QuotaWarning(
            quotas[0].name,
            "pools",
            "the namespace's quotas have no node pool in common, so there is no node for its pods",
            "let all of them name a common pool",
        )
    modes = {quota.policy.mode for quota in quotas}
    if Mode.AUDIT in modes and len(modes) > 1:
        watching = next(quota for quota in quotas if quota.policy.mode is Mode.AUDIT)
        other = next(quota for quota in quotas if quota.policy.mode is not Mode.AUDIT)
        said = "says enforce" if other.policy.mode is Mode.ENFORCE else "says nothing, which is the cluster's mode"
        yield QuotaWarning(
            watching.name,
            "mode",
            f"says audit, but {other.name} {said}; the stricter holds for all quotas of the namespace",
            "say the same in all of them",
        )


def narrower(quota: Quota, line: str) -> bool:
    """Tell whether a quota names products of a family: then part of it can be used."""
    return any(other != ALL_TYPES and matches(line, parse_model(other)) for other in quota.types)


def oversold(by_namespace: Mapping[str, Sequence[Quota]], stocks: Sequence[CardCapacity]) -> Iterator[QuotaWarning]:
    """Find models of which all namespaces together may use more than there is."""
    promised: dict[str, dict[str, int]] = {}
    for namespace, quotas in by_namespace.items():
        for line in {line for quota in quotas for line in quota.types if CORES in quota.types[line]}:
            # Of several quotas of one namespace the strictest counts.
            most = min(quota.types[line][CORES] for quota in quotas if CORES in quota.types.get(line, {}))
            promised.setdefault(line, {})[namespace] = most
    for line, each in sorted(promised.items()):
        there = sum(stock.cards for stock in having(stocks, line)) * CORES_PER_CARD
        if there and len(each) > 1 and sum(each.values()) > there:
            yield QuotaWarning(
                "all namespaces",
                f"types.{line}.{CORES}",
                f"{sum(each.values())} are promised to {len(each)} namespaces, and the cluster has {there}",
                "meant if not all need theirs at once; otherwise lower some, or add nodes",
            )
