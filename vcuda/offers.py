"""Sequences of tasks that are offered to a node, to estimate what it will still take.

They are drawn from the typical tasks by frequency, the same ones for every node, so that two states of a node differ
only by what they take.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from vcuda.workload import TypicalTask

# The kernel has as many lanes. Fewer than 16 sequences are too noisy, and longer ones change little.
SEQUENCES, LENGTH = 32, 40
# Pods without GPUs take CPU from those with GPUs, but not all of them come to nodes with GPUs.
CPU_ONLY_FACTOR = 0.6
SEED = 0x9E3779B97F4A7C15
MASK = 2**64 - 1

# Positions of tasks: sequences by offers.
Offers = NDArray[np.int64]


def draw_offers(tasks: Sequence[TypicalTask]) -> Offers:
    """Draw the sequences: a systematic sample, in an order that depends on nothing but the number of tasks drawn."""
    weights = [task.frequency * (1.0 if task.shape.gpus else CPU_ONLY_FACTOR) for task in tasks]
    total, count = sum(weights), SEQUENCES * LENGTH
    drawn = np.searchsorted(np.cumsum(weights), (np.arange(count) + 0.5) * total / count)
    return np.minimum(drawn, len(tasks) - 1)[shuffled(count)].reshape(SEQUENCES, LENGTH)


@cache  # in plain Python it takes a millisecond, and the order never changes
def shuffled(count: int) -> NDArray[np.int64]:
    """Return the positions of so many things in an order that is fixed for all times and machines."""
    order, state = list(range(count)), SEED
    for last in range(count - 1, 0, -1):
        # A linear congruential generator, of which the high bits are used.
        state = (state * 6364136223846793005 + 1442695040888963407) & MASK
        other = (state >> 33) % (last + 1)
        order[last], order[other] = order[other], order[last]
    return np.array(order, np.int64)
