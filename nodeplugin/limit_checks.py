"""Whether the limits of containers hold right now, judged from NVML.

NVML sees processes from outside. What a library in the container says of itself is not read: a tenant could write it.
"""

from msgspec import Struct

from nodeplugin.sampling import ContainerSample
from vcuda.isolation import Rung


class LimitCheck(Struct, frozen=True):
    """One limit of a container on one card: what enforces it, whether it holds, and the MiB beyond it.

    None where it is not known. A limit that nothing enforces may hold nevertheless, as long as it is not exceeded.
    """

    rung: Rung
    holds: bool | None = None
    over_mib: int | None = None

    @property
    def is_enforced(self) -> bool:
        return self.rung is not Rung.NONE


class LimitChecks(Struct, frozen=True):
    memory: LimitCheck
    compute: LimitCheck


def limits_hold(sample: ContainerSample, allowance_mib: int = 0) -> LimitChecks:
    """Judge the limits of a container on one card; `allowance_mib` is what it may use beyond its memory.

    Everything counts that NVML attributes to its processes, CUDA contexts included.
    """
    memory, compute = sample.isolation.memory, sample.isolation.compute
    return LimitChecks(
        check_memory(sample, memory, allowance_mib),
        # No measurement tells yet whether a share of compute is kept: utilization is also high on an idle card.
        LimitCheck(compute, holds=True if compute is Rung.EXCLUSIVE else None),
    )


def check_memory(sample: ContainerSample, rung: Rung, allowance_mib: int) -> LimitCheck:
    if rung is Rung.EXCLUSIVE:
        # Its limit is the card's own size.
        return LimitCheck(rung, holds=True, over_mib=0)
    used_mib = sample.measured_mib
    if used_mib is None:
        return LimitCheck(rung)
    over_mib = max(0, used_mib - sample.allocated.memory_mib - allowance_mib)
    return LimitCheck(rung, holds=not over_mib, over_mib=over_mib)


def describe_check(check: LimitCheck) -> str:
    """Return a check as people read it: what enforces the limit, and whether it holds."""
    over = f", exceeded by {check.over_mib} MiB" if check.over_mib else ""
    if not check.is_enforced:
        return f"not enforced{over}"
    state = {None: "unknown", True: "holds", False: "broken"}[check.holds]
    return f"{check.rung}: {state}{over}"
