"""What a pod is charged, and for which GPU model: the first candidate on which it fits the quotas of its namespace.

Memory that depends on the GPU (a whole GPU, or a share that follows its cores) is charged for the largest GPU that the
pod can get, so that the charge is only ever lowered when the pod is bound.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache

from msgspec import Struct

from vcuda.amounts import Amounts
from vcuda.catalogue import memory_in_name_mib
from vcuda.decision import Reason
from vcuda.dimensions import CORES, MEMORY
from vcuda.gpu_model import GpuModel, matches, parse_model, similar_names
from vcuda.pod_options import PodOptions
from vcuda.quota import ALL_TYPES, DENY, Quota
from vcuda.quota_refusals import (
    DEFAULT_REMEDIES,
    RemedyContext,
    add_alternatives,
    all_models_avoided,
    card_memory_unknown,
    model_not_granted,
    model_required,
    no_model_listed,
    quota_exceeded,
    slice_required,
)
from vcuda.quota_usage import ANY, Charge, LimitKey, QuotaUsage
from vcuda.request import PodRequest
from vcuda.vocabulary import CORES_PER_CARD

# A refusal shows fewer: a pod that names no model may be tried on hundreds.
MAX_REASONS = 32

# What a pod takes of GPUs with this many MiB, by dimension.
Demand = Callable[[int], Amounts]


class PodDemand(Struct, frozen=True):
    """The demand of `count` equal pods. A value and not a closure, so that it can be compared and logged."""

    request: PodRequest
    unit_mib: int
    count: int = 1

    def __call__(self, card_mib: int) -> Amounts:
        amounts = self.request.demand(card_mib, self.unit_mib)
        return amounts if self.count == 1 else amounts.times(self.count)


class Candidate(Struct, frozen=True):
    """A model that a pod may run on, and the memory of its largest GPU in the cluster; 0 if that is not known."""

    model: GpuModel
    card_mib: int

    def largest_first(self) -> tuple[int, str]:
        return -self.card_mib, self.model.name


class ChargeFit(Struct, frozen=True):
    """The charge of a demand. With reasons, the charge does not fit: audit mode records it nevertheless."""

    charge: Charge
    reasons: tuple[Reason, ...] = ()


def sized_candidate(model: GpuModel, card_mib: int) -> Candidate:
    """Return a candidate; a size that no node reports is taken from the model's name, if it is part of that."""
    return Candidate(model, card_mib or memory_in_name_mib(model.name))


def candidates(quotas: Iterable[Quota], options: PodOptions, cards: Mapping[str, int]) -> list[Candidate]:
    """List the models that a pod may run on, in the order in which they are tried.

    `cards` is the memory of the largest GPU of each model in the cluster. Requested models come in the pod's order; if
    there are none, the lines of the quotas in theirs. Each is replaced by the matching models of the cluster, the
    largest first; one without any is kept, because a node with it may be added.
    """
    quotas = list(quotas)
    lines = tuple(dict.fromkeys(line for quota in quotas for line in quota.types if line != ALL_TYPES))
    available = sorted(
        (sized_candidate(parse_model(name), mib) for name, mib in cards.items()), key=Candidate.largest_first
    )
    known: dict[str, Candidate] = {}
    unknown: dict[str, Candidate] = {}
    if not options.models:
        # A MIG slice has to be named by the pod: a quota that lists it does not make all pods of a namespace run on it.
        available = [each for each in available if not each.model.mig_profile]
        lines = tuple(line for line in lines if not parse_model(line).mig_profile)
    for pattern in options.models or lines:
        matching = [each for each in available if matches(pattern, each.model)]
        known.update((each.model.name, each) for each in matching if each.model.name not in known)
        if not matching:
            # A requested family may be granted by lines for its products.
            similar = similar_names(lines, pattern)
            products = [parse_model(each) for each in lines if each in similar and matches(pattern, parse_model(each))]
            for model in products or [parse_model(pattern)]:
                unknown.setdefault(model.name, sized_candidate(model, 0))
    if not options.models:
        known.update((each.model.name, each) for each in available if each.model.name not in known)
    # A pod that is charged for a model no node has could not be scheduled.
    ordered = [*known.values(), *unknown.values()]
    allowed = [each for each in ordered if not is_avoided(each.model, options)]
    if options.models:
        return allowed
    granted = [each for each in allowed if all(quota.grants(each.model) for quota in quotas)]
    # If none is granted, all are kept: the refusal then says so for each of them.
    return granted or allowed


def is_avoided(model: GpuModel, options: PodOptions) -> bool:
    return any(matches(each, model) for each in similar_names(options.avoided_models, model.name))


def charge_on(candidate: Candidate, demand: Demand) -> tuple[Charge, Amounts]:
    """Return the charge of a demand on a model, and the same as amounts by dimension."""
    amounts = demand(candidate.card_mib)
    return Charge(candidate.model.name, amounts[CORES], amounts[MEMORY]), amounts


def fit_charge(
    usage: QuotaUsage,
    demand: Demand,
    options: PodOptions,
    cards: Mapping[str, int],
    remedies: RemedyContext = DEFAULT_REMEDIES,
) -> ChargeFit:
    """Charge a demand for the first model on which it fits all quotas.

    If it fits on none, the result has the reasons for every model, and the charge on the first.
    """
    choices = candidates(usage.quotas, options, cards)
    # The same few sizes of cards again and again.
    demand = cache(demand)
    reasons = refusals_of_all(usage, options, choices, cards, remedies)
    choices = choices or [Candidate(ANY, 0)]
    if not reasons:
        for candidate in choices:
            charge, amounts = charge_on(candidate, demand)
            # One of the later models may still fit.
            if len(reasons) >= MAX_REASONS and is_refused(candidate, usage, demand, amounts):
                continue
            if not usage.grants(candidate.model):
                reasons.append(model_not_granted(candidate.model, usage))
            elif key := unknown_memory_limit(candidate, usage, demand):
                reasons.append(card_memory_unknown(candidate.model, key))
            elif exceeded := usage.exceeded_limits(candidate.model, amounts):
                # The memory of a whole GPU is what it is: a pod cannot ask for less of it.
                unit_mib = 0 if depends_on_card_memory(demand) else remedies.unit_mib
                reasons += [
                    quota_exceeded(key, amounts, candidate.model, usage, unit_mib, now_s=remedies.now_s)
                    for key in exceeded
                ]
            else:
                return ChargeFit(charge)
        alternatives = alternative_models(usage, demand, options, cards)
        reasons = add_alternatives(unique_reasons(reasons), alternatives, remedies.annotation)
    return ChargeFit(charge_on(choices[0], demand)[0], tuple(reasons))


def refusals_of_all(
    usage: QuotaUsage,
    options: PodOptions,
    choices: Sequence[Candidate],
    cards: Mapping[str, int],
    remedies: RemedyContext,
) -> list[Reason]:
    """Return why a pod is refused on whichever model, if it is: one reason, which names none of them."""
    if quota := quota_without_models(usage.quotas):
        return [no_model_listed(quota, options.models)]
    if slices := slices_to_name(usage, options, choices):
        return [slice_required(usage, slices, remedies.annotation)]
    if avoids_all_granted(usage, options, choices, cards):
        return [all_models_avoided(usage, options.avoided_models)]
    if quota := quota_requiring_model(usage.quotas, choices):
        return [model_required(quota, [each.model.name for each in choices], remedies.annotation)]
    return []


def is_refused(candidate: Candidate, usage: QuotaUsage, demand: Demand, amounts: Amounts) -> bool:
    """Whether the quotas refuse an amount of a model."""
    return (
        not usage.grants(candidate.model)
        or unknown_memory_limit(candidate, usage, demand) is not None
        or bool(usage.exceeded_limits(candidate.model, amounts))
    )


def common_limits(
    usage: QuotaUsage, demand: Demand, options: PodOptions, cards: Mapping[str, int]
) -> AbstractSet[LimitKey]:
    """Return the limits that a demand exceeds on every granted model: it fits on none until these are raised."""
    granted = [each for each in candidates(usage.quotas, options, cards) if usage.grants(each.model)]
    exceeded = [{*usage.exceeded_limits(each.model, charge_on(each, demand)[1])} for each in granted]
    return set.intersection(*exceeded) if exceeded else set()


def count_fitting(usage: QuotaUsage, demand: Demand, options: PodOptions, cards: Mapping[str, int], wanted: int) -> int:
    """Return how many of `wanted` equal pods fit the quotas, over all models they may run on."""
    return fill(usage, demand, options, cards, wanted)[0]


def fill(
    usage: QuotaUsage, demand: Demand, options: PodOptions, cards: Mapping[str, int], wanted: int
) -> tuple[int, QuotaUsage]:
    """Return how many of `wanted` equal pods fit the quotas, and the usage with those that do."""
    choices = candidates(usage.quotas, options, cards)
    if quota_requiring_model(usage.quotas, choices):
        return 0, usage
    count, demand = 0, cache(demand)
    # The caller's usage must not change; sharing its sums is safe, because amounts are values.
    trial = QuotaUsage(usage.quotas)
    trial.taken = usage.taken
    for candidate in choices or [Candidate(ANY, 0)]:
        if not trial.grants(candidate.model):
            continue
        _, amounts = charge_on(candidate, demand)
        fitting = trial.count_fitting(candidate.model, amounts)
        fitting = wanted - count if fitting is None else min(fitting, wanted - count)
        count += fitting
        trial.reserve(candidate.model, amounts.times(fitting))
        if count == wanted:
            break
    return count, trial


def quota_requiring_model(quotas: Iterable[Quota], choices: Sequence[Candidate]) -> Quota | None:
    """Return a quota with `untyped: deny` if a pod could run on several families; None if it may be charged."""
    families = {each.model.family.lower() for each in choices}
    if len(families) == 1:
        return None
    return next((quota for quota in quotas if quota.untyped == DENY), None)


def quota_without_models(quotas: Iterable[Quota]) -> Quota | None:
    """Return a quota that denies every model, because it lists none."""
    denying = (quota for quota in quotas if quota.unlisted == DENY)
    return next((quota for quota in denying if all(line == ALL_TYPES for line in quota.types)), None)


def slices_to_name(usage: QuotaUsage, options: PodOptions, choices: Sequence[Candidate]) -> tuple[str, ...]:
    """Return the MIG slices that are all that a namespace may use; empty if a pod names models, or may use others."""
    if options.models or usage.grants(ANY) or any(usage.grants(each.model) for each in choices):
        return ()
    granted = usage.granted_lines
    return granted if all(parse_model(line).mig_profile for line in granted) else ()


def avoids_all_granted(
    usage: QuotaUsage, options: PodOptions, choices: Sequence[Candidate], cards: Mapping[str, int]
) -> bool:
    """Whether a pod can run on no model only because of the models that it avoids."""
    if not options.avoided_models or usage.grants(ANY) or any(usage.grants(each.model) for each in choices):
        return False
    if options.models or not choices:
        return not choices
    # The other models of the cluster are left, and none of them is granted: one that is avoided may be.
    return any(usage.grants(each.model) for each in candidates(usage.quotas, PodOptions(), cards))


def depends_on_card_memory(demand: Demand) -> bool:
    """Whether a pod takes all or a fraction of its GPU's memory, instead of a fixed amount."""
    # Two sizes of which every percentage is a whole number of MiB: rounding could hide the difference.
    return demand(CORES_PER_CARD)[MEMORY] != demand(2 * CORES_PER_CARD)[MEMORY]


def unknown_memory_limit(candidate: Candidate, usage: QuotaUsage, demand: Demand) -> LimitKey | None:
    """Return a memory limit that cannot be checked, because the demand depends on a GPU of unknown size."""
    if candidate.card_mib or not depends_on_card_memory(demand):
        return None
    return next((key for key, dimension in usage.limits_of(candidate.model) if dimension == MEMORY), None)


def alternative_models(usage: QuotaUsage, demand: Demand, options: PodOptions, cards: Mapping[str, int]) -> list[str]:
    """List models that a pod did not request and on which it would fit; only such as some node has, if any is known."""
    if not options.models or not usage.quotas:
        return []
    # Runs only for pods that do not fit: it tries all other models, which takes as long as the decision itself.
    return [
        candidate.model.name
        for candidate in candidates(
            usage.quotas, PodOptions(avoided_models=(*options.avoided_models, *options.models)), cards
        )
        if (not cards or any(parse_model(name) == candidate.model for name in cards))
        and not is_refused(candidate, usage, demand, charge_on(candidate, demand)[1])
    ]


def unique_reasons(reasons: Iterable[Reason]) -> list[Reason]:
    """Remove repetitions: several models may exceed the same limit by the same amount."""
    return list({(reason.code, reason.field, reason.value): reason for reason in reasons}.values())
