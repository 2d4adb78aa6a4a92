"""What a pod is charged, on which model, and what is said when a quota has no room for it.

All functions here are about one namespace. What it holds already is known by model, as (model, dimension); what it may
hold is known by the lines of its quotas. A model is charged to every line that matches it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec
from msgspec import Struct

from vcuda.amounts import Amounts, HardLimits
from vcuda.catalogue import memory_in_name_mib
from vcuda.decision import Code, Reason
from vcuda.dimensions import CORES, EXPLAINED_UNITS, MEMORY, PODS, UNITS
from vcuda.gpu_model import GpuModel, matches, parse_model
from vcuda.pod_options import PodOptions
from vcuda.quota import ALL_TYPES, DENY, Quota
from vcuda.request import PodRequest
from vcuda.vocabulary import CORES_PER_CARD

# Stands for the models of a pod that names none, where neither quotas nor nodes name any.
ANY = GpuModel("any", "any")
MAX_HOLDERS_TOLD = 3

# A dimension of a line of a quota: which quota, which line, cores or memory or pods.
LineKey = tuple[str, str, str]
# What a pod needs on cards of a size.
Demand = Callable[[int], Amounts]


class PodDemand(Struct, frozen=True):
    """The demand of a number of equal pods, as data: it can be compared, shown and handed to another thread."""

    request: PodRequest
    unit_mib: int
    count: int = 1

    def __call__(self, card_mib: int) -> Amounts:
        amounts = self.request.demand(card_mib, self.unit_mib)
        return amounts if self.count == 1 else amounts.times(self.count)


class RemedyContext(Struct, frozen=True):
    """What remedies have to know: where a pod names its models, and in which unit it asks for memory."""

    annotation: str = "use-gputype"
    unit_mib: int = 1


DEFAULT_REMEDIES = RemedyContext()


class Charge(Struct, frozen=True, rename="camel"):
    """What one pod holds of a namespace's quotas: so much, of one model."""

    model: str
    cores: int
    memory_mib: int = msgspec.field(name="memoryMiB")

    @property
    def amounts(self) -> Amounts:
        """By dimension."""
        return Amounts({CORES: self.cores, MEMORY: self.memory_mib, PODS: 1})


class Holder(Struct, frozen=True, rename="camel"):
    """Somebody who holds much of a model: a workload, or a pod by itself."""

    name: str
    model: str
    cores: int
    pods: int
    memory_mib: int = msgspec.field(name="memoryMiB")

    @property
    def amounts(self) -> Amounts:
        """By dimension."""
        return Amounts({CORES: self.cores, MEMORY: self.memory_mib, PODS: self.pods})


class Candidate(Struct, frozen=True):
    """A model that a pod may run on, and the memory of its largest card there is; 0 while no card is known."""

    model: GpuModel
    card_mib: int

    def by_size(self) -> tuple[int, str]:
        """Order the largest first."""
        return -self.card_mib, self.model.name


def sized_candidate(model: GpuModel, card_mib: int) -> Candidate:
    """Give a model with the memory of its cards; where nobody says it, the name may."""
    return Candidate(model, card_mib or memory_in_name_mib(model.name))


class QuotaUsage:
    """Where a namespace stands: its quotas, and what is used and reserved, by model and by line."""

    def __init__(
        self,
        quotas: Sequence[Quota],
        used: Mapping[str, Amounts] | None = None,
        reserved: Mapping[str, Amounts] | None = None,
        holders: Sequence[Holder] = (),
    ) -> None:
        self.quotas, self.holders = tuple(quotas), holders
        self._lines: dict[str, tuple[tuple[LineKey, str], ...]] = {}
        self.used = self._by_line(used or {})
        self.reserved = self._by_line(reserved or {})
        self.taken = self.used + self.reserved

    @cached_property
    def hard(self) -> HardLimits[LineKey]:
        """The hard limits of all lines, in the order in which they are written."""
        return HardLimits(
            ((quota.name, line, dimension), hard)
            for quota in self.quotas
            for line, limits in quota.types.items()
            for dimension, hard in limits.items()
        )

    def lines(self, model: GpuModel) -> tuple[tuple[LineKey, str], ...]:
        """Give all lines that a model is charged to, each with its dimension."""
        found = self._lines.get(model.name)
        if found is None:
            found = self._lines[model.name] = tuple(
                ((quota.name, line, dimension), dimension)
                for quota in self.quotas
                for line in quota.lines(model)
                for dimension in quota.types[line]
            )
        return found

    def charged(self, model: GpuModel, amounts: Amounts) -> Amounts:
        """Spread what is taken of a model over the lines that match it."""
        return Amounts((key, amounts[dimension]) for key, dimension in self.lines(model))

    def take(self, model: GpuModel, amounts: Amounts) -> None:
        """Count something as reserved."""
        asked = self.charged(model, amounts)
        self.reserved += asked
        self.taken += asked

    def short(self, model: GpuModel, amounts: Amounts) -> list[LineKey]:
        """Return the lines that would be exceeded, in the order in which they are written."""
        missing = self.hard.short(self.taken, self.charged(model, amounts))
        return [key for key, _ in self.lines(model) if key in missing]

    def grants(self, model: GpuModel) -> bool:
        """Tell whether all quotas let the namespace use a model."""
        return all(quota.grants(model) for quota in self.quotas)

    def count_fitting(self, model: GpuModel, amounts: Amounts) -> int | None:
        """Return how many times the amounts fit; None if no limit applies."""
        return self.hard.count_fitting(self.taken, self.charged(model, amounts))

    def _by_line(self, by_model: Mapping[str, Amounts]) -> Amounts:
        total: dict[LineKey, int] = {}
        for name, amounts in by_model.items():
            for key, dimension in self.lines(model_by_name(name)):
                total[key] = total.get(key, 0) + amounts[dimension]
        return Amounts(total)


def model_by_name(name: str) -> GpuModel:
    """Give a model by the name under which it was charged."""
    return ANY if name == ANY.name else parse_model(name)


def candidates(quotas: Iterable[Quota], options: PodOptions, cards: Mapping[str, int]) -> list[Candidate]:
    """List the models a pod may run on, in the order in which they are tried.

    A wish, or a line of a quota where nothing is wished, stands for all cards it matches; the largest comes first, so
    that what is charged rarely has to grow. One that matches no card there is stands for itself: a node may come.
    """
    quotas = list(quotas)
    lines = dict.fromkeys(line for quota in quotas for line in quota.types if line != ALL_TYPES)
    there = sorted((sized_candidate(parse_model(name), mib) for name, mib in cards.items()), key=Candidate.by_size)
    known: dict[str, Candidate] = {}
    unknown: dict[str, Candidate] = {}
    for pattern in options.models or lines:
        found = [each for each in there if matches(pattern, each.model)]
        known.update((each.model.name, each) for each in found if each.model.name not in known)
        if not found:
            # A wish for a family may be granted by lines for its products.
            products = [parse_model(line) for line in lines if matches(pattern, parse_model(line))]
            for model in products or [parse_model(pattern)]:
                unknown.setdefault(model.name, sized_candidate(model, 0))
    if not options.models:
        known.update((each.model.name, each) for each in there if each.model.name not in known)
    # What some node has comes before what none has.
    ordered = [*known.values(), *unknown.values()]
    allowed = [each for each in ordered if not any(matches(avoided, each.model) for avoided in options.avoided_models)]
    if options.models:
        return allowed
    granted = [each for each in allowed if all(quota.grants(each.model) for quota in quotas)]
    return granted or allowed


class ChargeFit(Struct, frozen=True):
    """What became of a demand: a charge, and if it does not fit, why. A charge that does not fit is for audits."""

    charge: Charge
    reasons: tuple[Reason, ...] = ()


def charge_on(candidate: Candidate, demand: Demand) -> tuple[Charge, Amounts]:
    """Compute what a demand is charged on a model."""
    amounts = demand(candidate.card_mib)
    return Charge(candidate.model.name, amounts[CORES], amounts[MEMORY]), amounts


def fit_charge(
    usage: QuotaUsage,
    demand: Demand,
    options: PodOptions,
    cards: Mapping[str, int],
    remedies: RemedyContext = DEFAULT_REMEDIES,
) -> ChargeFit:
    """Find a model on which a demand fits a namespace's quotas, or say why there is none."""
    choices = candidates(usage.quotas, options, cards)
    reasons = list(undecided(usage.quotas, choices, remedies.annotation))
    if options.avoided_models and not choices and not usage.grants(ANY):
        reasons = [all_avoided(usage, options)]
    choices = choices or [Candidate(ANY, 0)]
    if not reasons:
        for candidate in choices:
            charge, amounts = charge_on(candidate, demand)
            if not usage.grants(candidate.model):
                reasons.append(not_granted(candidate.model, usage))
            elif line := unmeasured(candidate, usage, demand):
                reasons.append(card_unknown(candidate.model, line))
            elif missing := usage.short(candidate.model, amounts):
                # Of a card's own memory nobody can ask for less.
                unit_mib = 0 if follows_card(demand) else remedies.unit_mib
                reasons += [exceeded(key, amounts, candidate.model, usage, unit_mib) for key in missing]
            else:
                return ChargeFit(charge)
        reasons = advised(deduplicated(reasons), usage, demand, options=options, cards=cards, remedies=remedies)
    return ChargeFit(charge_on(choices[0], demand)[0], tuple(reasons))


def count_fitting(usage: QuotaUsage, demand: Demand, options: PodOptions, cards: Mapping[str, int], wanted: int) -> int:
    """Say how many of a number of equal pods find room."""
    if list(undecided(usage.quotas, choices := candidates(usage.quotas, options, cards), "")):
        return 0
    found = 0
    trial = QuotaUsage(usage.quotas)
    trial.taken = usage.taken
    for candidate in choices or [Candidate(ANY, 0)]:
        if not trial.grants(candidate.model):
            continue
        _, amounts = charge_on(candidate, demand)
        room = trial.count_fitting(candidate.model, amounts)
        if room is None or found + room >= wanted:
            return wanted
        found += room
        trial.take(candidate.model, amounts.times(room))
    return found


def follows_card(demand: Demand) -> bool:
    """Tell whether what a pod takes depends on the card it gets: all of its memory, or a part of it."""
    return demand(CORES_PER_CARD)[MEMORY] != demand(2 * CORES_PER_CARD)[MEMORY]


def unmeasured(candidate: Candidate, usage: QuotaUsage, demand: Demand) -> LineKey | None:
    """Find a line that limits memory which nobody can tell: of a card that no node has, and whose name does not say."""
    if candidate.card_mib or not follows_card(demand):
        return None
    return next((key for key, dimension in usage.lines(candidate.model) if dimension == MEMORY), None)


def card_unknown(model: GpuModel, key: LineKey) -> Reason:
    """Say that what a pod takes cannot be told."""
    quota, line, dimension = key
    return Reason(
        code=Code.CARD_UNKNOWN,
        field=f"{quota}: types.{line}.{dimension}",
        value=model.name,
        message="this quota limits memory, and no node says how much a card of this model has, all or a part of which "
        "this pod would take",
        remedy="ask for a part of a card with its memory, name a product such as A100-SXM4-40GB, or wait for a node",
    )


def undecided(quotas: Iterable[Quota], choices: Sequence[Candidate], annotation: str) -> Iterable[Reason]:
    """Refuse a pod that could run on several models where a quota wants it to say which."""
    families = {each.model.family.lower() for each in choices}
    for quota in quotas:
        if quota.untyped == DENY and len(families) != 1:
            listed = [line for line in quota.types if line != ALL_TYPES]
            yield Reason(
                code=Code.MODEL_NOT_GRANTED,
                field=f"{quota.name}: untyped",
                value=DENY,
                message="this namespace's quota wants every pod to name one GPU model, and this one could run on "
                + (", ".join(each.model.name for each in choices) or "any"),
                remedy=f"add the annotation {annotation} with one of {', '.join(listed) or 'its models'}",
            )
            return


def deduplicated(reasons: Iterable[Reason]) -> list[Reason]:
    """Say everything once: several models may be short of the same line."""
    return list({(reason.code, reason.field, reason.value): reason for reason in reasons}.values())


def exceeded(key: LineKey, amounts: Amounts, model: GpuModel, usage: QuotaUsage, unit_mib: int = 1) -> Reason:
    """Say by how much a quota is passed, with all numbers, and who holds most of it."""
    quota, line, dimension = key
    asked, used, reserved, hard = amounts[dimension], usage.used[key], usage.reserved[key], usage.hard[key]
    short, free = used + reserved + asked - hard, usage.hard.free(usage.taken, key)
    kind = "over all types" if line == ALL_TYPES else f"of {line}"
    if line not in (ALL_TYPES, model.name):
        kind += f" (as {model.name})"
    told = f"asked {asked} {EXPLAINED_UNITS[dimension]} {kind}; "
    told += f"used {used}, reserved {reserved}, hard {hard}: short by {short}"
    if used + reserved > hard:
        told += "; more is in use than the quota now allows, and nothing is admitted until it is less"
    if holders := largest(usage.holders, usage, key):
        told += f"; most is held by {', '.join(f'{holder.name} ({holder.amounts[dimension]})' for holder in holders)}"
    return Reason(
        code=Code.QUOTA_EXCEEDED,
        field=f"{quota}: types.{line}.{dimension}",
        value=str(asked),
        message=told,
        remedy=remedy_for(key, asked, hard, can_be_asked(dimension, free, unit_mib), short),
        numbers={"asked": asked, "used": used, "reserved": reserved, "hard": hard, "short": short},
    )


def can_be_asked(dimension: str, free: int, unit_mib: int) -> str:
    """Say how much of what is free a pod can ask for, as it is written; nothing if it cannot."""
    match dimension:
        case "cores":
            # Parts of one card or whole cards: 150 cannot be asked for.
            most = free // CORES_PER_CARD * CORES_PER_CARD if free >= CORES_PER_CARD else free
            return str(most) if most else ""
        case "memory" if unit_mib and free >= unit_mib:
            units = free // unit_mib
            return f"{units * unit_mib} MiB" + (f", which is {units} of vcuda-memory" if unit_mib > 1 else "")
    return ""


def remedy_for(key: LineKey, asked: int, hard: int, most: str, short: int) -> str:
    """Say what can be done: ask for what can be had, wait for what is missing, or have the quota raised."""
    quota, line, dimension = key
    options = []
    if most:
        options.append(f"ask for at most {most}")
    if asked <= hard:
        options.append(f"wait until {short} more {UNITS[dimension]} are free")
    raised = f"have types.{line}.{dimension} of {quota} raised"
    return f"{', '.join(options)}, or {raised}" if options else raised


def largest(holders: Sequence[Holder], usage: QuotaUsage, key: LineKey) -> list[Holder]:
    """Give those who hold most of a line."""
    _, _, dimension = key
    found = [
        holder
        for holder in holders
        if holder.amounts[dimension] and any(line == key for line, _ in usage.lines(model_by_name(holder.model)))
    ]
    return sorted(found, key=lambda holder: (-holder.amounts[dimension], holder.name))[:MAX_HOLDERS_TOLD]


def advised(
    reasons: list[Reason],
    usage: QuotaUsage,
    demand: Demand,
    *,
    options: PodOptions,
    cards: Mapping[str, int],
    remedies: RemedyContext,
) -> list[Reason]:
    """Add to the first reason which other model would have room; one that no node has helps nobody, if any is known."""
    if not options.models or not usage.quotas:
        return reasons
    others = [
        candidate.model.name
        for candidate in candidates(
            usage.quotas, PodOptions(avoided_models=(*options.avoided_models, *options.models)), cards
        )
        if usage.grants(candidate.model)
        and (not cards or any(parse_model(name) == candidate.model for name in cards))
        and not unmeasured(candidate, usage, demand)
        and not usage.short(candidate.model, charge_on(candidate, demand)[1])
    ]
    if not others:
        return reasons
    first, *rest = reasons
    told = f"{first.remedy}; there is room on {', '.join(others)}: name it in the annotation {remedies.annotation}"
    return [
        Reason(
            code=first.code,
            field=first.field,
            value=first.value,
            message=first.message,
            remedy=told,
            numbers=first.numbers,
        ),
        *rest,
    ]


def not_granted(model: GpuModel, usage: QuotaUsage) -> Reason:
    """Say that a namespace has no quota for a model."""
    lines = dict.fromkeys(line for quota in usage.quotas for line in quota.types if line != ALL_TYPES)
    listed = [line for line in lines if usage.grants(parse_model(line))]
    others = "no GPU here" if not lines else "nothing else: no model is in all of this namespace's quotas"
    return Reason(
        code=Code.MODEL_NOT_GRANTED,
        field=next(quota.name for quota in usage.quotas if not quota.grants(model)) + ": types",
        value=model.name,
        message="this namespace's quota names no such model, and denies what it does not name",
        remedy=f"ask for {' or '.join(listed) or others}, or have the quota extended",
    )


def all_avoided(usage: QuotaUsage, options: PodOptions) -> Reason:
    """Say that nothing is left to run on."""
    return Reason(
        code=Code.MODEL_NOT_GRANTED,
        field=next(quota.name for quota in usage.quotas if not quota.grants(ANY)) + ": types",
        value=", ".join(options.avoided_models),
        message="every model that this namespace may use is excluded by nouse-gputype",
        remedy="exclude fewer models",
    )
