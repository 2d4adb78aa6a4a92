"""What a namespace uses of its quotas: the charges of its pods, added up for each limit.

Everything here is about one namespace. A pod is charged for one GPU model, and the charge counts against every line of
its quotas that matches the model: the product, its family, and "*".
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property

import msgspec
from msgspec import Struct

from vcuda.amounts import Amounts, HardLimits
from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.gpu_model import GpuModel, parse_model
from vcuda.quota import ALL_TYPES, Quota

# The model of a pod that names none, where neither quotas nor nodes name any.
ANY = GpuModel("any", "any")

# One limit: the name of its quota, its line under `types`, its dimension.
LimitKey = tuple[str, str, str]
# How long a reservation waits for its pod. A create can take effect up to 34 s after its validating call was answered
# (measured on Kubernetes 1.36); the rest is margin.
RESERVATION_S = 45


class Charge(Struct, frozen=True, rename="camel", omit_defaults=True):
    """What one pod holds of its namespace's quotas.

    While the pod is being bound to a node of another model than it was charged for, `moved_from` is its former charge:
    until the binding is known, it holds the larger of both amounts of each limit.
    """

    model: str
    cores: int
    memory_mib: int = msgspec.field(name="memoryMiB")
    moved_from: "Charge | None" = None

    @property
    def amounts(self) -> Amounts:
        return Amounts({CORES: self.cores, MEMORY: self.memory_mib, PODS: 1})


class Holder(Struct, frozen=True, rename="camel"):
    """What a workload, or a pod without one, holds of one model. Refusals and the status name the largest holders."""

    name: str
    model: str
    cores: int
    pods: int
    memory_mib: int = msgspec.field(name="memoryMiB")

    @property
    def amounts(self) -> Amounts:
        return Amounts({CORES: self.cores, MEMORY: self.memory_mib, PODS: self.pods})


class Reserved(Struct, frozen=True):
    """Equal charges of admitted pods that are not known to exist yet, reserved since the same second."""

    charge: Charge
    since: int
    pods: int = 1


class UnconfirmedAmount(Struct, frozen=True):
    """How much of a limit is reserved for pods that are not known to exist, for how many, and since when the last."""

    amount: int
    pods: int
    last_since: int


def model_by_name(name: str) -> GpuModel:
    """Return the model of a charge; raises a ValueError if it names none."""
    return ANY if name == ANY.name else parse_model(name)


class QuotaUsage:
    """Used and reserved amounts of a namespace for each limit; `taken` is their sum.

    `used` and `reserved` are given by model name, and kept by limit.
    """

    def __init__(
        self,
        quotas: Sequence[Quota],
        used: Mapping[str, Amounts] | None = None,
        reserved: Mapping[str, Amounts] | None = None,
        holders: Sequence[Holder] = (),
    ) -> None:
        self.quotas = tuple(quotas)
        self.holders: Sequence[Holder] = holders
        # What is `reserved`, one by one: only refusals read it.
        self.reservations: list[Reserved] = []
        # Matching a model against every line is the costly part, and the pods of a namespace share a few models.
        self._limits_of: dict[str, tuple[tuple[LimitKey, str], ...]] = {}
        self.used = self._by_limit(used or {})
        self.reserved = self._by_limit(reserved or {})
        self.taken = self.used + self.reserved

    @cached_property
    def hard(self) -> HardLimits[LimitKey]:
        """All limits, in the order in which they are written."""
        return HardLimits(
            ((quota.name, line, dimension), hard)
            for quota in self.quotas
            for line, limits in quota.types.items()
            for dimension, hard in limits.items()
        )

    @cached_property
    def granted_lines(self) -> tuple[str, ...]:
        """The models and families that all quotas let the namespace use, as the quotas name them."""
        lines = dict.fromkeys(line for quota in self.quotas for line in quota.types if line != ALL_TYPES)
        return tuple(line for line in lines if self.grants(parse_model(line)))

    def limits_of(self, model: GpuModel) -> tuple[tuple[LimitKey, str], ...]:
        """Return the limits that a model counts against, each with its dimension, in the order they are written."""
        limits = self._limits_of.get(model.name)
        if limits is None:
            limits = self._limits_of[model.name] = tuple(
                ((quota.name, line, dimension), dimension)
                for quota in self.quotas
                for line in quota.lines(model)
                for dimension in quota.types[line]
            )
        return limits

    def amounts_by_limit(self, model: GpuModel, amounts: Amounts) -> Amounts:
        """Return what amounts of a model (by dimension) count against each limit."""
        return Amounts((key, amounts[dimension]) for key, dimension in self.limits_of(model))

    def reserve(self, model: GpuModel, amounts: Amounts) -> None:
        added = self.amounts_by_limit(model, amounts)
        self.reserved += added
        self.taken += added

    def exceeded_limits(self, model: GpuModel, amounts: Amounts) -> list[LimitKey]:
        """Return the limits that these amounts would exceed, in the order in which they are written."""
        short = self.hard.short(self.taken, self.amounts_by_limit(model, amounts))
        return [key for key, _ in self.limits_of(model) if key in short]

    def grants(self, model: GpuModel) -> bool:
        """Whether all quotas let the namespace use a model at all."""
        return all(quota.grants(model) for quota in self.quotas)

    def count_fitting(self, model: GpuModel, amounts: Amounts) -> int | None:
        """Return how many times the amounts fit; None if no limit applies."""
        return self.hard.count_fitting(self.taken, self.amounts_by_limit(model, amounts))

    def largest_holders(self, key: LimitKey, count: int) -> list[Holder]:
        """Return the holders of most of a limit, the largest first."""
        _, _, dimension = key
        holders = [
            holder
            for holder in self.holders
            if holder.amounts[dimension] and any(key == each for each, _ in self.limits_of(model_by_name(holder.model)))
        ]
        return sorted(holders, key=lambda holder: (-holder.amounts[dimension], holder.name))[:count]

    def unconfirmed(self, key: LimitKey) -> UnconfirmedAmount | None:
        """Return what of a limit is reserved for pods that are not known to exist; None if nothing is."""
        parts = [
            UnconfirmedAmount(amount * each.pods, each.pods, each.since)
            for each in self.reservations
            if (amount := self.charged_by_limit(each.charge)[key])
        ]
        if not parts:
            return None
        return UnconfirmedAmount(
            sum(each.amount for each in parts),
            sum(each.pods for each in parts),
            max(each.last_since for each in parts),
        )

    def charged_by_limit(self, charge: Charge) -> Amounts:
        """Return what a charge counts against each limit, with what it holds of its former model."""
        counted = self.amounts_by_limit(model_by_name(charge.model), charge.amounts)
        return counted | self.charged_by_limit(charge.moved_from) if charge.moved_from else counted

    def hold_former(self, charge: Charge, count: int) -> None:
        """Count what `count` charges hold beyond the amounts of their own model, because they are being moved."""
        own = self.amounts_by_limit(model_by_name(charge.model), charge.amounts)
        extra = (self.charged_by_limit(charge) - own).times(count)
        self.used += extra
        self.taken += extra

    def without_holders(self) -> "QuotaUsage":
        """Return the same usage for readers who must not learn the names of workloads."""
        _ = self.hard  # computed once, not for each copy
        anonymous = copy(self)
        anonymous.holders = ()
        return anonymous

    def _by_limit(self, by_model: Mapping[str, Amounts]) -> Amounts:
        total: dict[LimitKey, int] = {}
        for name, amounts in by_model.items():
            for key, dimension in self.limits_of(model_by_name(name)):
                total[key] = total.get(key, 0) + amounts[dimension]
        return Amounts(total)


def usage_of_charges(
    quotas: Sequence[Quota], charges: Iterable[tuple[Charge, int | None, int]], holders: Sequence[Holder] = ()
) -> QuotaUsage:
    """Return the usage of charges, each with since when it is reserved, if it is, and how many pods have it."""
    used: dict[str, Amounts] = {}
    reserved: dict[str, Amounts] = {}
    moving: list[tuple[Charge, int]] = []
    reservations: list[Reserved] = []
    for charge, since, count in charges:
        by_model = used if since is None else reserved
        by_model[charge.model] = by_model.get(charge.model, Amounts()) + charge.amounts.times(count)
        if charge.moved_from is not None:
            moving.append((charge, count))  # its pod exists
        elif since is not None:
            reservations.append(Reserved(charge, since, count))
    usage = QuotaUsage(quotas, used, reserved, holders)
    usage.reservations = reservations
    for charge, count in moving:
        usage.hold_former(charge, count)
    return usage
