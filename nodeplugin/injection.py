"""Makes a container's GPUs usable inside of it, in one of three ways.

`native` needs nothing but a stock runtime: device nodes and mounts. `cdi` says the same in a file that the runtime
reads, whose environment nobody can override. `nvidia-runtime` leaves libraries to NVIDIA's runtime. In each, a folder
with the container's limits is mounted at /etc/quotient, read-only.
"""

import re
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from nodeplugin.cards import Card, NodeCards
from nodeplugin.checkpoint import ContainerAllocation, InjectionMode, replace_file
from nodeplugin.host_driver import CURRENT, DeviceNode, HostDriver
from nodeplugin.pods import BoundPod
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from vcuda.memory_units import MIB
from vcuda.names import Names
from vcuda.placement_annotation import GpuSlice
from vcuda.vocabulary import CORES_PER_CARD

LIMITS_VERSION = 1
LIMITS_FILE, LIMITS_PATH = "limits.json", "/etc/quotient"
DRIVER_PATH = "/usr/local/nvidia"
VISIBLE = "NVIDIA_VISIBLE_DEVICES"
CDI_VERSION, CDI_KIND = "0.5.0", "quotient.dev/gpu"
CDI_PREFIX = "quotient.dev-gpu_"
# The first runtimes that read CDI files without being told to, and the first kubelet that names devices in them.
CDI_SINCE = {"containerd": (2, 0), "cri-o": (1, 28)}
CDI_KUBELET = (1, 31)
NUMBERS = re.compile(r"(\d+)\.(\d+)")


class LimitedCard(Struct, frozen=True, rename="camel"):
    """A card of a container, and how much of it."""

    uuid: str
    index: int
    minor: int
    cores: int
    memory_mib: int = field(name="memoryMiB")


class ContainerFile(Struct, frozen=True, rename="camel"):
    """The limits of a container, as it finds them in /etc/quotient/limits.json."""

    v: int
    pod_uid: str = field(name="podUID")
    namespace: str
    pod: str
    container: str
    cores: int
    core_limit: int
    memory_mib: int = field(name="memoryMiB")
    cards: tuple[LimitedCard, ...]


def detect_mode(runtime: str, kubelet: str) -> InjectionMode:
    """Choose a way by the versions that a node reports, such as containerd://2.1.0 and v1.36.4."""
    name, _, version = runtime.partition("://")
    since = CDI_SINCE.get(name)
    if since and numbers(version) >= since and numbers(kubelet) >= CDI_KUBELET:
        return "cdi"
    return "native"


def numbers(version: str) -> tuple[int, int]:
    """Read the first two numbers of a version."""
    found = NUMBERS.search(version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


class Injector:
    """Answers for containers in one way, and keeps their folders. `folder` is the same here and on the host."""

    def __init__(
        self, way: InjectionMode, folder: Path, driver: HostDriver, node_cards: NodeCards, *, names: Names, cdi: Path
    ) -> None:
        self.way = way
        self._driver, self._node_cards, self._names, self._cdi = driver, node_cards, names, cdi
        self._driver_folder, self._containers = folder / "driver", folder / "containers"
        self._version = ""

    def start(self, version: str) -> None:
        """Lay out what all containers share."""
        self._version = version
        self._containers.mkdir(parents=True, exist_ok=True)
        if self.way != "nvidia-runtime":
            self._driver_folder.mkdir(parents=True, exist_ok=True)
            self._driver.install_files(self._driver_folder, version)
        if self.way == "cdi":
            self._cdi.mkdir(parents=True, exist_ok=True)

    def answer(
        self, pod: BoundPod, container: str, allocation: ContainerAllocation, slices: Sequence[GpuSlice]
    ) -> api.ContainerAllocateResponse:
        """Say what the runtime has to do for a container."""
        self.prepare(pod, container, allocation, slices)
        cards = self._cards(slices)
        answer = api.ContainerAllocateResponse(annotations=self._ancestors_annotations(slices, cards))
        if allocation.way == "cdi":
            answer.cdi_devices.add(name=f"{CDI_KIND}={allocation.token}")
            return answer
        for node in self._driver.device_nodes(cards):
            answer.devices.add(host_path=node.host, container_path=node.container, permissions="rw")
        for host, inside in self._mounts(allocation.token):
            answer.mounts.add(host_path=host, container_path=inside, read_only=True)
        answer.envs.update(self._environment(slices))
        return answer

    def prepare(
        self, pod: BoundPod, container: str, allocation: ContainerAllocation, slices: Sequence[GpuSlice]
    ) -> None:
        """Write the container's folder as it should be; and its CDI file, if one was promised, whatever the way now."""
        if self.way != "nvidia-runtime" and not (self._driver_folder / CURRENT).is_symlink():
            # Never laid out, as without a driver; or somebody emptied the folder.
            self.start(self._version)
        folder = self._containers / allocation.token
        folder.mkdir(parents=True, exist_ok=True)
        # Whoever the container runs as, and whatever this process makes by default.
        folder.chmod(0o755)
        put(folder / LIMITS_FILE, msgspec.json.encode(self._limits(pod, container, slices)))
        if allocation.way == "cdi":
            self._cdi.mkdir(parents=True, exist_ok=True)
            nodes = self._driver.device_nodes(self._cards(slices))
            put(self._cdi_file(allocation.token), msgspec.json.encode(self._spec(allocation.token, slices, nodes)))

    def is_outdated(self, answer: api.ContainerAllocateResponse, slices: Sequence[GpuSlice]) -> bool:
        """Tell whether an answer names other device nodes than its cards have now: a boot may number them anew."""
        if answer.cdi_devices:  # its file is written anew
            return False
        of_cards = {node_of(card) for card in self._node_cards.cards()}
        return {each.container_path for each in answer.devices} & of_cards != {
            node_of(card) for card in self._cards(slices)
        }

    def forget(self, tokens: Collection[str]) -> None:
        """Remove folders and files of containers that are gone."""
        for token in tokens:
            shutil.rmtree(self._containers / token, ignore_errors=True)
            self._cdi_file(token).unlink(missing_ok=True)

    def kept(self) -> set[str]:
        """Name the containers that have a folder or a file."""
        found = {each.name for each in self._containers.glob("*")}
        files = self._cdi.glob(f"{CDI_PREFIX}*.json")
        return found | {each.name.removeprefix(CDI_PREFIX).removesuffix(".json") for each in files}

    def remove_old_drivers(self) -> None:
        """Remove the files of drivers before this one."""
        self._driver.remove_old_files(self._driver_folder)

    def _cdi_file(self, token: str) -> Path:
        return self._cdi / f"{CDI_PREFIX}{token}.json"

    def _cards(self, slices: Sequence[GpuSlice]) -> list[Card]:
        return [card for given in slices if (card := self._node_cards.get(given.uuid)) is not None]

    def _mounts(self, token: str) -> list[tuple[str, str]]:
        found = [(str(self._containers / token), LIMITS_PATH)]
        if self.way != "nvidia-runtime" and (self._driver_folder / CURRENT).exists():
            found += [(f"{self._driver_folder}/{CURRENT}/{part}", f"{DRIVER_PATH}/{part}") for part in ("bin", "lib64")]
        return found

    def _environment(self, slices: Sequence[GpuSlice]) -> dict[str, str]:
        found = {VISIBLE: ",".join(given.uuid for given in slices)}
        if self.way == "nvidia-runtime":
            return found | {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        return found | {"LD_LIBRARY_PATH": f"{DRIVER_PATH}/lib64"}

    def _ancestors_annotations(self, slices: Sequence[GpuSlice], cards: Sequence[Card]) -> dict[str, str]:
        """Tell the runtime what gpu-manager told it: tools of its time look there."""
        memory = sum(given.memory_mib for given in slices) * MIB
        return {
            self._names.core: str(sum(given.cores for given in slices)),
            self._names.memory: str(memory),
            f"{self._names.domain}/vcuda-device": ",".join(map(node_of, cards)),
        }

    def _limits(self, pod: BoundPod, container: str, slices: Sequence[GpuSlice]) -> ContainerFile:
        cards = {card.uuid: card for card in self._cards(slices)}
        cores = sum(given.cores for given in slices)
        limits = pod.limits.get(container)
        return ContainerFile(
            v=LIMITS_VERSION,
            pod_uid=pod.uid,
            namespace=pod.metadata.namespace,
            pod=pod.metadata.name,
            container=container,
            cores=cores,
            core_limit=max(
                cores, min(limits.core_limit, CORES_PER_CARD) if limits and cores < CORES_PER_CARD else cores
            ),
            memory_mib=sum(given.memory_mib for given in slices),
            cards=tuple(
                LimitedCard(given.uuid, cards[given.uuid].index, cards[given.uuid].minor, given.cores, given.memory_mib)
                for given in slices
                if given.uuid in cards
            ),
        )

    def _spec(self, token: str, slices: Sequence[GpuSlice], nodes: Sequence[DeviceNode]) -> dict[str, Any]:
        """Write a CDI file for one container."""
        options = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
        edits = {
            "env": [f"{name}={value}" for name, value in sorted(self._environment(slices).items())],
            "deviceNodes": [{"path": node.container, "hostPath": node.host, "permissions": "rw"} for node in nodes],
            "mounts": [
                {"hostPath": host, "containerPath": inside, "options": options} for host, inside in self._mounts(token)
            ],
        }
        return {"cdiVersion": CDI_VERSION, "kind": CDI_KIND, "devices": [{"name": token, "containerEdits": edits}]}


def node_of(card: Card) -> str:
    """Name a card's device node as containers see it."""
    return f"/dev/nvidia{card.minor}"


def put(path: Path, content: bytes) -> None:
    """Write a file that all may read, unless it says so already."""
    with suppress(OSError):
        if path.read_bytes() == content:
            return
    replace_file(path, content, mode=0o444)
