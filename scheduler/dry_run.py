"""Answers filter without a claim, also for nodes that do not exist yet: for autoscalers and other planners.

A node in the request that the cluster does not have is a template: its GPUs are those of its inventory, or follow from
its labels and its amount of vcuda-core, and all of them are unused.
"""

import msgspec

from cluster.gpu_nodes import GpuNode, gpu_node_of
from cluster.objects import Node
from scheduler.cluster_state import ClusterState
from scheduler.extender import Extender, result_of
from scheduler.extender_api import ExtenderArgs, FilterResult, decode_body
from scheduler.ledgers import Grant
from vcuda.catalogue import memory_in_name_mib
from vcuda.decision import BadRequest
from vcuda.gpu_table import GpuTable
from vcuda.inventory import Gpu, unavailable_reason
from vcuda.node_fit import fit_nodes
from vcuda.node_problem import NodeProblem
from vcuda.quantity import QuantityError, parse_quantity
from vcuda.scheme import Scheme
from vcuda.vocabulary import CORES_PER_CARD

NANOS = 10**9
# As many as a node can have: a template is written by hand.
MAX_GPUS = 64


class DryRun:
    """Decides as the extender does, and changes nothing."""

    def __init__(self, scheme: Scheme, extender: Extender, state: ClusterState) -> None:
        self._scheme, self._extender, self._state = scheme, extender, state

    def filter(self, args: ExtenderArgs) -> FilterResult:
        """Return the nodes that would fit now, and a reason for each of the others.

        A pod with a UID has to be charged to its quota, as for a real filter. One without does not exist yet: its quota
        is not checked.
        """
        names, pod = list(args.names()), self._extender.read_pod(args.pod)
        if pod is None:
            return FilterResult(names)
        grant = self._extender.grant(pod, waits=False) if pod.uid else Grant(is_charged=True)
        if not grant.is_charged:
            return FilterResult(unresolvable={NodeProblem.UNCHARGED.text: [names]})
        with self._state.lock:
            query = self._extender.query(pod, grant)
            table = self._state.table.copy()
            # What the pod has claimed, or is nominated for, is free for itself.
            if (holding := self._state.holding(pod.uid)) is not None:
                table.give_back(holding.node, holding.usage)
        for raw in (args.whole_nodes or {}).values():
            node = decode_body(bytes(raw), Node)
            if node.metadata.name not in table:
                add_template(table, self._template(node))
        return result_of(fit_nodes(table, names, query))

    def _template(self, node: Node) -> GpuNode:
        """Return a node that does not exist yet; raises BadRequest if it is not clear which GPUs it has."""
        reduced, names = gpu_node_of(node, self._scheme), self._scheme.names
        if reduced.gpus:
            return reduced
        title = f"node {node.metadata.name}"
        if names.inventory in node.metadata.annotations:
            raise BadRequest(f"{title}: annotation {names.inventory}: no valid inventory of GPUs; correct or remove it")
        count = gpu_count(node, names.core, title)
        if count and not reduced.model:
            raise BadRequest(f"{title}: label {names.model_label}: missing, or no model of a GPU; set it, as in T4")
        memory_mib = reduced.memory_mib or self._known_memory_mib(reduced.model)
        gpus = tuple(
            Gpu(
                uuid=f"{node.metadata.name}/{index}",
                index=index,
                model=reduced.model,
                memory_mib=memory_mib,
                healthy=True,
            )
            for index in range(count)
        )
        return msgspec.structs.replace(reduced, gpus=gpus)

    def _known_memory_mib(self, model: str) -> int:
        """Return the memory of a model: of the nodes that have it, or from its name."""
        return self._state.card_sizes_mib().get(model, 0) or memory_in_name_mib(model)


def add_template(table: GpuTable, node: GpuNode) -> None:
    """Add a node to a table if it has GPUs."""
    if node.gpus:
        table.set_node(node.metadata.name, node.gpus, node.pool, unavailable_reason)


def gpu_count(node: Node, core_resource: str, title: str) -> int:
    """Return how many GPUs a template has: its allocatable cores in GPUs, 0 if it names none."""
    written = node.status.allocatable.get(core_resource) or node.status.capacity.get(core_resource) or "0"
    try:
        count = parse_quantity(written).nanos // NANOS // CORES_PER_CARD
    except QuantityError:
        raise BadRequest(f"{title}: {core_resource}: {written!r} is no number of cores; 100 is one GPU") from None
    if not 0 <= count <= MAX_GPUS:
        raise BadRequest(f"{title}: {core_resource}: {written} is more than {MAX_GPUS} GPUs of 100 cores each")
    return count
