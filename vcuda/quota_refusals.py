"""Why a quota refuses a pod, in words and numbers: one function for each reason.

A refusal of this kind is what most users see of Quotient, so each says what was asked, used, reserved and allowed, how
much is missing, who holds most of it, and what to do.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from vcuda.amounts import Amounts
from vcuda.decision import Code, Reason
from vcuda.dimensions import CORES, EXPLAINED_UNITS, MEMORY, PODS, UNITS
from vcuda.gpu_model import GpuModel
from vcuda.quota import ALL_TYPES, DENY, Quota
from vcuda.quota_usage import ANY, RESERVATION_S, LimitKey, QuotaUsage, UnconfirmedAmount
from vcuda.vocabulary import CORES_PER_CARD

# Enough to know whom to ask; kubectl shows a refusal as one paragraph.
MAX_HOLDERS_NAMED, MAX_MODELS_NAMED = 3, 12
# How Kubernetes' own refusals for a quota begin.
EXCEEDED = "exceeded quota: "


class RemedyContext(Struct, frozen=True):
    """What refusals mention: the annotation in which a pod names its models, and the unit of its memory requests.

    `now_s` is the time to which the ends of reservations are relative; without it they are not mentioned.
    """

    annotation: str = "use-gputype"
    unit_mib: int = 1
    now_s: int | None = None


DEFAULT_REMEDIES = RemedyContext()


def limit_field(key: LimitKey) -> str:
    quota, line, dimension = key
    return f"{quota}: types.{line}.{dimension}"


def quota_exceeded(
    key: LimitKey,
    amounts: Amounts,
    model: GpuModel,
    usage: QuotaUsage,
    unit_mib: int = 1,
    *,
    now_s: int | None = None,
) -> Reason:
    """Refuse amounts of a model that exceed a limit. `unit_mib` is 0 if the pod cannot ask for less memory."""
    _, line, dimension = key
    asked, used, reserved, hard = amounts[dimension], usage.used[key], usage.reserved[key], usage.hard[key]
    short = used + reserved + asked - hard
    scope = "of all types together" if line == ALL_TYPES else f"of {line}"
    if line not in (ALL_TYPES, model.name):
        # The pod may have named the family, or nothing: say for which product it would have been charged.
        scope += f" (as {model.name})"
    message = f"{EXCEEDED}asked {asked} {EXPLAINED_UNITS[dimension]} {scope}; "
    message += f"used {used}, reserved {reserved}, hard {hard}: short by {short}"
    if used + reserved > hard:
        # Happens when a quota is lowered, and to pods that were running before there was one.
        over = used + reserved - hard
        message += f"; already {over} over the limit: no pod is admitted until usage drops below it"
    # For programs, in the webhook's /decisions.
    numbers = {"asked": asked, "used": used, "reserved": reserved, "hard": hard, "short": short}
    if now_s is not None and (unconfirmed := usage.unconfirmed(key)) is not None:
        ends_in_s = max(1, min(RESERVATION_S, unconfirmed.last_since + RESERVATION_S - now_s))
        numbers |= {"unconfirmed": unconfirmed.amount, "unconfirmedPods": unconfirmed.pods, "endsInS": ends_in_s}
        message += f"; {unconfirmed_text(unconfirmed, dimension, ends_in_s)}"
    if holders := usage.largest_holders(key, MAX_HOLDERS_NAMED):
        named = ", ".join(f"{holder.name} ({holder.amounts[dimension]})" for holder in holders)
        message += f"; largest holders: {named}"
    largest = largest_request(dimension, usage.hard.free(usage.taken, key), unit_mib)
    return Reason(
        code=Code.QUOTA_EXCEEDED,
        field=limit_field(key),
        value=str(asked),
        message=message,
        # Waiting does not help a pod that asks for more than the whole quota.
        remedy=exceeded_remedy(key, largest, short if asked <= hard else 0),
        numbers=numbers,
    )


def unconfirmed_text(unconfirmed: UnconfirmedAmount, dimension: str, ends_in_s: int) -> str:
    """Say what is reserved for pods that may never appear, because something else refused them, and for how long."""
    reserved = f"{unconfirmed.amount} {UNITS[dimension]} are reserved for"
    if unconfirmed.pods == 1:
        return f"{reserved} 1 pod that does not exist yet, as far as is known; this reservation ends in {ends_in_s} s"
    pods = f"{unconfirmed.pods} pods that do not exist yet, as far as is known"
    return f"{reserved} {pods}; the last of these reservations ends in {ends_in_s} s"


def largest_request(dimension: str, free: int, unit_mib: int) -> str:
    """Return the most that a pod can ask for of what is free, as people write it; an empty text if that is nothing."""
    if dimension == CORES:
        # A fraction of one GPU, or whole GPUs: 150 is not a valid request.
        cores = free // CORES_PER_CARD * CORES_PER_CARD if free >= CORES_PER_CARD else free
        return f"{cores} cores" if cores else ""
    if dimension == MEMORY and unit_mib and free >= unit_mib:
        units = free // unit_mib
        return f"{units * unit_mib} MiB" + (f" (vcuda-memory: {units})" if unit_mib > 1 else "")
    return ""


def exceeded_remedy(key: LimitKey, largest: str, wait_for: int) -> str:
    """List what to do: ask for less, wait, have the quota raised. Waiting is left out if `wait_for` is 0."""
    quota, line, dimension = key
    remedies = []
    if largest:
        remedies.append(f"ask for at most {largest}")
    if wait_for:
        remedies.append(
            f"wait until {wait_for} more {UNITS[dimension]} {'have ended' if dimension == PODS else 'are free'}"
        )
    remedies.append(f"have an administrator raise types.{line}.{dimension} in {quota}")
    *others, last = remedies
    return f"{', '.join(others)}, or {last}" if others else last


def add_alternatives(reasons: Sequence[Reason], models: Sequence[str], annotation: str) -> list[Reason]:
    """Add to the first remedy the models on which the pod would fit its quota."""
    if not models:
        return list(reasons)
    first, *rest = reasons
    advice = f"enough quota is left for {name_models(models, ' or ')}: name it in the annotation {annotation}"
    return [replace(first, remedy=f"{first.remedy}; {advice}"), *rest]


def card_memory_unknown(model: GpuModel, key: LimitKey) -> Reason:
    return Reason(
        code=Code.CARD_UNKNOWN,
        field=limit_field(key),
        value=model.name,
        message="the quota limits memory, and the pod takes all or a fraction of its GPU's memory, but no node reports "
        "how much memory a GPU of this model has",
        remedy="ask for a fraction with a fixed amount of memory (vcuda-memory), name a product that has its memory in "
        "its name such as A100-SXM4-40GB, or wait for a node with this model",
    )


def model_required(quota: Quota, models: Iterable[str], annotation: str) -> Reason:
    """Refuse a pod that could run on several models under a quota with `untyped: deny`."""
    listed = [line for line in quota.types if line != ALL_TYPES]
    return Reason(
        code=Code.MODEL_NOT_GRANTED,
        field=f"{quota.name}: untyped",
        value=DENY,
        message="the quota requires every pod to name one GPU model, and this pod could run on "
        + (name_models(list(models)) or "any model"),
        remedy=f"set the annotation {annotation} to {name_models(listed, ' or ') or 'one model'}",
    )


def model_not_granted(model: GpuModel, usage: QuotaUsage) -> Reason:
    quota = next(quota.name for quota in usage.quotas if not quota.grants(model))
    granted = usage.granted_lines
    extend = f"have an administrator add {model.name} to {quota}"
    if granted:
        remedy = f"ask for {name_models(granted, ' or ')}, or {extend}"
    else:
        remedy = f"no model is listed in all of this namespace's quotas: {extend}"
    return Reason(
        code=Code.MODEL_NOT_GRANTED,
        field=f"{quota}: types",
        value=model.name,
        message="the quota does not list this GPU model, and denies models that it does not list",
        remedy=remedy,
    )


def no_model_listed(quota: Quota, requested: Iterable[str]) -> Reason:
    """Refuse a pod under a quota that grants no model at all, whichever the pod requests."""
    return Reason(
        code=Code.MODEL_NOT_GRANTED,
        field=f"{quota.name}: types",
        value=name_models(list(requested)),
        message="the quota lists no GPU model and denies unlisted ones",
        remedy="have an administrator list models, or set unlisted: allow",
    )


def slice_required(usage: QuotaUsage, slices: Sequence[str], annotation: str) -> Reason:
    """Refuse a pod that names no model where the quotas grant nothing but MIG slices."""
    return Reason(
        code=Code.MODEL_NOT_GRANTED,
        field=next(quota.name for quota in usage.quotas if not quota.grants(ANY)) + ": types",
        value="",
        message="the quota lists only MIG slices, and a pod runs on one only if it names it",
        remedy=f"name one in {annotation}: {name_models(slices, ' or ')}",
    )


def all_models_avoided(usage: QuotaUsage, avoided: Iterable[str]) -> Reason:
    return Reason(
        code=Code.MODEL_NOT_GRANTED,
        field=next(quota.name for quota in usage.quotas if not quota.grants(ANY)) + ": types",
        value=name_models(list(avoided)),
        message="the annotation nouse-gputype excludes every GPU model that this namespace may use",
        remedy="exclude fewer models",
    )


def name_models(models: Sequence[str], separator: str = ", ") -> str:
    """List models; a quota, a pod and a cluster may have hundreds."""
    more = len(models) - MAX_MODELS_NAMED
    return separator.join((*models[:MAX_MODELS_NAMED], f"{more} more") if more > 0 else models)


class UnconfirmedSums(NamedTuple):
    """What is reserved, what expired within a window, and the limit of both together."""

    reserved: int
    expired: int
    hard: int
    window_s: int


def too_many_unconfirmed(field: str, dimension: str, asked: int, sums: UnconfirmedSums) -> Reason:
    """Refuse a charge to a caller of the webhook who may not be an API server."""
    return Reason(
        code=Code.TOO_MANY_UNCONFIRMED,
        field=field,
        value=str(asked),
        message=f"{sums.expired} {EXPLAINED_UNITS[dimension]} were reserved in the last {sums.window_s // 60} minutes "
        f"for pods that were never created, and {sums.reserved} are reserved for pods not seen yet; the caller of "
        f"the webhook is not known to be an API server, and may reserve {sums.hard} in all",
        remedy="try again when these have ended; an administrator can let only API servers call the webhook, with "
        "webhook.apiServerCidrs or webhook.clientCa, and then there is no such limit",
        numbers={"asked": asked, "reserved": sums.reserved, "expired": sums.expired, "hard": sums.hard},
    )


def ledger_missing() -> Reason:
    return Reason(
        code=Code.LEDGER_NOT_OPEN,
        field="metadata.namespace",
        value="",
        message="this namespace has no ledger yet; Quotient's controller is about to create it",
        remedy="try again; if this persists, check that Quotient's controller is running",
    )


def ledger_rebuilding() -> Reason:
    return Reason(
        code=Code.LEDGER_NOT_OPEN,
        field="metadata.namespace",
        value="",
        message="the ledger of this namespace was lost and is being rebuilt; pods with GPUs are admitted again when "
        "all pods that were admitted before are counted",
        remedy="try again in a minute",
    )


def ledger_full(pods: int, quota_bytes: int) -> Reason:
    """Refuse a pod in a namespace whose pods and quotas fill one ConfigMap."""
    return Reason(
        code=Code.QUOTA_EXCEEDED,
        field="metadata.namespace",
        value=str(pods),
        message=f"the ledger of this namespace is full with {pods} pods with GPUs and {quota_bytes} bytes of quotas",
        remedy="use another namespace, wait until pods have ended, or have an administrator shorten the quotas",
        numbers={"asked": 1, "used": pods},
    )
