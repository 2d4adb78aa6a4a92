"""Reads one card from the driver: its attributes, its MIG devices, and its NVLinks.

What cannot change is asked once, but only an answer is kept: a call that failed may succeed the next time. A card whose
uuid, name, minor number, memory or MIG mode cannot be read is not guessed: containers could get another card.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from nodeplugin.cards import Card
from vcuda.memory_units import MIB

# NVML_NVLINK_DEVICE_TYPE_SWITCH
NVLINK_SWITCH = 2
# NVML_NVLINK_MAX_LINKS of the newest driver.
MAX_NVLINKS = 36

T = TypeVar("T")


class NvLinks(Struct, frozen=True):
    """The active NVLinks of a card: how many lead to a switch, and to each other card by its bus id."""

    active: frozenset[int] = frozenset()
    to_switch: int = 0
    to_card: Mapping[str, int] = {}
    is_complete: bool = True


class CardReading(Struct, frozen=True):
    """What the driver says of one card, with the handles of the card and of its MIG devices.

    `is_complete` unless a call failed that may succeed later. `problem` is why a MIG device could not be read.
    """

    card: Card
    handle: Any
    is_in_mig_mode: bool
    parts: tuple[tuple[Card, Any], ...]
    nvlinks: NvLinks
    is_complete: bool
    problem: str = ""

    @property
    def offered(self) -> tuple[tuple[Card, Any], ...]:
        """The card, or its MIG devices if it is in MIG mode."""
        return self.parts if self.is_in_mig_mode else ((self.card, self.handle),)


class Values:
    """Reads values that not every driver and card reports, and remembers whether all others could be read."""

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401 - a module
        self._nvml = nvml
        # A function that the library lacks is reported in two ways, one of which is no NVMLError.
        self._errors = (nvml.NVMLError, nvml.NVMLLibraryMismatchError)
        self._unsupported = {None, nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND}
        self.is_complete = True

    def required(self, function: Callable[[], T], default: T) -> T:
        """Return a value, or the default if the driver does not have it; raises any other error."""
        try:
            return function()
        except self._errors as error:
            if not self._is_unsupported(error):
                raise
            return default

    def optional(self, function: Callable[[], T], default: T) -> T:
        """Return a value, or the default if the call fails."""
        try:
            return function()
        except self._errors as error:
            self.is_complete = self.is_complete and self._is_unsupported(error)
            return default

    def _is_unsupported(self, error: Exception) -> bool:
        return getattr(error, "value", None) in self._unsupported


class CardReader:
    """Reads cards, each by a call of its own; raises NVMLError if a card cannot be read."""

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401 - a module
        self._nvml = nvml
        # What the driver returns for the number of a MIG device or NVLink that does not exist.
        self._no_such = {nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_SUPPORTED}

    def read(self, index: int, known: Mapping[str, CardReading]) -> CardReading:
        """Read the card with an index; `known` are the last readings, by uuid."""
        handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = str(self._nvml.nvmlDeviceGetUUID(handle))
        # Asked each time: a card that was removed and added again may get the device node of another one.
        minor = int(self._nvml.nvmlDeviceGetMinorNumber(handle))
        before = known.get(uuid)
        values = Values(self._nvml)
        if before is not None and before.is_complete:
            card = replace(before.card, index=index, minor=minor)
        else:
            card = self._read_card(uuid, index, minor, handle, values)
        is_in_mig_mode = bool(values.required(lambda: self._nvml.nvmlDeviceGetMigMode(handle)[0], 0))
        parts, problem = self._read_parts(card, handle) if is_in_mig_mode else ((), "")
        nvlinks = self._read_nvlinks(handle, before.nvlinks if before is not None else None)
        return CardReading(card, handle, is_in_mig_mode, parts, nvlinks, values.is_complete, problem)

    def _read_card(self, uuid: str, index: int, minor: int, handle: Any, values: Values) -> Card:  # noqa: ANN401
        capability = values.optional(lambda: self._nvml.nvmlDeviceGetCudaComputeCapability(handle), ())
        pci = values.optional(lambda: self._nvml.nvmlDeviceGetPciInfo(handle), None)
        bus_id = str(pci.busId) if pci is not None else ""
        return Card(
            uuid=uuid,
            index=index,
            minor=minor,
            product=str(self._nvml.nvmlDeviceGetName(handle)),
            memory_mib=self._usable_mib(handle),
            capability=".".join(map(str, capability)),
            numa=self._read_numa_node(handle, bus_id, values),
            bus_id=bus_id,
        )

    def _usable_mib(self, handle: Any) -> int:  # noqa: ANN401 - an opaque handle of NVML's
        """Return the memory that containers can have: without what the driver reserves; 0 if it is not reported."""
        values, version = Values(self._nvml), self._nvml.nvmlMemory_v2
        memory = values.required(lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle, version), None)
        if memory is not None:
            return (int(memory.total) - int(memory.reserved)) // MIB
        # Before r510, where the total does not include it.
        memory = values.required(lambda: self._nvml.nvmlDeviceGetMemoryInfo(handle), None)
        return 0 if memory is None else int(memory.total) // MIB

    def _read_numa_node(self, handle: Any, bus_id: str, values: Values) -> int | None:  # noqa: ANN401
        # The kernel knows it for every PCI device, NVML only with newer drivers. sysfs writes PCI domains with four
        # digits, NVML with eight. A node of -1 means that the machine has no NUMA information.
        domain, _, rest = bus_id.lower().partition(":")
        file = Path("/sys/bus/pci/devices") / f"{domain[-4:]}:{rest}" / "numa_node"
        with suppress(OSError, ValueError):
            node = int(file.read_text())
            return node if node >= 0 else None
        node = values.optional(lambda: int(self._nvml.nvmlDeviceGetNumaNodeId(handle)), -1)
        return node if node >= 0 else None

    def _read_parts(self, card: Card, handle: Any) -> tuple[tuple[tuple[Card, Any], ...], str]:  # noqa: ANN401
        """Return the MIG devices of a card, and why one could not be read."""
        parts, problem = list[tuple[Card, Any]](), ""
        count = Values(self._nvml).required(lambda: int(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)), 0)
        for number in range(count):
            try:
                part = self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except self._nvml.NVMLError as error:
                if error.value not in self._no_such:
                    problem = f"driver error: {error}"
                continue
            try:
                parts.append((self._read_part(card, part), part))
            except self._nvml.NVMLError as error:
                problem = f"driver error: {error}"
        return tuple(parts), problem

    def _read_part(self, card: Card, handle: Any) -> Card:  # noqa: ANN401
        # Read each time: a MIG device of another size may get the uuid of one that was destroyed.
        return replace(
            card,
            uuid=str(self._nvml.nvmlDeviceGetUUID(handle)),
            product=str(self._nvml.nvmlDeviceGetName(handle)),
            memory_mib=self._usable_mib(handle),
            links={},  # MIG devices cannot use NVLink or peer-to-peer access
            parent=card.uuid,
            gpu_instance=int(self._nvml.nvmlDeviceGetGpuInstanceId(handle)),
            compute_instance=int(self._nvml.nvmlDeviceGetComputeInstanceId(handle)),
        )

    def _read_nvlinks(self, handle: Any, before: NvLinks | None) -> NvLinks:  # noqa: ANN401
        """Read the NVLinks that are active now; where they lead is asked only when others are than before."""
        # Links become active late, when the Fabric Manager has trained them. A board may leave out the first ones.
        active, values = set[int](), Values(self._nvml)
        for link in range(MAX_NVLINKS):
            try:
                if self._nvml.nvmlDeviceGetNvLinkState(handle, link):
                    active.add(link)
            except self._nvml.NVMLError as error:
                if error.value not in self._no_such:
                    values.is_complete = False
        if before is not None and (not values.is_complete or (before.is_complete and before.active == active)):
            return before
        to_switch, to_card = 0, dict[str, int]()
        for link in sorted(active):
            if self._leads_to_switch(handle, link, values):
                to_switch += 1
            elif bus_id := self._remote_bus_id(handle, link, values):
                to_card[bus_id] = to_card.get(bus_id, 0) + 1
        return NvLinks(frozenset(active), to_switch, to_card, values.is_complete)

    def _leads_to_switch(self, handle: Any, link: int, values: Values) -> bool:  # noqa: ANN401
        kind = values.optional(lambda: self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link), 0)
        return bool(kind == NVLINK_SWITCH)

    def _remote_bus_id(self, handle: Any, link: int, values: Values) -> str:  # noqa: ANN401
        remote = values.optional(lambda: self._nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link), None)
        return "" if remote is None else str(remote.busId)
