"""Why a pod is where it is: the decisions about it, from the objects of the API. Pure functions."""

from collections.abc import Iterator
from datetime import datetime

from cluster.object_details import ContainerStatusDetails
from console.printing import count_of
from console.why_facts import (
    FAILED_SCHEDULING,
    PodFacts,
    State,
    gates_of,
    is_uncharged,
    kube_scheduler_message,
    node_problem,
    other_problems,
    scheduler_of,
)
from console.why_next import next_step
from console.why_quota import charged_text, placed_gpus, waiting_reason
from console.why_steps import Explanation, WhyStep, age_s, event_step, format_age, latest
from vcuda.limits import ContainerLimits, decode_limits, limits_of
from vcuda.names import CONTROLLER, SCHEDULER
from vcuda.namespace_policy import NamespacePolicy
from vcuda.placement_annotation import decode_placement
from vcuda.pod_options import PodOptions
from vcuda.vocabulary import CORES_PER_CARD

KUBELET = "kubelet"


def explain_pod(facts: PodFacts) -> Explanation:
    metadata = facts.pod.metadata
    steps = [*request_steps(facts), *waiting_steps(facts), *placed_steps(facts), *container_steps(facts)]
    steps += [*end_steps(facts), *deletion_steps(facts)]
    steps += [WhyStep("unknown", f"{what} could not be read: {error}") for what, error in facts.unread.items()]
    return Explanation(
        object=f"pod {metadata.namespace}/{metadata.name}",
        found=True,
        state=facts.state,
        summary=summary_of(facts),
        steps=tuple(steps),
        next=next_step(facts),
    )


def summary_of(facts: PodFacts) -> str:
    metadata, status = facts.pod.metadata, facts.pod.status
    phase = f"{status.phase} ({status.reason})" if status.reason else status.phase
    if facts.state is State.ENDED:
        ends = [each.state.terminated.finished_at for each in status.all_containers if each.state.terminated]
        ended_s = age_s(facts.now, max((each for each in ends if each), default=None))
        return phase if ended_s is None else f"{phase} {format_age(ended_s)} ago"
    since = status.start_time if facts.state is State.RUNNING else metadata.creation_timestamp
    seconds = age_s(facts.now, since)
    duration = "" if seconds is None else f" for {format_age(seconds)}"
    return f"{phase}{duration}" + (", being deleted" if facts.state is State.DELETING else "")


def request_steps(facts: PodFacts) -> Iterator[WhyStep]:
    """Tell what the pod asked for, and whether Quotient admitted and charged it."""
    request, annotations = facts.request, facts.pod.metadata.annotations
    if not request.is_gpu:
        yield WhyStep("asked", "no GPU: Quotient decides nothing about this pod")
        return
    admitted = decode_limits(annotations.get(facts.scheme.names.limits, ""))
    limits = admitted or limits_of(request, facts.options, NamespacePolicy(), facts.scheme.unit_mib)
    containers = [f"container {name}: {describe_limits(each)}" for name, each in limits.containers.items()]
    yield WhyStep("asked", "; ".join([*containers, *describe_options(facts.options)]))
    if admitted is None:
        text = "not by Quotient's webhook: created before it, in audit mode, or while disarmed"
        yield WhyStep("admitted", text)
    if facts.state is not State.ENDED:
        yield from charge_steps(facts)


def describe_limits(limits: ContainerLimits) -> str:
    if limits.cores >= CORES_PER_CARD:
        return count_of(limits.cores // CORES_PER_CARD, "whole GPU")
    memory = f", {limits.memory_mib} MiB" if limits.memory_mib else f" and {limits.memory_percent} % of the memory"
    burst = f", up to {limits.core_limit} cores while they are unused" if limits.core_limit > limits.cores else ""
    return f"{limits.cores} cores{memory} of one GPU{burst}"


def describe_options(options: PodOptions) -> Iterator[str]:
    yield f"models: {', '.join(options.models) or 'any'}" + (
        f" except {', '.join(options.avoided_models)}" if options.avoided_models else ""
    )
    if options.uuids or options.avoided_uuids:
        allowed, avoided = ", ".join(options.uuids) or "any", ", ".join(options.avoided_uuids)
        yield f"GPUs: {allowed}" + (f" except {avoided}" if avoided else "")
    if options.min_isolation:
        yield f"isolation {options.min_isolation} or stronger"
    if options.spread_members:
        yield f"not on the same {options.spread_members} as other pods of its workload"


def charge_steps(facts: PodFacts) -> Iterator[WhyStep]:
    metadata = facts.pod.metadata
    if reason := waiting_reason(facts.quota_status or {}, metadata.name):
        yield WhyStep("charged", f"not yet: {reason}", CONTROLLER)
    elif is_uncharged(facts) and (event := facts.own_event):
        yield event_step("charged", event, facts.now, f"not yet: {event.message}")
    elif facts.quota_status is not None:
        gpus, unit_mib = placed_gpus(facts.pod, facts.node, facts.scheme), facts.scheme.unit_mib
        yield WhyStep("charged", charged_text(facts.request, facts.options, gpus, facts.quota_status, unit_mib))
    elif "quota" not in facts.unread:
        yield WhyStep("charged", f"namespace {metadata.namespace} has no GPU quota: nothing is limited")


def waiting_steps(facts: PodFacts) -> Iterator[WhyStep]:
    """Tell why a pod has no node yet."""
    if facts.state is not State.PENDING:
        return
    spec = facts.pod.spec
    if spec.scheduling_gates:
        yield WhyStep("gated", f"no scheduler considers the pod: {gates_of(facts)}")
        return
    if facts.request.is_gpu and scheduler_of(facts) != SCHEDULER:
        yield WhyStep(
            "scheduler", f"schedulerName is {scheduler_of(facts)}: Quotient's scheduler does not place this pod"
        )
    own, message = facts.own_event, kube_scheduler_message(facts)
    if own and not is_uncharged(facts):
        yield event_step("placing", own, facts.now)
    if message and (own is None or other_problems(message)):
        event = latest(each for each in facts.events if each.reason == FAILED_SCHEDULING)
        yield WhyStep("placing", message, "kube-scheduler", age_s(facts.now, event.seen_at) if event else None)
    if not own and not message:
        yield WhyStep("placing", f"no scheduler has reported anything; schedulerName is {scheduler_of(facts)}")


def placed_steps(facts: PodFacts) -> Iterator[WhyStep]:
    """Tell which node and GPUs the pod got, and whether they work."""
    name = facts.pod.spec.node_name
    if not name:
        return
    yield WhyStep("placed", f"node {name}" + (f": {describe_gpus(facts)}" if facts.request.is_gpu else ""))
    if facts.state is not State.ENDED and (problem := node_problem(facts)):
        yield WhyStep("node", problem)


def describe_gpus(facts: PodFacts) -> str:
    placed = decode_placement(facts.pod.metadata.annotations.get(facts.scheme.names.placement, ""))
    if not placed:
        return "the scheduler chose no GPUs; the node plugin does when the containers start"
    known = {gpu.uuid: f"GPU {gpu.index} ({gpu.model})" for gpu in placed_gpus(facts.pod, facts.node, facts.scheme)}
    return "; ".join(
        f"container {container}: "
        + ", ".join(f"{known.get(each.uuid, each.uuid)} {each.cores} cores, {each.memory_mib} MiB" for each in slices)
        for container, slices in placed.items()
    )


def container_steps(facts: PodFacts) -> Iterator[WhyStep]:
    """Tell which containers wait or restarted, and what the kubelet says."""
    if facts.state in (State.PENDING, State.ENDED):
        return
    problems = [each for each in facts.pod.status.all_containers if describe_trouble(each)]
    for each in problems:
        yield WhyStep("starting" if facts.state is State.PLACED else "containers", describe_trouble(each))
    warning = latest(each for each in facts.events if each.component == KUBELET and each.type == "Warning")
    if warning is not None and (problems or facts.state is State.PLACED):
        yield event_step("kubelet", warning, facts.now, f"{warning.reason}: {warning.message}")
    elif not problems and facts.state is State.RUNNING:
        yield WhyStep("running", "all containers run")
    elif not problems and facts.state is State.PLACED:
        yield WhyStep("starting", "the kubelet has not started the containers yet")


def describe_trouble(status: ContainerStatusDetails) -> str:
    """Describe a container that waits, or was started again; empty for all others."""
    waiting, before = status.state.waiting, status.last_state.terminated
    text = ""
    if waiting is not None:
        text = f"container {status.name} waits: {waiting.reason}" + (f": {waiting.message}" if waiting.message else "")
    elif status.restart_count and status.state.running:
        text = f"container {status.name} was restarted {count_of(status.restart_count, 'time')}"
    if text and before is not None:
        text += f"; it ended with code {before.exit_code}" + (f" ({before.reason})" if before.reason else "")
    return text


def end_steps(facts: PodFacts) -> Iterator[WhyStep]:
    if facts.state is not State.ENDED:
        return
    status = facts.pod.status
    if status.message:
        yield WhyStep("ended", f"{status.reason}: {status.message}" if status.reason else status.message)
    for each in status.all_containers:
        if (end := each.state.terminated) is not None:
            details = ": ".join(filter(None, (end.reason, end.message)))
            yield WhyStep(
                "ended", f"container {each.name}: code {end.exit_code}" + (f" ({details})" if details else "")
            )


def deletion_steps(facts: PodFacts) -> Iterator[WhyStep]:
    metadata = facts.pod.metadata
    if not metadata.deletion_timestamp:
        return
    overdue_s = (facts.now - datetime.fromisoformat(metadata.deletion_timestamp)).total_seconds()
    text = "its grace period ends in " if overdue_s < 0 else "its grace period ended "
    text += format_age(abs(overdue_s)) + ("" if overdue_s < 0 else " ago")
    if metadata.finalizers:
        text += f"; finalizers: {', '.join(metadata.finalizers)}"
    yield WhyStep("deleting", f"{text}; it counts against the quota until it is gone")
