"""What `quotient why` knows about a pod: objects of the API, and what follows from them. Pure functions."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from enum import StrEnum

from msgspec import Struct

from cluster.gpu_nodes import READY
from cluster.object_details import EventDetails, PodDetails
from cluster.objects import Node
from console.quota_status_view import QuotaStatus
from console.why_quota import placed_gpus, waiting_reason
from console.why_steps import age_s, format_age, latest
from vcuda.decision import Code
from vcuda.inventory import unavailable_reason
from vcuda.limits import admitted_options
from vcuda.names import CONTROLLER, DEFAULT_SCHEDULER, SCHEDULER
from vcuda.node_problem import TEXTS
from vcuda.pod_options import PodOptions
from vcuda.request import PodRequest, request_held_by
from vcuda.scheme import Scheme

# Reasons of the events of Quotient's scheduler (scheduler/reporting.py) and controller. kube-scheduler's own events
# come from a component of the same name, since that is the name of its profile.
NOT_CHARGED = "NotCharged"
RECENT_S = 60
OWN_REASONS = (NOT_CHARGED, "InsufficientGPUs", *Code)
FAILED_SCHEDULING = "FailedScheduling"
# In kube-scheduler's messages, between the count of nodes and the problems.
NODES_AVAILABLE = " nodes are available: "


class State(StrEnum):
    PENDING = "pending"
    PLACED = "placed"
    RUNNING = "running"
    ENDED = "ended"
    DELETING = "deleting"


class PodFacts(Struct, frozen=True, kw_only=True):
    """What was read. `unread` has an error for each of `events`, `quota` and `node` that could not be read.

    Without such an error, no quota status means no quota, and no node that it does not exist.
    """

    pod: PodDetails
    now: datetime
    scheme: Scheme
    events: Sequence[EventDetails] = ()
    quota_status: QuotaStatus | None = None
    node: Node | None = None
    unread: dict[str, str] = {}

    @property
    def request(self) -> PodRequest:
        return request_held_by(self.pod.spec, self.pod.metadata.annotations, self.scheme)

    @property
    def options(self) -> PodOptions:
        return admitted_options(self.pod.metadata.annotations, self.scheme)

    @property
    def own_event(self) -> EventDetails | None:
        return own_event_in(self.events)

    @property
    def state(self) -> State:
        status = self.pod.status
        if status.has_ended:
            return State.ENDED
        if self.pod.metadata.deletion_timestamp:
            return State.DELETING
        if status.phase == "Running":
            return State.RUNNING
        return State.PLACED if self.pod.spec.node_name else State.PENDING


def is_uncharged(facts: PodFacts) -> bool:
    """Whether the pod waits for its charge, as far as its namespace shows."""
    if facts.state is not State.PENDING:
        return False
    if waiting_reason(facts.quota_status or {}, facts.pod.metadata.name):
        return True
    event = facts.own_event
    if event is None or event.reason != NOT_CHARGED:
        return event is not None and event.component == CONTROLLER
    # The charge follows within seconds, and no event says so; the status lists pods that are not charged.
    return not facts.quota_status or (age_s(facts.now, event.seen_at) or 0) < RECENT_S


def scheduler_of(facts: PodFacts) -> str:
    return facts.pod.spec.scheduler_name or DEFAULT_SCHEDULER


def gates_of(facts: PodFacts) -> str:
    names = [each.name for each in facts.pod.spec.scheduling_gates]
    return f"{'gate' if len(names) == 1 else 'gates'} {', '.join(names)}"


def own_event_in(events: Iterable[EventDetails]) -> EventDetails | None:
    """Return the last event in which Quotient's scheduler or controller says why a pod waits."""
    own = (SCHEDULER, CONTROLLER)
    return latest(each for each in events if each.component in own and each.reason in OWN_REASONS)


def kube_scheduler_message(facts: PodFacts) -> str:
    return kube_scheduler_text(facts.pod, facts.events)


def kube_scheduler_text(pod: PodDetails, events: Iterable[EventDetails]) -> str:
    """Return why kube-scheduler did not place a pod. The condition outlives events, which are kept for an hour."""
    conditions = [each for each in pod.status.conditions if each.type == "PodScheduled"]
    message = next((each.message for each in conditions if each.status == "False"), "")
    if not message and (event := latest(each for each in events if each.reason == FAILED_SCHEDULING)):
        message = event.message
    count, separator, rest = message.partition(NODES_AVAILABLE)
    # A second sentence says what preemption and resource claims could do: it repeats the same nodes.
    return f"{count}{separator}{rest.partition('. ')[0].rstrip('.')}." if separator else message


def other_problems(message: str) -> list[str]:
    """Return the problems in a message of kube-scheduler that are not those of Quotient's extender."""
    _, _, problems = message.rstrip(". ").partition(NODES_AVAILABLE)
    texts = [part.strip(". ").partition(" ")[2] for part in problems.split(", ")] if problems else [message]
    return [text for text in texts if text not in TEXTS.values()]


def node_problem(facts: PodFacts) -> str:
    """Return what is wrong with the node or the pod's GPUs; empty if nothing is known to be."""
    name = facts.pod.spec.node_name
    if facts.node is None:
        return "" if "node" in facts.unread else f"{name} does not exist any more"
    ready = next((each for each in facts.node.status.conditions if each.type == READY), None)
    if ready is not None and ready.status != "True":
        seconds = age_s(facts.now, ready.last_transition_time)
        return f"{name} is not ready" + ("" if seconds is None else f" since {format_age(seconds)}")
    bad = [(gpu, unavailable_reason(gpu)) for gpu in placed_gpus(facts.pod, facts.node, facts.scheme)]
    return "; ".join(f"GPU {gpu.index} of {name}: {reason}" for gpu, reason in bad if reason and not gpu.healthy)
