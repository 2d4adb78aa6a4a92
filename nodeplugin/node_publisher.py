"""Publishes the node's GPUs: inventory and model label on the Node, events about cards, placements on pods.

It also watches the Node for what others write there: the cordon annotation, and resources of another device plugin that
offers the same cards. When the plugin is uninstalled, it removes the annotations and the label again: no other
account may.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from cluster.backoff import Backoff
from cluster.errors import ApiError, Conflict, NotFound, Rejected
from cluster.events import WARNING, EventRecorder
from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import NODES, PODS, Node, ObjectReference
from nodeplugin.cards import NodeCards
from nodeplugin.checkpoint import PodAllocation
from nodeplugin.uninstalling import Uninstallation, Uninstalled
from vcuda.decision import Unavailable
from vcuda.inventory import Gpu, encode_inventory
from vcuda.names import MIG_RESOURCE_PREFIX, MIXED_MODELS, NODE_PLUGIN, OTHER_GPU_RESOURCES, VCUDA_CORE_SUFFIX, Names
from vcuda.placement_annotation import encode_placement

# Every node has a publisher, and all of them fail at the same moment if the API server restarts.
RETRY_BACKOFF = Backoff(first_s=5.0, max_s=30.0)
# Reasons of events on the Node. Users filter by them, so they must not change.
OFFERED_TWICE, UNHEALTHY, RECOVERED = "GPUsOfferedTwice", "GPUUnhealthy", "GPUHealthy"


class NodePublisher:
    """Keeps the Node, and the placements of pods that this plugin placed, up to date on a thread of its own.

    `unwritten_placements` returns the allocations whose placement annotation is not on the pod yet. `on_change` is
    called when cordons change.
    """

    def __init__(
        self,
        cluster: Cluster,
        node: str,
        names: Names,
        node_cards: NodeCards,
        *,
        on_change: Callable[[], None],
        unwritten_placements: Callable[[], list[PodAllocation]],
        driver_version: Callable[[], str],
        namespace: str,
    ) -> None:
        self._cluster, self._node, self._names, self._node_cards = cluster, node, names, node_cards
        self.nodes: Informer[Node] = Informer(cluster, NODES, selector=Selector(fields=f"metadata.name={node}"))
        self.nodes.on_change(lambda _old, new: self._on_node_change(new))
        self._on_change, self._unwritten_placements = on_change, unwritten_placements
        self._driver_version = driver_version
        self._events = EventRecorder(cluster, NODE_PLUGIN)
        # Uids of pods whose placement cannot be written: they are gone, or another pod has their name.
        self._gone: set[str] = set()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._uninstallation = Uninstallation(cluster, namespace, on_start=self._wake.set)
        self.conflicts: list[str] = []
        # The fault of each card in its last event, so that each change is one event.
        self._reported_faults: dict[str, str] = {}
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        self.nodes.start()
        self._uninstallation.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop; if the plugin is being uninstalled, clear the Node."""
        self._stopping.set()
        self._wake.set()
        self.nodes.stop()
        self._uninstallation.stop()
        self._thread.join(10)
        self._attempt(self._clear_node_if_uninstalled)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def enqueue(self) -> None:
        """Have the thread compare the Node and the pods with the current state; several calls may be served at once."""
        self._wake.set()

    def _on_node_change(self, node: Node | None) -> None:
        if node is None:
            return
        conflicts = conflicting_resources(node, self._names)
        if conflicts != self.conflicts:
            self.conflicts = conflicts
            if conflicts:
                self._report_conflicts(node)
        self._update_cordons(node)
        self._wake.set()

    def _report_conflicts(self, node: Node) -> None:
        self._log.error("gpus_offered_twice", resources=self.conflicts)
        message = (
            f"another device plugin offers this node's GPUs as {', '.join(self.conflicts)}: Quotient allocates none of "
            "them until that plugin is removed from the node"
        )
        self._events.record(self._reference(node), OFFERED_TWICE, message, type_=WARNING)

    def _update_cordons(self, node: Node) -> None:
        if self._node_cards.set_cordons(self.cordon_reasons(node)):
            self._on_change()

    def cordon_reasons(self, node: Node) -> dict[str, str]:
        """Return the reason of every cordoned card, by uuid."""
        if self.conflicts:
            reason = f"also offered by another device plugin, as {', '.join(self.conflicts)}"
            return {card.uuid: reason for card in self._node_cards.cards()}
        text = node.metadata.annotations.get(self._names.cordon, "")
        named = {part.strip() for part in text.split(",")}
        return {
            card.uuid: f"cordoned by the annotation {self._names.cordon}"
            for card in self._node_cards.cards()
            # A MIG device is named by its own uuid, or together with all others of its card by the card's.
            if named & {card.uuid, card.parent or card.uuid, str(card.index)}
        }

    def _clear_node_if_uninstalled(self) -> bool:
        uninstalled = self._uninstallation.check()
        return uninstalled is Uninstalled.NO or self._clear_node(with_cordons=uninstalled is Uninstalled.YES)

    def _clear_node(self, *, with_cordons: bool = True) -> bool:
        """Remove what Quotient and its administrators have written to the Node, but for the pool, which quotas use."""
        keys = [self._names.inventory, *([self._names.cordon] if with_cordons else [])]
        metadata = {"annotations": dict.fromkeys(keys), "labels": {self._names.model_label: None}}
        self._cluster.patch(NODES, self._node, "", {"metadata": metadata})
        return True

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            steps = self._publish_node, self._write_placements, self._uninstallation.find_daemon_set
            # Each step runs even if one before it fails.
            succeeded = [self._attempt(step) for step in steps]
            done = all(succeeded)
            failures = 0 if done else failures + 1
            self._wake.wait(None if done else RETRY_BACKOFF.delay_s(failures))
            self._wake.clear()

    def _attempt(self, step: Callable[[], bool]) -> bool:
        """Run a step; False means it has to be retried."""
        try:
            return step()
        except (ApiError, Unavailable) as error:
            self._log.warning("publish_failed", error=str(error))
        except Exception:  # the outermost frame of the thread, which must not end
            self._log.exception("publisher_failed")
        return False

    def _publish_node(self) -> bool:
        """Patch the Node where it differs; returns False if the informer does not have it yet."""
        if self._uninstallation.has_started.is_set():
            return self._clear_node()
        node = self.nodes.get(self._node)
        if node is None:
            return False
        # Cordons name cards that may have been discovered since the Node last changed.
        self._update_cordons(node)
        gpus = self._node_cards.gpus()
        models = sorted({gpu.model for gpu in gpus})
        wanted: dict[str, dict[str, str | None]] = {
            "annotations": {self._names.inventory: encode_inventory(gpus, self._driver_version())},
            "labels": {self._names.model_label: (models[0] if len(models) == 1 else MIXED_MODELS) if models else None},
        }
        if changes := metadata_changes(node, wanted):
            self._cluster.patch(NODES, self._node, "", {"metadata": changes})
        for gpu in gpus:
            self._report_health(node, gpu)
        return True

    def _report_health(self, node: Node, gpu: Gpu) -> None:
        """Record an event if the card became unhealthy, recovered, or is unhealthy for another reason than before."""
        fault = "" if gpu.healthy else gpu.reason
        if fault == self._reported_faults.get(gpu.uuid, ""):
            return
        self._reported_faults[gpu.uuid] = fault
        card = f"GPU {gpu.index} ({gpu.uuid})"
        if fault:
            self._events.record(self._reference(node), UNHEALTHY, f"{card}: {fault}", type_=WARNING)
        else:
            self._events.record(self._reference(node), RECOVERED, f"{card} has recovered")

    def _write_placements(self) -> bool:
        """Write the placement annotation of pods that this node placed; returns False if one has to be retried."""
        allocations = self._unwritten_placements()
        self._gone &= {allocation.uid for allocation in allocations}
        # A list, not a generator: a pod whose patch fails must not delay the others.
        done = [self._attempt(partial(self._write_placement, allocation)) for allocation in allocations]
        return all(done)

    def _write_placement(self, allocation: PodAllocation) -> bool:
        if allocation.uid in self._gone:
            return True
        # With the uid the patch fails, instead of reaching a new pod of the same name.
        annotations = {self._names.placement: encode_placement(allocation.placed)}
        changes = {"metadata": {"uid": allocation.uid, "annotations": annotations}}
        try:
            self._cluster.patch(PODS, allocation.name, allocation.namespace, changes)
        except (NotFound, Rejected, Conflict) as error:
            # Other rejections, such as by an admission policy, are retried.
            if not (isinstance(error, NotFound) or "uid" in str(error).lower()):
                raise
            self._gone.add(allocation.uid)
        return True

    def _reference(self, node: Node) -> ObjectReference:
        return ObjectReference("v1", "Node", "", self._node, node.metadata.uid)


def metadata_changes(node: Node, wanted: dict[str, dict[str, str | None]]) -> dict[str, Any]:
    """Return those labels and annotations that differ on the node, as a merge patch; None removes a key."""
    changes: dict[str, Any] = {}
    for part, values in wanted.items():
        current: dict[str, str] = getattr(node.metadata, part)
        if different := {key: value for key, value in values.items() if current.get(key) != value}:
            changes[part] = different
    return changes


def conflicting_resources(node: Node, names: Names) -> list[str]:
    """Return the resources under which other device plugins offer NVIDIA cards on a node."""
    return sorted(
        key
        for key, amount in node.status.capacity.items()
        # The kubelet keeps the resource of a plugin that is gone, with capacity 0.
        if amount != "0"
        and (
            key in OTHER_GPU_RESOURCES
            or key.startswith(MIG_RESOURCE_PREFIX)
            or (key.endswith(VCUDA_CORE_SUFFIX) and key != names.core)
        )
    )
