"""A cluster as it is now, for questions that change nothing: nodes, pods and quotas, from the API or from a dump.

A dump is what `kubectl get nodes,pods,configmaps -A -o yaml` writes.
"""

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from cluster.errors import ApiError
from cluster.gpu_nodes import READY, gpu_node_of
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, NODES, PODS, Node, Object, Pod
from console.connecting import connect_cluster
from console.errors import CommandError
from console.existing_pods import ExistingPods, reduced
from console.manifests import Document, decode_document, mapping_at, read_objects
from console.quota_files import SourcedDocument
from console.quotas_in_force import quotas_in_force, title_of
from ledger.ledger_store import LEDGER_SELECTOR
from scheduler.cluster_state import ClusterState
from scheduler.pods import OtherPod, SchedulerPod, cached_pod_of
from settings.configuration import Configuration
from simulator.experiment import Scenario
from simulator.replay import add_nodes
from simulator.trace_files import ClusterPod, Task, TraceError, TraceNode
from vcuda.compiled_workload import CompiledWorkload
from vcuda.decision import Unavailable
from vcuda.gpu_table import GpuTable
from vcuda.ledger import Ledger, LedgerState
from vcuda.names import LEGACY_NAME, LEGACY_NAMESPACE, WORKLOAD_CONFIG_MAP, WORKLOAD_KEY, names_for
from vcuda.placement_costs import WorkloadEstimate
from vcuda.quota import Quota
from vcuda.quota_usage import QuotaUsage
from vcuda.scheme import Scheme, build_scheme
from vcuda.task_shapes import task_shape
from vcuda.trial_cluster import TrialCluster
from vcuda.workload import WorkloadHistory, decode_history

QuotasOf = Callable[[str], Sequence[Quota]]
AddedTo = Callable[[Sequence[TraceNode]], Iterable[TraceNode]]


def no_quotas(_: str) -> Sequence[Quota]:
    return ()


class ClusterSnapshot:
    """Nodes with what pods hold of them, quotas with what pods are charged, and the pods that wait."""

    def __init__(self, documents: Sequence[SourcedDocument], configuration: Configuration) -> None:
        self._configuration = configuration
        self.scheme = build_scheme(
            names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies
        )
        listed = unique_documents(documents)
        nodes = [decode_document(each, Node) for _, each in listed if each.get("kind") == "Node"]
        pods = [decode_pod(each) for _, each in listed if each.get("kind") == "Pod"]
        cached = [each for pod in pods if (each := reduced(pod, cached_pod_of, self.scheme)) is not None]
        self._state = state_of(nodes, cached, self.scheme)
        self._pods = [pod for pod in cached if isinstance(pod, SchedulerPod)]
        self._nodes = [simulated_node(name, self._state) for name in self._state.node_names()]
        self._existing = ExistingPods(pods, nodes, configuration)
        self.quotas = quotas_in_force(listed, configuration)
        self._history = stored_history(listed, configuration.system_namespace) or WorkloadHistory()

    def usages(
        self, namespaces: Iterable[str] = (), *, instead: QuotasOf = no_quotas, only_bound: bool = False
    ) -> dict[str, QuotaUsage]:
        """Return what each namespace with quotas uses of them: those with pods, with quotas of their own, and these.

        `instead` are quotas that replace those of the namespaces they are for. With `only_bound`, pods that wait are
        not charged.
        """
        usages = {}
        for name in sorted({*self.quotas.by_namespace, *self._existing.namespaces, *namespaces}):
            if quotas := instead(name) or self.quotas.of(name):
                ledger = Ledger(name, LedgerState.OPEN)
                ledger.set_quotas(quotas, 0)
                self._existing.charge(ledger, name, only_bound=only_bound)
                usages[name] = ledger.usage
        return usages

    def trial(self, namespaces: Iterable[str] = ()) -> TrialCluster:
        """Return a cluster on which pods of these namespaces can be tried."""
        estimate = WorkloadEstimate(CompiledWorkload(self._history.typical()))
        return TrialCluster(
            self._state.table.copy(),
            estimate,
            unit_mib=self.scheme.unit_mib,
            strategy=self._configuration.scheduler.policy,
            usages=self.usages(namespaces),
            cluster_mode=self._configuration.mode,
        )

    def scenario(self, added: AddedTo, instead: QuotasOf = no_quotas) -> Scenario:
        """Return a simulation that begins with the running pods, then has the waiting ones and others like them.

        `added` returns nodes to add, given those of the cluster; for `instead` see `usages`.
        """
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
            # Those that wait are charged when they arrive.
            usages=self.usages(instead=instead, only_bound=True),
            cluster_mode=self._configuration.mode,
        )

    def _task(self, pod: SchedulerPod) -> Task:
        """Return a pod as a task, which is placed as what the pod requests, and counted by its shape."""
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
            pod=ClusterPod(pod.request, pod.options, shape),
        )


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
    documents = [("cluster", {"kind": kind, **msgspec.to_builtins(each)}) for kind, each in found]
    if quotas_in_force(documents, configuration).warnings:
        # Ledgers have the last valid version of an invalid quota. They are large, and else not needed.
        with suppress(ApiError, Unavailable):
            ledgers = cluster.list(CONFIG_MAPS, configuration.system_namespace, LEDGER_SELECTOR).items
            documents += [("cluster", {"kind": "ConfigMap", **msgspec.to_builtins(each)}) for each in ledgers]
    return documents


def unique_documents(documents: Iterable[SourcedDocument]) -> list[SourcedDocument]:
    """Return each object once: a ConfigMap may have several quota labels, and dumps may overlap."""
    unique = {(str(document.get("kind")), title_of(document)): (file, document) for file, document in documents}
    return list(unique.values())


def decode_pod(document: Document) -> Pod:
    """Decode a pod. One that was written by hand gets a UID of its own: what pods hold is kept by it."""
    pod = decode_document(document, Pod)
    if pod.metadata.uid:
        return pod
    return replace(pod, metadata=replace(pod.metadata, uid=str(uuid.uuid5(uuid.NAMESPACE_OID, title_of(document)))))


def state_of(nodes: Iterable[Node], pods: Iterable[SchedulerPod | OtherPod], scheme: Scheme) -> ClusterState:
    """Return what a scheduler would know of a cluster; nodes that take no pods are left out."""
    state = ClusterState(scheme.unit_mib, time.monotonic)
    for node in nodes:
        gpu_node = gpu_node_of(node, scheme)
        if gpu_node.gpus and takes_pods(node):
            state.handle_node(None, gpu_node)
    for pod in pods:
        if isinstance(pod, OtherPod):
            state.handle_other_pod(None, pod)
        else:
            state.handle_pod(None, pod)
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
        gpus[0].isolation,
    )


def stored_history(documents: Iterable[SourcedDocument], system_namespace: str) -> WorkloadHistory | None:
    """Return what a scheduler has learned and stored; None if that is not among the documents."""
    title = f"{system_namespace}/{WORKLOAD_CONFIG_MAP}"
    for _, document in documents:
        if document.get("kind") == "ConfigMap" and title_of(document) == title:
            try:
                return decode_history(str(mapping_at(document, "data").get(WORKLOAD_KEY, "")))
            except ValueError:
                return None
    return None
