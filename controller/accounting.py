"""How a ledger is brought to say what is true: a pure function of the ledger, the pods and the quotas.

Charges are added for pods that are seen, and taken away only for a reason that stays true whatever one does not know
yet: a pod that was seen to end, or that was in no list made after the ledger was read. So a controller whose view is
old, or that wakes up after a long pause, may free too late, and never too early.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet

from msgspec import Struct

from controller.pod_usage import PodUsage
from vcuda.charging import Candidate, PodDemand, candidates, charge_on
from vcuda.decision import Reason
from vcuda.ledger import MAX_HOLDERS, ChargeRequest, Ledger, LedgerState, PodKey, mark_used, reserve
from vcuda.namespace_policy import Mode
from vcuda.quota_refusals import DEFAULT_REMEDIES, RemedyContext
from vcuda.quota_usage import ANY, Charge, Holder

# A create can take effect up to 34 s after its charge.
RESERVATION_S = 45


class NamespaceView(Struct, frozen=True):
    """What is known of a namespace: the pods that hold something, which are known to be gone, and its quotas.

    `actual` says what a pod holds where that is known; `cards` are the largest of each model that it may use.
    """

    holdings: Mapping[PodKey, PodUsage]
    gone: AbstractSet[PodKey]
    actual: Callable[[PodUsage], Charge | None]
    cards: Mapping[str, int]
    unit_mib: int
    cluster_mode: Mode = Mode.ENFORCE
    remedies: RemedyContext = DEFAULT_REMEDIES


class ReconcileReport(Struct, frozen=True):
    """What remains to be done: pods that found no room, and charges whose pods nobody sees."""

    waiting: Mapping[PodKey, tuple[Reason, ...]] = {}
    missing: tuple[PodKey, ...] = ()


def reconcile(
    ledger: Ledger, view: NamespaceView, now_s: float, expired: Callable[[PodKey, int], bool]
) -> ReconcileReport:
    """Bring a ledger up to date with what is seen; gives what cannot be decided by that alone."""
    for pod in ledger.pods() & view.gone:
        ledger.release(pod)
    for pod, held in view.holdings.items():
        record(ledger, pod, held, view)
    waiting = admit_waiting(ledger, view, now_s) if ledger.state is LedgerState.OPEN else {}
    ledger.set_holders(largest_holders(ledger, view.holdings))
    reserved = dict(ledger.reservations())
    unseen = ledger.pods() - view.holdings.keys()
    return ReconcileReport(waiting, tuple(pod for pod in unseen if pod not in reserved or expired(pod, reserved[pod])))


def record(ledger: Ledger, pod: PodKey, held: PodUsage, view: NamespaceView) -> None:
    """Turn a reservation into usage, and charge a pod on a node what it holds there."""
    place = ledger.entry(pod)
    real = view.actual(held)
    if place is None:
        if held.node:
            # It has its GPUs, whoever gave them to it: what is in use is in use.
            ledger.put(pod, real or estimated_charge(ledger, held, view), None)
        return
    charge, since = place
    if since is not None or (real is not None and real != charge):
        ledger.put(pod, real or charge, None)


def estimated_charge(ledger: Ledger, held: PodUsage, view: NamespaceView) -> Charge:
    """Say what a pod on an unknown card is charged: the first model it may run on."""
    first = next(iter(candidates(ledger.quotas, held.options, view.cards)), Candidate(ANY, 0))
    return charge_on(first, PodDemand(held.request, view.unit_mib))[0]


def admit_waiting(ledger: Ledger, view: NamespaceView, now_s: float) -> dict[PodKey, tuple[Reason, ...]]:
    """Charge pods that got in without a charge, as far as there is room, or say why there is none.

    Those that name a model come before those that leave the choice, and the older before the younger.
    """
    waiting: dict[PodKey, tuple[Reason, ...]] = {}
    uncharged = [
        (not held.options.models, held.created, pod)
        for pod, held in view.holdings.items()
        if not held.node and pod not in ledger
    ]
    for _, _, pod in sorted(uncharged):
        held = view.holdings[pod]
        demand = PodDemand(held.request, view.unit_mib)
        verdict = reserve(
            ledger,
            ChargeRequest(pod, demand, held.options, view.cards, remedies=view.remedies),
            int(now_s),
            view.cluster_mode,
        )
        if verdict.reasons:
            waiting[pod] = verdict.reasons
    # All at once: what is reserved in a row is added up as it comes, what is turned has to be added up anew.
    for _, _, pod in uncharged:
        mark_used(ledger, pod)
    return waiting


def largest_holders(ledger: Ledger, holdings: Mapping[PodKey, PodUsage]) -> list[Holder]:
    """Name those who hold most, workloads as a whole."""
    return top_holders(
        Holder(held.owner, place[0].model, cores=place[0].cores, memory_mib=place[0].memory_mib, pods=1)
        for pod, held in holdings.items()
        if (place := ledger.entry(pod)) is not None
    )


def top_holders(holders: Iterable[Holder]) -> list[Holder]:
    """Put together what the same holder has of the same model, and give those who have most."""
    sums: dict[tuple[str, str], list[int]] = {}
    for each in holders:
        total = sums.setdefault((each.name, each.model), [0, 0, 0])
        for index, amount in enumerate((each.cores, each.memory_mib, each.pods)):
            total[index] += amount
    found = [
        Holder(name, model, cores=cores, memory_mib=memory_mib, pods=pods)
        for (name, model), (cores, memory_mib, pods) in sums.items()
    ]
    return sorted(found, key=lambda each: (-each.cores, -each.memory_mib, each.name, each.model))[:MAX_HOLDERS]


def drop_missing(ledger: Ledger, missing: Iterable[PodKey], alive: Collection[PodKey]) -> None:
    """Free what pods hold that were in no list made after the ledger was read."""
    for pod in missing:
        if pod not in alive:
            ledger.release(pod)
