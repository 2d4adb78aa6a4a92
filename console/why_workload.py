"""Why a workload has no pods, or a pod does not exist: the refusals of its creation. Pure functions."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime

from msgspec import Struct

from cluster.object_details import EventDetails, PodDetails
from cluster.objects import Workload
from console.printing import count_of
from console.why_steps import Explanation, WhyStep, age_s, event_step, latest
from vcuda.workload_kinds import WORKLOAD_KINDS, WorkloadKind

FAILED_CREATE = "FailedCreate"
SHORT_NAMES = {"deploy": "Deployment", "sts": "StatefulSet", "ds": "DaemonSet", "rs": "ReplicaSet", "cj": "CronJob"}
# The objects between a workload and its pods, whose names begin with the workload's.
CHILDREN = {"Deployment": "ReplicaSet", "CronJob": "Job"}
MAX_PODS_SHOWN = 5
AGAIN = "creates the pod again by itself"


class MissingPodFacts(Struct, frozen=True, kw_only=True):
    """What was read instead of a pod that does not exist.

    `refusals` are all events of the namespace about pods that could not be created, `events` those about a former pod
    of this name.
    """

    name: str
    namespace: str
    now: datetime
    refusals: Sequence[EventDetails] = ()
    events: Sequence[EventDetails] = ()
    unread: dict[str, str] = {}


class WorkloadFacts(Struct, frozen=True, kw_only=True):
    """What was read about a workload; None if it does not exist. `pods` are those with its labels."""

    kind: WorkloadKind
    name: str
    namespace: str
    now: datetime
    workload: Workload | None = None
    pods: Sequence[PodDetails] = ()
    refusals: Sequence[EventDetails] = ()
    unread: dict[str, str] = {}


def workload_kind(word: str) -> WorkloadKind | None:
    """Return the kind for a word as kubectl accepts it: `Deployment`, `deployments`, `deploy`."""
    name = SHORT_NAMES.get(word.lower(), word).lower()
    return next((each for each in WORKLOAD_KINDS if name in (each.kind.lower(), each.plural)), None)


def explain_missing_pod(facts: MissingPodFacts) -> Explanation:
    refusal = latest(
        each for each in facts.refusals if facts.name.startswith(f"{each.involved_object.name}-")
    ) or latest(each for each in facts.refusals if f" {facts.name} " in each.message)
    before = latest(facts.events)
    steps = [refusal_step(refusal, facts.now)] if refusal else []
    if before:
        steps.append(event_step("existed", before, facts.now, f"last event, {before.reason}: {before.message}"))
    return Explanation(
        object=f"pod {facts.namespace}/{facts.name}",
        found=False,
        state="missing",
        summary="does not exist",
        steps=(*steps, *unread_steps(facts.unread)),
        next=next_for_missing(refusal, facts),
    )


def next_for_missing(refusal: EventDetails | None, facts: MissingPodFacts) -> str:
    if refusal is not None:
        return f"do what the refusal says; {owner_of(refusal)} {AGAIN}"
    return (
        f"check name and namespace: kubectl get pods -n {facts.namespace}; for refused pods of a workload: "
        f"quotient why Deployment/NAME -n {facts.namespace}; for a pod without a workload: quotient admit FILE"
    )


def explain_workload(facts: WorkloadFacts) -> Explanation:
    title = f"{facts.kind.kind} {facts.namespace}/{facts.name}"
    if facts.workload is None:
        advice = f"check name and namespace: kubectl get {facts.kind.plural} -n {facts.namespace}"
        steps = tuple(unread_steps(facts.unread))
        return Explanation(
            object=title, found=False, state="missing", summary="does not exist", steps=steps, next=advice
        )
    refusal = latest(each for each in facts.refusals if belongs_to(facts, each))
    return Explanation(
        object=title,
        found=True,
        state="refused" if refusal else "found",
        summary=count_phases(owned_pods(facts)),
        steps=tuple(workload_steps(facts, refusal)),
        next=next_for_workload(facts, refusal),
    )


def workload_steps(facts: WorkloadFacts, refusal: EventDetails | None) -> Iterator[WhyStep]:
    if refusal:
        yield refusal_step(refusal, facts.now)
    pending = pending_pods(owned_pods(facts))
    for pod in pending[:MAX_PODS_SHOWN]:
        yield WhyStep("pending", pod.metadata.name, "", age_s(facts.now, pod.metadata.creation_timestamp))
    if len(pending) > MAX_PODS_SHOWN:
        yield WhyStep("pending", f"and {len(pending) - MAX_PODS_SHOWN} more")
    yield from unread_steps(facts.unread)


def next_for_workload(facts: WorkloadFacts, refusal: EventDetails | None) -> str:
    if pending := pending_pods(owned_pods(facts)):
        return f"quotient why {pending[0].metadata.name} -n {facts.namespace}"
    if refusal is not None:
        return f"do what the refusal says; {owner_of(refusal)} {AGAIN}"
    if not owned_pods(facts):
        return f"kubectl describe {facts.kind.kind.lower()} {facts.name} -n {facts.namespace}"
    return "nothing to do: no pod waits, and none was refused within the time that events are kept"


def belongs_to(facts: WorkloadFacts, event: EventDetails) -> bool:
    return is_part(facts, event.involved_object.kind, event.involved_object.name)


def owned_pods(facts: WorkloadFacts) -> list[PodDetails]:
    """Return the workload's own pods: others may have the same labels."""
    return [
        pod
        for pod in facts.pods
        if any(each.controller and is_part(facts, each.kind, each.name) for each in pod.metadata.owner_references)
    ]


def is_part(facts: WorkloadFacts, kind: str, name: str) -> bool:
    """Whether an object is the workload, or one between it and its pods."""
    # A ReplicaSet is its Deployment's name and one more word. This also excludes those of `train-large` for `train`.
    is_child = kind == CHILDREN.get(facts.kind.kind) and name.rpartition("-")[0] == facts.name
    return is_child or (kind, name) == (facts.kind.kind, facts.name)


def refusal_step(event: EventDetails, now: datetime) -> WhyStep:
    return event_step("refused", event, now, f"{owner_of(event)}: {event.message}")


def owner_of(event: EventDetails) -> str:
    return f"{event.involved_object.kind}/{event.involved_object.name}"


def pending_pods(pods: Iterable[PodDetails]) -> list[PodDetails]:
    """Return pods that do not run yet, the oldest first."""
    waiting = [each for each in pods if each.status.phase in ("", "Pending")]
    return sorted(waiting, key=lambda pod: pod.metadata.creation_timestamp or "")


def count_phases(pods: Sequence[PodDetails]) -> str:
    phases = [pod.status.phase for pod in pods]
    counts = [f"{phases.count(phase)} {phase}" for phase in sorted(set(phases))]
    return count_of(len(pods), "pod") + (f" ({', '.join(counts)})" if counts else "")


def unread_steps(unread: dict[str, str]) -> list[WhyStep]:
    return [WhyStep("unknown", f"{what} could not be read: {error}") for what, error in unread.items()]
