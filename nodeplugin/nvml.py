"""The driver, asked through NVML: which cards there are, how they are, and what runs on them.

A call that the driver does not know or does not allow leaves out what it would have told; only a card that cannot even
say its name is left out as a whole.
"""

import ctypes
import importlib.util
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pynvml
import structlog
from msgspec import Struct
from msgspec.structs import replace

from nodeplugin.cards import Card

LIBRARY = "libnvidia-ml.so.1"
MIB = 2**20
LEVELS = {0: "board", 10: "pix", 20: "pxb", 30: "phb", 40: "node", 50: "sys"}
SWITCH = 2
MAX_LINKS = 36
SAMPLES_US = 1_000_000
DEGREES_SENSOR = 0

T = TypeVar("T")


class DriverError(Exception):
    """The driver cannot be asked; the message says why and what helps."""


class GpuProcess(Struct, frozen=True):
    """A process on a card: the memory it has, and its part of the card's time in percent."""

    pid: int
    memory_mib: int
    utilization: int


class MeasuredUsage(Struct, frozen=True):
    """What a card does now; what the driver does not say is None."""

    utilization: int | None = None
    used_mib: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    processes: tuple[GpuProcess, ...] = ()


class XidEvent(Struct, frozen=True):
    """An error that the driver reports; of a card that it cannot name, the uuid is empty."""

    uuid: str
    xid: int


def own_bindings() -> Any:  # noqa: ANN401 - a module
    """Give bindings for a library of their own: one module knows one driver, and a simulation has several."""
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.loader is None:
        raise DriverError("nvidia-ml-py is not installed")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class Driver:
    """NVML, loaded once. Its calls may be made from any thread, and may take long where the hardware is broken."""

    def __init__(self, library: Path | None = None, bindings: Any = pynvml) -> None:  # noqa: ANN401 - a module
        self.library, self._nvml = library, bindings
        self._handles: dict[str, Any] = {}
        self._addresses: dict[int, str] = {}
        self._events: Any = None
        self._log = structlog.get_logger()

    def open(self) -> "Driver":
        """Begin; a DriverError if there is no driver, or it does not answer."""
        if self._nvml.nvmlLib is None and self.library is not None:
            try:
                self._nvml.nvmlLib = ctypes.CDLL(str(self.library))
            except OSError as wrong:
                raise DriverError(f"{self.library} cannot be loaded: {wrong}") from None
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as wrong:
            raise DriverError(
                f"the NVIDIA driver does not answer: {wrong}; is it installed and loaded (nvidia-smi), and is "
                f"{LIBRARY} in nodePlugin.driverRoot?"
            ) from None
        return self

    def close(self) -> None:
        """End."""
        self._forget_events()
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()

    def version(self) -> str:
        """Say which driver it is."""
        return str(self._answered(self._nvml.nvmlSystemGetDriverVersion, "") or "")

    def cards(self) -> tuple[Card, ...]:
        """Find all cards; those in MIG mode as their parts."""
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as wrong:
            raise DriverError(f"the NVIDIA driver does not say how many cards there are: {wrong}") from None
        whole: list[tuple[Card, Any]] = []
        for index in range(count):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                whole.append((self._card_at(handle, index), handle))
            except self._nvml.NVMLError as wrong:
                self._log.warning("card_unreadable", index=index, cause=str(wrong))
        linked = [(replace(card, links=self._links_of(card, handle, whole)), handle) for card, handle in whole]
        found: list[tuple[Card, Any]] = []
        for card, handle in linked:
            found += self._parts_of(card, handle) if self._in_mig_mode(handle) else [(card, handle)]
        self._handles = {card.uuid: handle for card, handle in (*linked, *found)}
        self._addresses = {address(handle): card.uuid for card, handle in linked}
        return tuple(card for card, _ in found)

    def fault_of(self, card: Card) -> str:
        """Look whether a card still answers as the one it was; what is wrong, or nothing."""
        for asked in filter(None, (card.parent, card.uuid)):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(asked)
                if self._nvml.nvmlDeviceGetUUID(handle) != asked:
                    return "another card answers in its place"
            except self._nvml.NVMLError as wrong:
                return f"the driver says: {wrong}"
            self._handles[asked] = handle
        return ""

    def usage(self, card: Card) -> MeasuredUsage:
        """Measure a card."""
        handle = self._handles.get(card.uuid)
        if handle is None:
            return MeasuredUsage()
        memory = self._answered(lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle), None)
        rates = self._answered(lambda: self._nvml.nvmlDeviceGetUtilizationRates(handle), None)
        power_mw = self._answered(lambda: self._nvml.nvmlDeviceGetPowerUsage(handle), None)
        return MeasuredUsage(
            utilization=None if rates is None else int(rates.gpu),
            used_mib=None if memory is None else int(memory.used) // MIB,
            temperature_c=self._answered(
                lambda: int(self._nvml.nvmlDeviceGetTemperature(handle, DEGREES_SENSOR)), None
            ),
            power_w=None if power_mw is None else power_mw / 1000,
            processes=self._processes_on(handle),
        )

    def listen(self, cards: Sequence[Card]) -> None:
        """Ask to be told of errors on these cards."""
        self._forget_events()
        self._events = self._nvml.nvmlEventSetCreate()
        for uuid in sorted({card.parent or card.uuid for card in cards}):
            handle = self._handles.get(uuid)
            wanted = self._nvml.nvmlEventTypeXidCriticalError
            supported = self._answered(lambda: self._nvml.nvmlDeviceGetSupportedEventTypes(handle), 0)  # noqa: B023 - asked now
            if handle is not None and supported & wanted:
                with suppress(self._nvml.NVMLError):
                    self._nvml.nvmlDeviceRegisterEvents(handle, wanted, self._events)

    def wait(self, timeout_s: float) -> XidEvent | None:
        """Wait for the next error; None if there was none in this time."""
        if self._events is None:
            time.sleep(timeout_s)
            return None
        try:
            event = self._nvml.nvmlEventSetWait(self._events, int(timeout_s * 1000))
        except self._nvml.NVMLError as wrong:
            if wrong.value == self._nvml.NVML_ERROR_TIMEOUT:
                return None
            raise DriverError(f"the driver does not report errors any more: {wrong}") from None
        # A card that is lost cannot say its name any more.
        known = self._addresses.get(address(event.device), "")
        return XidEvent(
            known or str(self._answered(lambda: self._nvml.nvmlDeviceGetUUID(event.device), "")), int(event.eventData)
        )

    def _forget_events(self) -> None:
        if self._events is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(self._events)
            self._events = None

    def _answered(self, ask: Callable[[], T], otherwise: T) -> T:
        """Ask something that not every driver or card answers."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return otherwise

    def _card_at(self, handle: Any, index: int) -> Card:  # noqa: ANN401 - an opaque handle of NVML's
        """Read one card."""
        memory = self._answered(lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle), None)
        capability = self._answered(lambda: self._nvml.nvmlDeviceGetCudaComputeCapability(handle), ())
        pci = self._answered(lambda: self._nvml.nvmlDeviceGetPciInfo(handle), None)
        bus_id = str(pci.busId) if pci is not None else ""
        return Card(
            uuid=str(self._nvml.nvmlDeviceGetUUID(handle)),
            index=index,
            minor=self._answered(lambda: int(self._nvml.nvmlDeviceGetMinorNumber(handle)), index),
            product=str(self._nvml.nvmlDeviceGetName(handle)),
            memory_mib=0 if memory is None else int(memory.total) // MIB,
            capability=".".join(map(str, capability)),
            numa=self._numa_of(handle, bus_id),
            bus_id=bus_id,
        )

    def _numa_of(self, handle: Any, bus_id: str) -> int | None:  # noqa: ANN401
        """Find the NUMA node that a card is near to: the kernel knows it for all, the driver for some."""
        domain, _, rest = bus_id.lower().partition(":")
        file = Path("/sys/bus/pci/devices") / f"{domain[-4:]}:{rest}" / "numa_node"
        with suppress(OSError, ValueError):
            node = int(file.read_text())
            return node if node >= 0 else None
        node = self._answered(lambda: int(self._nvml.nvmlDeviceGetNumaNodeId(handle)), -1)
        return node if node >= 0 else None

    def _in_mig_mode(self, handle: Any) -> bool:  # noqa: ANN401
        """Tell whether a card is divided by its own hardware."""
        return bool(self._answered(lambda: self._nvml.nvmlDeviceGetMigMode(handle)[0], 0))

    def _parts_of(self, card: Card, handle: Any) -> list[tuple[Card, Any]]:  # noqa: ANN401
        """Read the MIG devices of a card."""
        found = []
        for number in range(self._answered(lambda: int(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)), 0)):
            part = self._answered(lambda: self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number), None)  # noqa: B023
            if part is None:
                continue
            memory = self._answered(lambda: self._nvml.nvmlDeviceGetMemoryInfo(part), None)  # noqa: B023
            made = replace(
                card,
                uuid=str(self._nvml.nvmlDeviceGetUUID(part)),
                product=str(self._nvml.nvmlDeviceGetName(part)),
                memory_mib=0 if memory is None else int(memory.total) // MIB,
                links={},
                parent=card.uuid,
                gpu_instance=self._answered(lambda: int(self._nvml.nvmlDeviceGetGpuInstanceId(part)), -1),  # noqa: B023
                compute_instance=self._answered(lambda: int(self._nvml.nvmlDeviceGetComputeInstanceId(part)), -1),  # noqa: B023
            )
            found.append((made, part))
        return found

    def _links_of(self, card: Card, handle: Any, others: Sequence[tuple[Card, Any]]) -> dict[str, str]:  # noqa: ANN401
        """Say how well a card reaches each other one: by NVLink, or over PCIe and the processors."""
        to_switch, to_card = self._nvlinks_of(handle)
        links: dict[str, str] = {}
        for other, its_handle in others:
            if other.uuid == card.uuid:
                continue
            count = to_card.get(other.bus_id, 0)
            if to_switch:
                count += min(to_switch, self._nvlinks_of(its_handle)[0])
            level = self._answered(lambda: self._nvml.nvmlDeviceGetTopologyCommonAncestor(handle, its_handle), None)  # noqa: B023
            if count:
                links[other.uuid] = f"nvlink{count}"
            elif level in LEVELS:
                links[other.uuid] = LEVELS[level]
        return links

    def _nvlinks_of(self, handle: Any) -> tuple[int, dict[str, int]]:  # noqa: ANN401
        """Count a card's NVLinks that are up: those to a switch, and those to each other card by its bus id."""
        to_switch, to_card = 0, dict[str, int]()
        for link in range(MAX_LINKS):
            try:
                if not self._nvml.nvmlDeviceGetNvLinkState(handle, link):
                    continue
            except self._nvml.NVMLError:
                break
            if self._answered(lambda: self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link), 0) == SWITCH:  # noqa: B023
                to_switch += 1
            elif remote := self._answered(lambda: self._nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link), None):  # noqa: B023
                to_card[str(remote.busId)] = to_card.get(str(remote.busId), 0) + 1
        return to_switch, to_card

    def _processes_on(self, handle: Any) -> tuple[GpuProcess, ...]:  # noqa: ANN401
        """List the processes on a card, with what each uses."""
        memory: dict[int, int] = {}
        none: list[Any] = []
        for ask in (self._nvml.nvmlDeviceGetComputeRunningProcesses, self._nvml.nvmlDeviceGetGraphicsRunningProcesses):
            for process in self._answered(lambda: ask(handle), none):  # noqa: B023
                memory[int(process.pid)] = int(process.usedGpuMemory or 0) // MIB
        since_us = int(time.time() * 1_000_000) - SAMPLES_US
        busy: dict[int, int] = {}
        for sample in self._answered(lambda: self._nvml.nvmlDeviceGetProcessUtilization(handle, since_us), none):
            busy[int(sample.pid)] = max(int(sample.smUtil), busy.get(int(sample.pid), 0))
        return tuple(GpuProcess(pid, mib, busy.get(pid, 0)) for pid, mib in sorted(memory.items()))


def address(handle: Any) -> int:  # noqa: ANN401 - an opaque pointer
    """Tell handles apart."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
