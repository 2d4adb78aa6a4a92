"""Validates pods and Bindings, and returns every mistake of an object in one answer.

On CREATE a pod has to satisfy all rules, and has to be exactly what the mutating webhook makes of it: neither a pod
that bypassed the mutating webhook nor one that another webhook changed afterwards gets in. On UPDATE only changes of
what belongs to Quotient are checked, so that a pod that was admitted under other rules can still be updated.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from vcuda.catalogue import CardModel
from vcuda.decision import Code, Decision, Reason, printable
from vcuda.names import HOSTNAME_LABEL, MIRROR_ANNOTATION, NO_DEVICES, SCHEDULER, VISIBLE_DEVICES
from vcuda.namespace_policy import NamespacePolicy
from vcuda.pod import Container, PodSpec, Resources
from vcuda.pod_options import annotation_field
from vcuda.request import iter_containers
from webhook.admission_config import AdmissionConfig
from webhook.gpu_access import check_device_list_volumes, check_gpu_access
from webhook.mutating import containers_of, is_reserved_variable, rewrite, was_admitted_by_quotient
from webhook.objects import AdmittedContainer, Binding, EnvVar, Pod
from webhook.patching import Operation, field_of, pointer_steps
from webhook.pod_parsing import ParsedPod
from webhook.pod_warnings import pod_warnings
from webhook.review import User
from webhook.size_limits import size_mistakes

# A kubelet authenticates with this group and with its node's name: the node authorizer requires both as well.
NODES_GROUP = "system:nodes"
NODE_PREFIX = "system:node:"


class PodToBind(Struct, frozen=True):
    """The pod of a Binding, as it is stored."""

    uid: str
    annotations: dict[str, str]
    spec: PodSpec


def check_created(
    pod: Pod,
    parsed: ParsedPod,
    config: AdmissionConfig,
    policy: NamespacePolicy,
    user: User,
    *,
    cards: Sequence[CardModel] = (),
) -> Decision:
    """Check a new pod. `cards` are the models that the cluster has; they are used in warnings only."""
    if MIRROR_ANNOTATION in pod.metadata.annotations_or_empty:
        return check_mirror(pod, parsed, config, user)
    reasons = pod_mistakes(pod, parsed, config, policy)
    if not reasons:
        # Pods with mistakes are not rewritten, so they would always differ.
        reasons = check_rewritten(pod, parsed, config, policy)
    return Decision(tuple(reasons)) if reasons else Decision(warnings=tuple(pod_warnings(pod, parsed, config, cards)))


def pod_mistakes(
    pod: Pod, parsed: ParsedPod, config: AdmissionConfig, policy: NamespacePolicy, field_prefix: str = ""
) -> list[Reason]:
    """Return what the user has to change on a pod, or on a template whose fields start with `field_prefix`."""
    if parsed.is_too_large:
        return [with_field_prefix(reason, field_prefix) for reason in parsed.reasons]  # and nothing else is read
    reasons = list(parsed.reasons)
    if parsed.is_gpu:
        reasons += check_scheduling(pod, config)
        # From the resources, because a pod with mistakes has no shares.
        for pointer, container in containers_of(pod.spec):
            has_gpu = requests_gpu(container, config)
            reasons += check_gpu_access(pointer, container, config, policy, has_gpu=has_gpu)
        reasons += check_device_list_volumes(pod)
    if field_prefix:
        reasons = [with_field_prefix(reason, field_prefix) for reason in reasons]
    return [*reasons, *check_pools(pod, policy)] if parsed.is_gpu else reasons


def with_field_prefix(reason: Reason, field_prefix: str) -> Reason:
    return replace(reason, field=field_prefix + reason.field)


def check_scheduling(pod: Pod, config: AdmissionConfig) -> list[Reason]:
    """Refuse pods that bypass Quotient's scheduler: no other component knows which GPUs are free."""
    reasons = []
    if pod.spec.node_name:
        node = printable(pod.spec.node_name)
        reasons.append(
            Reason(
                code=Code.NODE_CHOSEN,
                field="spec.nodeName",
                value=node,
                message=f"only {SCHEDULER} may assign a pod with GPUs to a node",
                remedy=f"remove nodeName; to select a node, use nodeSelector: {{{HOSTNAME_LABEL}: {node}}}",
            )
        )
    name = pod.spec.scheduler_name
    if name != SCHEDULER and not config.replaces_scheduler(name):
        reasons.append(
            Reason(
                code=Code.SCHEDULER_FOREIGN,
                field="spec.schedulerName",
                value=printable(name),
                message=f"only {SCHEDULER} may schedule a pod with GPUs",
                remedy=f"remove schedulerName, or set it to {SCHEDULER}",
            )
        )
    return reasons


def check_pools(pod: Pod, policy: NamespacePolicy) -> list[Reason]:
    """Refuse a pod that no node could run: None means any pool, but an empty tuple means none."""
    if policy.pools != ():
        return []
    return [
        Reason(
            code=Code.POOL_NOT_GRANTED,
            field="metadata.namespace",
            value=printable(pod.metadata.namespace),
            message="the quotas of this namespace have no node pool in common, so its pods can run on no node",
            remedy="ask an administrator to correct the pools in these quotas",
        )
    ]


def check_mirror(pod: Pod, parsed: ParsedPod, config: AdmissionConfig, user: User) -> Decision:
    """Allow a mirror pod with GPUs only from the kubelet of its node.

    Any user can set the annotation, and a mirror pod is neither rewritten nor charged.
    """
    node = pod.spec.node_name or ""
    annotations = pod.metadata.annotations_or_empty
    if not parsed.is_gpu and not any(map(config.owns_annotation, annotations)):
        return Decision()
    field = annotation_field(MIRROR_ANNOTATION)
    if NODES_GROUP in user.groups and node and user.username == f"{NODE_PREFIX}{node}":
        return Decision(warnings=(f"{field}: the GPUs of a static pod are neither charged to a quota nor scheduled",))
    creator = f"the kubelet of node {printable(node)}" if node else "a kubelet, for the node in spec.nodeName,"
    forged = Reason(
        code=Code.MIRROR_FORGED,
        field=field,
        value=printable(annotations[MIRROR_ANNOTATION]),
        message=f"only {creator} may create a mirror pod",
        remedy="remove the annotation",
    )
    return Decision((forged,))


def check_rewritten(pod: Pod, parsed: ParsedPod, config: AdmissionConfig, policy: NamespacePolicy) -> list[Reason]:
    """Refuse a pod that the mutating webhook would still change: one reason for each operation of its patch."""
    operations = rewrite(pod, parsed, config, policy).operations
    if not operations:
        return []
    return [not_rewritten(operation, pod) for operation in operations]


def not_rewritten(operation: Operation, pod: Pod) -> Reason:
    """Return the difference between a pod and what the mutating webhook makes of it."""
    value = value_at(pod, operation["path"])
    expected = format_value(operation.get("value"))
    if operation["op"] == "remove":
        message = "not allowed: Quotient's mutating webhook removes it"
    elif value is None:
        message = f"missing: Quotient's mutating webhook adds {expected}"
    else:
        message = f"differs: Quotient's mutating webhook writes {expected}"
    return Reason(
        code=Code.NOT_REWRITTEN,
        field=field_of(operation["path"]),
        value="" if value is None else format_value(value),
        message=message,
        remedy="create the pod again; if this persists, check that this webhook is registered and that no other "
        "webhook changes the pod after it",
    )


def value_at(value: Any, pointer: str) -> Any:  # noqa: ANN401 - any JSON
    """Return what a JSON pointer refers to; None if there is nothing."""
    for step in pointer_steps(pointer):
        if isinstance(value, Struct):
            value = getattr(value, attributes_of(type(value)).get(step, ""), None)
        elif isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list | tuple) and step.isdecimal():
            value = value[int(step)]
        else:
            return None
    return value


@cache
def attributes_of(kind: type[Struct]) -> dict[str, str]:
    """Return the attributes of a struct by their names in JSON."""
    return {field.encode_name: field.name for field in msgspec.structs.fields(kind)}


def format_value(value: Any) -> str:  # noqa: ANN401 - any JSON
    """Return a value as a message shows it: text as it is, anything else as JSON, shortened."""
    return printable(value if isinstance(value, str) else msgspec.json.encode(value).decode())


def check_updated(new: Pod, old: Pod, config: AdmissionConfig, user: User) -> Decision:
    """Check which annotations an update changes; Quotient itself may change those it owns."""
    if config.is_own_service_account(user.username):
        return Decision()
    now, before = new.metadata.annotations_or_empty, old.metadata.annotations_or_empty
    if now == before:
        return Decision()
    # Keys of both, because removing an owned annotation is a change too.
    owned = [key for key in {**before, **now} if config.owns_annotation(key) and now.get(key) != before.get(key)]
    # A pod that was created before Quotient was installed is charged by its annotations too.
    is_charged = has_gpu(before, old.spec, config)
    frozen = [key for key in config.frozen_annotations if now.get(key) != before.get(key)] if is_charged else []
    return Decision(
        tuple(
            [annotation_owned(key, now, before) for key in owned]
            + [annotation_frozen(key, now, before, config.scheme.canonical_keys.get(key, key)) for key in frozen]
        )
    )


def annotation_owned(key: str, now: Mapping[str, str], before: Mapping[str, str]) -> Reason:
    return Reason(
        code=Code.ANNOTATION_OWNED,
        field=annotation_field(key),
        value=printable(now.get(key, "")),
        message="only Quotient may write this annotation",
        remedy=f"restore its value {printable(before[key])}" if key in before else "remove it",
    )


def annotation_frozen(key: str, now: Mapping[str, str], before: Mapping[str, str], canonical: str) -> Reason:
    """Return the reason for a changed option. An ancestor's key was stored under its canonical name."""
    admitted = before.get(key, before.get(canonical))
    with_what = "without this annotation" if admitted is None else f"with {printable(admitted)!r}"
    return Reason(
        code=Code.ANNOTATION_FROZEN,
        field=annotation_field(key),
        value=printable(now.get(key, "")),
        message=f"cannot change: the pod was admitted and charged {with_what}",
        remedy="undo the change, or delete the pod and create it again",
    )


def check_ephemeral(
    new: Pod, old: Pod, parsed: ParsedPod, config: AdmissionConfig, policy: NamespacePolicy
) -> Decision:
    """Check containers that are added to a running GPU pod: they cannot request GPUs, and must not see any."""
    if not parsed.is_gpu and not was_admitted_by_quotient(old, config):
        return Decision()
    if mistakes := size_mistakes(new, config):
        return Decision(tuple(mistakes))
    present = {container.name for container in old.spec.ephemeral_containers or ()}
    reasons: list[Reason] = []
    for index, container in enumerate(new.spec.ephemeral_containers or ()):
        if container.name in present:
            continue
        pointer = f"/spec/ephemeralContainers/{index}"
        reasons += check_gpu_access(pointer, container, config, policy, has_gpu=False)
        reasons += [exposes_gpus(pointer, variable) for variable in exposing_variables(container)]
    return Decision(tuple(reasons))


def exposes_gpus(pointer: str, variable: EnvVar) -> Reason:
    return Reason(
        code=Code.NOT_REWRITTEN,
        field=f"{field_of(pointer)}.env[{printable(variable.name)}]",
        value=printable(variable.value or ""),
        message="an ephemeral container must not see the GPUs of its pod",
        remedy=f"set {VISIBLE_DEVICES}={NO_DEVICES}, and no other variable that selects GPUs",
    )


def exposing_variables(container: AdmittedContainer) -> list[EnvVar]:
    """Return the variables that let a container see GPUs; NVIDIA_VISIBLE_DEVICES without a value if it is absent."""
    # Absent, the image decides, and CUDA images set it to `all`.
    reserved = [variable for variable in container.env or () if is_reserved_variable(variable.name)]
    exposing = [each for each in reserved if (each.name, each.value) != (VISIBLE_DEVICES, NO_DEVICES)]
    return exposing if reserved else [EnvVar(VISIBLE_DEVICES)]


def check_binding(binding: Binding, pod_to_bind: PodToBind | None, config: AdmissionConfig, user: User) -> Decision:
    """Allow only schedulers to bind GPU pods, and only Quotient to write a placement with a Binding."""
    if config.may_bind(user.username):
        return Decision()
    metadata = binding.metadata
    annotations = metadata.annotations_or_empty
    reasons = [annotation_owned(key, annotations, {}) for key in annotations if config.owns_annotation(key)]
    # An absent pod is refused too: by the time the Binding takes effect, a GPU pod of that name may have been created.
    if pod_to_bind is None:
        reasons.append(
            binding_refused("metadata.name", metadata.name, "pod not found", "check the pod's name and namespace")
        )
    elif metadata.uid and metadata.uid != pod_to_bind.uid:
        reasons.append(
            binding_refused(
                "metadata.uid",
                metadata.uid,
                "the pod has another uid",
                "set the uid of the existing pod, or leave it out",
            )
        )
    elif has_gpu(pod_to_bind.annotations, pod_to_bind.spec, config):
        reasons.append(
            binding_refused(
                "target.name",
                binding.target.name,
                f"user {printable(user.username)} may not bind a pod with GPUs: only {SCHEDULER} knows which GPUs "
                "are free",
                f"leave the pod to {SCHEDULER}, or add the user to webhook.binders in Quotient's configuration",
            )
        )
    return Decision(tuple(reasons))


def binding_refused(field: str, value: str, message: str, remedy: str) -> Reason:
    return Reason(code=Code.BINDING_FOREIGN, field=field, value=printable(value), message=message, remedy=remedy)


def has_gpu(annotations: Mapping[str, str], spec: PodSpec, config: AdmissionConfig) -> bool:
    """Whether a pod was admitted as one with GPUs, or has a GPU resource of any vocabulary."""
    if config.names.limits in annotations:
        return True
    # Keys only: parsing the amounts would not tell more, because an invalid amount counts as well.
    return any(requests_gpu(container, config) for _, _, container in iter_containers(spec))


def requests_gpu(container: Container, config: AdmissionConfig) -> bool:
    resources = container.resources or Resources()
    return any(key in config.scheme.by_key for key in (*(resources.limits or ()), *(resources.requests or ())))
