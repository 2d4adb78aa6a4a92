"""Reservations that no pod ever confirmed, and how much of a quota callers may reserve who are not known.

A review that an API server sends is followed by its pod within a second, or by none if a later check refuses the pod. A
forged review never is. So what expires unconfirmed is added up for WINDOW_S, and together with that and with what is
reserved at the moment an unknown caller may reserve TIMES a limit: forged reviews can take a quota a few times in a
window instead of all the time, and a create that failed holds up no other one after its reservation. Pods that appear
are in neither sum, and take their amounts off what expired, so real pods are not held up because some of them failed.
Known callers have no such limit: else forged reviews could use it up for them.
"""

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from vcuda.amounts import Amounts
from vcuda.decision import Reason
from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.quota_refusals import UnconfirmedSums, too_many_unconfirmed
from vcuda.quota_usage import ANY, Charge, QuotaUsage, model_by_name

WINDOW_S = 600
TIMES = 3
# Pods without a limit could fill the ledger itself, which holds some 30,000. A burst of a large Deployment fits.
MAX_PODS = 2000
# Models are named by users; those beyond count as no model, against the limits of all types together.
MAX_MODELS = 16


class ExpiredAmounts(Struct, frozen=True, rename="camel"):
    """What expired of one model."""

    cores: int
    memory_mib: int = msgspec.field(name="memoryMiB")
    pods: int

    @property
    def amounts(self) -> Amounts:
        return Amounts({CORES: self.cores, MEMORY: self.memory_mib, PODS: self.pods})


class Unconfirmed(Struct, frozen=True):
    """What expired, by model, since the window began, in seconds."""

    since: int
    models: dict[str, ExpiredAmounts]

    def is_current(self, now_s: float) -> bool:
        return now_s - self.since < WINDOW_S


NOTHING: Mapping[str, ExpiredAmounts] = {}


def expired_in(unconfirmed: Unconfirmed | None, now_s: float) -> Mapping[str, ExpiredAmounts]:
    return unconfirmed.models if unconfirmed is not None and unconfirmed.is_current(now_s) else NOTHING


def add_expired(unconfirmed: Unconfirmed | None, charge: Charge, now_s: int) -> Unconfirmed:
    """Add a reservation that expired; one that is the first for a long time begins a new window."""
    models = dict(expired_in(unconfirmed, now_s))
    since = unconfirmed.since if unconfirmed is not None and models else now_s
    name = charge.model if charge.model in models or len(models) < MAX_MODELS else ANY.name
    before = models.get(name, ExpiredAmounts(0, 0, 0))
    models[name] = ExpiredAmounts(before.cores + charge.cores, before.memory_mib + charge.memory_mib, before.pods + 1)
    return Unconfirmed(since, models)


def subtract_confirmed(unconfirmed: Unconfirmed | None, charge: Charge) -> Unconfirmed | None:
    """Take a pod that has appeared off what expired of its model."""
    if unconfirmed is None or (before := unconfirmed.models.get(charge.model)) is None:
        return unconfirmed
    left = ExpiredAmounts(
        max(0, before.cores - charge.cores), max(0, before.memory_mib - charge.memory_mib), max(0, before.pods - 1)
    )
    models = {name: each for name, each in unconfirmed.models.items() if name != charge.model}
    if left.amounts:
        models[charge.model] = left
    return Unconfirmed(unconfirmed.since, models) if models else None


def unconfirmed_excess(
    usage: QuotaUsage, charge: Charge, unconfirmed: Unconfirmed | None, reserved_pods: int, now_s: int
) -> tuple[Reason, ...]:
    """Return why an unknown caller may not reserve a charge now; nothing if it may."""
    models = expired_in(unconfirmed, now_s)
    expired_pods = sum(each.pods for each in models.values())
    if reserved_pods + expired_pods >= MAX_PODS:
        return (
            too_many_unconfirmed(
                "metadata.namespace", PODS, 1, UnconfirmedSums(reserved_pods, expired_pods, MAX_PODS, WINDOW_S)
            ),
        )
    expired = Amounts()
    for name, each in models.items():
        expired += usage.amounts_by_limit(model_by_name(name), each.amounts)
    model = model_by_name(charge.model)
    asked = usage.amounts_by_limit(model, charge.amounts)
    total = usage.reserved + expired + asked
    # Where nothing expired, the quota itself is the limit, which is checked elsewhere.
    return tuple(
        too_many_unconfirmed(
            f"{key[0]}: types.{key[1]}.{dimension}",
            dimension,
            asked[key],
            UnconfirmedSums(usage.reserved[key], expired[key], TIMES * usage.hard[key], WINDOW_S),
        )
        for key, dimension in usage.limits_of(model)
        if expired[key] and total[key] > TIMES * usage.hard[key]
    )
