"""The kubelet of this node: what it says of its containers' devices, and what it wrote down."""

import base64
import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import grpc
import msgspec
from google.protobuf.message import DecodeError
from msgspec import Struct, field

from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.proto import deviceplugin_v1beta1_pb2_grpc as api_grpc
from nodeplugin.proto import podresources_v1_pb2 as resources
from nodeplugin.proto import podresources_v1_pb2_grpc as resources_grpc
from vcuda.decoding import decoder_for

VERSION = "v1beta1"
CHECKPOINT = "kubelet_internal_checkpoint"
SOCKET = "kubelet.sock"
# It answers 100 calls a second, 10 at once, and refuses more: whoever else asks may have used them up.
TRIES = 8
RETRY_S = 0.03
CALL_S = 2.0
REGISTER_S = 10.0

T = TypeVar("T")


class KubeletError(Exception):
    """The kubelet does not answer."""


class UnknownPod(KubeletError):  # noqa: N818 - an answer
    """The kubelet has not taken this pod up."""


class ListedContainer(Struct, frozen=True):
    """A container as the kubelet lists it. Its devices are read when they are asked for: a node has thousands."""

    namespace: str
    pod: str
    container: str
    devices: Iterable[resources.ContainerDevices]

    def has(self, resource: str) -> bool:
        """Tell whether it holds anything of a resource."""
        return any(part.resource_name == resource and part.device_ids for part in self.devices)

    def ids(self, resource: str) -> frozenset[str]:
        """Give the ids that it holds of a resource; they may come in several parts."""
        return frozenset(each for part in self.devices if part.resource_name == resource for each in part.device_ids)


class CheckpointedContainer(Struct, frozen=True):
    """What the kubelet keeps for a container and a resource: the ids, and the answer it got for them."""

    uid: str
    container: str
    resource: str
    ids: frozenset[str]
    packed: bytes = b""

    @property
    def answer(self) -> api.ContainerAllocateResponse:
        """The answer; one that cannot be read is as good as an empty one."""
        found = api.ContainerAllocateResponse()
        with suppress(DecodeError):
            found.ParseFromString(self.packed)
        return found


class CheckpointEntry(Struct, frozen=True):
    """An entry of the kubelet's own file; older ones list ids without NUMA nodes."""

    uid: str = field(name="PodUID")
    container: str = field(name="ContainerName")
    resource: str = field(name="ResourceName")
    ids: dict[str, list[str] | None] | list[str] | None = field(name="DeviceIDs", default=None)
    answer: str | None = field(name="AllocResp", default=None)


class CheckpointData(Struct, frozen=True):
    """All entries."""

    entries: list[CheckpointEntry] | None = field(name="PodDeviceEntries", default=None)


class KubeletCheckpoint(Struct, frozen=True):
    """The kubelet's file, as far as it concerns us."""

    data: CheckpointData = field(name="Data")


class Kubelet:
    """Asks the kubelet over its sockets, and reads its file."""

    def __init__(self, plugins: Path, pod_resources: Path) -> None:
        self.plugins = plugins
        self.socket = plugins / SOCKET
        # The kubelet, and strict servers with it, want a host name where there is none.
        options = [
            ("grpc.default_authority", "localhost"),
            ("grpc.max_receive_message_length", 64 * 2**20),
            # A kubelet that was away for a moment is back in a moment.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._channel = grpc.insecure_channel(f"unix://{pod_resources}", options)
        self._lister = resources_grpc.PodResourcesListerStub(self._channel)

    def close(self) -> None:
        """End."""
        self._channel.close()

    def register(self, endpoint: str, resource: str) -> None:
        """Offer a resource; the kubelet calls back before it answers."""
        with grpc.insecure_channel(f"unix://{self.socket}", [("grpc.default_authority", "localhost")]) as channel:
            request = api.RegisterRequest(
                version=VERSION, endpoint=endpoint, resource_name=resource, options=plugin_options()
            )
            try:
                api_grpc.RegistrationStub(channel).Register(request, timeout=REGISTER_S)
            except grpc.RpcError as wrong:
                raise KubeletError(f"{resource} was not registered: {grpc_error(wrong)}") from None

    def greet(self) -> None:
        """Have the connection made before it is needed, by a question that has no side effect."""
        with suppress(KubeletError):
            self.held_by("default", "nobody")

    def listed(self) -> list[ListedContainer]:
        """List what containers hold. Never while an Allocate is being answered: the kubelet would forget that one."""
        answer = retry_while_busy(lambda: self._lister.List(resources.ListPodResourcesRequest(), timeout=CALL_S))
        return [held for pod in answer.pod_resources for held in listed_containers(pod)]

    def held_by(self, namespace: str, pod: str) -> list[ListedContainer]:
        """Say what the containers of one pod hold; has no side effect, and is not known to kubelets before 1.34."""
        request = resources.GetPodResourcesRequest(pod_name=pod, pod_namespace=namespace)
        try:
            return listed_containers(retry_while_busy(lambda: self._lister.Get(request, timeout=CALL_S)).pod_resources)
        except KubeletError as wrong:
            if "not found" in str(wrong):
                raise UnknownPod(str(wrong)) from None
            raise

    def kept(self) -> list[CheckpointedContainer]:
        """Read what the kubelet wrote down; nothing if that is not there or cannot be read."""
        return [checkpointed_container(entry) for entry in self._entries() or ()]

    def written(self, uid: str) -> set[str] | None:
        """Name the containers of a pod that the kubelet wrote down; None if that is not there or cannot be read."""
        entries = self._entries()
        return None if entries is None else {entry.container for entry in entries if entry.uid == uid}

    def _entries(self) -> list[CheckpointEntry] | None:
        try:
            found = decoder_for(KubeletCheckpoint).decode((self.plugins / CHECKPOINT).read_bytes())
        except (OSError, msgspec.MsgspecError, UnicodeError):
            return None
        return found.data.entries or []

    def identity(self) -> tuple[int, int, int] | None:
        """Tell one kubelet's socket from the next one's; None while there is none."""
        with suppress(OSError):
            found = self.socket.stat()
            return found.st_dev, found.st_ino, found.st_ctime_ns
        return None


def plugin_options() -> api.DevicePluginOptions:
    """Say what the kubelet should ask us."""
    return api.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)


def retry_while_busy(ask: Callable[[], T]) -> T:
    """Ask, and ask again where the kubelet has been asked too often."""
    for remaining in reversed(range(TRIES)):
        try:
            return ask()
        except grpc.RpcError as wrong:
            is_busy = wrong.code() in {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
            if not is_busy or not remaining:
                raise KubeletError(grpc_error(wrong)) from None
            time.sleep(RETRY_S * random.uniform(1, 2))
    raise KubeletError("not asked")


def grpc_error(wrong: grpc.RpcError) -> str:
    """Say what a call failed with."""
    return f"{wrong.code().name}: {wrong.details()}"


def listed_containers(pod: resources.PodResources) -> list[ListedContainer]:
    """List the containers of a pod."""
    return [ListedContainer(pod.namespace, pod.name, container.name, container.devices) for container in pod.containers]


def checkpointed_container(entry: CheckpointEntry) -> CheckpointedContainer:
    """Read one entry."""
    parts: Iterable[list[str] | None] = entry.ids.values() if isinstance(entry.ids, dict) else [entry.ids]
    packed = b""
    with suppress(ValueError):
        packed = base64.b64decode(entry.answer or "")
    ids = frozenset(each for part in parts for each in part or ())
    return CheckpointedContainer(entry.uid, entry.container, entry.resource, ids, packed)
