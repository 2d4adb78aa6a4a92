"""Builders of quotas and of what pods take of them."""

from vcuda.amounts import Amounts
from vcuda.charging import Demand
from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.quota import Quota, parse_quota

# The largest GPU of each model of a cluster, in MiB.
CARDS = {"A100-SXM4-40GB": 40960, "A100-SXM4-80GB": 81920, "T4": 16384}


def quota(text: str, name: str = "team/q") -> Quota:
    return parse_quota(text, name)


def fixed(cores: int, memory_mib: int = 0) -> Demand:
    """A demand that is the same on every GPU."""
    return lambda _: Amounts({CORES: cores, MEMORY: memory_mib, PODS: 1})


def whole_card(card_mib: int) -> Amounts:
    return Amounts({CORES: 100, MEMORY: card_mib, PODS: 1})
