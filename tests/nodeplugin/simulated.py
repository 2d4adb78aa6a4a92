"""The kubelet's device manager in this process: calls in its order, checkpoints as it does, and forgets as it does."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from cluster.objects import Pod
from nodeplugin.allocating import Allocator
from nodeplugin.allocation_store import AllocationStore
from nodeplugin.cards import Card, NodeCards
from nodeplugin.checkpoint import ContainerAllocation
from nodeplugin.device_ids import Resource
from nodeplugin.injection import Injector
from nodeplugin.isolation_ladder import CardLadder
from nodeplugin.kubelet import CheckpointedContainer, Kubelet, KubeletError, ListedContainer, UnknownPod
from nodeplugin.pods import BoundPod, NodePods, PodsByUid, parse_bound_pod
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.proto import podresources_v1_pb2 as resources
from nodeplugin.service import unwritten_placements
from vcuda.injection_modes import InjectionMode
from vcuda.isolation import NO_ISOLATION, Isolation
from vcuda.names import Names
from vcuda.placement_annotation import GpuSlice, encode_placement
from vcuda.placement_strategies import PlacementStrategy
from vcuda.scheme import Scheme, build_scheme

NAMES = Names()
SCHEME = build_scheme()
A100_MIB = 40960
# The cards in a response: all that a container runtime would need here.
CARDS = "CARDS"


def card(index: int, mib: int = A100_MIB, product: str = "NVIDIA A100-SXM4-40GB", **more: Any) -> Card:
    """A card whose minor number differs from its index."""
    return Card(uuid=f"GPU-{index}", index=index, minor=index + 4, product=product, memory_mib=mib, **more)


def container(name: str, cores: int, units: int, *, sidecar: bool = False) -> dict[str, Any]:
    """A container's manifest; 0 means that it does not request a resource."""
    limits = {key: str(amount) for key, amount in ((NAMES.core, cores), (NAMES.memory, units)) if amount}
    return {"name": name, "resources": {"limits": limits}, **({"restartPolicy": "Always"} if sidecar else {})}


def pod(
    name: str,
    *containers: dict[str, Any],
    inits: Sequence[dict[str, Any]] = (),
    placed: Mapping[str, Sequence[GpuSlice]] | None = None,
    annotations: Mapping[str, str] | None = None,
    phase: str = "Pending",
    uid: str = "",
    created: Sequence[str] = (),
) -> Pod:
    """A pod bound to the node; of the containers `created`, the runtime knows the ID."""
    all_annotations = dict(annotations or {})
    if placed is not None:
        all_annotations[NAMES.placement] = encode_placement(placed)
    raw = {
        "metadata": {"name": name, "namespace": "default", "uid": uid or f"uid-{name}", "annotations": all_annotations},
        "spec": {"containers": list(containers), "initContainers": list(inits), "nodeName": "node-1"},
        "status": {
            "phase": phase,
            "initContainerStatuses": [{"name": each, "containerID": f"containerd://{each}"} for each in created],
        },
    }
    return msgspec.convert(raw, Pod)


class SimulatedPods:
    """The node's pods: on the API server, and in the plugin's cache, which may lag behind."""

    def __init__(self, scheme: Scheme = SCHEME) -> None:
        self._scheme = scheme
        self.on_server: dict[str, Pod] = {}
        self.in_cache: dict[str, Pod] = {}
        self.is_server_down = False
        self.synced = True

    @property
    def informer(self) -> "SimulatedPods":
        return self

    def put(self, *pods: Pod, cached: bool = True) -> None:
        for each in pods:
            self.on_server[each.metadata.uid] = each
            if cached:
                self.in_cache[each.metadata.uid] = each

    def remove(self, uid: str, *, cached: bool = True) -> None:
        self.on_server.pop(uid, None)
        if cached:
            self.in_cache.pop(uid, None)

    def cached_pods(self) -> PodsByUid:
        return self._parse(self.in_cache)

    def fetch_pods(self) -> PodsByUid | None:
        return None if self.is_server_down else self._parse(self.on_server)

    def _parse(self, pods: Mapping[str, Pod]) -> dict[str, BoundPod]:
        parsed = {uid: parse_bound_pod(each, self._scheme) for uid, each in pods.items()}
        return {uid: each for uid, each in parsed.items() if each is not None}


class PodRejected(Exception):  # noqa: N818 - the kubelet's answer
    """The kubelet did not admit a pod."""


class SimulatedKubelet:
    """Admits pods, and answers PodResources calls, as the kubelet does."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.allocator: Allocator | None = None
        self.devices: dict[tuple[str, str, str], tuple[frozenset[str], api.ContainerAllocateResponse]] = {}
        self.in_use: dict[str, set[str]] = {}
        self.active: dict[str, Pod] = {}
        self.has_get = True
        self.has_list = True
        self.is_checkpoint_readable = True
        self.is_allocating = False
        # The container being allocated: the checkpoint is written when both its resources are.
        self._uncheckpointed: tuple[str, str] | None = None
        self.between_calls: Callable[[], None] = lambda: None
        self.lists_during_allocate = 0

    # PodResources and the checkpoint.

    def list_containers(self) -> list[ListedContainer]:
        if self.is_allocating:
            self.lists_during_allocate += 1
        if not self.has_list:
            raise KubeletError("UNAVAILABLE: connection refused")
        return [listed for each in self.active.values() for listed in self._listed_containers(each)]

    def get_pod_containers(self, namespace: str, pod: str) -> list[ListedContainer]:
        if not self.has_get:
            raise KubeletError("UNIMPLEMENTED: unknown method Get")
        key = (namespace, pod)
        pods = [each for each in self.active.values() if (each.metadata.namespace, each.metadata.name) == key]
        if not pods:
            raise UnknownPod("UNKNOWN: not found")
        return [listed for each in pods for listed in self._listed_containers(each)]

    def checkpointed(self) -> list[CheckpointedContainer]:
        if not self.is_checkpoint_readable:
            return []
        return [
            CheckpointedContainer(uid, name, resource, ids, response.SerializeToString())
            for (uid, name, resource), (ids, response) in self.devices.items()
            if (uid, name) != self._uncheckpointed
        ]

    def checkpointed_containers(self, uid: str) -> set[str] | None:
        if not self.is_checkpoint_readable:
            return None
        return {each.container for each in self.checkpointed() if each.uid == uid}

    def _listed_containers(self, each: Pod) -> list[ListedContainer]:
        sidecars = [one for one in each.spec.init_containers or () if one.restart_policy == "Always"]
        return [
            ListedContainer(
                each.metadata.namespace,
                each.metadata.name,
                one.name,
                # One entry per device, as the kubelet does.
                [
                    resources.ContainerDevices(resource_name=resource, device_ids=[device])
                    for (uid, name, resource), (ids, _) in self.devices.items()
                    if (uid, name) == (each.metadata.uid, one.name)
                    for device in ids
                ],
            )
            for one in (*sidecars, *(each.spec.containers or ()))
        ]

    # Admission and container starts.

    def admit(self, each: Pod) -> None:
        """Allocate for all containers; PodRejected if one gets nothing."""
        self.active[each.metadata.uid] = each
        reusable: dict[str, set[str]] = {}
        inits = list(each.spec.init_containers or ())
        for one in (*inits, *(each.spec.containers or ())):
            self._allocate(each, one, reusable)
            is_plain_init = one in inits and one.restart_policy != "Always"
            for resource in (NAMES.core, NAMES.memory):
                ids, _ = self.devices.get((each.metadata.uid, one.name, resource), (frozenset[str](), None))
                reused = reusable.setdefault(resource, set())
                if is_plain_init:
                    reused |= ids
                else:
                    reused -= ids

    def _allocate(self, each: Pod, one: Any, reusable: Mapping[str, set[str]]) -> None:
        assert self.allocator is not None
        self._uncheckpointed = each.metadata.uid, one.name
        limits = list((one.resources.limits or {}).items()) if one.resources else []
        self._random.shuffle(limits)
        for number, (resource, amount) in enumerate(limits):
            if resource not in {NAMES.core, NAMES.memory}:
                continue
            if number:
                self.between_calls()
            kind = Resource.CORE if resource == NAMES.core else Resource.MEMORY
            reused = sorted(reusable.get(resource, ()))[: int(amount)]
            healthy = {device for device, good in self.allocator.devices(kind).items() if good}
            free = healthy - self.in_use.get(resource, set())
            ids = set(reused)
            if len(ids) < int(amount):
                if len(free) < int(amount) - len(ids):
                    self.remove_pod(each.metadata.uid)
                    raise PodRejected(f"requested number of devices unavailable for {resource}")
                offered = sorted(free | ids)
                self._random.shuffle(offered)
                ids |= set(self.allocator.choose_ids(kind, offered, reused, int(amount)))
            self.in_use.setdefault(resource, set()).update(ids)
            self.is_allocating = True
            try:
                response = self.allocator.allocate(kind, sorted(ids))
            except Exception as error:
                self.remove_pod(each.metadata.uid)
                raise PodRejected(str(error)) from error
            finally:
                self.is_allocating = False
            self.devices[each.metadata.uid, one.name, resource] = (frozenset(ids), response)
        self._uncheckpointed = None

    def start_container(self, uid: str, name: str) -> None:
        """Call PreStartContainer for each resource; raises what the plugin raises."""
        assert self.allocator is not None
        for resource, kind in ((NAMES.core, Resource.CORE), (NAMES.memory, Resource.MEMORY)):
            if entry := self.devices.get((uid, name, resource)):
                self.allocator.check_start(kind, sorted(entry[0]))

    def crash_before_checkpoint(self, each: Pod, one: Any) -> None:
        """Allocate for a container, and restart before the checkpoint is written."""
        self.active[each.metadata.uid] = each
        self._allocate(each, one, {})
        self.devices, self.in_use, self.active = {}, {}, {}
        if self.allocator is not None:
            self.allocator.reset_calls()

    def remove_pod(self, uid: str) -> None:
        self.active.pop(uid, None)
        self.devices = {key: entry for key, entry in self.devices.items() if key[0] != uid}
        self.in_use = {}
        for (_, _, resource), (ids, _) in self.devices.items():
            self.in_use.setdefault(resource, set()).update(ids)

    def cards_of(self, uid: str, name: str) -> list[str]:
        """Return a container's cards from the responses to both its calls, as a runtime would see them."""
        return [
            card
            for (owner, container, _), (_, response) in self.devices.items()
            if (owner, container) == (uid, name)
            for card in filter(None, response.envs.get(CARDS, "").split(","))
        ]


class RecordingInjector:
    """An injector that creates no files, but records what it was asked for."""

    mode: InjectionMode = "native"

    def __init__(self) -> None:
        self.removed: set[str] = set()
        self.prepared: dict[str, tuple[str, str, tuple[GpuSlice, ...]]] = {}

    def build_response(
        self, pod: BoundPod, container: str, allocation: ContainerAllocation, slices: Sequence[GpuSlice]
    ) -> api.ContainerAllocateResponse:
        self.prepare(pod, container, allocation, slices)
        return api.ContainerAllocateResponse(envs={CARDS: ",".join(each.uuid for each in slices)})

    def prepare(
        self, pod: BoundPod, container: str, allocation: ContainerAllocation, slices: Sequence[GpuSlice]
    ) -> None:
        self.prepared[allocation.token] = (pod.uid, container, tuple(slices))

    def is_outdated(self, response: api.ContainerAllocateResponse, slices: Sequence[GpuSlice]) -> bool:
        return response.envs.get(CARDS, "") != ",".join(each.uuid for each in slices)

    def remove(self, tokens: Collection[str]) -> None:
        self.removed |= set(tokens)
        for token in tokens:
            self.prepared.pop(token, None)

    def existing_tokens(self) -> set[str]:
        return set(self.prepared)


class Machine:
    """A node: cards, a kubelet, and a plugin that can be killed and started again."""

    def __init__(
        self,
        folder: Path,
        *cards: Card,
        seed: int = 0,
        policy: PlacementStrategy = PlacementStrategy.BINPACK,
        isolation: Isolation = NO_ISOLATION,
    ) -> None:
        self._folder, self._policy = folder, policy
        self.node_cards = NodeCards(ladder_of=lambda _: CardLadder(isolation))
        self.node_cards.update(cards or [card(index) for index in range(4)])
        self.pods, self.injector, self.kubelet = SimulatedPods(), RecordingInjector(), SimulatedKubelet(seed)
        self.running: set[str] = set()
        self.now = self.slept_s = 0.0
        # Called after each sleep of the plugin.
        self.on_sleep: Callable[[], None] = lambda: None
        self.start()

    def start(self) -> None:
        """Start the plugin; a plugin that runs is replaced, as if it had been killed."""
        pods, kubelet = cast("NodePods", self.pods), cast("Kubelet", self.kubelet)
        injector = cast("Injector", self.injector)
        self.allocations = AllocationStore(
            self._folder,
            SCHEME,
            self.node_cards,
            pods=pods,
            kubelet=kubelet,
            injector=injector,
            running_pods=lambda uids: self.running & set(uids),
        )
        self.allocator = Allocator(
            self.allocations,
            SCHEME,
            self.node_cards,
            pods=pods,
            kubelet=kubelet,
            injector=injector,
            policy=self._policy,
            clock=lambda: self.now,
            sleep=self._sleep,
        )
        self.kubelet.allocator = self.allocator
        self.allocations.recover()

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept_s += seconds
        assert self.slept_s < 600, "an allocation waits without end"
        self.on_sleep()

    def unwritten_placements(self) -> list[str]:
        """Return the names of pods that the node placed itself and whose annotation says otherwise."""
        return [each.name for each in unwritten_placements(self.allocations.all(), self.pods.cached_pods())]

    def admit(self, *pods: Pod) -> None:
        """Bind pods, and have the kubelet admit them."""
        self.pods.put(*pods)
        for each in pods:
            self.kubelet.admit(each)

    def delete(self, uid: str) -> None:
        self.pods.remove(uid)
        self.kubelet.remove_pod(uid)
        self.allocations.release_ended()

    def cards(self, uid: str, name: str = "c0") -> list[str]:
        return self.kubelet.cards_of(uid, name)
