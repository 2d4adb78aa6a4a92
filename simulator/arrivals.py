"""The order in which the tasks of a list arrive, and how much GPU demand arrives in total."""

import random
from collections.abc import Iterable, Sequence

from simulator.trace_files import Task


def draw_arrivals(tasks: Sequence[Task], wanted: float, seed: int) -> list[Task]:
    """Return the tasks in a random order, as many as request so many cores.

    If they request less, further ones are drawn from the list with replacement until the next one would exceed that;
    if they request more, random ones are left out. This is the experiment of the FGD paper.
    """
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
