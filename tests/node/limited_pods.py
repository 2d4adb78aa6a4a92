"""Pods with the hook of the driver's memory limit, on a node with a real kubelet, containerd and runc.

Their CDI device is given by a device plugin of this module. What answers the hook runs outside of the cluster, and sees
its processes by the cluster's own /proc.
"""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from cluster.objects import Pod
from nodeplugin import fake
from nodeplugin.injection import CDI_VERSION
from nodeplugin.kubelet import Kubelet
from nodeplugin.memory_limit_hook import MemoryLimitHook
from nodeplugin.memory_limit_server import MemoryLimitServer
from nodeplugin.memory_limits import LimitedContainer, MemoryLimiter
from nodeplugin.nvml import Driver, load_bindings
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.proto import deviceplugin_v1beta1_pb2_grpc as api_grpc
from tests.cluster.layout import CDI
from tests.node.node import GpuNode, container
from tests.nodeplugin.limit_bench import LIMIT_MIB, TOKEN, description
from tests.waiting import eventually

RESOURCE, SOCKET = "test.example/limited", "limited.sock"
KIND, CDI_FILE = "test.example/limit", "test.example-limit.json"
DEVICES = 8


class CdiDevicePlugin(api_grpc.DevicePluginServicer):
    """Answers each allocation with the one CDI device."""

    def GetDevicePluginOptions(self, request: api.Empty, context: grpc.ServicerContext) -> api.DevicePluginOptions:  # noqa: ARG002, N802
        return api.DevicePluginOptions()

    def ListAndWatch(self, request: api.Empty, context: grpc.ServicerContext) -> Iterator[api.ListAndWatchResponse]:  # noqa: ARG002, N802
        devices = [api.Device(ID=str(number), health="Healthy") for number in range(DEVICES)]
        yield api.ListAndWatchResponse(devices=devices)
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()

    def Allocate(self, request: api.AllocateRequest, context: grpc.ServicerContext) -> api.AllocateResponse:  # noqa: ARG002, N802
        response = api.AllocateResponse()
        for _ in request.container_requests:
            response.container_responses.add().cdi_devices.add(name=f"{KIND}={TOKEN}")
        return response


class LimitedPods:
    """The device plugin, and the plugin's part: hook, socket, limiter, and a fake driver of r615."""

    def __init__(self, node: GpuNode, folder: Path) -> None:
        inside = Path(f"/proc/{node.cluster.supervisor_info()['init']}/root")
        self.node, self.library = node, folder / "driver"
        self.hook = MemoryLimitHook(node.cluster.layout.state)
        self.hook.install()
        fake.install(self.library, description())
        self.driver = Driver(self.library / "libnvidia-ml.so.1", load_bindings()).open()
        self.driver.read_cards(self.driver.count_cards())
        self.containers: dict[str, LimitedContainer] = {}
        limiter = MemoryLimiter(self.driver, Path("/"), lambda: self.containers, inside / "proc")
        self._server = MemoryLimitServer(self.hook.socket, limiter.apply)
        self._cdi = inside / CDI[1:] / CDI_FILE
        self._kubelet = Kubelet(inside / "var/lib/kubelet/device-plugins", folder / "unused.sock")
        self._grpc = grpc.server(ThreadPoolExecutor(4))

    def start(self) -> "LimitedPods":
        devices = [{"name": TOKEN, "containerEdits": {"hooks": [self.hook.hook(TOKEN)]}}]
        self._cdi.write_text(json.dumps({"cdiVersion": CDI_VERSION, "kind": KIND, "devices": devices}))
        self._server.start()
        api_grpc.add_DevicePluginServicer_to_server(CdiDevicePlugin(), self._grpc)
        self._grpc.add_insecure_port(f"unix://{self._kubelet.plugins / SOCKET}")
        self._grpc.start()
        self._kubelet.register(SOCKET, RESOURCE)
        eventually(lambda: self.node.allocatable().get(RESOURCE) == str(DEVICES), f"{RESOURCE} to be offered", 60)
        return self

    def stop(self) -> None:
        self._grpc.stop(0).wait()
        self._server.stop()
        self._kubelet.close()
        self._cdi.unlink()
        self.driver.close()

    def container(self, name: str) -> dict[str, Any]:
        return container(name, 0, 0) | {"resources": {"limits": {RESOURCE: "1"}}}

    def allocate(self, pod: Pod) -> None:
        """Let a pod have the token."""
        title = f"{pod.metadata.namespace}/{pod.metadata.name}"
        self.containers[TOKEN] = LimitedContainer(pod.metadata.uid, title, "c0", {"GPU-0": LIMIT_MIB})

    def limited_cgroups(self) -> list[str]:
        """Return the cgroups whose limit was set, oldest first."""
        lines = (self.library / "memory-limits.txt").read_text().splitlines()
        return [line.split(" ", 4)[4] for line in lines]
