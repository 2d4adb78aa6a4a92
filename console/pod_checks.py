"""Checks of `quotient doctor`: pods with GPUs that no quota counts, and those that are pending for long."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from console.check_results import ERROR, MAX_NAMES_SHOWN, WARNING, CheckResult, shorten_list
from console.why_steps import age_s, clean, format_age
from ledger.ledger_store import LEDGER_SELECTOR, UnreadableLedger, read_ledger
from settings.configuration import Configuration
from vcuda.names import NVIDIA_GPU, SCHEDULER, names_for
from vcuda.request import request_held_by
from vcuda.scheme import Scheme, build_scheme
from vcuda.vocabulary import VocabularyOptions

if TYPE_CHECKING:
    from cluster.object_details import PodDetails
    from cluster.objects import Pod

GPU_PODS, PENDING = "pods with gpus", "pending pods"
PENDING_AFTER_S = 60


def check_pods(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Find pods with GPUs that are not charged, or that request them by names which are not counted."""
    from cluster.objects import CONFIG_MAPS, PODS  # noqa: PLC0415 - only loaded where a cluster is used
    from controller.pod_usage import pod_usage_of  # noqa: PLC0415

    scheme = configured_scheme(configuration)
    every_vocabulary = VocabularyOptions(nvidia_gpu=True, hami=True)
    full_scheme = build_scheme(scheme.names, configuration.memory_unit_mib, every_vocabulary)
    ledgers = cluster.list(CONFIG_MAPS, configuration.system_namespace, LEDGER_SELECTOR).items
    charged: set[str] = set()
    for each in ledgers:
        try:
            charged.update(read_ledger(each).ledger.pods())
        except UnreadableLedger as error:
            yield CheckResult(ERROR, GPU_PODS, str(error), "if this lasts for minutes, check that the controller runs")
    uncharged, unread = [], []
    pods: list[Pod] = cluster.list(PODS).items
    for pod in pods:
        if pod.metadata.namespace == configuration.system_namespace:
            continue  # Quotient's own pods are never charged
        usage = pod_usage_of(pod, scheme)
        if usage is not None and usage.node and not usage.is_terminal and usage.key not in charged:
            uncharged.append(f"{usage.metadata.namespace}/{usage.metadata.name}")
        if usage is None and (other := pod_usage_of(pod, full_scheme)) is not None and not other.is_terminal:
            unread.append(f"{other.metadata.namespace}/{other.metadata.name}")
    if uncharged:
        remedy = "the controller charges them within seconds: check that it runs"
        yield CheckResult(WARNING, GPU_PODS, f"not in any ledger: {shorten_list(uncharged)}", remedy)
    if unread:
        remedy = f"set vocabularies.nvidiaGpu, or vocabularies.hami, so that {NVIDIA_GPU} counts against quotas"
        message = f"GPUs under resource names that no quota counts: {shorten_list(unread)}"
        yield CheckResult(WARNING, GPU_PODS, message, remedy)


def configured_scheme(configuration: Configuration) -> Scheme:
    return build_scheme(names_for(configuration.domain), configuration.memory_unit_mib, configuration.vocabularies)


def check_pending(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Find pods that wait for long for Quotient's scheduler, or with GPUs for another or on their node, and why."""
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.object_details import POD_DETAILS  # noqa: PLC0415

    now, scheme = datetime.now(UTC), configured_scheme(configuration)
    pods = [
        pod
        for pod in cluster.list(POD_DETAILS, "", Selector(fields="status.phase=Pending")).items
        if not pod.spec.scheduling_gates
        and (age_s(now, pod.metadata.creation_timestamp) or 0) > PENDING_AFTER_S
        and is_relevant(pod, scheme)
    ]
    # Only those that are shown are asked for their events.
    oldest = sorted(pods, key=lambda pod: pod.metadata.creation_timestamp or "")[:MAX_NAMES_SHOWN]
    for pod in oldest:
        metadata = pod.metadata
        age = format_age(age_s(now, metadata.creation_timestamp) or 0)
        message = f"{metadata.namespace}/{metadata.name}, for {age}: {pending_reason(cluster, pod)}"
        yield CheckResult(WARNING, PENDING, message, f"quotient why {metadata.name} -n {metadata.namespace}")
    if len(pods) > len(oldest):
        yield CheckResult(WARNING, PENDING, f"and {len(pods) - len(oldest)} more, not as old")


def is_relevant(pod: "PodDetails", scheme: Scheme) -> bool:
    """Whether a pod waits for Quotient's scheduler, or has GPUs."""
    if pod.spec.scheduler_name == SCHEDULER and not pod.spec.node_name:
        return True
    return request_held_by(pod.spec, pod.metadata.annotations, scheme).is_gpu


def pending_reason(cluster: Any, pod: "PodDetails") -> str:  # noqa: ANN401
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.object_details import EVENT_DETAILS  # noqa: PLC0415
    from console.why_facts import kube_scheduler_text, own_event_in  # noqa: PLC0415

    if pod.spec.node_name:
        waiting = [each.state.waiting for each in pod.status.all_containers if each.state.waiting]
        text = ": ".join(filter(None, (waiting[0].reason, waiting[0].message))) if waiting else pod.status.message
        return f"on node {pod.spec.node_name}: {clean(text) or 'its kubelet has not reported anything'}"
    selector = Selector(fields=f"involvedObject.uid={pod.metadata.uid}")
    events = cluster.list(EVENT_DETAILS, pod.metadata.namespace, selector).items
    own = own_event_in(events)
    return clean(own.message if own else kube_scheduler_text(pod, events)) or "no scheduler has reported anything"
