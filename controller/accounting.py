"""Reconciles a ledger with the pods that exist: a pure function of the ledger, the cached pods and the quotas.

A charge is added for every pod that is seen. It is removed only for a reason that no stale cache can make wrong: the
pod was seen to end, or it was not in a list that was made after the ledger was read. So a controller with an old cache,
or one that resumes after a long pause, may free quota too late, and never too early.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from msgspec import Struct

from cluster.objects import Metadata
from controller.pod_usage import PodUsage
from vcuda.charge_moves import revert_move
from vcuda.charging import Candidate, PodDemand, candidates, charge_on
from vcuda.decision import Reason
from vcuda.ledger import (
    MAX_HOLDERS,
    MAX_STORED_BYTES,
    ChargeRequest,
    Ledger,
    LedgerState,
    PodKey,
    Reservation,
    mark_used,
    pack_uid,
    reserve,
)
from vcuda.namespace_policy import Mode
from vcuda.quota_refusals import DEFAULT_REMEDIES, RemedyContext
from vcuda.quota_usage import ANY, RESERVATION_S, Charge, Holder

# How long a charge that is being moved waits for its pod to be bound: the time for a binding, and for its late effect.
MOVE_S = 90


class NamespaceView(Struct, frozen=True):
    """What is known of a namespace.

    `pods` count against the quota; `gone` are pods that are known to use nothing any more. `actual_charge` returns
    None for a pod whose GPUs are not known. `cards` has the memory of the largest GPU of each model, in MiB.
    """

    pods: Mapping[PodKey, PodUsage]
    gone: AbstractSet[PodKey]
    actual_charge: Callable[[PodUsage], Charge | None]
    cards: Mapping[str, int]
    unit_mib: int
    cluster_mode: Mode = Mode.ENFORCE
    remedies: RemedyContext = DEFAULT_REMEDIES


class ReconcileReport(Struct, frozen=True):
    """What remains: pods that exist but do not fit the quota, and charges that only a list of pods can decide about.

    `missing` are pods that are not in the cache, `stalled` those that were not bound since their charge was moved.
    `unrecorded` is how many pods use GPUs for which the ledger has no room. A ledger that is full admits no pod.
    """

    waiting: Mapping[PodKey, tuple[Reason, ...]] = {}
    missing: tuple[PodKey, ...] = ()
    stalled: tuple[PodKey, ...] = ()
    unrecorded: int = 0


def reconcile_ledger(
    ledger: Ledger, view: NamespaceView, now_s: float, is_expired: Callable[[Reservation], bool]
) -> ReconcileReport:
    """Update a ledger from a view. `is_expired` decides about reservations."""
    for key in ledger.pods() & view.gone:
        ledger.release(key)
    unrecorded = sum(not record_pod(ledger, key, pod, view) for key, pod in view.pods.items())
    waiting = admit_waiting(ledger, view, now_s) if ledger.state is LedgerState.OPEN else {}
    ledger.set_holders(largest_holders(ledger, view.pods))
    reserved = {each.pod: each for each in ledger.reservations()}
    unseen = ledger.pods() - view.pods.keys()
    missing = tuple(key for key in unseen if key not in reserved or is_expired(reserved[key]))
    stalled = tuple(key for key, each in reserved.items() if each.is_move and key not in unseen and is_expired(each))
    return ReconcileReport(waiting, missing, stalled, unrecorded)


def record_pod(ledger: Ledger, key: PodKey, pod: PodUsage, view: NamespaceView) -> bool:
    """Turn a pod's reservation into usage, and correct its charge to what it really uses; False if there is no room."""
    entry = ledger.entry(key)
    actual = view.actual_charge(pod)
    if entry is None:
        if pod.node and ledger.size() > MAX_STORED_BYTES:
            return False
        if pod.node:
            # It has GPUs, however it was admitted: usage is recorded even beyond the quota.
            ledger.put(key, actual or estimated_charge(ledger, pod, view), None)
        return True
    charge, reserved_since = entry
    if charge.moved_from is not None and not pod.node:
        return True  # it holds both models until its binding is known
    if reserved_since is not None or (actual is not None and actual != charge):
        ledger.put(key, actual or charge, None)
    return True


def estimated_charge(ledger: Ledger, pod: PodUsage, view: NamespaceView) -> Charge:
    """Return the charge of a pod on an unknown GPU: that of the first model it may run on."""
    first = next(iter(candidates(ledger.quotas, pod.options, view.cards)), Candidate(ANY, 0))
    return charge_on(first, PodDemand(pod.request, view.unit_mib))[0]


def admit_waiting(ledger: Ledger, view: NamespaceView, now_s: float) -> dict[PodKey, tuple[Reason, ...]]:
    """Charge unbound pods that were created without a charge, as far as they fit; returns why the others do not.

    Pods that name a model come first, since the others can still use what is left; then older before younger.
    """
    waiting: dict[PodKey, tuple[Reason, ...]] = {}
    uncharged = [
        (not pod.options.models, pod.created, key)
        for key, pod in view.pods.items()
        if not pod.node and key not in ledger
    ]
    for _, _, key in sorted(uncharged):
        pod = view.pods[key]
        demand = PodDemand(pod.request, view.unit_mib)
        request = ChargeRequest(key, demand, pod.options, view.cards, remedies=view.remedies)
        result = reserve(ledger, request, int(now_s), view.cluster_mode)
        if result.reasons:
            waiting[key] = result.reasons
    # After all reservations: `reserve` updates the ledger's usage, while each `mark_used` makes it be computed again.
    for _, _, key in uncharged:
        mark_used(ledger, key)
    return waiting


def largest_holders(ledger: Ledger, pods: Mapping[PodKey, PodUsage]) -> list[Holder]:
    """Return the workloads with the largest charges."""
    return top_holders(
        Holder(pod.owner, entry[0].model, cores=entry[0].cores, memory_mib=entry[0].memory_mib, pods=1)
        for key, pod in pods.items()
        if (entry := ledger.entry(key)) is not None
    )


def top_holders(holders: Iterable[Holder]) -> list[Holder]:
    """Sum up holders of the same name and model, and return the largest, by cores first."""
    sums: dict[tuple[str, str], list[int]] = {}
    for holder in holders:
        total = sums.setdefault((holder.name, holder.model), [0, 0, 0])
        for index, amount in enumerate((holder.cores, holder.memory_mib, holder.pods)):
            total[index] += amount
    merged = [
        Holder(name, model, cores=cores, memory_mib=memory_mib, pods=pods)
        for (name, model), (cores, memory_mib, pods) in sums.items()
    ]
    return sorted(merged, key=lambda each: (-each.cores, -each.memory_mib, each.name, each.model))[:MAX_HOLDERS]


def lifetime_s(reservation: Reservation) -> int:
    return MOVE_S if reservation.is_move else RESERVATION_S


def revert_stalled(ledger: Ledger, stalled: Iterable[PodKey], unbound: Collection[PodKey]) -> None:
    """Revert moved charges of pods in `unbound`, which must be listed after the ledger was read."""
    for key in stalled:
        if key in unbound:
            revert_move(ledger, key)


def remove_missing(ledger: Ledger, missing: Iterable[PodKey], existing: Collection[PodKey], now_s: float) -> None:
    """Remove charges whose pods are not in `existing`, which must be listed after the ledger was read."""
    for key in missing:
        if key not in existing:
            ledger.expire(key, int(now_s))


def release_failed_creates(ledger: Ledger, holders: Mapping[PodKey, Metadata]) -> None:
    """Release reservations of pods that cannot be created, because another pod has their name.

    `holders` are the pods that had the names of reserved pods, read after the ledger. One that is being deleted proves
    nothing, because the name may be free when the create takes effect. Should another be deleted at once while the
    create is still on its way, the new pod has no charge and waits for one, like each that outlives its reservation.
    """
    for key, holder in holders.items():
        if holder.deletion_timestamp is None and pack_uid(holder.uid) != key:
            ledger.release(key)
