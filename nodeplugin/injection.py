"""Makes a container's GPUs usable inside the container, in one of three modes.

`native` works with any container runtime: device nodes and mounts in the Allocate response. `cdi` puts the same into a
CDI file that the runtime reads; its environment variables cannot be overridden by the pod. `nvidia-runtime` leaves the
driver's libraries to NVIDIA's runtime. In every mode, a folder with the container's limits is mounted read-only at
/etc/quotient.
"""

import errno
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from nodeplugin.cards import Card, NodeCards
from nodeplugin.checkpoint import ContainerAllocation, replace_file
from nodeplugin.host_driver import CONTAINER_FOLDER, CURRENT, SHARED, DeviceNode, HostDriver, installed_descriptions
from nodeplugin.library_cache import LibraryCache
from nodeplugin.memory_limit_hook import MemoryLimitHook
from nodeplugin.memory_limits import limited_slices
from nodeplugin.pods import BoundPod
from nodeplugin.preload_files import Mount, PreloadFiles
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.selinux import label_for_containers
from nodeplugin.share_files import DEFAULT_CONTEXT_MIB, CardLimits
from vcuda.injection_modes import InjectionMode
from vcuda.isolation import Rung
from vcuda.memory_units import MIB
from vcuda.names import CDI_FILE_PREFIX, CDI_KIND, Names
from vcuda.placement_annotation import GpuSlice
from vcuda.vocabulary import CORES_PER_CARD

LIMITS_VERSION = 1
LIMITS_FILE, LIMITS_PATH = "limits.json", "/etc/quotient"
VISIBLE, CAPABILITIES = "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"
LIBRARY_PATH = "LD_LIBRARY_PATH"
CDI_VERSION = "0.5.0"
# The first runtimes that read CDI files without being configured to, and the first kubelet in which CDI devices of
# plugins are generally available.
CDI_RUNTIMES = {"containerd": (2, 0), "cri-o": (1, 28)}
CDI_KUBELET = (1, 31)
VERSION_NUMBERS = re.compile(r"(\d+)\.(\d+)")


class LimitedCard(Struct, frozen=True, rename="camel"):
    """A container's share of one card."""

    uuid: str
    index: int
    minor: int
    cores: int
    memory_mib: int = field(name="memoryMiB")


class ContainerFile(Struct, frozen=True, rename="camel"):
    """The content of /etc/quotient/limits.json: a contract with programs inside containers."""

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
    """Choose a mode by the versions in the Node's status, such as containerd://2.1.0 and v1.36.4."""
    name, _, version = runtime.partition("://")
    since = CDI_RUNTIMES.get(name)
    if since and major_minor(version) >= since and major_minor(kubelet) >= CDI_KUBELET:
        return "cdi"
    return "native"


def major_minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it has none, which is older than anything."""
    match = VERSION_NUMBERS.search(version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def mode_of(response: api.ContainerAllocateResponse) -> InjectionMode:
    """Return the mode in which a response was built."""
    if response.cdi_devices:
        return "cdi"
    # By the variable, not by the absence of driver mounts: `native` has none either while there is no driver.
    return "nvidia-runtime" if CAPABILITIES in response.envs else "native"


class Injector:
    """Builds Allocate responses in one mode, and owns the containers' folders and CDI files.

    `folder` must have the same path in this process and on the host: mounts refer to it.
    """

    def __init__(
        self, mode: InjectionMode, folder: Path, driver: HostDriver, node_cards: NodeCards, *, names: Names, cdi: Path
    ) -> None:
        self.mode = mode
        self._driver, self._node_cards, self._names, self._cdi = driver, node_cards, names, cdi
        self._driver_folder, self._containers = folder / "driver", folder / "containers"
        self._library_cache = LibraryCache(folder / "hooks", driver.host)
        self.memory_limit_hook = MemoryLimitHook(folder)
        self.preload = PreloadFiles(folder / "preload", self._containers, folder / "accounts")
        # What a context of a card takes, by uuid.
        self.context_mib: Callable[[str], int] = lambda _: DEFAULT_CONTEXT_MIB
        self._version = ""

    def start(self, version: str) -> None:
        """Create what all containers share; `version` is the driver's. Safe to call again."""
        self._version = version
        self._containers.mkdir(parents=True, exist_ok=True)
        label_for_containers(self._containers)
        # Containers that run since before this plugin, or that a restart of it missed, need the links as well.
        self._driver.link_devices()
        self.preload.install()
        if self.mode != "nvidia-runtime":
            self._driver_folder.mkdir(parents=True, exist_ok=True)
            label_for_containers(self._driver_folder)
            # Complete before it is the current one: a container may start at any moment.
            self._driver.install_files(self._driver_folder, version, self.preload.stand_in)
        if self.mode == "cdi":
            self._cdi.mkdir(parents=True, exist_ok=True)
            self._library_cache.install()
            self.memory_limit_hook.install()
            self.preload.install_hook(self._library_cache.folder)

    def build_response(
        self,
        pod: BoundPod,
        container: str,
        allocation: ContainerAllocation,
        slices: Sequence[GpuSlice],
    ) -> api.ContainerAllocateResponse:
        """Create the container's files, and return what the runtime has to inject; OSError if a file cannot be made."""
        self.prepare(pod, container, allocation, slices)
        cards = self._find_cards(slices)
        response = api.ContainerAllocateResponse(annotations=self._gpu_manager_annotations(slices, cards))
        if allocation.mode == "cdi":
            response.cdi_devices.add(name=f"{CDI_KIND}={allocation.token}")
            return response
        for node in self._driver.device_nodes(cards):
            response.devices.add(host_path=node.host, container_path=node.container, permissions="rw")
        for mount in self._mounts(allocation):
            response.mounts.add(host_path=mount.host, container_path=mount.container, read_only=mount.read_only)
        response.envs.update(self._environment(slices))
        return response

    def prepare(
        self,
        pod: BoundPod,
        container: str,
        allocation: ContainerAllocation,
        slices: Sequence[GpuSlice],
    ) -> None:
        """Create or repair the container's files; called before every start, because /run is empty after a reboot.

        OSError also if its limits would not be enforced as its allocation says.
        """
        rung = allocation.isolation.memory
        has_limit = rung is Rung.DRIVER and bool(limited_slices(slices, self._node_cards))
        if has_limit and allocation.mode != "cdi":
            raise OSError(errno.ENOTSUP, f"the driver's memory limit needs CDI, not {allocation.mode}")
        if self.mode != "nvidia-runtime" and not (self._driver_folder / CURRENT).is_symlink():
            # There was no driver at the start, or the folder was emptied since.
            self.start(self._version)
        folder = self._containers / allocation.token
        folder.mkdir(parents=True, exist_ok=True)
        # Readable for any user the container runs as; mkdir's mode is reduced by the umask.
        folder.chmod(0o755)
        limits = self._limits(pod, container, slices)
        write_if_changed(folder / LIMITS_FILE, msgspec.json.encode(limits))
        if rung is Rung.PRELOAD:
            if (self._driver_folder / CURRENT).is_symlink():
                self.preload.stand_in((self._driver_folder / CURRENT).resolve())
            self.preload.prepare(
                allocation.token, self._card_limits(limits), self._version, self._libraries_in_container()
            )
        # The mode of the allocation, not the current one: the kubelet replays the response that names the CDI device.
        if allocation.mode == "cdi":
            self._cdi.mkdir(parents=True, exist_ok=True)
            cards = self._find_cards(slices)
            # Only here: the numbers of graphics nodes may differ after a boot, and the kubelet replays responses.
            nodes = [*self._driver.device_nodes(cards), *self._driver.graphics_nodes(cards)]
            hooks = [self.memory_limit_hook.hook(allocation.token)] if has_limit else []
            if rung is Rung.PRELOAD:
                hooks += self.preload.hooks(allocation.token)
            spec = self._cdi_spec(allocation, slices, nodes, hooks)
            write_if_changed(self._cdi_file(allocation.token), msgspec.json.encode(spec))

    def is_outdated(self, response: api.ContainerAllocateResponse, slices: Sequence[GpuSlice]) -> bool:
        """Whether a response names device nodes that its cards no longer have: minor numbers can change at a boot."""
        # A CDI file is rewritten before each start; a response cannot be changed in the kubelet's checkpoint.
        if response.cdi_devices:
            return False
        all_paths = {device_path(card) for card in self._node_cards.cards()}
        return {each.container_path for each in response.devices} & all_paths != {
            device_path(card) for card in self._find_cards(slices)
        }

    def remove(self, tokens: Collection[str]) -> None:
        """Remove the folders and CDI files of containers that are gone."""
        for token in tokens:
            self.preload.remove(token)
            shutil.rmtree(self._containers / token, ignore_errors=True)
            self._cdi_file(token).unlink(missing_ok=True)

    def existing_tokens(self) -> set[str]:
        """Return the tokens that have a folder or a CDI file."""
        folders = {each.name for each in self._containers.glob("*")}
        files = self._cdi.glob(f"{CDI_FILE_PREFIX}*.json")
        return (
            folders
            | self.preload.tokens()
            | {each.name.removeprefix(CDI_FILE_PREFIX).removesuffix(".json") for each in files}
        )

    def remove_old_drivers(self) -> None:
        """Remove the files of earlier driver versions; only safe while no container uses them."""
        self._driver.remove_old_files(self._driver_folder)
        self.preload.remove_old()

    def _cdi_file(self, token: str) -> Path:
        return self._cdi / f"{CDI_FILE_PREFIX}{token}.json"

    def _find_cards(self, slices: Sequence[GpuSlice]) -> list[Card]:
        return [card for given in slices if (card := self._node_cards.get(given.uuid)) is not None]

    def _mounts(self, allocation: ContainerAllocation) -> list[Mount]:
        mounts = [Mount(str(self._containers / allocation.token), LIMITS_PATH)]
        is_preloaded = allocation.isolation.memory is Rung.PRELOAD
        # Without driver files nothing is mounted: a container does not start if a mount's source is missing.
        if self.mode != "nvidia-runtime" and (self._driver_folder / CURRENT).exists():
            libraries = self.preload.library_folder if is_preloaded else "lib64"
            mounts += [
                Mount(f"{self._driver_folder}/{CURRENT}/{part}", f"{CONTAINER_FOLDER}/{inside}")
                for part, inside in (("bin", "bin"), (libraries, "lib64"))
            ]
            # One by one: the image may have descriptions of other drivers in the same folders.
            for name in installed_descriptions(self._driver_folder / CURRENT):
                mounts.append(Mount(f"{self._driver_folder}/{CURRENT}/{name}", f"/{name.removeprefix(f'{SHARED}/')}"))
        return [*mounts, *(self.preload.mounts(allocation.token) if is_preloaded else ())]

    def _libraries_in_container(self) -> str:
        """Return where the driver's libraries are mounted; empty if NVIDIA's runtime mounts them where it likes."""
        return "" if self.mode == "nvidia-runtime" else f"{CONTAINER_FOLDER}/lib64"

    def _card_limits(self, limits: ContainerFile) -> list[CardLimits]:
        return [
            CardLimits(
                uuid=card.uuid,
                memory_bytes=card.memory_mib * MIB,
                context_bytes=self.context_mib(card.uuid) * MIB,
                cores=card.cores,
                core_limit=limits.core_limit,
            )
            for card in limits.cards
        ]

    def _environment(self, slices: Sequence[GpuSlice]) -> dict[str, str]:
        # In responses these are only defaults: the kubelet lets the pod's own variables win.
        visible = {VISIBLE: ",".join(given.uuid for given in slices)}
        if self.mode == "nvidia-runtime":
            return visible | {CAPABILITIES: "compute,utility"}
        return visible | {LIBRARY_PATH: f"{CONTAINER_FOLDER}/lib64"}

    def _gpu_manager_annotations(self, slices: Sequence[GpuSlice], cards: Sequence[Card]) -> dict[str, str]:
        """Return the container annotations that gpu-manager set, for tools that read them; memory is in bytes."""
        memory_bytes = sum(given.memory_mib for given in slices) * MIB
        return {
            self._names.core: str(sum(given.cores for given in slices)),
            self._names.memory: str(memory_bytes),
            self._names.device_annotation: ",".join(map(device_path, cards)),
        }

    def _limits(self, pod: BoundPod, container: str, slices: Sequence[GpuSlice]) -> ContainerFile:
        cards = {card.uuid: card for card in self._find_cards(slices)}
        cores = sum(given.cores for given in slices)
        limits = pod.limits.get(container)
        # A share may burst up to one card; whole cards have nothing to burst into.
        burst = min(limits.core_limit, CORES_PER_CARD) if limits and cores < CORES_PER_CARD else cores
        return ContainerFile(
            v=LIMITS_VERSION,
            pod_uid=pod.uid,
            namespace=pod.metadata.namespace,
            pod=pod.metadata.name,
            container=container,
            cores=cores,
            core_limit=max(cores, burst),
            memory_mib=sum(given.memory_mib for given in slices),
            cards=tuple(
                LimitedCard(given.uuid, cards[given.uuid].index, cards[given.uuid].minor, given.cores, given.memory_mib)
                for given in slices
                if given.uuid in cards
            ),
        )

    def _cdi_spec(
        self,
        allocation: ContainerAllocation,
        slices: Sequence[GpuSlice],
        nodes: Sequence[DeviceNode],
        hooks: Sequence[dict[str, Any]],
    ) -> dict[str, Any]:
        # A daemon that starts again makes a new socket, so these too are looked up before each start.
        mounts = [*self._mounts(allocation), *(Mount(host, inside) for host, inside in self._driver.sockets())]
        environment, hook = self._environment(slices), self._library_cache.hook(f"{CONTAINER_FOLDER}/lib64")
        if hook is not None:
            # The image's own stays, which the variable would replace.
            environment.pop(LIBRARY_PATH, None)
        edits: dict[str, Any] = {
            "env": [f"{name}={value}" for name, value in sorted(environment.items())],
            "deviceNodes": [{"path": node.container, "hostPath": node.host, "permissions": "rw"} for node in nodes],
            "mounts": [
                {
                    "hostPath": mount.host,
                    "containerPath": mount.container,
                    "options": ["ro" if mount.read_only else "rw", "nosuid", "nodev", "rbind", "rprivate"],
                }
                for mount in mounts
            ],
        }
        if all_hooks := [*hooks, *([] if hook is None else [hook])]:
            edits["hooks"] = all_hooks
        return {
            "cdiVersion": CDI_VERSION,
            "kind": CDI_KIND,
            "devices": [{"name": allocation.token, "containerEdits": edits}],
        }


def device_path(card: Card) -> str:
    """Return the path of a card's device node inside containers."""
    return f"/dev/nvidia{card.minor}"


def write_if_changed(path: Path, content: bytes) -> None:
    """Replace a world-readable file, unless it has this content already."""
    with suppress(OSError):
        if path.read_bytes() == content:
            return
    replace_file(path, content, mode=0o444)
