"""Explains pods that the extender is never asked about, because kube-scheduler's own filters exclude every node.

On a full cluster it only counts resources: "Insufficient inspur.com/vcuda-core". Users get the same explanation with
numbers as for pods that were filtered.
"""

from collections.abc import Callable

from cluster.background_queue import BackgroundQueue
from scheduler.extender import Extender
from scheduler.pods import SchedulerPod

MAX_QUEUED = 1024


def explanation_queue(extender: Extender, is_active: Callable[[], bool]) -> BackgroundQueue[SchedulerPod]:
    """Return a queue of pods to be explained, by the active replica alone."""

    def explain(pod: SchedulerPod) -> None:
        if is_active():
            extender.explain(pod)

    return BackgroundQueue("explainer", "explanation", explain, MAX_QUEUED)
