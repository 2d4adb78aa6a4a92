"""The order in which the tasks of a list arrive, and how much GPU demand arrives in total."""

import random
from collections.abc import Iterable, Sequence

from simulator.trace_files import Task

# Each takes a millisecond to place, and all of them are kept.
MAX_ARRIVALS = 3_000_000


class TooManyArrivalsError(ValueError):
    """So many tasks would arrive that a simulation would not end; the message says why."""


def check_count(tasks: Sequence[Task], wanted: float) -> None:
    """Raise TooManyArrivalsError if too many tasks would have to arrive to request so many cores."""
    total = total_demand(tasks)
    expected = wanted * len(tasks) / total if total else 0
    if expected > MAX_ARRIVALS:
        raise TooManyArrivalsError(
            f"about {expected:.0f} tasks would have to arrive, above {MAX_ARRIVALS}: they request "
            f"{total / len(tasks):.3g} cores (100 = one GPU) on average, of {wanted:.0f} that are to arrive; "
            "use a lower --demand or --load, fewer nodes, or a list of tasks of which fewer request no GPUs"
        )


def draw_arrivals(tasks: Sequence[Task], wanted: float, seed: int) -> list[Task]:
    """Return the tasks in a random order, as many as request so many cores.

    If they request less, further ones are drawn from the list with replacement until the next one would exceed that;
    if they request more, random ones are left out. This is the experiment of the FGD paper.
    """
    check_count(tasks, wanted)
    choose = random.Random(seed)
    arrivals = list(tasks)
    choose.shuffle(arrivals)
    total = total_demand(arrivals)
    while arrivals and total > wanted:
        total -= arrivals.pop().demand
    if not total:
        return arrivals
    while total + (drawn := choose.choice(tasks)).demand <= wanted:
        arrivals.append(drawn)
        total += drawn.demand
    return arrivals


def total_demand(tasks: Iterable[Task]) -> int:
    return sum(task.demand for task in tasks)
