"""A small kubelet and a small scheduler for `quotient local`: as much of both as the real node plugin can tell.

The kubelet speaks to the plugin as the real one does: over gRPC on Unix sockets, two calls for each container, in any
order. Containers do not run; what they would have been given is all there is to see.
"""

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from cluster.errors import ApiError
from cluster.interface import Cluster
from cluster.objects import NODES, PODS, Node, Pod
from nodeplugin.device_plugin import HEALTHY
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.proto import deviceplugin_v1beta1_pb2_grpc as api_grpc
from nodeplugin.proto import podresources_v1_pb2 as resources
from nodeplugin.proto import podresources_v1_pb2_grpc as resources_grpc
from vcuda.gpu_availability import GpuAvailability, GpuUsage, available_gpus
from vcuda.inventory import decode_inventory
from vcuda.placement import InsufficientGpus, PlacedSlices, peak_usage, place_pod
from vcuda.placement_annotation import decode_placement
from vcuda.pod import Container
from vcuda.pod_options import read_pod_options
from vcuda.request import Role, iter_containers, request_held_by
from vcuda.scheme import Scheme

CALL_S = 20.0
THREADS = 4
RUNNING, FAILED = "Running", "Failed"

Ids = frozenset[str]


class Refusal(Exception):  # noqa: N818 - of a pod
    """A pod is not admitted, and why."""


class PluginEndpoint:
    """A plugin that has registered, and the devices that it offers."""

    def __init__(self, socket: Path, on_change: Any) -> None:  # noqa: ANN401 - a callback
        self.channel = grpc.insecure_channel(f"unix://{socket}", [("grpc.default_authority", "localhost")])
        self.stub = api_grpc.DevicePluginStub(self.channel)
        self.healthy: Ids = frozenset()
        self._on_change = on_change
        threading.Thread(target=self._follow, name="devices", daemon=True).start()

    def _follow(self) -> None:
        with suppress(grpc.RpcError):
            for said in self.stub.ListAndWatch(api.Empty()):
                self.healthy = frozenset(each.ID for each in said.devices if each.health == HEALTHY)
                self._on_change()
        self.healthy = frozenset()


class LocalKubelet(api_grpc.RegistrationServicer, resources_grpc.PodResourcesListerServicer):
    """Admits the pods of one node."""

    def __init__(self, cluster: Cluster, node: str, folder: Path) -> None:
        self._cluster, self._node = cluster, node
        self.plugins, self.pod_resources = folder / "device-plugins", folder / "pod-resources"
        for each in (self.plugins, self.pod_resources):
            each.mkdir(parents=True)
        # Guards what containers hold, which the plugin asks for while it is being asked.
        self._lock = threading.RLock()
        self._endpoints: dict[str, PluginEndpoint] = {}
        self._pods: dict[str, Pod] = {}
        self._held: dict[tuple[str, str, str], Ids] = {}
        self._servers = [self._serve(self.plugins / "kubelet.sock"), self._serve(self.pod_resources / "kubelet.sock")]

    def _serve(self, socket: Path) -> grpc.Server:
        server = grpc.server(ThreadPoolExecutor(THREADS, thread_name_prefix="kubelet"))
        api_grpc.add_RegistrationServicer_to_server(self, server)
        resources_grpc.add_PodResourcesListerServicer_to_server(self, server)
        server.add_insecure_port(f"unix://{socket}")
        server.start()
        return server

    def stop(self) -> None:
        """End."""
        for endpoint in self._endpoints.values():
            endpoint.channel.close()
        for server in self._servers:
            server.stop(0)

    def Register(self, request: api.RegisterRequest, context: grpc.ServicerContext) -> api.Empty:  # noqa: ARG002, N802
        """Take a plugin's resource."""
        self._endpoints[request.resource_name] = PluginEndpoint(self.plugins / request.endpoint, self._publish)
        return api.Empty()

    def List(  # noqa: N802
        self,
        request: resources.ListPodResourcesRequest,  # noqa: ARG002
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> resources.ListPodResourcesResponse:
        """List what containers hold; plain init containers are not listed, as the real one does not."""
        with self._lock:
            return resources.ListPodResourcesResponse(pod_resources=[self._listed(pod) for pod in self._pods.values()])

    def Get(  # noqa: N802
        self, request: resources.GetPodResourcesRequest, context: grpc.ServicerContext
    ) -> resources.GetPodResourcesResponse:
        """Say what the containers of one pod hold."""
        with self._lock:
            for pod in self._pods.values():
                if (pod.metadata.name, pod.metadata.namespace) == (request.pod_name, request.pod_namespace):
                    return resources.GetPodResourcesResponse(pod_resources=self._listed(pod))
        context.abort(grpc.StatusCode.NOT_FOUND, "no such pod")
        raise AssertionError("abort raises")

    def _listed(self, pod: Pod) -> resources.PodResources:
        said = resources.PodResources(name=pod.metadata.name, namespace=pod.metadata.namespace)
        for _, role, container in iter_containers(pod.spec):
            if role is not Role.INIT:
                each = said.containers.add(name=container.name)
                for (uid, name, resource), ids in self._held.items():
                    if (uid, name) == (pod.metadata.uid, container.name):
                        each.devices.add(resource_name=resource, device_ids=sorted(ids))
        return said

    def _publish(self) -> None:
        offered = {name: str(len(endpoint.healthy)) for name, endpoint in self._endpoints.items()}
        with suppress(ApiError):
            status = {"capacity": offered, "allocatable": offered}
            self._cluster.patch(NODES, self._node, "", {"status": status}, subresource="status")

    @property
    def offered(self) -> dict[str, int]:
        """What the plugin offers now."""
        return {name: len(endpoint.healthy) for name, endpoint in self._endpoints.items()}

    def sync(self, pods: Iterable[Pod]) -> None:
        """Admit pods that are new here, and forget those that are gone."""
        there = {pod.metadata.uid: pod for pod in pods}
        for uid in set(self._pods) - set(there):
            self._forget(uid)
        for uid, pod in there.items():
            if uid not in self._pods and pod.status.phase not in (RUNNING, FAILED):
                self._admit(pod)

    def _admit(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        with self._lock:
            self._pods[uid] = pod
        status = {"phase": RUNNING, "reason": "", "message": ""}
        try:
            reusable: dict[str, set[str]] = {}
            for _, role, container in iter_containers(pod.spec):
                self._allocate(uid, container, reusable)
                for resource, ids in self._of(uid, container.name):
                    again = reusable.setdefault(resource, set())
                    if role is Role.INIT:
                        again |= ids
                    else:
                        again -= ids
            for _, _, container in iter_containers(pod.spec):
                for resource, ids in self._of(uid, container.name):
                    request = api.PreStartContainerRequest(devices_ids=sorted(ids))
                    self._endpoints[resource].stub.PreStartContainer(request, timeout=CALL_S)
        except (Refusal, grpc.RpcError) as wrong:
            told = wrong.details() if isinstance(wrong, grpc.RpcError) else str(wrong)
            self._forget(uid)
            status = {"phase": FAILED, "reason": "UnexpectedAdmissionError", "message": f"Pod was rejected: {told}"}
        with suppress(ApiError):
            self._cluster.patch(
                PODS, pod.metadata.name, pod.metadata.namespace, {"status": status}, subresource="status"
            )

    def _allocate(self, uid: str, container: Container, reusable: dict[str, set[str]]) -> None:
        limits = [(key, int(value)) for key, value in asked(container).items() if key in self._endpoints]
        random.shuffle(limits)
        for resource, amount in limits:
            endpoint = self._endpoints[resource]
            with self._lock:
                used = {each for (_, _, name), ids in self._held.items() if name == resource for each in ids}
            ids = set(sorted(reusable.get(resource, ()))[:amount])
            if len(ids) < amount:
                free = sorted(endpoint.healthy - used)
                if len(free) < amount - len(ids):
                    raise Refusal(f"not enough {resource}: {amount} asked, {len(free)} free")
                request = api.PreferredAllocationRequest()
                request.container_requests.add(
                    available_deviceIDs=[*ids, *free], must_include_deviceIDs=sorted(ids), allocation_size=amount
                )
                answer = endpoint.stub.GetPreferredAllocation(request, timeout=CALL_S)
                ids |= set(answer.container_responses[0].deviceIDs)
            wanted = api.AllocateRequest()
            wanted.container_requests.add(devices_ids=sorted(ids))
            endpoint.stub.Allocate(wanted, timeout=CALL_S)
            with self._lock:
                self._held[uid, container.name, resource] = frozenset(ids)

    def _of(self, uid: str, name: str) -> list[tuple[str, Ids]]:
        with self._lock:
            return [
                (resource, ids) for (owner, one, resource), ids in self._held.items() if (owner, one) == (uid, name)
            ]

    def _forget(self, uid: str) -> None:
        with self._lock:
            self._pods.pop(uid, None)
            self._held = {key: ids for key, ids in self._held.items() if key[0] != uid}


def asked(container: Container) -> dict[str, Any]:
    """Give a container's limits."""
    return dict(container.resources.limits or {}) if container.resources else {}


def choose(
    pod: Pod, nodes: Sequence[Node], pods: Sequence[Pod], scheme: Scheme, granted: Callable[[str], bool]
) -> tuple[str, PlacedSlices] | str:
    """Find a node and cards for a pod, as the scheduler will by the same function; or say why there are none."""
    request = request_held_by(pod.spec, pod.metadata.annotations, scheme)
    options, _ = read_pod_options(pod.metadata.annotations, scheme)
    seen: list[tuple[str, list[GpuAvailability]]] = []
    for node in nodes:
        with suppress(ValueError):
            inventory = decode_inventory(node.metadata.annotations.get(scheme.names.inventory, ""))
            gpus = [gpu for gpu in inventory if granted(gpu.model)]
            held = held_on(node.metadata.name, pods, scheme)
            seen.append((node.metadata.name, available_gpus(gpus, held, lambda gpu: gpu.reason)))
    told = []
    # The fullest node first, so that large pods find the others empty.
    for name, free in sorted(seen, key=lambda each: (sum(gpu.free_cores for gpu in each[1]), each[0])):
        try:
            return name, place_pod(request, free, unit_mib=scheme.unit_mib, options=options)
        except InsufficientGpus as wrong:
            told.append(f"{name}: {wrong}")
    return "; ".join(told)


def held_on(node: str, pods: Sequence[Pod], scheme: Scheme) -> list[dict[str, GpuUsage]]:
    """List what the pods of a node hold of its cards."""
    found = []
    for pod in pods:
        placed = decode_placement(pod.metadata.annotations.get(scheme.names.placement, ""))
        if placed and pod.spec.node_name == node and pod.status.phase != FAILED:
            found.append(peak_usage(request_held_by(pod.spec, pod.metadata.annotations, scheme), placed))
    return found
