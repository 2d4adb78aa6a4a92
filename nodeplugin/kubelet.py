"""A client of this node's kubelet: plugin registration, the PodResources API, and the device manager's checkpoint.

PodResources tells which devices each running container has. The checkpoint also has plain init containers, and the
Allocate responses that the kubelet replays whenever a container restarts.
"""

import base64
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import grpc
import msgspec
from google.protobuf.message import DecodeError
from msgspec import Struct, field

from cluster.backoff import jittered
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.proto import deviceplugin_v1beta1_pb2_grpc as api_grpc
from nodeplugin.proto import podresources_v1_pb2 as resources
from nodeplugin.proto import podresources_v1_pb2_grpc as resources_grpc
from vcuda.decoding import decoder_for

VERSION = "v1beta1"
CHECKPOINT = "kubelet_internal_checkpoint"
SOCKET = "kubelet.sock"
# PodResources is limited to 100 calls per second with a burst of 10, shared with all other agents on the node.
MAX_TRIES = 8
RETRY_S = 0.03
CALL_TIMEOUT_S = 2.0
REGISTER_TIMEOUT_S = 10.0

T = TypeVar("T")


class KubeletError(Exception):
    """A call to the kubelet failed."""


class UnknownPod(KubeletError):  # noqa: N818 - an answer
    """The kubelet does not list this pod: not admitted yet, or gone."""


class ListedContainer(Struct, frozen=True):
    """A container in PodResources. Devices are searched only on demand: a node has thousands."""

    namespace: str
    pod: str
    container: str
    devices: Iterable[resources.ContainerDevices]

    def has(self, resource: str) -> bool:
        return any(part.resource_name == resource and part.device_ids for part in self.devices)

    def ids(self, resource: str) -> frozenset[str]:
        # The kubelet may spread a resource over several entries, one per NUMA node or even per device.
        return frozenset(each for part in self.devices if part.resource_name == resource for each in part.device_ids)


class CheckpointedContainer(Struct, frozen=True):
    """One container and resource in the kubelet's checkpoint: the device IDs, and the Allocate response for them."""

    uid: str
    container: str
    resource: str
    ids: frozenset[str]
    response_bytes: bytes = b""

    @property
    def response(self) -> api.ContainerAllocateResponse:
        """The decoded response; empty if it cannot be decoded."""
        response = api.ContainerAllocateResponse()
        with suppress(DecodeError):
            response.ParseFromString(self.response_bytes)
        return response


class CheckpointEntry(Struct, frozen=True):
    """An entry of the kubelet's checkpoint. Device IDs are grouped by NUMA node; older kubelets wrote a plain list."""

    uid: str = field(name="PodUID")
    container: str = field(name="ContainerName")
    resource: str = field(name="ResourceName")
    ids: dict[str, list[str] | None] | list[str] | None = field(name="DeviceIDs", default=None)
    response: str | None = field(name="AllocResp", default=None)


class CheckpointData(Struct, frozen=True):
    entries: list[CheckpointEntry] | None = field(name="PodDeviceEntries", default=None)


class KubeletCheckpoint(Struct, frozen=True):
    """The kubelet's checkpoint file, partial. Its checksum is not verified: it hashes Go's rendering of the data."""

    data: CheckpointData = field(name="Data")


class Kubelet:
    """Calls the kubelet over its Unix sockets, and reads its checkpoint. Safe for use by several threads."""

    def __init__(self, plugins: Path, pod_resources: Path) -> None:
        self.plugins = plugins
        self.socket = plugins / SOCKET
        options = [
            # gRPC would derive :authority from the socket's path, which the kubelet's server does not accept.
            ("grpc.default_authority", "localhost"),
            ("grpc.max_receive_message_length", 64 * 2**20),
            # A kubelet restart takes a second or two; gRPC's default backoff goes up to two minutes.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._channel = grpc.insecure_channel(f"unix://{pod_resources}", options)
        self._lister = resources_grpc.PodResourcesListerStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def register(self, endpoint: str, resource: str) -> None:
        """Register a plugin. The plugin must be serving: the kubelet calls it before this returns."""
        with grpc.insecure_channel(f"unix://{self.socket}", [("grpc.default_authority", "localhost")]) as channel:
            request = api.RegisterRequest(
                version=VERSION, endpoint=endpoint, resource_name=resource, options=plugin_options()
            )
            try:
                api_grpc.RegistrationStub(channel).Register(request, timeout=REGISTER_TIMEOUT_S)
            except grpc.RpcError as error:
                raise KubeletError(f"registering {resource} failed: {grpc_error(error)}") from None

    def connect(self) -> None:
        """Open the PodResources connection now, so that the first allocation does not wait for it."""
        # Any call connects; Get has no side effect, and an error is as good as an answer.
        with suppress(KubeletError):
            self.get_pod_containers("default", "no-such-pod")

    def list_containers(self) -> list[ListedContainer]:
        """List the containers of all pods. Never call this while an Allocate call is being answered.

        List makes the kubelet rebuild its reservations from completed allocations if a pod has ended: the device IDs
        of the call in flight would be assigned again.
        """
        response = retry_while_busy(
            lambda: self._lister.List(resources.ListPodResourcesRequest(), timeout=CALL_TIMEOUT_S)
        )
        return [each for pod in response.pod_resources for each in containers_in(pod)]

    def get_pod_containers(self, namespace: str, pod: str) -> list[ListedContainer]:
        """List the containers of one pod; UnknownPod if the kubelet does not list it.

        Has no side effect, unlike List. Kubelets before 1.34 do not serve it: KubeletError.
        """
        request = resources.GetPodResourcesRequest(pod_name=pod, pod_namespace=namespace)
        try:
            return containers_in(
                retry_while_busy(lambda: self._lister.Get(request, timeout=CALL_TIMEOUT_S)).pod_resources
            )
        except KubeletError as error:
            # The kubelet answers with the status UNKNOWN; only the text tells.
            if "not found" in str(error):
                raise UnknownPod(str(error)) from None
            raise

    def checkpointed(self) -> list[CheckpointedContainer]:
        """Read the kubelet's checkpoint; empty if it is missing or unreadable."""
        return [checkpointed_container(entry) for entry in self._read_entries() or ()]

    def checkpointed_containers(self, uid: str) -> set[str] | None:
        """Return the names of a pod's containers in the kubelet's checkpoint; None if it is missing or unreadable."""
        entries = self._read_entries()
        return None if entries is None else {entry.container for entry in entries if entry.uid == uid}

    def _read_entries(self) -> list[CheckpointEntry] | None:
        try:
            checkpoint = decoder_for(KubeletCheckpoint).decode((self.plugins / CHECKPOINT).read_bytes())
        except (OSError, msgspec.MsgspecError, UnicodeError):
            return None
        return checkpoint.data.entries or []

    def socket_identity(self) -> tuple[int, int, int] | None:
        """Identify the current registration socket: a restarted kubelet creates a new one. None if there is none."""
        with suppress(OSError):
            status = self.socket.stat()
            # Inode numbers are reused at once on some file systems; the change time tells two sockets apart.
            return status.st_dev, status.st_ino, status.st_ctime_ns
        return None


def plugin_options() -> api.DevicePluginOptions:
    return api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)


def retry_while_busy(call: Callable[[], T]) -> T:
    """Make a call, and repeat it while the kubelet is over its rate limit or restarting."""
    for remaining in reversed(range(MAX_TRIES)):
        try:
            return call()
        except grpc.RpcError as error:
            is_busy = error.code() in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
            if not is_busy or not remaining:
                raise KubeletError(grpc_error(error)) from None
            # Jitter: agents that were throttled together should not come back together.
            time.sleep(jittered(RETRY_S, 1.0, 2.0))
    raise AssertionError("the last try returns or raises")


def grpc_error(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {error.details()}"


def containers_in(pod: resources.PodResources) -> list[ListedContainer]:
    return [ListedContainer(pod.namespace, pod.name, container.name, container.devices) for container in pod.containers]


def checkpointed_container(entry: CheckpointEntry) -> CheckpointedContainer:
    parts: Iterable[list[str] | None] = entry.ids.values() if isinstance(entry.ids, dict) else [entry.ids]
    response_bytes = b""
    # A response that is not base64 counts as empty, like one that cannot be decoded.
    with suppress(ValueError):
        response_bytes = base64.b64decode(entry.response or "")
    ids = frozenset(each for part in parts for each in part or ())
    return CheckpointedContainer(entry.uid, entry.container, entry.resource, ids, response_bytes)
