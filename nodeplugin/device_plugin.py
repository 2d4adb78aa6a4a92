"""The two device plugins as the kubelet sees them: sockets, registration, and the calls it makes.

One loop keeps both registered: it notices a new kubelet by its socket, a deleted socket of ours, and a kubelet that
stopped listening, and begins anew with a socket of another name each time, which no kubelet knows yet.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import grpc
import structlog

from nodeplugin.allocating import AllocationRefused, Allocator
from nodeplugin.allocation_store import CheckpointWriteError
from nodeplugin.device_ids import Resource
from nodeplugin.kubelet import Kubelet, KubeletError, plugin_options
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.proto import deviceplugin_v1beta1_pb2_grpc as api_grpc

LOOK_S = 0.2
# How long a kubelet that was just registered may take to ask for the devices.
LISTEN_S = 5.0
THREADS = 6
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
PREFIX = "quotient-"
MOST_RETRY_S = 1.0

Observe = Callable[[str, float, bool], None]


class DevicePlugin(api_grpc.DevicePluginServicer):
    """Answers for one resource."""

    def __init__(self, resource: Resource, allocator: Allocator, observe: Observe) -> None:
        self.resource, self._allocator, self._observe = resource, allocator, observe
        # Guards the number of the last change, for which streams wait.
        self._changed = threading.Condition()
        self._version = 0
        self._closed = False
        self.streams = 0
        self._log = structlog.get_logger().bind(resource=resource.value)

    def changed(self) -> None:
        """Have the streams look whether the devices are others now."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the streams."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def GetDevicePluginOptions(self, request: api.Empty, context: grpc.ServicerContext) -> api.DevicePluginOptions:  # noqa: ARG002, N802
        """Say what to ask for."""
        return plugin_options()

    def ListAndWatch(self, request: api.Empty, context: grpc.ServicerContext) -> Iterator[api.ListAndWatchResponse]:  # noqa: ARG002, N802
        """Tell all devices, and again whenever one changes."""
        ended = threading.Event()

        def end() -> None:
            ended.set()
            with self._changed:
                self._changed.notify_all()

        context.add_callback(end)
        self.streams += 1
        sent: dict[str, bool] | None = None
        seen = -1
        try:
            while not (ended.is_set() or self._closed):
                with self._changed:
                    while self._version == seen and not (ended.is_set() or self._closed):
                        self._changed.wait()
                    seen = self._version
                devices = self._allocator.devices(self.resource)
                if devices != sent and not ended.is_set():
                    sent = devices
                    yield listing(devices)
        finally:
            self.streams -= 1

    def GetPreferredAllocation(  # noqa: N802
        self,
        request: api.PreferredAllocationRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> api.PreferredAllocationResponse:
        """Choose ids; never an error, which would refuse the pod."""
        answer = api.PreferredAllocationResponse()
        began = time.monotonic()
        for each in request.container_requests:
            chosen = self._allocator.preferred(
                self.resource, each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size
            )
            answer.container_responses.add(deviceIDs=chosen)
        self._went_well("prefer", began)
        return answer

    def Allocate(self, request: api.AllocateRequest, context: grpc.ServicerContext) -> api.AllocateResponse:  # noqa: N802
        """Give containers their cards."""
        began = time.monotonic()
        try:
            given = [self._allocator.allocate(self.resource, each.devices_ids) for each in request.container_requests]
        except Exception as wrong:  # the outermost frame of the call
            self._refuse("allocate", wrong, began, context)
        self._went_well("allocate", began)
        return api.AllocateResponse(container_responses=given)

    def PreStartContainer(  # noqa: N802
        self, request: api.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> api.PreStartContainerResponse:
        """Check a container before it starts."""
        began = time.monotonic()
        try:
            self._allocator.prestart(self.resource, request.devices_ids)
        except Exception as wrong:  # the outermost frame of the call
            self._refuse("start", wrong, began, context)
        self._went_well("start", began)
        return api.PreStartContainerResponse()

    def _went_well(self, step: str, began: float) -> None:
        took_s = time.monotonic() - began
        self._observe(step, took_s, True)  # noqa: FBT003 - whether it went well
        self._log.debug("answered", step=step, took_ms=round(took_s * 1000, 3))

    def _refuse(self, step: str, wrong: Exception, began: float, context: grpc.ServicerContext) -> NoReturn:
        self._observe(step, time.monotonic() - began, False)  # noqa: FBT003
        if isinstance(wrong, AllocationRefused | CheckpointWriteError):
            self._log.warning("refused", step=step, cause=str(wrong))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"Quotient: {wrong}")
        self._log.error("failed", step=step, exc_info=wrong)
        context.abort(grpc.StatusCode.INTERNAL, f"Quotient: the node plugin failed: {wrong}")
        raise AssertionError("abort raises")


def listing(devices: dict[str, bool]) -> api.ListAndWatchResponse:
    """Write devices as the kubelet reads them."""
    return api.ListAndWatchResponse(
        devices=[api.Device(ID=each, health=HEALTHY if healthy else UNHEALTHY) for each, healthy in devices.items()]
    )


class DevicePluginServer:
    """One plugin on one socket, until something happens to either."""

    def __init__(self, plugin: DevicePlugin, folder: Path) -> None:
        self.plugin = plugin
        self.socket = folder / f"{PREFIX}{plugin.resource}-{secrets.token_hex(4)}.sock"
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix=f"plugin-{plugin.resource}"),
            options=[("grpc.max_receive_message_length", 64 * 2**20), ("grpc.so_reuseport", 0)],
        )
        api_grpc.add_DevicePluginServicer_to_server(plugin, self._server)
        self._server.add_insecure_port(f"unix://{self.socket}")
        self._server.start()
        self._inode = self.socket.stat().st_ino

    def is_intact(self) -> bool:
        """Whether the socket is still the one we made."""
        with suppress(OSError):
            return self.socket.stat().st_ino == self._inode
        return False

    def stop(self) -> None:
        """End at once: the kubelet hears of it by the end of the stream."""
        self.plugin.close()
        self._server.stop(0).wait(2.0)
        with suppress(OSError):
            self.socket.unlink()


class Registrar:
    """Keeps both plugins served and registered."""

    def __init__(self, kubelet: Kubelet, allocator: Allocator, names: dict[Resource, str], observe: Observe) -> None:
        self._kubelet, self._allocator, self._names, self._observe = kubelet, allocator, names, observe
        self._servers: list[DevicePluginServer] = []
        self._ending = threading.Event()
        self._registered: tuple[int, int, int] | None = None
        self._since = 0.0
        self.registrations = 0
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="registrar", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and leave no socket."""
        self._ending.set()
        self._thread.join(10)
        self._drop()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def registered(self) -> bool:
        """Whether the kubelet listens to both."""
        return bool(self._servers) and all(each.plugin.streams for each in self._servers)

    def changed(self) -> None:
        """Have the kubelet told of what has changed."""
        for server in list(self._servers):
            server.plugin.changed()

    def _run(self) -> None:
        failures = 0
        self._sweep()
        while not self._ending.is_set():
            wait_s = LOOK_S
            try:
                if why := self._why_anew():
                    self._begin(why)
                    failures = 0
            except Exception as wrong:  # the outermost frame of the thread: it has to go on
                failures += 1
                wait_s = min(LOOK_S * 2**failures, MOST_RETRY_S)
                self._log.warning("not_registered", cause=str(wrong), failures=failures)
                self._drop()
            self._ending.wait(wait_s)

    def _why_anew(self) -> str:
        """Say why to register again; nothing if all is well, or there is no kubelet."""
        identity = self._kubelet.identity()
        if identity is None:
            return ""
        if not self._servers:
            return "not registered yet"
        if identity != self._registered:
            return "the kubelet is another one"
        if not all(server.is_intact() for server in self._servers):
            return "a socket of ours is gone"
        if not self.registered and time.monotonic() - self._since > LISTEN_S:
            return "the kubelet does not listen"
        if self.registered:
            self._since = time.monotonic()
        return ""

    def _begin(self, why: str) -> None:
        began = time.monotonic()
        self._drop()
        self._allocator.begin_anew()
        identity = self._kubelet.identity()
        for resource, name in self._names.items():
            server = DevicePluginServer(DevicePlugin(resource, self._allocator, self._observe), self._kubelet.plugins)
            self._servers.append(server)
            self._kubelet.register(server.socket.name, name)
        if identity != self._kubelet.identity():
            raise KubeletError("the kubelet was replaced meanwhile")
        self._registered, self._since = identity, time.monotonic()
        self.registrations += 1
        self._kubelet.greet()
        self._log.info("registered", why=why, took_s=round(time.monotonic() - began, 3))

    def _drop(self) -> None:
        servers, self._servers = self._servers, []
        for server in servers:
            server.stop()

    def _sweep(self) -> None:
        """Remove the sockets of a plugin that was killed."""
        for left in self._kubelet.plugins.glob(f"{PREFIX}*.sock"):
            left.unlink(missing_ok=True)
