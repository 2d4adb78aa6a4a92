"""A cluster as it is now, for questions that change nothing: nodes, pods and quotas, from the API or from a dump.

A dump is what `kubectl get nodes,pods,configmaps -A -o yaml` writes.
"""

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from cluster.errors import ApiError
from cluster.gpu_nodes import READY, gpu_node_of
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, NODES, PODS, Node, Object, Pod
from console.connecting import connect_cluster
from console.errors import CommandError
from console.manifests import decode_document, read_objects
from console.offline_admission import OfflineQuotas
from console.quota_files import FileCharges, SourcedDocument, find_quotas
from scheduler.cluster_state import ClusterState
from scheduler.pods import OtherPod, SchedulerPod, cached_pod_of
from settings.configuration import Configuration
from simulator.experiment import Scenario
from simulator.replay import add_nodes
from simulator.trace_files import Task, TraceError, TraceNode
from vcuda.amounts import Amounts
from vcuda.compiled_workload import CompiledWorkload
from vcuda.decision import Unavailable
from vcuda.gpu_table import GpuTable
from vcuda.names import LEGACY_NAME, LEGACY_NAMESPACE, WORKLOAD_CONFIG_MAP, WORKLOAD_KEY, names_for
from vcuda.placement_costs import WorkloadEstimate
from vcuda.quota_usage import QuotaUsage
from vcuda.scheme import Scheme, build_scheme
from vcuda.task_shapes import task_shape
from vcuda.trial_cluster import TrialCluster
from vcuda.workload import WorkloadHistory, decode_history


class ClusterSnapshot:
    """Nodes with what pods hold of them, quotas with what pods are charged, and the pods that wait."""

    def __init__(self, documents: Sequence[SourcedDocument], configuration: Configuration) -> None:
        self._configuration = configuration
        self.scheme = build_scheme(
            names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies
        )
        nodes = [decode_document(each, Node) for _, each in documents if each.get("kind") == "Node"]
        pods = [decode_document(each, Pod) for _, each in documents if each.get("kind") == "Pod"]
        self._state = state_of(nodes, pods, self.scheme)
        self._pods = [pod for each in pods if isinstance(pod := cached_pod_of(each, self.scheme), SchedulerPod)]
        self._nodes = [simulated_node(name, self._state) for name in self._state.node_names()]
        found = find_quotas(documents, configuration)
        if found.mistakes:
            raise CommandError("\n".join(map(str, found.mistakes)))
        charges = FileCharges(OfflineQuotas(found.quotas), list(documents), configuration)
        charges.charge_existing_pods()
        self._ledgers = {name: charges.quotas.ledger(name) for name in charges.quotas.namespaces}
        self._history = stored_history(documents) or WorkloadHistory()

    def usages(self) -> dict[str, QuotaUsage]:
        """Return what each namespace with quotas uses of them; the caller may change it."""
        # Shallow: amounts are values.
        return {name: copy.copy(ledger.usage) for name, ledger in self._ledgers.items()}

    def trial(self) -> TrialCluster:
        """Return a cluster on which pods can be tried."""
        estimate = WorkloadEstimate(CompiledWorkload(self._history.typical()))
        return TrialCluster(
            self._state.table.copy(),
            estimate,
            unit_mib=self.scheme.unit_mib,
            strategy=self._configuration.scheduler.policy,
            usages=self.usages(),
        )

    def scenario(self, added: Callable[[Sequence[TraceNode]], Iterable[TraceNode]]) -> Scenario:
        """Return a simulation that begins with the running pods, then has the waiting ones and others like them."""
        table: GpuTable = self._state.table.copy()
        if not len(table):
            raise TraceError("the cluster has no nodes with GPUs that a node plugin has published")
        add_nodes(table, added(self._nodes))
        alive = [pod for pod in self._pods if not pod.has_ended and not pod.is_deleting]
        waiting = [self._task(pod) for pod in sorted(alive, key=lambda pod: pod.queue_position) if not pod.node]
        return Scenario(
            table,
            [self._task(pod) for pod in alive],
            first=waiting,
            usages=self.usages(),
            charged=self._charged(),
        )

    def _task(self, pod: SchedulerPod) -> Task:
        """Return a pod as a task: several containers count as one that takes as much as all of them."""
        shape = task_shape(pod.request, pod.options, pod.host, self.scheme.unit_mib)
        return Task(
            name=pod.title,
            cpu_milli=pod.host.cpu_milli,
            memory_mib=pod.host.mib,
            gpus=shape.gpus,
            cores=shape.cores,
            models=shape.models,
            gpu_memory_mib=shape.memory_mib,
            namespace=pod.metadata.namespace,
        )

    def _charged(self) -> dict[str, dict[str, Amounts]]:
        charged: dict[str, dict[str, Amounts]] = {}
        for pod in self._state.bound_pods():
            holding = self._state.holding(pod.uid)
            models = {gpu.uuid: gpu.model for gpu in self._state.table.gpus(pod.node)}
            model = next((models[uuid] for uuid in holding.usage if uuid in models), "") if holding else ""
            if model:
                sizes = self._state.card_sizes_mib()
                by_model = charged.setdefault(pod.metadata.namespace, {})
                amounts = pod.request.demand(sizes[model], self.scheme.unit_mib)
                by_model[model] = by_model.get(model, Amounts()) + amounts
        return charged


def read_snapshot(configuration: Configuration, files: Sequence[str] = ()) -> ClusterSnapshot:
    """Read the cluster of the kubeconfig, or dumps of one."""
    return ClusterSnapshot(read_objects(files) if files else read_cluster_objects(configuration), configuration)


def read_cluster_objects(configuration: Configuration) -> list[SourcedDocument]:
    """Read nodes, pods and quotas as documents; raises CommandError that says what may not be read."""
    cluster: Cluster = connect_cluster(configuration)
    names = build_scheme(names_for(configuration.domain)).all_names
    quotas = [Selector(labels=f"{each.quota_label}=true") for each in names]
    try:
        found: list[tuple[str, Object]] = [("Node", each) for each in cluster.list(NODES).items]
        found += [("Pod", each) for page in cluster.pages(PODS) for each in page.items]
        found += [("ConfigMap", each) for selector in quotas for each in cluster.list(CONFIG_MAPS, "", selector).items]
        legacy = Selector(fields=f"metadata.name={LEGACY_NAME}")
        found += [("ConfigMap", each) for each in cluster.list(CONFIG_MAPS, LEGACY_NAMESPACE, legacy).items]
    except (ApiError, Unavailable) as error:
        raise CommandError(
            f"{error}; this needs to list nodes, pods and ConfigMaps of all namespaces, or a dump of them"
        ) from None
    # Without it the prior applies.
    with suppress(ApiError, Unavailable):
        found.append(("ConfigMap", cluster.get(CONFIG_MAPS, WORKLOAD_CONFIG_MAP, configuration.system_namespace)))
    unique = {(kind, each.metadata.namespace, each.metadata.name): each for kind, each in found}
    return [("cluster", {"kind": kind, **msgspec.to_builtins(each)}) for (kind, *_), each in unique.items()]


def state_of(nodes: Iterable[Node], pods: Iterable[Pod], scheme: Scheme) -> ClusterState:
    """Return what a scheduler would know of a cluster; nodes that take no pods are left out."""
    state = ClusterState(scheme.unit_mib, time.monotonic)
    for node in nodes:
        gpu_node = gpu_node_of(node, scheme)
        if gpu_node.gpus and takes_pods(node):
            state.handle_node(None, gpu_node)
    for pod in pods:
        cached = cached_pod_of(pod, scheme)
        if isinstance(cached, OtherPod):
            state.handle_other_pod(None, cached)
        elif cached is not None:
            state.handle_pod(None, cached)
    return state


def takes_pods(node: Node) -> bool:
    """Whether a node is neither cordoned nor known not to be ready."""
    ready = [condition.status for condition in node.status.conditions if condition.type == READY]
    return not node.spec.unschedulable and all(status == "True" for status in ready)


def simulated_node(name: str, state: ClusterState) -> TraceNode:
    gpus, node = state.table.gpus(name), state.node(name)
    host, pool = (node.host, node.pool) if node else (None, "")
    return TraceNode(
        name,
        host.cpu_milli if host else 0,
        host.mib if host else 0,
        len(gpus),
        gpus[0].model,
        gpus[0].memory_mib,
        pool,
    )


def stored_history(documents: Iterable[SourcedDocument]) -> WorkloadHistory | None:
    """Return what a scheduler has learned and stored; None if that is not among the documents."""
    for _, document in documents:
        metadata, data = document.get("metadata") or {}, document.get("data") or {}
        if document.get("kind") == "ConfigMap" and metadata.get("name") == WORKLOAD_CONFIG_MAP:
            try:
                return decode_history(str(data.get(WORKLOAD_KEY, "")))
            except ValueError:
                return None
    return None
