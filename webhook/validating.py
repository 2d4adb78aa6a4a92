"""What is refused, and why: every mistake of an object in one answer.

On CREATE a pod is held to all rules, and to being exactly what the mutating webhook makes of it: nothing that another
webhook changed afterwards, and nothing that never passed it, gets in. On UPDATE only what changed is looked at, and
only where it is Quotient's: a pod that was admitted under other rules must remain usable.
"""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from vcuda.decision import Code, Decision, Reason, printable
from vcuda.names import MIRROR_ANNOTATION, NO_DEVICES, SCHEDULER, VISIBLE_DEVICES
from vcuda.namespace_policy import NamespacePolicy
from vcuda.pod import PodSpec, Resources
from vcuda.pod_options import annotation_field
from vcuda.request import iter_containers
from webhook.admission_config import AdmissionConfig
from webhook.mutating import is_reserved, rewrite
from webhook.objects import AdmittedContainer, Binding, Pod, Variable
from webhook.pod_parsing import ParsedPod
from webhook.pod_warnings import pod_warnings
from webhook.review import User

NODES_GROUP = "system:nodes"
NODE_PREFIX = "system:node:"


class PodToBind(Struct, frozen=True):
    """A pod that somebody wants to put on a node."""

    uid: str
    annotations: dict[str, str]
    spec: PodSpec


def check_created(
    pod: Pod, parsed: ParsedPod, config: AdmissionConfig, policy: NamespacePolicy, user: User
) -> Decision:
    """Check a pod that is to be created."""
    if MIRROR_ANNOTATION in pod.metadata.noted:
        return check_mirror(pod, parsed, config, user)
    reasons = pod_mistakes(pod, parsed, config, policy)
    if not reasons:
        reasons = not_rewritten(pod, parsed, config, policy)
    return Decision(tuple(reasons)) if reasons else Decision(warnings=tuple(pod_warnings(pod, parsed, config)))


def pod_mistakes(
    pod: Pod, parsed: ParsedPod, config: AdmissionConfig, policy: NamespacePolicy, path: str = ""
) -> list[Reason]:
    """Find what its author has to change on a pod, or on a template that stands at `path`."""
    reasons = list(parsed.reasons)
    if parsed.is_gpu:
        reasons += check_scheduling(pod, config)
        reasons += check_pools(policy)
    return [moved(reason, path) for reason in reasons] if path else reasons


def moved(reason: Reason, path: str) -> Reason:
    """Say where a reason stands in the object that holds the pod's template."""
    return replace(reason, field=path + reason.field)


def check_scheduling(pod: Pod, config: AdmissionConfig) -> list[Reason]:
    """Refuse what goes past the scheduler, which alone knows which GPUs are free."""
    reasons = []
    if pod.spec.node_name:
        reasons.append(
            Reason(
                code=Code.NODE_CHOSEN,
                field="spec.nodeName",
                value=printable(pod.spec.node_name),
                message="a pod with GPUs is put on a node by Quotient's scheduler alone",
                remedy="remove nodeName; to choose a node, write nodeSelector: {kubernetes.io/hostname: "
                f"{printable(pod.spec.node_name)}}}",
            )
        )
    name = pod.spec.scheduler_name
    if name != SCHEDULER and not config.replaces_scheduler(name):
        reasons.append(
            Reason(
                code=Code.SCHEDULER_FOREIGN,
                field="spec.schedulerName",
                value=printable(name),
                message=f"a pod with GPUs is scheduled by {SCHEDULER}, which knows which of them are free",
                remedy=f"remove schedulerName, or write {SCHEDULER}",
            )
        )
    return reasons


def check_pools(policy: NamespacePolicy) -> list[Reason]:
    """Refuse where the quotas of a namespace leave it no node."""
    if policy.pools != ():
        return []
    return [
        Reason(
            code=Code.POOL_NOT_GRANTED,
            field="metadata.namespace",
            value="",
            message="the quotas of this namespace have no node pool in common, so there is no node for its pods",
            remedy="have the quotas' pools corrected",
        )
    ]


def check_mirror(pod: Pod, parsed: ParsedPod, config: AdmissionConfig, user: User) -> Decision:
    """Believe that a pod runs on a node already only if that node says so: it is shown as it is, forged or not."""
    node = pod.spec.node_name or ""
    if not parsed.is_gpu and not any(map(config.owns, pod.metadata.noted)):
        return Decision()
    if NODES_GROUP in user.groups and node and user.username == f"{NODE_PREFIX}{node}":
        return Decision(warnings=("a static pod with GPUs runs outside quotas and placement",))
    return Decision(
        (
            Reason(
                code=Code.MIRROR_FORGED,
                field=annotation_field(MIRROR_ANNOTATION),
                value=printable(pod.metadata.noted[MIRROR_ANNOTATION]),
                message=f"only the kubelet of node {printable(node) or 'spec.nodeName'} may create a mirror pod",
                remedy="remove the annotation",
            ),
        )
    )


def not_rewritten(pod: Pod, parsed: ParsedPod, config: AdmissionConfig, policy: NamespacePolicy) -> list[Reason]:
    """Refuse a pod that is not as the mutating webhook leaves it."""
    return [
        Reason(
            code=Code.NOT_REWRITTEN,
            field=str(operation["path"])[1:].replace("/", ".").replace("~1", "/"),
            value=printable(operation.get("value", "")),
            message="not as Quotient's mutating webhook leaves it"
            + (", which would take it out" if operation["op"] == "remove" else ""),
            remedy="try again; if it stays so, another webhook changes the pod after Quotient's, or Quotient's "
            "mutating webhook is not registered",
        )
        for operation in rewrite(pod, parsed, config, policy).operations
    ]


def check_updated(new: Pod, old: Pod, config: AdmissionConfig, user: User) -> Decision:
    """Check what an update changes of a pod; Quotient itself may change what it owns."""
    if config.is_quotient(user.username):
        return Decision()
    now, before = new.metadata.noted, old.metadata.noted
    if now == before:
        return Decision()
    owned = [key for key in {**before, **now} if config.owns(key) and now.get(key) != before.get(key)]
    # Also on a pod that was there before Quotient: it is charged by what its annotations say.
    frozen = [key for key in config.frozen if now.get(key) != before.get(key)] if is_charged(old, config) else []
    return Decision(
        tuple(
            [annotation_owned(key, now, before) for key in owned]
            + [annotation_frozen(key, now, before, config.scheme.canonical_keys.get(key, key)) for key in frozen]
        )
    )


def is_charged(pod: Pod, config: AdmissionConfig) -> bool:
    """Tell whether a pod holds something of its namespace's quota."""
    return has_gpu(pod.metadata.noted, pod.spec, config)


def is_governed(pod: Pod, config: AdmissionConfig) -> bool:
    """Tell whether a pod was admitted by Quotient, and charged."""
    return config.names.limits in pod.metadata.noted


def annotation_owned(key: str, now: Mapping[str, str], before: Mapping[str, str]) -> Reason:
    """Say that an annotation is not the user's."""
    return Reason(
        code=Code.ANNOTATION_OWNED,
        field=annotation_field(key),
        value=printable(now.get(key, "")),
        message="written by Quotient alone",
        remedy=f"leave it as it is: {printable(before[key])}" if key in before else "remove it",
    )


def annotation_frozen(key: str, now: Mapping[str, str], before: Mapping[str, str], canonical: str) -> Reason:
    """Say that an annotation cannot change any more; an ancestor's was kept under its canonical name."""
    kept = before.get(key, before.get(canonical))
    return Reason(
        code=Code.ANNOTATION_FROZEN,
        field=annotation_field(key),
        value=printable(now.get(key, "")),
        message="the pod was charged and placed with "
        + ("no such annotation" if kept is None else f"{printable(kept)!r}"),
        remedy="delete the pod and create it anew, or leave the annotation as it was",
    )


def check_ephemeral(new: Pod, old: Pod, parsed: ParsedPod, config: AdmissionConfig) -> Decision:
    """Check containers that are added to a running pod: they see the GPUs of none."""
    if not parsed.is_gpu and not is_governed(old, config):
        return Decision()
    known = {container.name for container in old.spec.ephemeral_containers or ()}
    return Decision(
        tuple(
            Reason(
                code=Code.NOT_REWRITTEN,
                field=f"spec.ephemeralContainers[{index}].env[{printable(variable.name)}]",
                value=printable(variable.value or ""),
                message="which GPUs a container sees follows from its request, and such a container can have none",
                remedy=f"leave such variables out, or write {VISIBLE_DEVICES}={NO_DEVICES}",
            )
            for index, container in enumerate(new.spec.ephemeral_containers or ())
            if container.name not in known
            for variable in reserved_in(container)
        )
    )


def reserved_in(container: AdmittedContainer) -> list[Variable]:
    """Find what keeps a container from being one that sees no GPU; that it is not said at all counts as well."""
    found = [variable for variable in container.env or () if is_reserved(variable.name)]
    blind = [variable for variable in found if (variable.name, variable.value) == (VISIBLE_DEVICES, NO_DEVICES)]
    wrong = [variable for variable in found if variable not in blind]
    return wrong or ([] if blind else [Variable(VISIBLE_DEVICES)])


def check_binding(binding: Binding, pod_to_bind: PodToBind | None, config: AdmissionConfig, user: User) -> Decision:
    """Check that nobody but the scheduler puts a GPU pod on a node, nor writes placements on any pod.

    A pod that is not there yet may be there, with GPUs, when the binding takes effect; and so may another of its name.
    """
    if config.may_bind(user.username):
        return Decision()
    reasons = [annotation_owned(key, binding.metadata.noted, {}) for key in binding.metadata.noted if config.owns(key)]
    if pod_to_bind is None or (binding.metadata.uid and binding.metadata.uid != pod_to_bind.uid):
        reasons.append(
            foreign(
                "metadata.name" if pod_to_bind is None else "metadata.uid",
                binding.metadata.name if pod_to_bind is None else binding.metadata.uid,
                "there is no such pod to put on a node",
                "bind a pod that exists, by its uid",
            )
        )
    elif has_gpu(pod_to_bind.annotations, pod_to_bind.spec, config):
        reasons.append(
            foreign(
                "target.name",
                binding.target.name,
                f"{printable(user.username)} may not bind a pod with GPUs: only {SCHEDULER} knows which GPUs of a node "
                "are free",
                "leave the pod to its scheduler; another scheduler may be allowed in webhook.binders",
            )
        )
    return Decision(tuple(reasons))


def foreign(field: str, value: str, message: str, remedy: str) -> Reason:
    """Say why a binding is refused."""
    return Reason(code=Code.BINDING_FOREIGN, field=field, value=printable(value), message=message, remedy=remedy)


def has_gpu(annotations: Mapping[str, str], spec: PodSpec, config: AdmissionConfig) -> bool:
    """Tell whether any container names a resource of ours, or the pod was admitted as one with GPUs."""
    if config.names.limits in annotations:
        return True
    for _, _, container in iter_containers(spec):
        resources = container.resources or Resources()
        if any(key in config.scheme.by_key for key in (*(resources.limits or ()), *(resources.requests or ()))):
            return True
    return False
