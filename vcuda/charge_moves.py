"""Charges of pods that are being bound: before a pod is bound, its charge has to cover the GPUs that it will hold.

A pod that may run on several models is charged for one of them when it is created. If it is then placed on another one,
its charge is moved, and holds both until the binding is known: a pod whose binding fails must not have lost the quota
it was admitted with. Charges are only extended here; the controller lowers them to what a bound pod really holds, and
reverts those of pods that were not bound after all.
"""

from msgspec.structs import replace

from vcuda.amounts import Amounts
from vcuda.decision import Code, Reason
from vcuda.ledger import MAX_BYTES, MAX_STORED_BYTES, ChargeResult, Ledger, LedgerState, PodKey, ledger_not_open
from vcuda.namespace_policy import Mode
from vcuda.quota_refusals import ledger_full, model_not_granted, quota_exceeded
from vcuda.quota_usage import Charge, QuotaUsage, model_by_name


def move_problems(usage: QuotaUsage, held: Charge | None, charge: Charge) -> tuple[Reason, ...]:
    """Return why a pod that holds one charge cannot have another in addition; none if it can.

    Only what grows is checked: a pod keeps what it holds in a namespace that exceeds its quota.
    """
    before = usage.charged_by_limit(held) if held else Amounts()
    model = model_by_name(charge.model)
    if not usage.grants(model) and (held is None or held.model != charge.model):
        return (model_not_granted(model, usage),)
    asked = usage.amounts_by_limit(model, charge.amounts)
    grown = Amounts((key, amount - before[key]) for key, amount in asked.items() if amount > before[key])
    short = usage.hard.short(usage.taken, grown)
    return tuple(quota_exceeded(key, charge.amounts, model, usage) for key, _ in usage.limits_of(model) if key in short)


def is_covered(usage: QuotaUsage, held: Charge, charge: Charge) -> bool:
    """Whether a pod that holds one charge may hold another one instead, without a change of its ledger."""
    model = model_by_name(charge.model)
    if held.model != charge.model and not usage.grants(model):
        return False
    before, asked = usage.charged_by_limit(held), usage.amounts_by_limit(model, charge.amounts)
    return all(amount <= before[key] for key, amount in asked.items())


def extend_charge(
    ledger: Ledger, pod: PodKey, charge: Charge, now_s: int, cluster_mode: Mode = Mode.ENFORCE
) -> ChargeResult:
    """Make the ledger hold a charge for a pod that is about to be bound, beside what it holds already; or refuse it.

    A charge that is moved is a reservation from now on.
    """
    if ledger.state is not LedgerState.OPEN:
        return ChargeResult(reasons=(ledger_not_open(ledger.state),))
    entry = ledger.entry(pod)
    held = entry[0] if entry else None
    if held is not None and is_covered(ledger.usage, held, charge):
        if held.moved_from is not None:
            # By an earlier attempt: from now on, or the controller would revert it during this one.
            ledger.put(pod, held, now_s)
        return ChargeResult(held)
    if ledger.size() > (MAX_BYTES if held is None else MAX_STORED_BYTES):
        return ChargeResult(reasons=(ledger_full(len(ledger), ledger.quotas_size()),))
    if held is not None and held.moved_from is not None:
        # Another replica is binding the pod to another node at this moment: what it holds for that must not be lost.
        return ChargeResult(reasons=(charge_moving(held),))
    reasons = move_problems(ledger.usage, held, charge)
    if reasons and ledger.policy.effective_mode(cluster_mode) is Mode.ENFORCE:
        return ChargeResult(reasons=reasons)
    ledger.put(pod, replace(charge, moved_from=held), now_s)
    return ChargeResult(charge, audited=reasons)


def revert_charge(ledger: Ledger, pod: PodKey, charge: Charge) -> ChargeResult:
    """Give a pod whose binding failed the charge it had before it was moved to this one; else do nothing."""
    entry = ledger.entry(pod)
    if entry is None or entry[0].moved_from is None or replace(entry[0], moved_from=None) != charge:
        return ChargeResult(entry[0] if entry else None)
    return ChargeResult(revert_move(ledger, pod))


def revert_move(ledger: Ledger, pod: PodKey) -> Charge | None:
    """Give a pod the charge it had before it was moved; returns the charge. Does nothing if it is not being moved."""
    entry = ledger.entry(pod)
    if entry is None or entry[0].moved_from is None:
        return entry[0] if entry else None
    ledger.put(pod, entry[0].moved_from, None)
    return entry[0].moved_from


def charge_moving(held: Charge) -> Reason:
    return Reason(
        code=Code.LEDGER_NOT_OPEN,
        field="metadata.uid",
        value=held.model,
        message="the pod is being bound to a node of another GPU model",
        remedy="it is scheduled again when that is decided",
    )
