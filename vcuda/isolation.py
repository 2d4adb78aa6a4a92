"""What enforces a container's share of a GPU.

The node plugin publishes one of these values per card, and metrics and the monitor page show one per container. A limit
that nothing enforces is only recorded and measured.
"""

from enum import StrEnum


class Isolation(StrEnum):
    """The values on the wire: the `isolation` key of the inventory, and the `isolation` label of the metrics."""

    NONE = "none"
    PRELOAD = "preload"
    MPS = "mps"
    # NVML's memory limit per cgroup, from driver r615 on. It has no counterpart for compute.
    DRIVER = "driver"
    # Whole cards: no other container shares them, so there is nothing to enforce.
    EXCLUSIVE = "exclusive"

    @classmethod
    def _missing_(cls, value: object) -> "Isolation | None":
        # A newer node plugin may publish a mechanism that this version does not know. Its inventory must stay readable,
        # and "none" promises least.
        return cls.NONE if isinstance(value, str) else None

    def is_at_least(self, minimum: "Isolation") -> bool:
        """Whether this mechanism is as strong as another: the members above are in order of strength."""
        strength = list(Isolation)
        return strength.index(self) >= strength.index(minimum)

    @property
    def limits_memory(self) -> bool:
        return self is not Isolation.NONE

    @property
    def limits_compute(self) -> bool:
        return self not in {Isolation.NONE, Isolation.DRIVER}
