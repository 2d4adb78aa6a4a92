"""CPU and memory of a node itself, beside its GPUs: what it has, and what pods request of it."""

from collections.abc import Mapping

from msgspec import Struct

from vcuda.pod import Container, PodSpec, Resources
from vcuda.quantity import QuantityError, parse_quantity
from vcuda.request import iter_containers, most_at_any_time

NANOS_PER_MILLI, NANOS_PER_MIB = 10**6, 10**9 * 2**20


class Host(Struct, frozen=True):
    """An amount of CPU, in thousandths, and of memory."""

    cpu_milli: int = 0
    mib: int = 0

    def __add__(self, other: "Host") -> "Host":
        return Host(self.cpu_milli + other.cpu_milli, self.mib + other.mib)

    def __sub__(self, other: "Host") -> "Host":
        return Host(self.cpu_milli - other.cpu_milli, self.mib - other.mib)

    def covers(self, requested: "Host") -> bool:
        """Whether there is as much as a pod requests. One that requests nothing also runs on an overcommitted node."""
        has_cpu = not requested.cpu_milli or self.cpu_milli >= requested.cpu_milli
        return has_cpu and (not requested.mib or self.mib >= requested.mib)

    def __or__(self, other: "Host") -> "Host":
        """Return the larger amount of each."""
        return Host(max(self.cpu_milli, other.cpu_milli), max(self.mib, other.mib))


NOTHING = Host()
# A million CPUs, and a PiB: more counts as much. Pods may request what no array of numbers holds.
MOST = 2**30
# What counts as free of a node as long as it is not known.
UNLIMITED = Host(MOST, MOST)


def clamped(cpu_milli: int, mib: int) -> Host:
    return Host(min(cpu_milli, MOST), min(mib, MOST))


def allocatable_host(allocatable: Mapping[str, str]) -> Host:
    """Return what a node has for pods; unlimited if its status does not say."""
    cpu, memory = (quantity_nanos(allocatable.get(name)) for name in ("cpu", "memory"))
    return clamped(
        MOST if cpu is None else cpu // NANOS_PER_MILLI,
        MOST if memory is None else memory // NANOS_PER_MIB,
    )


def host_requests(spec: PodSpec) -> Host:
    """Return the most that a pod requests at any time: init containers run one after another, sidecars beside them."""
    most = most_at_any_time(((role, container_host(each)) for _, role, each in iter_containers(spec)), NOTHING)
    return clamped(most.cpu_milli, most.mib)


def container_host(container: Container) -> Host:
    resources = container.resources or Resources()
    # The API server copies limits to requests that are not set; a manifest has not been there yet.
    requested = {**(resources.limits or {}), **(resources.requests or {})}
    cpu, memory = (quantity_nanos(requested.get(name)) or 0 for name in ("cpu", "memory"))
    return clamped(-(-cpu // NANOS_PER_MILLI), -(-memory // NANOS_PER_MIB))


def quantity_nanos(written: str | float | None) -> int | None:
    if written is None:
        return None
    try:
        return parse_quantity(written).nanos
    except QuantityError:
        return None
