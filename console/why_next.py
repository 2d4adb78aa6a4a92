"""What to do next about a pod. Pure functions."""

from console.why_advice import (
    CONTAINER_ADVICE,
    DOCTOR,
    GPU_ADVICE,
    KUBE_SCHEDULER_ADVICE,
    OTHER_CONTAINER_ADVICE,
    OTHER_GPU_ADVICE,
    OTHER_KUBE_SCHEDULER_ADVICE,
    advice_for,
)
from console.why_facts import (
    PodFacts,
    State,
    gates_of,
    is_uncharged,
    kube_scheduler_message,
    node_problem,
    other_problems,
    scheduler_of,
)
from console.why_quota import waiting_reason
from vcuda.names import SCHEDULER

# How every refusal of the node plugin begins, in the kubelet's messages.
REFUSAL_PREFIX = "Quotient: "


def next_step(facts: PodFacts) -> str:
    match facts.state:
        case State.ENDED:
            return next_after_end(facts)
        case State.DELETING:
            return next_for_deletion(facts)
        case State.PENDING:
            return next_for_pending(facts)
        case _:
            return next_on_node(facts)


def next_for_pending(facts: PodFacts) -> str:
    if facts.pod.spec.scheduling_gates:
        return f"the component that set {gates_of(facts)} has to remove it from spec.schedulingGates"
    if text := own_message(facts):
        return gpu_advice(facts, text)
    if message := kube_scheduler_message(facts):
        others = ", ".join(other_problems(message))
        if not others:
            return gpu_advice(facts, message)
        return advice_for(others, KUBE_SCHEDULER_ADVICE, OTHER_KUBE_SCHEDULER_ADVICE, **pod_names(facts))
    if facts.request.is_gpu and scheduler_of(facts) == SCHEDULER:
        return f"wait some seconds; if nothing is reported, check that Quotient's scheduler runs: {DOCTOR}"
    return f"check that the scheduler {scheduler_of(facts)} runs"


def own_message(facts: PodFacts) -> str:
    """Return what Quotient says about a pod that waits; empty if it has said nothing."""
    if is_uncharged(facts) and (reason := waiting_reason(facts.quota_status or {}, facts.pod.metadata.name)):
        return reason
    return facts.own_event.message if facts.own_event else ""


def gpu_advice(facts: PodFacts, message: str) -> str:
    return advice_for(message, GPU_ADVICE, OTHER_GPU_ADVICE, models=models_of(facts), **pod_names(facts))


def pod_names(facts: PodFacts) -> dict[str, str]:
    return {"pod": facts.pod.metadata.name, "namespace": facts.pod.metadata.namespace}


def models_of(facts: PodFacts) -> str:
    models = facts.options.models
    return f"{'an' if models[0][0] in 'AEFHLMNRSX' else 'a'} {' or '.join(models)}" if models else "a GPU"


def next_on_node(facts: PodFacts) -> str:
    names = pod_names(facts)
    if problem := node_problem(facts):
        return f"{problem}: if it does not recover, delete the pod; its controller creates it again"
    for each in facts.pod.status.all_containers:
        if (waiting := each.state.waiting) is not None:
            if REFUSAL_PREFIX in waiting.message:
                return f"do what the node plugin says: {waiting.message.partition(REFUSAL_PREFIX)[2]}"
            return advice_for(waiting.reason, CONTAINER_ADVICE, OTHER_CONTAINER_ADVICE, container=each.name, **names)
        if (before := each.last_state.terminated) is not None and each.state.running:
            fallback = "see why it ended: kubectl logs {pod} -n {namespace} -c {container} --previous"
            return advice_for(before.reason, CONTAINER_ADVICE, fallback, container=each.name, **names)
    if facts.state is State.RUNNING:
        return "nothing to do"
    return OTHER_CONTAINER_ADVICE.format(**names) + " if it does not start within a minute"


def next_for_deletion(facts: PodFacts) -> str:
    if problem := node_problem(facts):
        return f"{problem}: if the node is lost for good, delete the Node object"
    if facts.pod.metadata.finalizers:
        return "wait for the controllers that set the finalizers"
    return "wait until the kubelet has stopped the containers"


def next_after_end(facts: PodFacts) -> str:
    status, names = facts.pod.status, pod_names(facts)
    if status.phase == "Succeeded":
        return "nothing to do: the pod uses no GPU and no quota any more"
    if REFUSAL_PREFIX in status.message:
        return "do what the node plugin says; a pod that the kubelet rejected is not started again, only a new one"
    if status.reason:
        return "delete the pod; if it has a controller, that creates it again"
    return "see its output: kubectl logs {pod} -n {namespace} --all-containers".format(**names)
