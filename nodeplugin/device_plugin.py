"""The two device plugins, one per resource, as the kubelet sees them: gRPC servers, registration, and its calls.

One loop keeps both registered. It detects a restarted kubelet by its socket, a deleted socket of ours, and a kubelet
that does not watch the devices, and then registers again on new sockets. Their names are random: kubelets from 1.37 on
refuse to register a connected socket twice.
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

from cluster.backoff import Backoff
from nodeplugin.allocating import Allocator
from nodeplugin.device_ids import Resource
from nodeplugin.kubelet import Kubelet, KubeletError, plugin_options
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.proto import deviceplugin_v1beta1_pb2_grpc as api_grpc
from nodeplugin.refusal import AllocationRefused

POLL_S = 0.2
RETRY_BACKOFF = Backoff(first_s=2 * POLL_S, max_s=1.0)
# How long the kubelet may take from the registration to ListAndWatch.
WATCH_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 2.0
# Each ListAndWatch stream occupies one; the kubelet makes one other call per plugin at a time, and starts containers
# in parallel to that.
THREADS = 6
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
SOCKET_PREFIX = "quotient-"

# Receives the step (prefer, allocate or start), its seconds, and whether it succeeded.
Observe = Callable[[str, float, bool], None]


class DevicePlugin(api_grpc.DevicePluginServicer):
    """The device plugin service of one resource."""

    def __init__(self, resource: Resource, allocator: Allocator, observe: Observe) -> None:
        self.resource, self._allocator, self._observe = resource, allocator, observe
        # Guards the change counter, on which ListAndWatch streams wait.
        self._changed = threading.Condition()
        self._version = 0
        self._closed = False
        self.streams = 0
        self._log = structlog.get_logger().bind(resource=resource.value)

    def notify(self) -> None:
        """Make the streams compare the devices with what they sent last."""
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End the streams."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def GetDevicePluginOptions(self, request: api.Empty, context: grpc.ServicerContext) -> api.DevicePluginOptions:  # noqa: ARG002, N802
        return plugin_options()

    def ListAndWatch(self, request: api.Empty, context: grpc.ServicerContext) -> Iterator[api.ListAndWatchResponse]:  # noqa: ARG002, N802
        """Stream all devices: once at the start, then after every change."""
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
                # Outside the lock: a change during the computation increments the version and is sent next.
                devices = self._allocator.devices(self.resource)
                if devices != sent and not ended.is_set():
                    sent = devices
                    yield encode_devices(devices)
        finally:
            self.streams -= 1

    def GetPreferredAllocation(  # noqa: N802
        self,
        request: api.PreferredAllocationRequest,
        context: grpc.ServicerContext,  # noqa: ARG002
    ) -> api.PreferredAllocationResponse:
        response = api.PreferredAllocationResponse()
        started = time.monotonic()
        for each in request.container_requests:
            chosen = self._allocator.choose_ids(
                self.resource, each.available_deviceIDs, each.must_include_deviceIDs, each.allocation_size
            )
            response.container_responses.add(deviceIDs=chosen)
        self._record_success("prefer", started)
        return response

    def Allocate(self, request: api.AllocateRequest, context: grpc.ServicerContext) -> api.AllocateResponse:  # noqa: N802
        started = time.monotonic()
        try:
            responses = [
                self._allocator.allocate(self.resource, each.devices_ids) for each in request.container_requests
            ]
        except Exception as error:  # the outermost frame of the call
            self._abort("allocate", error, started, context)
        self._record_success("allocate", started)
        return api.AllocateResponse(container_responses=responses)

    def PreStartContainer(  # noqa: N802
        self, request: api.PreStartContainerRequest, context: grpc.ServicerContext
    ) -> api.PreStartContainerResponse:
        started = time.monotonic()
        try:
            self._allocator.check_start(self.resource, request.devices_ids)
        except Exception as error:  # the outermost frame of the call
            self._abort("start", error, started, context)
        self._record_success("start", started)
        return api.PreStartContainerResponse()

    def _record_success(self, step: str, started: float) -> None:
        took_s = time.monotonic() - started
        self._observe(step, took_s, True)  # noqa: FBT003 - whether it succeeded
        self._log.debug("answered", step=step, took_ms=round(took_s * 1000, 3))

    def _abort(self, step: str, error: Exception, started: float, context: grpc.ServicerContext) -> NoReturn:
        self._observe(step, time.monotonic() - started, False)  # noqa: FBT003
        if isinstance(error, AllocationRefused):
            self._log.warning("allocation_refused", step=step, error=str(error))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"Quotient: {error}")
        self._log.error("call_failed", step=step, exc_info=error)
        context.abort(
            grpc.StatusCode.INTERNAL,
            f"Quotient: internal error in the node plugin: {error}; its log on this node has the details",
        )
        raise AssertionError("abort raises")


def encode_devices(devices: dict[str, bool]) -> api.ListAndWatchResponse:
    return api.ListAndWatchResponse(
        devices=[api.Device(ID=each, health=HEALTHY if healthy else UNHEALTHY) for each, healthy in devices.items()]
    )


class DevicePluginServer:
    """One plugin on one socket; never restarted, but replaced by a new server on a new socket."""

    def __init__(self, plugin: DevicePlugin, folder: Path) -> None:
        self.plugin = plugin
        self.socket = folder / f"{SOCKET_PREFIX}{plugin.resource}-{secrets.token_hex(4)}.sock"
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix=f"plugin-{plugin.resource}"),
            options=[("grpc.max_receive_message_length", 64 * 2**20), ("grpc.so_reuseport", 0)],
        )
        api_grpc.add_DevicePluginServicer_to_server(plugin, self._server)
        self._server.add_insecure_port(f"unix://{self.socket}")
        self._server.start()
        self._inode = self.socket.stat().st_ino

    def is_intact(self) -> bool:
        """Whether the socket file is still the one created here: a starting kubelet deletes all of them."""
        with suppress(OSError):
            return self.socket.stat().st_ino == self._inode
        return False

    def stop(self) -> None:
        """Stop without grace: the end of the stream is what tells the kubelet, and it marks all devices unhealthy."""
        self.plugin.close()
        self._server.stop(0).wait(STOP_TIMEOUT_S)
        with suppress(OSError):
            self.socket.unlink()


class Registrar:
    """Keeps both plugins serving and registered with the kubelet."""

    def __init__(self, kubelet: Kubelet, allocator: Allocator, names: dict[Resource, str], observe: Observe) -> None:
        self._kubelet, self._allocator, self._names, self._observe = kubelet, allocator, names, observe
        self._servers: list[DevicePluginServer] = []
        self._ending = threading.Event()
        # The kubelet's socket at the last registration.
        self._registered: tuple[int, int, int] | None = None
        # When the kubelet last watched both plugins, or the registration ended.
        self._watched_at = 0.0
        self.registrations = 0
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="registrar", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._thread.join(10)
        self._stop_servers()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def registered(self) -> bool:
        """Whether the kubelet watches the devices of both plugins."""
        return bool(self._servers) and all(each.plugin.streams for each in self._servers)

    def notify(self) -> None:
        """Send the devices to the kubelet if they have changed."""
        for server in list(self._servers):
            server.plugin.notify()

    def _run(self) -> None:
        failures = 0
        self._remove_stale_sockets()
        while not self._ending.is_set():
            wait_s = POLL_S
            try:
                if reason := self._registration_reason():
                    self._register(reason)
                    failures = 0
            except Exception as error:  # the outermost frame of the thread: it has to go on
                failures += 1
                wait_s = RETRY_BACKOFF.delay_s(failures)
                self._log.warning("registration_failed", error=str(error), failures=failures)
                self._stop_servers()
            self._ending.wait(wait_s)

    def _registration_reason(self) -> str:
        """Say why to register; empty if there is no reason, or no kubelet."""
        identity = self._kubelet.socket_identity()
        if identity is None:
            return ""
        if not self._servers:
            return "not registered yet"
        if identity != self._registered:
            return "the kubelet was restarted"
        if not all(server.is_intact() for server in self._servers):
            return "a socket of this plugin was deleted"
        if not self.registered and time.monotonic() - self._watched_at > WATCH_TIMEOUT_S:
            return "the kubelet does not watch the devices"
        if self.registered:
            self._watched_at = time.monotonic()
        return ""

    def _register(self, reason: str) -> None:
        started = time.monotonic()
        self._stop_servers()
        self._allocator.reset_calls()
        identity = self._kubelet.socket_identity()
        for resource, name in self._names.items():
            server = DevicePluginServer(DevicePlugin(resource, self._allocator, self._observe), self._kubelet.plugins)
            self._servers.append(server)
            self._kubelet.register(server.socket.name, name)
        # Otherwise the two plugins could be registered with two different kubelets.
        if identity != self._kubelet.socket_identity():
            raise KubeletError("the kubelet was restarted during the registration")
        self._registered, self._watched_at = identity, time.monotonic()
        self.registrations += 1
        self._kubelet.connect()
        self._log.info("registered", reason=reason, took_s=round(time.monotonic() - started, 3))

    def _stop_servers(self) -> None:
        servers, self._servers = self._servers, []
        for server in servers:
            server.stop()

    def _remove_stale_sockets(self) -> None:
        """Remove the sockets of a plugin process that was killed."""
        for socket in self._kubelet.plugins.glob(f"{SOCKET_PREFIX}*.sock"):
            socket.unlink(missing_ok=True)
