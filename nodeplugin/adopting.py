"""Allocations of pods that run on this node without one in the allocation checkpoint.

gpu-manager started them, and its annotations name their cards; or Quotient did, and neither its checkpoint nor the
kubelet's can be read: then the placement annotation is what is left. Only the cards are taken from annotations; the
amounts follow from the request.
"""

from collections.abc import Iterable, Mapping, Sequence

from nodeplugin.cards import Card
from nodeplugin.checkpoint import PodAllocation
from nodeplugin.pods import BoundPod
from vcuda.inventory import Gpu
from vcuda.placement import card_uuids, peak_usage, slices_on_cards


def adopt_predicates(pod: BoundPod, cards: Iterable[Card], gpus: Sequence[Gpu], unit_mib: int) -> PodAllocation | None:
    """Build the allocation of a pod that gpu-manager started; None if none of its cards is known."""
    # gpu-manager recorded cards by minor number; it did not know MIG devices.
    by_minor = {card.minor: card.uuid for card in cards if not card.is_mig}
    uuids = {
        name: [by_minor[minor] for minor in minors if minor in by_minor]
        for name, minors in pod.predicate_minors.items()
    }
    return adopt_cards(pod, uuids, gpus, unit_mib)


def adopt_placement(pod: BoundPod, gpus: Sequence[Gpu], unit_mib: int) -> PodAllocation | None:
    """Build the allocation of a started pod from its placement; None if none of its cards is known, or if it waits."""
    return adopt_cards(pod, card_uuids(pod.placed or {}), gpus, unit_mib) if pod.has_started else None


def adopt_cards(
    pod: BoundPod, uuids: Mapping[str, Sequence[str]], gpus: Sequence[Gpu], unit_mib: int
) -> PodAllocation | None:
    placed = slices_on_cards(pod.request, uuids, gpus, unit_mib)
    usage = peak_usage(pod.request, placed)
    if not usage:
        return None
    metadata = pod.metadata
    return PodAllocation(uid=pod.uid, namespace=metadata.namespace, name=metadata.name, placed=placed, usage=usage)
