"""A small kubelet for `quotient local`: as much of one as the real node plugin needs.

It talks to the plugin as the real one does: over gRPC on Unix sockets, with two calls for each container in random
order. It admits pods and reports their phase, but starts no containers.
"""

import random
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from cluster.errors import ApiError
from cluster.interface import Cluster
from cluster.objects import NODES, PODS, Pod
from nodeplugin.device_plugin import HEALTHY
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.proto import deviceplugin_v1beta1_pb2_grpc as api_grpc
from nodeplugin.proto import podresources_v1_pb2 as resources
from nodeplugin.proto import podresources_v1_pb2_grpc as resources_grpc
from vcuda.pod import Container
from vcuda.request import Role, iter_containers

CALL_S = 20.0
THREADS = 4
RUNNING, FAILED = "Running", "Failed"

Ids = frozenset[str]


class AdmissionError(Exception):
    """A pod is not admitted; the message becomes its status."""


class PluginEndpoint:
    """A registered device plugin, and the IDs of its healthy devices."""

    def __init__(self, socket: Path, on_change: Any) -> None:  # noqa: ANN401 - a callback
        self.channel = grpc.insecure_channel(f"unix://{socket}", [("grpc.default_authority", "localhost")])
        self.stub = api_grpc.DevicePluginStub(self.channel)
        self.healthy: Ids = frozenset()
        self._on_change = on_change
        threading.Thread(target=self._watch_devices, name="devices", daemon=True).start()

    def _watch_devices(self) -> None:
        with suppress(grpc.RpcError):
            for response in self.stub.ListAndWatch(api.Empty()):
                self.healthy = frozenset(each.ID for each in response.devices if each.health == HEALTHY)
                self._on_change()
        self.healthy = frozenset()


class LocalKubelet(api_grpc.RegistrationServicer, resources_grpc.PodResourcesListerServicer):
    """Admits the pods of one node: registration, allocation and PodResources."""

    def __init__(self, cluster: Cluster, node: str, folder: Path) -> None:
        self._cluster, self._node = cluster, node
        self.plugins, self.pod_resources = folder / "device-plugins", folder / "pod-resources"
        for each in (self.plugins, self.pod_resources):
            each.mkdir(parents=True)
        # Guards pods and their devices: the plugin calls PodResources while its own Allocate is being called.
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
        for endpoint in self._endpoints.values():
            endpoint.channel.close()
        for server in self._servers:
            server.stop(0)

    def Register(self, request: api.RegisterRequest, context: grpc.ServicerContext) -> api.Empty:  # noqa: ARG002, N802
        self._endpoints[request.resource_name] = PluginEndpoint(self.plugins / request.endpoint, self._publish)
        return api.Empty()

    def List(  # noqa: N802
        self,
        request: resources.ListPodResourcesRequest,  # noqa: ARG002
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> resources.ListPodResourcesResponse:
        """List the devices of containers; like the real kubelet, without those of plain init containers."""
        with self._lock:
            return resources.ListPodResourcesResponse(pod_resources=[self._listed(pod) for pod in self._pods.values()])

    def Get(  # noqa: N802
        self, request: resources.GetPodResourcesRequest, context: grpc.ServicerContext
    ) -> resources.GetPodResourcesResponse:
        with self._lock:
            for pod in self._pods.values():
                if (pod.metadata.name, pod.metadata.namespace) == (request.pod_name, request.pod_namespace):
                    return resources.GetPodResourcesResponse(pod_resources=self._listed(pod))
        context.abort(grpc.StatusCode.NOT_FOUND, "no such pod")
        raise AssertionError("abort raises")

    def _listed(self, pod: Pod) -> resources.PodResources:
        listed = resources.PodResources(name=pod.metadata.name, namespace=pod.metadata.namespace)
        for _, role, container in iter_containers(pod.spec):
            if role is not Role.INIT:
                each = listed.containers.add(name=container.name)
                for (uid, name, resource), ids in self._held.items():
                    if (uid, name) == (pod.metadata.uid, container.name):
                        each.devices.add(resource_name=resource, device_ids=sorted(ids))
        return listed

    def _publish(self) -> None:
        offered = {name: str(len(endpoint.healthy)) for name, endpoint in self._endpoints.items()}
        with suppress(ApiError):
            status = {"capacity": offered, "allocatable": offered}
            self._cluster.patch(NODES, self._node, "", {"status": status}, subresource="status")

    @property
    def offered(self) -> dict[str, int]:
        """The number of healthy devices of each resource."""
        return {name: len(endpoint.healthy) for name, endpoint in self._endpoints.items()}

    def sync(self, pods: Iterable[Pod]) -> None:
        """Admit pods that are new on this node, and release the devices of those that are gone."""
        current = {pod.metadata.uid: pod for pod in pods}
        for uid in set(self._pods) - set(current):
            self._release(uid)
        for uid, pod in current.items():
            if uid not in self._pods and pod.status.phase not in (RUNNING, FAILED):
                self._admit(pod)

    def _admit(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        with self._lock:
            self._pods[uid] = pod
        status = {"phase": RUNNING, "reason": "", "message": ""}
        try:
            # Devices of init containers are reused by the containers after them, as in the real kubelet.
            reusable: dict[str, set[str]] = {}
            for _, role, container in iter_containers(pod.spec):
                self._allocate(uid, container, reusable)
                for resource, ids in self._devices_of(uid, container.name):
                    again = reusable.setdefault(resource, set())
                    if role is Role.INIT:
                        again |= ids
                    else:
                        again -= ids
            for _, _, container in iter_containers(pod.spec):
                for resource, ids in self._devices_of(uid, container.name):
                    request = api.PreStartContainerRequest(devices_ids=sorted(ids))
                    self._endpoints[resource].stub.PreStartContainer(request, timeout=CALL_S)
        except (AdmissionError, grpc.RpcError) as error:
            message = error.details() if isinstance(error, grpc.RpcError) else str(error)
            self._release(uid)
            status = {"phase": FAILED, "reason": "UnexpectedAdmissionError", "message": f"Pod was rejected: {message}"}
        with suppress(ApiError):
            self._cluster.patch(
                PODS, pod.metadata.name, pod.metadata.namespace, {"status": status}, subresource="status"
            )

    def _allocate(self, uid: str, container: Container, reusable: dict[str, set[str]]) -> None:
        limits = [(key, int(value)) for key, value in limits_of(container).items() if key in self._endpoints]
        # The real kubelet iterates over a Go map here: the order is random.
        random.shuffle(limits)
        for resource, amount in limits:
            endpoint = self._endpoints[resource]
            with self._lock:
                used = {each for (_, _, name), ids in self._held.items() if name == resource for each in ids}
            ids = set(sorted(reusable.get(resource, ()))[:amount])
            if len(ids) < amount:
                free = sorted(endpoint.healthy - used)
                if len(free) < amount - len(ids):
                    raise AdmissionError(f"not enough {resource}: {amount} requested, {len(free)} free")
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

    def _devices_of(self, uid: str, name: str) -> list[tuple[str, Ids]]:
        with self._lock:
            return [
                (resource, ids) for (owner, one, resource), ids in self._held.items() if (owner, one) == (uid, name)
            ]

    def _release(self, uid: str) -> None:
        with self._lock:
            self._pods.pop(uid, None)
            self._held = {key: ids for key, ids in self._held.items() if key[0] != uid}


def limits_of(container: Container) -> dict[str, Any]:
    return dict(container.resources.limits or {}) if container.resources else {}
