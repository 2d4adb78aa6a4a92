"""A kubelet's device manager in this process: it calls in its order, keeps its records, and forgets as it does."""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from cluster.objects import Pod
from nodeplugin.allocating import Allocator
from nodeplugin.allocation_store import AllocationStore
from nodeplugin.cards import Card, NodeCards
from nodeplugin.checkpoint import ContainerAllocation, InjectionMode
from nodeplugin.device_ids import Resource
from nodeplugin.injection import Injector
from nodeplugin.kubelet import CheckpointedContainer, Kubelet, KubeletError, ListedContainer, UnknownPod
from nodeplugin.pods import BoundPod, NodePods, PodsByUid, bound_pod
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.proto import podresources_v1_pb2 as resources
from nodeplugin.service import deviating
from vcuda.names import Names
from vcuda.placement_annotation import GpuSlice, encode_placement
from vcuda.placement_strategies import PlacementStrategy
from vcuda.scheme import Scheme, build_scheme

NAMES = Names()
SPOKEN = build_scheme()
A100_MIB = 40960


def card(index: int, mib: int = A100_MIB, product: str = "NVIDIA A100-SXM4-40GB", **more: Any) -> Card:
    """Make a card; its minor number is another than its index."""
    return Card(uuid=f"GPU-{index}", index=index, minor=index + 4, product=product, memory_mib=mib, **more)


def asking(name: str, cores: int, units: int, *, sidecar: bool = False) -> dict[str, Any]:
    """Describe a container; 0 of a resource means that it does not ask for it."""
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
) -> Pod:
    """Make a pod that is bound to the node."""
    noted = dict(annotations or {}) | ({NAMES.placement: encode_placement(placed)} if placed is not None else {})
    raw = {
        "metadata": {"name": name, "namespace": "default", "uid": uid or f"uid-{name}", "annotations": noted},
        "spec": {"containers": list(containers), "initContainers": list(inits), "nodeName": "node-1"},
        "status": {"phase": phase},
    }
    return msgspec.convert(raw, Pod)


class View:
    """The pods as the plugin sees them: what has reached it, and what the API server would say if it were asked."""

    def __init__(self, scheme: Scheme = SPOKEN) -> None:
        self._scheme = scheme
        self.there: dict[str, Pod] = {}
        self.seen: dict[str, Pod] = {}
        self.is_away = False
        self.synced = True

    @property
    def informer(self) -> "View":
        return self

    def put(self, *pods: Pod, seen: bool = True) -> None:
        for each in pods:
            self.there[each.metadata.uid] = each
            if seen:
                self.seen[each.metadata.uid] = each

    def remove(self, uid: str, *, seen: bool = True) -> None:
        self.there.pop(uid, None)
        if seen:
            self.seen.pop(uid, None)

    def known(self) -> PodsByUid:
        return self._read(self.seen)

    def asked(self) -> PodsByUid | None:
        return None if self.is_away else self._read(self.there)

    def _read(self, pods: Mapping[str, Pod]) -> dict[str, BoundPod]:
        read = {uid: bound_pod(each, self._scheme) for uid, each in pods.items()}
        return {uid: each for uid, each in read.items() if each is not None}


class Refusal(Exception):  # noqa: N818 - what the kubelet says to a pod
    """A pod was refused."""


class SimulatedKubelet:
    """Admits pods as the kubelet does, and lets plugins look at what it holds as the kubelet does."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.allocator: Allocator | None = None
        self.devices: dict[tuple[str, str, str], tuple[frozenset[str], api.ContainerAllocateResponse]] = {}
        self.in_use: dict[str, set[str]] = {}
        self.active: dict[str, Pod] = {}
        self.has_get = True
        self.has_list = True
        self.is_allocating = False
        # The container that is being allocated: it is written down when all of it is.
        self._unwritten: tuple[str, str] | None = None
        self.between: Callable[[], None] = lambda: None
        self.lost: list[str] = []

    # What a plugin may ask.

    def listed(self) -> list[ListedContainer]:
        if self.is_allocating:
            self.lost.append("listed during an allocation")
        if not self.has_list:
            raise KubeletError("UNAVAILABLE: away")
        return [held for each in self.active.values() for held in self._holdings(each)]

    def held_by(self, namespace: str, pod: str) -> list[ListedContainer]:
        if not self.has_get:
            raise KubeletError("UNIMPLEMENTED: not here")
        named = (namespace, pod)
        found = [each for each in self.active.values() if (each.metadata.namespace, each.metadata.name) == named]
        if not found:
            raise UnknownPod("UNKNOWN: not found")
        return [held for each in found for held in self._holdings(each)]

    def kept(self) -> list[CheckpointedContainer]:
        return [
            CheckpointedContainer(uid, name, resource, ids, answer.SerializeToString())
            for (uid, name, resource), (ids, answer) in self.devices.items()
            if (uid, name) != self._unwritten
        ]

    def written(self, uid: str) -> set[str] | None:
        return {each.container for each in self.kept() if each.uid == uid}

    def _holdings(self, each: Pod) -> list[ListedContainer]:
        sidecars = [one for one in each.spec.init_containers or () if one.restart_policy == "Always"]
        return [
            ListedContainer(
                each.metadata.namespace,
                each.metadata.name,
                one.name,
                # One part for each device, as the kubelet does.
                [
                    resources.ContainerDevices(resource_name=resource, device_ids=[device])
                    for (uid, name, resource), (ids, _) in self.devices.items()
                    if (uid, name) == (each.metadata.uid, one.name)
                    for device in ids
                ],
            )
            for one in (*sidecars, *(each.spec.containers or ()))
        ]

    # What it does itself.

    def admit(self, each: Pod) -> None:
        """Allocate for all containers, or refuse the pod."""
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
        self._unwritten = each.metadata.uid, one.name
        limits = list((one.resources.limits or {}).items()) if one.resources else []
        self._random.shuffle(limits)
        for number, (resource, amount) in enumerate(limits):
            if resource not in {NAMES.core, NAMES.memory}:
                continue
            if number:
                self.between()
            kind = Resource.CORE if resource == NAMES.core else Resource.MEMORY
            again = sorted(reusable.get(resource, ()))[: int(amount)]
            healthy = {device for device, good in self.allocator.devices(kind).items() if good}
            free = healthy - self.in_use.get(resource, set())
            ids = set(again)
            if len(ids) < int(amount):
                if len(free) < int(amount) - len(ids):
                    self.forget(each.metadata.uid)
                    raise Refusal(f"requested number of devices unavailable for {resource}")
                offered = sorted(free | ids)
                self._random.shuffle(offered)
                ids |= set(self.allocator.preferred(kind, offered, again, int(amount)))
            self.in_use.setdefault(resource, set()).update(ids)
            self.is_allocating = True
            try:
                answer = self.allocator.allocate(kind, sorted(ids))
            except Exception as wrong:
                self.forget(each.metadata.uid)
                raise Refusal(str(wrong)) from wrong
            finally:
                self.is_allocating = False
            self.devices[each.metadata.uid, one.name, resource] = (frozenset(ids), answer)
        self._unwritten = None

    def start(self, uid: str, name: str) -> None:
        """Ask the plugin whether a container may start."""
        assert self.allocator is not None
        for resource, kind in ((NAMES.core, Resource.CORE), (NAMES.memory, Resource.MEMORY)):
            if found := self.devices.get((uid, name, resource)):
                self.allocator.prestart(kind, sorted(found[0]))

    def die_unwritten(self, each: Pod, one: Any) -> None:
        """Die when a container's last answer has come, and before it is written down; then begin anew."""
        self.active[each.metadata.uid] = each
        self._allocate(each, one, {})
        self.devices, self.in_use, self.active = {}, {}, {}
        if self.allocator is not None:
            self.allocator.begin_anew()

    def forget(self, uid: str) -> None:
        """Let go of a pod."""
        self.active.pop(uid, None)
        self.devices = {key: held for key, held in self.devices.items() if key[0] != uid}
        self.in_use = {}
        for (_, _, resource), (ids, _) in self.devices.items():
            self.in_use.setdefault(resource, set()).update(ids)

    def cards_of(self, uid: str, name: str) -> list[str]:
        """Say which cards a container was given: by both answers together, as a runtime would see them."""
        return [
            card
            for (owner, container, _), (_, answer) in self.devices.items()
            if (owner, container) == (uid, name)
            for card in filter(None, answer.envs.get("CARDS", "").split(","))
        ]


class Notes:
    """Notes what the runtime would be told, instead of telling it."""

    way: InjectionMode = "native"

    def __init__(self) -> None:
        self.forgotten: set[str] = set()
        self.prepared: dict[str, tuple[str, str, tuple[GpuSlice, ...]]] = {}

    def answer(
        self, pod: BoundPod, container: str, allocation: ContainerAllocation, slices: Sequence[GpuSlice]
    ) -> api.ContainerAllocateResponse:
        self.prepare(pod, container, allocation, slices)
        return api.ContainerAllocateResponse(envs={"CARDS": ",".join(each.uuid for each in slices)})

    def prepare(
        self, pod: BoundPod, container: str, allocation: ContainerAllocation, slices: Sequence[GpuSlice]
    ) -> None:
        self.prepared[allocation.token] = (pod.uid, container, tuple(slices))

    def is_outdated(self, answer: api.ContainerAllocateResponse, slices: Sequence[GpuSlice]) -> bool:
        return answer.envs.get("CARDS", "") != ",".join(each.uuid for each in slices)

    def forget(self, tokens: Collection[str]) -> None:
        self.forgotten |= set(tokens)
        for token in tokens:
            self.prepared.pop(token, None)

    def kept(self) -> set[str]:
        return set(self.prepared)


class Machine:
    """A node: cards, a kubelet, and a plugin that can be killed and started again."""

    def __init__(
        self, folder: Path, *cards: Card, seed: int = 0, policy: PlacementStrategy = PlacementStrategy.BINPACK
    ) -> None:
        self._folder, self._policy = folder, policy
        self.node_cards = NodeCards()
        self.node_cards.found(cards or [card(index) for index in range(4)])
        self.view, self.notes, self.kubelet = View(), Notes(), SimulatedKubelet(seed)
        self.running: set[str] = set()
        self.now = 0.0
        self.start()

    def start(self) -> None:
        """Start the plugin, or another in its place."""
        pods, kubelet = cast("NodePods", self.view), cast("Kubelet", self.kubelet)
        injection = cast("Injector", self.notes)
        self.book = AllocationStore(
            self._folder,
            SPOKEN,
            self.node_cards,
            pods=pods,
            kubelet=kubelet,
            injection=injection,
            running=lambda uids: self.running & set(uids),
        )
        self.allocator = Allocator(
            self.book,
            SPOKEN,
            self.node_cards,
            pods=pods,
            kubelet=kubelet,
            injection=injection,
            policy=self._policy,
            clock=lambda: self.now,
        )
        self.kubelet.allocator = self.allocator
        self.book.recover()

    def deviating(self) -> list[str]:
        """Name the pods that the node placed itself, and that do not say so."""
        return [hold.name for hold in deviating(self.book.holds(), self.view.known())]

    def admit(self, *pods: Pod) -> None:
        """Bind pods and have the kubelet admit them, in its own order."""
        self.view.put(*pods)
        for each in pods:
            self.kubelet.admit(each)

    def end(self, uid: str) -> None:
        """Delete a pod."""
        self.view.remove(uid)
        self.kubelet.forget(uid)
        self.book.collect()

    def cards(self, uid: str, name: str = "c0") -> list[str]:
        """Say which cards a container was given."""
        return self.kubelet.cards_of(uid, name)
