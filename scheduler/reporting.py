"""Tells people what the scheduler decided about a pod: in the decision log, and as events on the pod."""

from scheduler.decisions import PlacementLog
from scheduler.pod_events import PodEvents
from scheduler.pods import SchedulerPod
from vcuda.fit_summary import Problems
from vcuda.ledger import ChargeResult
from vcuda.node_problem import NodeProblem
from vcuda.placement import PlacedSlices

UNCHARGED = "the pod is not charged to the GPU quota of its namespace yet"


def pods_of_lower_priority(count: int) -> str:
    return "1 pod of lower priority" if count == 1 else f"{count} pods of lower priority"


class Reporter:
    def __init__(self, decisions: PlacementLog, events: PodEvents) -> None:
        self._decisions, self._events = decisions, events

    def report_uncharged(self, pod: SchedulerPod) -> None:
        self._decisions.record(pod, "filter", "refused", UNCHARGED)
        self._events.record_waiting(pod, "NotCharged", UNCHARGED, frozenset())

    def report_refused(
        self, pod: SchedulerPod, summary: str, problems: Problems, shortage: NodeProblem | None = None
    ) -> None:
        """`shortage` stands for all problems that change with every pod that ends."""
        nodes = {problem.text: count for problem, count in problems.items()}
        self._decisions.record(pod, "filter", "refused", summary, nodes=nodes)
        lasting = frozenset(shortage if shortage and each.is_shortage else each for each in problems)
        self._events.record_waiting(pod, "InsufficientGPUs", summary, lasting)

    def report_preempting(self, pod: SchedulerPod, node: str, count: int) -> None:
        message = f"evicting {pods_of_lower_priority(count)} from node {node} to make room"
        self._decisions.record(pod, "preempt", "evicting", message, node=node)
        self._events.record(pod, "Preempting", message)

    def report_preemptable(self, pod: SchedulerPod, node: str, count: int) -> None:
        """Say that an eviction would help, which kube-scheduler does not find and the configuration does not allow."""
        message = (
            f"evicting {pods_of_lower_priority(count)} from node {node} would make room, but kube-scheduler counts "
            "resources of nodes, not of GPUs, and finds none to evict; an administrator can set scheduler.evicts"
        )
        self._decisions.record(pod, "preempt", "possible", message, node=node)
        self._events.record_waiting(pod, "PreemptionPossible", message, frozenset())

    def report_evicted(self, victim: SchedulerPod, preemptor: SchedulerPod, node: str) -> None:
        # As kube-scheduler's own event: the preemptor's name may be another tenant's.
        self._events.record(victim, "Preempted", f"Preempted by pod {preemptor.uid} on node {node}")

    def report_bound(self, pod: SchedulerPod, node: str, placed: PlacedSlices) -> None:
        gpus = sorted({each.uuid for slices in placed.values() for each in slices})
        self._decisions.record(pod, "bind", "bound", f"bound to {node}", node=node, gpus=gpus)
        self._events.forget(pod.uid)

    def report_not_bound(self, pod: SchedulerPod, node: str, message: str) -> None:
        self._decisions.record(pod, "bind", "failed", message, node=node)

    def report_charge_refused(self, pod: SchedulerPod, node: str, result: ChargeResult) -> str:
        """Return the message, too."""
        message = f"not bound to {node}: {'; '.join(map(str, result.reasons))}"
        self._decisions.record(pod, "bind", "refused", message, node=node)
        self._events.record(pod, result.reasons[0].code, message)
        return message
