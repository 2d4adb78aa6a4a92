"""What the node tells the cluster: its cards on the Node, and on a pod where it had to place it otherwise.

And what it hears from there: which cards take nothing new, and whether another plugin offers the same ones.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from cluster.errors import ApiError, Conflict, NotFound, Rejected
from cluster.events import WARNING, EventRecorder
from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import NODES, PODS, Node, ObjectReference
from nodeplugin.cards import NodeCards
from nodeplugin.checkpoint import PodAllocation
from vcuda.decision import Unavailable
from vcuda.inventory import encode_inventory
from vcuda.names import AWS_VGPU, MIXED_MODELS, NANO_PERCENT, NVIDIA_GPU, Names
from vcuda.placement_annotation import encode_placement

RETRY_S = 5.0
# Resources under which other plugins offer NVIDIA cards, whole or in parts.
RIVALS = (
    NVIDIA_GPU,
    "nvidia.com/gpu.shared",
    NANO_PERCENT,
    *AWS_VGPU,
    "nano-gpu.io/gpu-core",
    "elasticgpu.io/gpu-core",
    "aliyun.com/gpu-mem",
    "volcano.sh/vgpu-number",
)
RIVAL_PREFIX, VCUDA_CORE = "nvidia.com/mig-", "/vcuda-core"
RIVAL_EVENT, CARD_EVENT = "GPUsOfferedTwice", "GPUUnhealthy"


class NodePublisher:
    """Keeps the Node and the pods' placements as this plugin knows them."""

    def __init__(
        self,
        cluster: Cluster,
        node: str,
        names: Names,
        node_cards: NodeCards,
        *,
        on_change: Callable[[], None],
        deviating: Callable[[], list[PodAllocation]],
        driver: Callable[[], str],
    ) -> None:
        self._cluster, self._node, self._names, self._node_cards, self._on_change = (
            cluster,
            node,
            names,
            node_cards,
            on_change,
        )
        self.nodes: Informer[Node] = Informer(cluster, NODES, selector=Selector(fields=f"metadata.name={node}"))
        self.nodes.on_change(lambda _old, new: self._heard(new))
        self._deviating, self._driver = deviating, driver
        self._events = EventRecorder(cluster, "quotient-nodeplugin")
        # Pods whose placement is refused for good: they are gone, or others have their names.
        self._given_up: set[str] = set()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self.rivals: list[str] = []
        self._told: dict[str, str] = {}
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def start(self) -> None:
        """Begin."""
        self.nodes.start()
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._ending.set()
        self._wake.set()
        self.nodes.stop()
        self._thread.join(10)

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def look_again(self) -> None:
        """Have the Node compared with what is known."""
        self._wake.set()

    def _heard(self, node: Node | None) -> None:
        if node is None:
            return
        rivals = rivals_in(node, self._names)
        if rivals != self.rivals:
            self.rivals = rivals
            if rivals:
                told = f"{', '.join(rivals)}: another plugin offers this node's GPUs, so Quotient does not; remove it"
                self._log.error("offered_twice", resources=rivals)
                self._events.record(self._reference(node), RIVAL_EVENT, told, type_=WARNING)
        if self._node_cards.cordon(self.cordons(node)):
            self._on_change()
        self._wake.set()

    def cordons(self, node: Node) -> dict[str, str]:
        """Say which cards take nothing new, and why."""
        if self.rivals:
            why = f"offered by another plugin as well: {', '.join(self.rivals)}"
            return {card.uuid: why for card in self._node_cards.cards()}
        text = node.metadata.annotations.get(self._names.cordon, "")
        named = {part.strip() for part in text.split(",")}
        return {
            card.uuid: f"cordoned by the annotation {self._names.cordon}"
            for card in self._node_cards.cards()
            if named & {card.uuid, card.parent or card.uuid, str(card.index)}
        }

    def _run(self) -> None:
        while not self._ending.is_set():
            # One that fails does not hold up the other.
            done = all([self._tried(self._publish), self._tried(self._write_placements)])
            self._wake.wait(None if done else RETRY_S)
            self._wake.clear()

    def _tried(self, step: Callable[[], bool]) -> bool:
        try:
            return step()
        except (ApiError, Unavailable) as wrong:
            self._log.warning("not_published", cause=str(wrong))
        except Exception:  # the outermost frame of the thread: it has to go on
            self._log.exception("publisher_failed")
        return False

    def _publish(self) -> bool:
        """Write the Node if it says something else; false if it is not known yet."""
        node = self.nodes.get(self._node)
        if node is None:
            return False
        if self._node_cards.cordon(self.cordons(node)):
            self._on_change()
        gpus = self._node_cards.gpus()
        models = sorted({gpu.model for gpu in gpus})
        wanted: dict[str, dict[str, str | None]] = {
            "annotations": {self._names.inventory: encode_inventory(gpus, self._driver())},
            "labels": {self._names.model_label: (models[0] if len(models) == 1 else MIXED_MODELS) if models else None},
        }
        if changes := differences(node, wanted):
            self._cluster.patch(NODES, self._node, "", {"metadata": changes})
        for gpu in gpus:
            told = "" if gpu.healthy else gpu.reason
            if told != self._told.get(gpu.uuid, ""):
                self._told[gpu.uuid] = told
                message = (
                    f"GPU {gpu.index} ({gpu.uuid}): {told}" if told else f"GPU {gpu.index} ({gpu.uuid}) is well again"
                )
                kind = {"type_": WARNING} if told else {}
                self._events.record(self._reference(node), CARD_EVENT if told else "GPUHealthy", message, **kind)
        return True

    def _write_placements(self) -> bool:
        """Have pods say where they are that the node placed itself, until they do; false if one has to wait."""
        deviating = self._deviating()
        self._given_up &= {hold.uid for hold in deviating}
        # One that fails does not hold up the others.
        done = [self._tried(partial(self._write_placement, hold)) for hold in deviating]
        return all(done)

    def _write_placement(self, hold: PodAllocation) -> bool:
        if hold.uid in self._given_up:
            return True
        changes = {"metadata": {"uid": hold.uid, "annotations": {self._names.placement: encode_placement(hold.placed)}}}
        try:
            self._cluster.patch(PODS, hold.name, hold.namespace, changes)
        except (NotFound, Rejected, Conflict) as gone:
            # Another pod of this name, or none: the node's own book is what counts.
            if not (isinstance(gone, NotFound) or "uid" in str(gone).lower()):
                raise
            self._given_up.add(hold.uid)
        return True

    def _reference(self, node: Node) -> ObjectReference:
        return ObjectReference("v1", "Node", "", self._node, node.metadata.uid)


def differences(node: Node, wanted: dict[str, dict[str, str | None]]) -> dict[str, Any]:
    """Give what has to be written of what is wanted."""
    found: dict[str, Any] = {}
    for part, values in wanted.items():
        there: dict[str, str] = getattr(node.metadata, part)
        if changes := {key: value for key, value in values.items() if there.get(key) != value}:
            found[part] = changes
    return found


def rivals_in(node: Node, names: Names) -> list[str]:
    """List the resources by which others offer NVIDIA cards on a node."""
    return sorted(
        key
        for key, amount in node.status.capacity.items()
        if amount != "0"
        and (key in RIVALS or key.startswith(RIVAL_PREFIX) or (key.endswith(VCUDA_CORE) and key != names.core))
    )
