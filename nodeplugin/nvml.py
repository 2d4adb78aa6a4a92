"""The NVIDIA driver, through NVML: which cards there are, whether they work, and what runs on them.

Not every driver and card supports every call, so a value whose call fails is left at its default.
"""

import ctypes
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

import pynvml
import structlog
from msgspec import Struct
from msgspec.structs import replace

from nodeplugin.card_reader import CardReader, CardReading, Values
from nodeplugin.cards import Card
from nodeplugin.parallel_calls import ParallelCalls
from vcuda.memory_units import MIB

LIBRARY = "libnvidia-ml.so.1"
# nvmlGpuTopologyLevel_t, with the names of `nvidia-smi topo`.
PATHS = {0: "board", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
# How long a list waits for cards while none answers. The first call for a card may take some seconds.
CARD_ANSWER_S = 10.0
# How long one that hangs may hold up the registration for XID errors.
REGISTER_S = 2.0
# In events: the whole card, not an instance of it.
NO_INSTANCE = 0xFFFFFFFF
# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, from r565 on, and its value for none.
RECOVERY_ACTION, NO_ACTION = 230, 0
# NVML_DEVICE_MEMORY_LIMIT_MAX
NO_LIMIT = 0xFFFFFFFFFFFFFFFF
# Processes are sampled several times a second; utilization is the maximum within this window.
UTILIZATION_WINDOW_US = 1_000_000
# NVML_TEMPERATURE_GPU
GPU_SENSOR = 0

T = TypeVar("T")


class DriverError(Exception):
    """The driver cannot be used; the message says why, and the remedy."""


class GpuProcess(Struct, frozen=True):
    """A process on a card; `utilization` is in percent of the card.

    `memory_mib` is None if the driver does not report it, as in some virtual machines.
    """

    pid: int
    memory_mib: int | None
    utilization: int


class MeasuredUsage(Struct, frozen=True):
    """What is used of a card now; None where the driver does not report it."""

    utilization: int | None = None
    used_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    processes: tuple[GpuProcess, ...] | None = None


class MemoryLimits(Struct, frozen=True):
    """What a cgroup may use of a card: up to `hard`, and `soft` of it is reserved. Without limits: 0 and NO_LIMIT."""

    soft_bytes: int
    hard_bytes: int


class CardList(Struct, frozen=True):
    """The cards that the driver lists, and by index why it could not be read which others there are."""

    cards: tuple[Card, ...]
    unreadable: Mapping[int, str] = {}


class CardCheck(Struct, frozen=True):
    """Why a card does not respond; empty if it does. `is_away`: it is being reset, or gone, and not only slow."""

    error: str = ""
    is_away: bool = False


class XidEvent(Struct, frozen=True):
    """An XID error of a card; `uuid` is empty if the driver cannot attribute it.

    The instances are -1 unless it concerns one MIG slice of the card.
    """

    uuid: str
    xid: int
    gpu_instance: int = -1
    compute_instance: int = -1


def load_bindings() -> Any:  # noqa: ANN401 - a module
    """Load another copy of pynvml: the module keeps one library in a global, and a simulation has several drivers."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.loader is None:
        raise DriverError("nvidia-ml-py is not installed")
    bindings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bindings)
    return bindings


class Driver:
    """A loaded NVML library. Any thread may call it; calls can block for as long as hardware is broken."""

    def __init__(self, library: Path | None = None, bindings: Any = pynvml) -> None:  # noqa: ANN401 - a module
        self.library, self._nvml = library, bindings
        self._handles: dict[str, Any] = {}
        # By the address of a handle: a card that is lost no longer reports the uuid of its handle.
        self._uuids: dict[int, str] = {}
        # The last reading of each card, and the PCIe path between each two: what cannot change is not asked again.
        self._known: dict[str, CardReading] = {}
        self._paths: dict[tuple[str, str], str] = {}
        self._reader = CardReader(bindings)
        self._reads: ParallelCalls[CardReading] = ParallelCalls("card")
        self._path_reads: ParallelCalls[dict[tuple[str, str], str]] = ParallelCalls("paths")
        # What could not be read the last time, by index.
        self._problems: dict[int, str] = {}
        self.is_open = False
        self._events: Any = None
        # The handle with which each card is subscribed, by the uuid of the card.
        self._subscribed: dict[str, int] = {}
        self._registrations: ParallelCalls[bool] = ParallelCalls("events")
        # A function that the library lacks is reported in two ways, one of which is no NVMLError.
        self._errors = (bindings.NVMLError, bindings.NVMLLibraryMismatchError)
        # What the driver returns for a card while it is reset.
        self._away_errors = {
            bindings.NVML_ERROR_NOT_FOUND,
            bindings.NVML_ERROR_GPU_IS_LOST,
            bindings.NVML_ERROR_RESET_REQUIRED,
        }
        self._log = structlog.get_logger()

    def open(self) -> "Driver":
        """Load and initialize NVML; raises DriverError if there is no driver or it does not respond."""
        if self._nvml.nvmlLib is None and self.library is not None:
            # Set before nvmlInit, which would otherwise search this process's own library path.
            try:
                self._nvml.nvmlLib = ctypes.CDLL(str(self.library))
            except OSError as error:
                raise DriverError(f"cannot load {self.library}: {error}") from None
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise DriverError(
                f"the NVIDIA driver does not respond: {error}; check that it is installed and loaded (nvidia-smi), and "
                f"that nodePlugin.driverRoot contains {LIBRARY}"
            ) from None
        self.is_open = True
        return self

    def close(self) -> None:
        self.unsubscribe()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def version(self) -> str:
        """Return the driver's version, such as 550.54.15; empty if it does not report one."""
        return str(self._call(self._nvml.nvmlSystemGetDriverVersion, "") or "")

    def count_cards(self) -> int:
        """Count the cards; like `open`, this returns late or never where a driver hangs as a whole."""
        try:
            return int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            # Not an empty list: that would make every card missing.
            raise DriverError(f"the NVIDIA driver does not report the number of cards: {error}") from None

    def read_cards(self, count: int) -> CardList:
        """List the cards with these indexes, except those that do not answer for CARD_ANSWER_S.

        A card in MIG mode is listed as its MIG devices; without any, it is not listed.
        """
        calls = {str(index): partial(self._reader.read, index, self._known) for index in range(count)}
        answers = self._reads.gather(calls, CARD_ANSWER_S)
        readings: list[CardReading] = []
        problems: dict[int, str] = {}
        away: set[int] = set()
        for index in range(count):
            if (answer := answers.get(str(index))) is None:
                problems[index] = f"no answer from the driver for {CARD_ANSWER_S:.0f} s"
                continue
            try:
                reading = answer.result()
            except self._nvml.NVMLError as error:
                problems[index] = f"driver error: {error}"
                if error.value in self._away_errors:
                    away.add(index)
                continue
            readings.append(reading)
            if reading.problem:
                problems[index] = reading.problem
        if problems != self._problems:
            self._log.warning("cards_unreadable", problems=problems)
            self._problems = problems
        # Of a card that could not be read now, the last reading; of one that is gone none: another may have its handle.
        self._known = {uuid: each for uuid, each in self._known.items() if each.card.index in problems}
        self._known |= {each.card.uuid: each for each in readings}
        # Physical cards in MIG mode included: XIDs are reported for them.
        self._handles = {
            card.uuid: handle
            for each in self._known.values()
            for card, handle in ((each.card, each.handle), *each.parts)
        }
        self._uuids = {handle_address(each.handle): each.card.uuid for each in self._known.values()}
        links = self._links_between(readings)
        return CardList(
            tuple(replace(card, links=links.get(card.uuid, {})) for each in readings for card, _ in each.offered),
            {index: problem for index, problem in problems.items() if index not in away},
        )

    def check_card(self, card: Card) -> CardCheck:
        """Check whether a card responds. A MIG device is checked together with its card."""
        for uuid in filter(None, (card.parent, card.uuid)):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
                if self._nvml.nvmlDeviceGetUUID(handle) != uuid:
                    return CardCheck("the driver returned another card for this uuid")
            except self._nvml.NVMLError as error:
                return CardCheck(f"driver error: {error}", error.value in self._away_errors)
            # A card that was reset has a new handle.
            self._handles[uuid] = handle
        return CardCheck()

    def needs_reset(self, card: Card) -> bool | None:
        """Whether the driver wants a card to be reset; None if it is too old to say."""
        handle = self._handles.get(card.parent or card.uuid)
        values = self._call(lambda: self._nvml.nvmlDeviceGetFieldValues(handle, [RECOVERY_ACTION]), None)
        if not values or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return int(values[0].value.uiVal) != NO_ACTION

    def usage(self, card: Card) -> MeasuredUsage:
        """Measure a card; one that was never listed, or is lost, has no values."""
        handle = self._handles.get(card.uuid)
        if handle is None:
            return MeasuredUsage()
        memory = self._call(lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle), None)
        rates = self._call(lambda: self._nvml.nvmlDeviceGetUtilizationRates(handle), None)
        power_mw = self._call(lambda: self._nvml.nvmlDeviceGetPowerUsage(handle), None)
        return MeasuredUsage(
            utilization=None if rates is None else int(rates.gpu),
            used_mib=None if memory is None else int(memory.used) // MIB,
            temperature_c=self._call(lambda: int(self._nvml.nvmlDeviceGetTemperature(handle, GPU_SENSOR)), None),
            power_w=None if power_mw is None else power_mw / 1000,
            processes=self._read_processes(handle),
        )

    def memory_limits(self, uuid: str, cgroup: Path) -> MemoryLimits:
        """Return the limits of a cgroup, given by its folder, on a card; raises DriverError."""
        limits = self._nvml.c_nvmlGetMemoryLimits_v1_t(nameSpace=os.fsencode(cgroup))
        self._limit(self._nvml.nvmlDeviceGetMemoryLimits_v1, uuid, limits)
        return MemoryLimits(int(limits.softLimit), int(limits.hardLimit))

    def set_memory_limits(self, uuid: str, cgroup: Path, limits: MemoryLimits) -> None:
        """Set the limits of a cgroup on a card, which needs root; raises DriverError."""
        wanted = self._nvml.c_nvmlSetMemoryLimits_v1_t(os.fsencode(cgroup), limits.soft_bytes, limits.hard_bytes)
        self._limit(self._nvml.nvmlDeviceSetMemoryLimits_v1, uuid, wanted)

    def clear_memory_limits(self, uuid: str, cgroup: Path) -> None:
        self.set_memory_limits(uuid, cgroup, MemoryLimits(0, NO_LIMIT))

    def _limit(self, call: Callable[[Any, Any], None], uuid: str, limits: Any) -> None:  # noqa: ANN401 - a C struct
        try:
            call(self._handles.get(uuid) or self._nvml.nvmlDeviceGetHandleByUUID(uuid), limits)
        except self._errors as error:
            raise DriverError(f"the NVIDIA driver does not limit the memory of GPU {uuid}: {error}") from None

    def subscribe(self, cards: Sequence[Card]) -> None:
        """Subscribe to the XID errors of those cards that were listed, and that are not subscribed yet.

        A subscription is extended and not replaced: what happens in between would be lost.
        """
        handles = {uuid: self._handles.get(uuid) for uuid in sorted({card.parent or card.uuid for card in cards})}
        # A card that was reset may have a new handle.
        missing = {
            uuid: handle
            for uuid, handle in handles.items()
            if handle is not None and self._subscribed.get(uuid) != handle_address(handle)
        }
        if missing and self._events is None:
            self._events = self._nvml.nvmlEventSetCreate()
        calls = {uuid: partial(self._register, handle, self._events) for uuid, handle in missing.items()}
        for uuid, answer in self._registrations.gather(calls, REGISTER_S).items():
            if answer.result():
                self._subscribed[uuid] = handle_address(missing[uuid])

    def _register(self, handle: Any, events: Any) -> bool:  # noqa: ANN401
        """Register for the XID errors of a card; returns False if that failed and may succeed later."""
        values, wanted = Values(self._nvml), self._nvml.nvmlEventTypeXidCriticalError
        supported = values.optional(lambda: self._nvml.nvmlDeviceGetSupportedEventTypes(handle), 0)
        # Cards that do not support events are still covered by polling.
        if supported & wanted:
            values.optional(lambda: self._nvml.nvmlDeviceRegisterEvents(handle, wanted, events), None)
        return values.is_complete

    def wait_for_xid(self, timeout_s: float) -> XidEvent | None:
        """Wait for the next XID error; None after the timeout, or without a subscription."""
        if self._events is None:
            time.sleep(timeout_s)
            return None
        try:
            event = self._nvml.nvmlEventSetWait(self._events, int(timeout_s * 1000))
        except self._nvml.NVMLError as error:
            if error.value == self._nvml.NVML_ERROR_TIMEOUT:
                return None
            raise DriverError(f"the NVIDIA driver no longer reports XID errors: {error}") from None
        known = self._uuids.get(handle_address(event.device), "")
        uuid = known or str(self._call(lambda: self._nvml.nvmlDeviceGetUUID(event.device), ""))
        instances = (int(event.gpuInstanceId), int(event.computeInstanceId))
        return XidEvent(uuid, int(event.eventData), *(-1 if each == NO_INSTANCE else each for each in instances))

    def unsubscribe(self) -> None:
        """End all subscriptions, which may have failed: the next ones are new."""
        # A registration that hangs still uses the set.
        if self._events is not None and not self._registrations.is_running:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
        self._events = None
        self._subscribed = {}

    def _call(self, function: Callable[[], T], default: T) -> T:
        """Make a call that not every driver or card supports; returns the default if it fails."""
        try:
            return function()
        except self._errors:
            return default

    def _links_between(self, readings: Sequence[CardReading]) -> dict[str, dict[str, str]]:
        """Return how each card reaches each other one: over NVLink with the number of links, or over PCIe."""
        self._read_paths(readings)
        links: dict[str, dict[str, str]] = {each.card.uuid: {} for each in readings}
        for one, other in combinations(readings, 2):
            # Any card reaches any other through an NVSwitch, as fast as the one with fewer links.
            switched = min(one.nvlinks.to_switch, other.nvlinks.to_switch)
            count = one.nvlinks.to_card.get(other.card.bus_id, 0) + switched
            if link := f"nvlink{count}" if count else self._paths.get((one.card.uuid, other.card.uuid), ""):
                links[one.card.uuid][other.card.uuid] = links[other.card.uuid][one.card.uuid] = link
        return links

    def _read_paths(self, readings: Sequence[CardReading]) -> None:
        unknown: dict[str, list[tuple[CardReading, CardReading]]] = {}
        for one, other in combinations(readings, 2):
            if (one.card.uuid, other.card.uuid) not in self._paths:
                unknown.setdefault(one.card.uuid, []).append((one, other))
        calls = {uuid: partial(self._paths_between, pairs) for uuid, pairs in unknown.items()}
        for answer in self._path_reads.gather(calls, CARD_ANSWER_S).values():
            self._paths |= answer.result()

    def _paths_between(self, pairs: Sequence[tuple[CardReading, CardReading]]) -> dict[tuple[str, str], str]:
        paths = {}
        for one, other in pairs:
            values = Values(self._nvml)
            ancestor = partial(self._nvml.nvmlDeviceGetTopologyCommonAncestor, one.handle, other.handle)
            path = PATHS.get(values.optional(ancestor, None), "")
            if values.is_complete:
                paths[one.card.uuid, other.card.uuid] = path
        return paths

    def _list_processes(self, handle: Any, kind: str) -> Sequence[Any] | None:  # noqa: ANN401
        """List the processes of one kind, by the newest function that the library has: before r510, version 2.

        None if the driver does not report them.
        """
        for version in (3, 2):
            try:
                found: Sequence[Any] = getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses_v{version}")(handle)
            except self._nvml.NVMLError as error:
                if error.value != self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    break
            else:
                return found
        return None

    def _read_processes(self, handle: Any) -> tuple[GpuProcess, ...] | None:  # noqa: ANN401
        memory: dict[int, int | None] = {}
        none: list[Any] = []
        compute = self._list_processes(handle, "Compute")
        if compute is None:
            return None
        for process in (*compute, *(self._list_processes(handle, "Graphics") or ())):
            used = process.usedGpuMemory
            memory[int(process.pid)] = None if used is None else int(used) // MIB
        since_us = int(time.time() * 1_000_000) - UTILIZATION_WINDOW_US
        utilization: dict[int, int] = {}
        for sample in self._call(lambda: self._nvml.nvmlDeviceGetProcessUtilization(handle, since_us), none):
            utilization[int(sample.pid)] = max(int(sample.smUtil), utilization.get(int(sample.pid), 0))
        return tuple(GpuProcess(pid, mib, utilization.get(pid, 0)) for pid, mib in sorted(memory.items()))


def handle_address(handle: Any) -> int:  # noqa: ANN401 - an opaque pointer
    """Return the pointer itself: NVML's handles have no other identity."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
