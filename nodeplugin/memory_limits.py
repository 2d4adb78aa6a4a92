"""The driver's own memory limits (r615 and newer): on which containers, and whether this node can have them.

A limit is set on the leaf cgroup of a container before its first program starts, with the container's share as the hard
limit. The soft limit stays 0: it would reserve memory in all cgroups above, also while the container uses none, and
stay there if the cgroup were removed first. The shares of a card never add up to more than the card has, so there is
nothing to reserve.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec import Struct

from nodeplugin.cards import Card, NodeCards
from nodeplugin.cgroups import process_ids
from nodeplugin.checkpoint import PodAllocation
from nodeplugin.leaf_cgroups import (
    CONTROLLER,
    CONTROLLERS,
    NoLeafCgroup,
    enable_controller,
    find_cgroup2,
    read_leaf,
    read_words,
)
from nodeplugin.nvml import NO_LIMIT, Driver, DriverError, MemoryLimits
from nodeplugin.pods import PodsByUid
from vcuda.injection_modes import InjectionMode
from vcuda.memory_units import MIB
from vcuda.placement_annotation import GpuSlice
from vcuda.vocabulary import CORES_PER_CARD

# The first branch with the limits.
FIRST_BRANCH = 615
# The driver may round a limit down to its own pages, the largest of which have this size.
LARGEST_PAGE = 2 * MIB


class MemoryLimitFacts(Struct, frozen=True):
    """What decides whether a node can limit memory by its driver.

    `controllers` are those of the root of cgroup v2, None without cgroup v2. `sees_cgroups` is false if the plugin is
    in a cgroup namespace of its own.
    """

    driver: str
    mode: InjectionMode
    has_hook: bool
    controllers: frozenset[str] | None
    sees_cgroups: bool = True


def offers_memory_limits(facts: MemoryLimitFacts, card: Card) -> str:
    """Return why the driver's memory limit is not offered on a card; empty if it is."""
    major = facts.driver.partition(".")[0]
    is_old = not major.isdecimal() or int(major) < FIRST_BRANCH
    problems = (
        (is_old, f"the driver is {facts.driver or 'of unknown version'}; memory limits exist from r{FIRST_BRANCH} on"),
        (card.is_mig, "the driver does not limit the memory of MIG devices, which have memory of their own"),
        (facts.mode != "cdi", f"a hook of the container runtime sets the limit: that needs CDI, not {facts.mode}"),
        (not facts.has_hook, "the hook that sets the limit is not installed, or is on a mount with noexec"),
        (facts.controllers is None, "this node has no cgroup v2"),
        (
            CONTROLLER not in (facts.controllers or ()),
            f"the kernel has no {CONTROLLER} controller (Linux 6.14 and newer, with CONFIG_CGROUP_DMEM)",
        ),
        (not facts.sees_cgroups, "the node plugin is in a cgroup namespace of its own and sees no other container"),
    )
    return next((reason for is_wrong, reason in problems if is_wrong), "")


def read_facts(
    host: Path, driver: str, mode: InjectionMode, *, has_hook: bool, proc: Path = Path("/proc")
) -> MemoryLimitFacts:
    """Read what is not known of this node; `host` is where the host's root file system is seen."""
    root, controllers = find_cgroup2(host), None
    if root is not None:
        with suppress(OSError):
            controllers = frozenset(read_words(root / CONTROLLERS))
    return MemoryLimitFacts(driver, mode, has_hook, controllers, sees_cgroups=sees_cgroups(proc))


def sees_cgroups(proc: Path) -> bool:
    """Whether this process is in the cgroup namespace of the host's first process."""
    try:
        return (proc / "self/ns/cgroup").readlink() == (proc / "1/ns/cgroup").readlink()
    except OSError:
        return False


def limited_slices(slices: Sequence[GpuSlice], node_cards: NodeCards) -> tuple[GpuSlice, ...]:
    """Return the slices that the driver can limit: shares of cards, neither whole ones nor MIG devices."""
    shares = [given for given in slices if given.cores < CORES_PER_CARD]
    # A card that is not known has a limit that cannot be set: its container does not start.
    return tuple(given for given in shares if (card := node_cards.get(given.uuid)) is None or not card.is_mig)


class LimitedContainer(Struct, frozen=True):
    """A container whose memory the driver limits, by the uuid of each card."""

    uid: str
    title: str
    name: str
    limits_mib: Mapping[str, int]


def limited_containers(
    allocations: Mapping[str, PodAllocation], node_cards: NodeCards, is_limited: Callable[[PodAllocation, str], bool]
) -> dict[str, LimitedContainer]:
    """Return the containers with a driver's limit, by token; `is_limited` tells for which ones it was chosen."""
    return {
        given.token: LimitedContainer(
            uid, pod.title, name, {each.uuid: each.memory_mib for each in limited_slices(pod.placed[name], node_cards)}
        )
        for uid, pod in allocations.items()
        for name, given in pod.containers.items()
        if given.token and name in pod.placed and is_limited(pod, name)
    }


class CannotLimit(Exception):  # noqa: N818 - not a fault of the program
    """A container gets no limit, so it must not start; the message says why."""


class MemoryLimiter:
    """Sets and checks the limits. `containers` returns those that have one, by token; may be called on any thread."""

    def __init__(
        self,
        driver: Driver,
        host: Path,
        containers: Callable[[], Mapping[str, LimitedContainer]],
        proc: Path = Path("/proc"),
    ) -> None:
        self._driver, self._host, self._containers, self._proc = driver, host, containers, proc
        # Guards the leaves: the server's thread sets them, the reconciler removes them. Not held in driver calls.
        self._lock = threading.Lock()
        # The cgroup and the limited cards of containers, by token.
        self._leaves: dict[str, tuple[Path, frozenset[str]]] = {}
        self._log = structlog.get_logger()

    def apply(self, token: str, pid: int, container_id: str) -> None:
        """Limit the container of a process that is about to start; CannotLimit if its limits are not in force."""
        containers = self._containers()
        container = containers.get(token)
        if container is None or not container.limits_mib:
            raise CannotLimit("no share of GPU memory is allocated for this token; delete the pod")
        root = self._root()
        try:
            leaf, owner = read_leaf(pid, root, frozenset(each.uid for each in containers.values()), self._proc)
        except NoLeafCgroup as error:
            raise CannotLimit(str(error)) from None
        # The token is an argument in a file that only root writes; even so, one container's must not serve another.
        if (owner.uid, owner.container_id) != (container.uid, container_id):
            raise CannotLimit(f"process {pid} is of pod {owner.uid}, container {owner.container_id}: not of this token")
        try:
            enable_controller(root, leaf)
        except OSError as error:
            raise CannotLimit(f"the {CONTROLLER} controller cannot be enabled for {leaf}: {error}") from None
        self._drop_reservation(token)
        for uuid, limit_mib in container.limits_mib.items():
            self._limit(uuid, leaf, limit_mib * MIB)
        self._remember(token, leaf, container)
        self._log.info("memory_limit_set", pod=container.title, container=container.name, cgroup=str(leaf))

    def _root(self) -> Path:
        root = find_cgroup2(self._host)
        if root is None:
            raise CannotLimit("this node has no cgroup v2")
        return root

    def _limit(self, uuid: str, leaf: Path, limit_bytes: int) -> None:
        try:
            self._driver.set_memory_limits(uuid, leaf, MemoryLimits(0, limit_bytes))
            found = self._driver.memory_limits(uuid, leaf)
        except DriverError as error:
            raise CannotLimit(f"{error} (cgroup {leaf})") from None
        if problem := difference(found, limit_bytes):
            raise CannotLimit(f"GPU {uuid}, cgroup {leaf}: {problem}")

    def verify(self, pods: PodsByUid) -> list[str]:
        """Check the limits of all containers that run, and log what is wrong with them; nothing is changed.

        Limits belong to cgroups, so they survive the plugin. Called once for each start of it.
        """
        problems: list[str] = []
        for token, container, folders in self._running(pods):
            for uuid, limit_mib in container.limits_mib.items():
                found = [self._check(uuid, folder, limit_mib * MIB) for folder in folders]
                # One of them is enough: a limit holds for the cgroups below it as well.
                folder = next((each for each, problem in zip(folders, found, strict=True) if not problem), folders[-1])
                self._remember(token, folder, container)
                if all(found):
                    problems.append(f"pod {container.title}, container {container.name}, GPU {uuid}: {found[-1]}")
        problems = list(dict.fromkeys(problems))
        for problem in problems:
            self._log.error("memory_limit_not_in_force", problem=problem, remedy="delete the pod")
        return problems

    def _check(self, uuid: str, folder: Path, limit_bytes: int) -> str:
        try:
            return difference(self._driver.memory_limits(uuid, folder), limit_bytes)
        except DriverError as error:
            return str(error)

    def _running(self, pods: PodsByUid) -> list[tuple[str, LimitedContainer, tuple[Path, ...]]]:
        """Return each container with its cgroups that have processes, from these up to the container's own."""
        containers, root = self._containers(), find_cgroup2(self._host)
        tokens = {(each.uid, each.name): token for token, each in containers.items()}
        uids = frozenset(each.uid for each in containers.values())
        found: dict[Path, tuple[str, LimitedContainer, tuple[Path, ...]]] = {}
        for pid in process_ids(self._proc) if root and containers else ():
            with suppress(NoLeafCgroup):
                leaf, owner = read_leaf(pid, root or Path(), uids, self._proc)
                pod = pods.get(owner.uid)
                name = pod.container_ids.get(owner.container_id, "") if pod else ""
                if token := tokens.get((owner.uid, name)):
                    # Programs of the container may have made cgroups below its own.
                    above = (each for each in leaf.parents if owner.container_id in str(each))
                    found[leaf] = (token, containers[token], (leaf, *above))
        return list(found.values())

    def _remember(self, token: str, leaf: Path, container: LimitedContainer) -> None:
        with self._lock:
            self._leaves[token] = (leaf, frozenset(container.limits_mib))

    def release_ended(self) -> None:
        """Drop what is reserved for containers whose allocation is gone; called after allocations were released."""
        with self._lock:
            ended = self._leaves.keys() - self._containers().keys()
        for token in ended:
            self._drop_reservation(token)

    def _drop_reservation(self, token: str) -> None:
        """Set the soft limit to 0 if it is not: an administrator can set one by `nvidia-smi memory-limits`.

        The hard limit stays: programs of the container may still run.
        """
        with self._lock:
            leaf, uuids = self._leaves.pop(token, (Path(), frozenset[str]()))
        for uuid in uuids if leaf.is_dir() else ():
            try:
                found = self._driver.memory_limits(uuid, leaf)
                if found.soft_bytes:
                    self._driver.set_memory_limits(uuid, leaf, MemoryLimits(0, found.hard_bytes))
            except DriverError as error:
                if leaf.is_dir():
                    self._log.warning("memory_reservation_kept", cgroup=str(leaf), error=str(error))


def difference(found: MemoryLimits, limit_bytes: int) -> str:
    """Return how limits differ from the container's share; empty if they hold it to that."""
    if 0 <= limit_bytes - found.hard_bytes < LARGEST_PAGE and not found.soft_bytes:
        return ""
    hard = "none" if found.hard_bytes == NO_LIMIT else f"{found.hard_bytes} bytes"
    return f"the driver has the hard limit {hard} and the soft limit {found.soft_bytes}, not {limit_bytes} and 0"
