"""What is free of every GPU of a cluster, in arrays: one column for each node, one row for each of its GPUs.

A scheduler looks at all nodes for every pod. With array operations that takes about a millisecond for 5,000 nodes,
whatever the pod requests. The GPUs of a node are along the first axis,
because numpy then works on whole rows: `any` over the GPUs of 5,000 nodes takes 11 microseconds instead of 143.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from vcuda.gpu_availability import NO_USAGE, GpuAvailability, GpuUsage
from vcuda.gpu_topology import LinkRanks, link_ranks
from vcuda.inventory import Gpu
from vcuda.json_names import JsonNames, NameIndex, NodeNames, node_names
from vcuda.vocabulary import CORES_PER_CARD

FIRST_SLOTS, FIRST_COLUMNS = 8, 64
# What counts as free of a node's own CPU and memory as long as they are not known.
UNLIMITED_HOST = 2**30
# The model number of a slot without a GPU.
NO_GPU = 0
# Below this part of all nodes, copying their columns is cheaper than computing with all columns.
SMALL_PART = 4

Columns = NDArray[np.intp]
Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]
Amounts = NDArray[np.int32]
# What `vcuda.fill_kernel` reads, in its order: free cores and memory of GPUs, their size and model, whether they are
# usable, and what is free of the nodes' own CPU and memory.
GpuArrays = tuple[Amounts, Amounts, Amounts, Amounts, Flags, Numbers, Numbers]


class TableView(Struct, frozen=True):
    """The GPUs of all nodes, or of some: arrays of slots by nodes. They are the table's own and must not be changed."""

    columns: Columns
    free_cores: Amounts
    free_mib: Amounts
    card_mib: Amounts
    model: Amounts
    # Strengths of what enforces memory and compute of a share.
    memory_rung: Amounts
    compute_rung: Amounts
    # Healthy and not cordoned.
    usable: Flags
    # Free cores of all usable GPUs of a node.
    node_cores: Numbers
    pool: Amounts
    # What is free of the nodes' own CPU, in thousandths, and memory.
    host_cpu: Numbers
    host_mib: Numbers
    # Measured to be used so much that no more pods should be added.
    busy: Flags

    @property
    def present(self) -> Flags:
        """Which slots hold a GPU."""
        flags: Flags = self.model != NO_GPU
        return flags

    @property
    def unused(self) -> Flags:
        """Which GPUs no pod holds. Both amounts count: a GPU whose driver does not report its memory has none free."""
        flags: Flags = (self.free_cores == CORES_PER_CARD) & (self.free_mib == self.card_mib)
        return flags


class AllNodes(Struct, frozen=True):
    """The names of all nodes in the order of their columns."""

    names: NodeNames
    columns: Columns
    index: NameIndex


class GpuTable:
    """The GPUs of all nodes, and what is free of them. Not thread-safe.

    Free amounts are negative where pods hold more than a GPU has.
    """

    def __init__(self) -> None:
        self._columns: dict[str, int] = {}
        self._vacant: list[int] = []
        # By column: the name, the GPUs, why each is unavailable, and the slot of each UUID.
        self._names: list[str] = []
        self._gpus: list[tuple[Gpu, ...]] = []
        self._reasons: list[tuple[str, ...]] = []
        self._slots: list[dict[str, int]] = []
        self._links: dict[int, LinkRanks] = {}
        # Slot and column of each GPU.
        self._places: dict[str, tuple[int, int]] = {}
        self._models: dict[str, int] = {"": NO_GPU}
        self._pools: dict[str, int] = {"": 0}
        shape = (FIRST_SLOTS, FIRST_COLUMNS)
        self._free_cores = np.zeros(shape, np.int32)
        self._free_mib = np.zeros(shape, np.int32)
        self._card_mib = np.zeros(shape, np.int32)
        self._model = np.zeros(shape, np.int32)
        self._memory_rung = np.zeros(shape, np.int32)
        self._compute_rung = np.zeros(shape, np.int32)
        self._usable = np.zeros(shape, np.bool_)
        self._busy = np.zeros(shape, np.bool_)
        self._pool = np.zeros(FIRST_COLUMNS, np.int32)
        self._host_cpu = np.full(FIRST_COLUMNS, UNLIMITED_HOST, np.int64)
        self._host_mib = np.full(FIRST_COLUMNS, UNLIMITED_HOST, np.int64)
        # The memory of the largest GPU of each model.
        self._model_mib: dict[str, int] = {"": 0}
        # Counts changes, for callers that keep results; `_changed_at` is the number of each column's last one.
        self.changes = 0
        self._changed_at = np.zeros(FIRST_COLUMNS, np.int64)
        # What is free of all usable GPUs of each node.
        self._node_cores = np.zeros(FIRST_COLUMNS, np.int64)
        # Derived from the names; None after a change.
        self._name_numbers: NDArray[np.uint64] | None = None
        self._name_order: Numbers | None = None
        self._all: AllNodes | None = None

    def __len__(self) -> int:
        return len(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def names(self) -> Iterable[str]:
        return self._columns.keys()

    def set_node(
        self, name: str, gpus: Sequence[Gpu], pool: str = "", unavailable_reason: Callable[[Gpu], str] = lambda _: ""
    ) -> None:
        """Add a node or replace its GPUs, all of them unused: the caller takes again what pods hold of them."""
        column = self._columns.get(name)
        if column is None:
            column = self._new_column(name)
        if len(gpus) > len(self._model):
            self._grow(len(gpus), self._model.shape[1])
        self._clear(column)
        self._gpus[column] = tuple(gpus)
        self._reasons[column] = tuple(map(unavailable_reason, gpus))
        self._slots[column] = {gpu.uuid: slot for slot, gpu in enumerate(gpus)}
        self._pool[column] = self._pools.setdefault(pool, len(self._pools))
        for slot, gpu in enumerate(gpus):
            self._free_cores[slot, column] = CORES_PER_CARD
            self._free_mib[slot, column] = self._card_mib[slot, column] = gpu.memory_mib
            self._model[slot, column] = self._models.setdefault(gpu.model, len(self._models))
            self._model_mib[gpu.model] = max(gpu.memory_mib, self._model_mib.get(gpu.model, 0))
            self._memory_rung[slot, column] = gpu.isolation.memory.strength
            self._compute_rung[slot, column] = gpu.isolation.compute.strength
            self._usable[slot, column] = not self._reasons[column][slot]
            self._places[gpu.uuid] = slot, column
        self._note_change(column)

    def remove_node(self, name: str) -> None:
        column = self._columns.pop(name, None)
        if column is not None:
            self._clear(column)
            self._names[column] = ""
            self._host_cpu[column] = self._host_mib[column] = UNLIMITED_HOST
            self._note_change(column)
            self._vacant.append(column)
            self._name_order = self._name_numbers = self._all = None

    def set_host(self, name: str, cpu_milli: int, mib: int) -> None:
        """Set what is free of a node's own CPU and memory."""
        column = self._columns.get(name)
        if column is not None and (self._host_cpu[column], self._host_mib[column]) != (cpu_milli, mib):
            self._host_cpu[column], self._host_mib[column] = cpu_milli, mib
            self._note_change(column)

    def set_busy(self, name: str, uuids: Collection[str]) -> None:
        """Set which GPUs of a node are used so much that no more pods should be added."""
        column = self._columns.get(name)
        if column is None:
            return
        flags = np.zeros(len(self._busy), np.bool_)
        flags[[slot for uuid, slot in self._slots[column].items() if uuid in uuids]] = True
        if (self._busy[:, column] != flags).any():
            self._busy[:, column] = flags
            self._note_change(column)

    def host(self, name: str) -> tuple[int, int]:
        """Return what is free of a node's own CPU and memory."""
        column = self._columns[name]
        return int(self._host_cpu[column]), int(self._host_mib[column])

    def take(self, name: str, usage: Mapping[str, GpuUsage]) -> None:
        """Subtract what a pod holds from what is free; GPUs that the node does not have are ignored."""
        self._change(name, usage, -1)

    def give_back(self, name: str, usage: Mapping[str, GpuUsage]) -> None:
        self._change(name, usage, 1)

    def give_back_all(self, held: Iterable[tuple[str, Mapping[str, GpuUsage]]]) -> None:
        """Give back what many pods hold, each given with the name of its node."""
        listed = [
            (place, amounts)
            for name, usage in held
            for uuid, amounts in usage.items()
            if (place := self._places.get(uuid)) is not None and place[1] == self._columns.get(name)
        ]
        slots, columns = np.array([place for place, _ in listed], np.intp).reshape(-1, 2).T
        cores, mib = np.array([amounts for _, amounts in listed], np.int32).reshape(-1, 2).T
        np.add.at(self._free_cores, (slots, columns), cores)
        np.add.at(self._free_mib, (slots, columns), mib)
        changed = np.unique(columns)
        self.changes += 1
        self._changed_at[changed] = self.changes
        self._node_cores[changed] = (self._free_cores[:, changed] * self._usable[:, changed]).sum(axis=0)

    def _change(self, name: str, usage: Mapping[str, GpuUsage], sign: int) -> None:
        column = self._columns.get(name)
        if column is None:
            return
        for uuid, (cores, mib) in usage.items():
            slot = self._slots[column].get(uuid)
            if slot is not None:
                self._free_cores[slot, column] += sign * cores
                self._free_mib[slot, column] += sign * mib
        self._note_change(column)

    def _note_change(self, column: int) -> None:
        self.changes += 1
        self._changed_at[column] = self.changes
        self._node_cores[column] = (self._free_cores[:, column] * self._usable[:, column]).sum()

    def gpus(self, name: str) -> tuple[Gpu, ...]:
        column = self._columns.get(name)
        return () if column is None else self._gpus[column]

    def available_gpus(self, name: str, without: Mapping[str, GpuUsage] | None = None) -> list[GpuAvailability]:
        """Return what is free of each GPU of a node; `without` is not counted as held."""
        column = self._columns.get(name)
        if column is None:
            return []
        free: list[GpuAvailability] = []
        for slot, (gpu, reason) in enumerate(zip(self._gpus[column], self._reasons[column], strict=True)):
            cores, mib = (without or {}).get(gpu.uuid, NO_USAGE)
            free_cores, free_mib = int(self._free_cores[slot, column]), int(self._free_mib[slot, column])
            is_busy = bool(self._busy[slot, column])
            free.append(GpuAvailability(gpu, free_cores + cores, free_mib + mib, reason, is_busy))
        return free

    def copy(self) -> "GpuTable":
        """Return a table of its own, for trying out placements; for 5,000 nodes it takes some milliseconds."""
        other = GpuTable()
        for name, value in vars(self).items():
            is_container = isinstance(value, (dict, list, np.ndarray))
            setattr(other, name, value.copy() if is_container else value)
        return other

    def versions(self) -> Numbers:
        """Return the number of the last change of each column."""
        return self._changed_at

    def changed_since(self, change: int) -> Columns:
        """Return the columns that changed after a change, which is given by its number."""
        return np.flatnonzero(self._changed_at > change)

    @property
    def width(self) -> int:
        """How many columns the table has, vacant ones included."""
        return len(self._changed_at)

    def resolve(self, names: Sequence[str]) -> tuple[NodeNames, Columns]:
        """Return the same nodes, perhaps in another order, and the column of each; -1 where there is none."""
        if self._all is None:
            ordered = sorted(self._columns, key=self._columns.__getitem__)
            self._all = AllNodes(node_names(ordered), self.columns_of(ordered), NameIndex(ordered))
        nodes = self._all
        if isinstance(names, JsonNames) and (positions := nodes.index.find(names)) is not None:
            if isinstance(positions, slice):
                return nodes.names, nodes.columns
            return nodes.names.take(positions), nodes.columns[positions]
        return node_names(names), self.columns_of(names)

    def columns_of(self, names: Sequence[str]) -> Columns:
        """Return the column of each node; -1 where there is none."""
        try:
            return np.fromiter(map(self._columns.__getitem__, names), np.intp, len(names))
        except KeyError:
            return np.fromiter((self._columns.get(name, -1) for name in names), np.intp, len(names))

    def view(self, columns: Columns | None = None) -> TableView:
        """Return a view of some columns; None means all, vacant ones included."""
        part: slice | Columns = slice(None) if columns is None else columns
        return TableView(
            columns=np.arange(self.width) if columns is None else columns,
            free_cores=self._free_cores[:, part],
            free_mib=self._free_mib[:, part],
            card_mib=self._card_mib[:, part],
            model=self._model[:, part],
            memory_rung=self._memory_rung[:, part],
            compute_rung=self._compute_rung[:, part],
            usable=self._usable[:, part],
            node_cores=self._node_cores[part],
            pool=self._pool[part],
            host_cpu=self._host_cpu[part],
            host_mib=self._host_mib[part],
            busy=self._busy[:, part],
        )

    def kernel_arrays(self) -> GpuArrays:
        return (
            self._free_cores,
            self._free_mib,
            self._card_mib,
            self._model,
            self._usable,
            self._host_cpu,
            self._host_mib,
        )

    def models(self) -> tuple[tuple[str, int], ...]:
        """Return the models and the memory of the largest GPU of each, in the order of their numbers."""
        return tuple(self._model_mib.items())

    def gpu_count(self) -> int:
        return len(self._places)

    def usable_gpus(self) -> int:
        """Return how many GPUs are healthy and not cordoned."""
        return int(self._usable.sum())

    def node_cores(self) -> Numbers:
        """Return what is free of all usable GPUs of each column."""
        return self._node_cores

    def free_gpus_by_model(self) -> NDArray[np.float64]:
        """Return how much is free of the usable GPUs of each model, in GPUs."""
        free = np.maximum(self._free_cores, 0) * self._usable
        sums: NDArray[np.float64] = np.bincount(self._model.ravel(), free.ravel(), len(self._models)) / CORES_PER_CARD
        return sums

    def name_in(self, column: int) -> str:
        """Return the name of the node in a column; empty if there is none."""
        return self._names[column] if column < len(self._names) else ""

    def link_ranks(self, column: int) -> LinkRanks:
        """Return the links between the GPUs of a node."""
        links = self._links.get(column)
        if links is None:
            links = self._links[column] = link_ranks(self._gpus[column])
        return links

    def free_cores(self) -> int:
        """Return how many cores of all usable GPUs are free."""
        return int(self._node_cores.sum())

    def model_flags(self, is_wanted: Callable[[str], bool], view: TableView) -> Flags:
        """Return which GPUs of a view are of a wanted model."""
        wanted = np.fromiter((bool(name) and is_wanted(name) for name in self._models), np.bool_, len(self._models))
        return wanted.take(view.model)

    def pool_flags(self, pools: Sequence[str], view: TableView) -> Flags:
        """Return which nodes of a view are in one of these pools."""
        wanted = np.fromiter((name in pools for name in self._pools), np.bool_, len(self._pools))
        return wanted.take(view.pool)

    def gpu_flags(self, uuids: Iterable[str], view: TableView) -> Flags:
        """Return which GPUs of a view have one of these UUIDs."""
        flags = np.zeros((len(self._model), self.width), np.bool_)
        places = [place for uuid in uuids if (place := self._places.get(uuid)) is not None]
        flags[[slot for slot, _ in places], [column for _, column in places]] = True
        return flags[:, view.columns]

    def name_order(self) -> Numbers:
        """Return the position of every column in the order of node names, which breaks ties."""
        if self._name_order is None:
            order = np.zeros(self.width, np.int64)
            for position, name in enumerate(sorted(self._columns)):
                order[self._columns[name]] = position
            self._name_order = order
        return self._name_order

    def name_numbers(self) -> NDArray[np.uint64]:
        """Return a number for the name of each column's node, which is the same in every cluster."""
        if self._name_numbers is None:
            numbers = [zlib.crc32(self.name_in(column).encode()) for column in range(self.width)]
            self._name_numbers = np.array(numbers, np.uint64)
        return self._name_numbers

    def _new_column(self, name: str) -> int:
        if self._vacant:
            column = self._vacant.pop()
        else:
            column = len(self._gpus)
            self._names.append("")
            self._gpus.append(())
            self._reasons.append(())
            self._slots.append({})
            if column >= self.width:
                self._grow(len(self._model), 2 * column)
        self._columns[name] = column
        self._names[column] = name
        self._name_order = self._name_numbers = self._all = None
        return column

    def _grow(self, slots: int, columns: int) -> None:
        added = ((0, slots - self._model.shape[0]), (0, columns - self._model.shape[1]))
        self._free_cores, self._free_mib = np.pad(self._free_cores, added), np.pad(self._free_mib, added)
        self._card_mib, self._model = np.pad(self._card_mib, added), np.pad(self._model, added)
        self._memory_rung = np.pad(self._memory_rung, added)
        self._compute_rung = np.pad(self._compute_rung, added)
        self._usable = np.pad(self._usable, added)
        self._busy = np.pad(self._busy, added)
        self._pool, self._changed_at = np.pad(self._pool, added[1]), np.pad(self._changed_at, added[1])
        self._node_cores = np.pad(self._node_cores, added[1])
        self._host_cpu = np.pad(self._host_cpu, added[1], constant_values=UNLIMITED_HOST)
        self._host_mib = np.pad(self._host_mib, added[1], constant_values=UNLIMITED_HOST)
        self._name_order = self._name_numbers = None

    def _clear(self, column: int) -> None:
        for uuid, slot in self._slots[column].items():
            if self._places.get(uuid) == (slot, column):
                del self._places[uuid]
        self._gpus[column], self._reasons[column], self._slots[column] = (), (), {}
        self._links.pop(column, None)
        for amounts in (self._free_cores, self._free_mib, self._card_mib, self._model):
            amounts[:, column] = 0
        self._memory_rung[:, column] = self._compute_rung[:, column] = 0
        self._usable[:, column] = self._busy[:, column] = False
        self._pool[column] = 0
