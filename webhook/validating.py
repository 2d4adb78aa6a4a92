"""What is refused, and why: every mistake of an object in one answer.

On CREATE a pod is held to all rules, and to being exactly what the mutating webhook makes of it: nothing that another
webhook changed afterwards, and nothing that never passed it, gets in. On UPDATE only what changed is looked at, and
only where it is Quotient's: a pod that was admitted under other rules must remain usable.
"""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from vcuda.decision import Code, Decision, Reason, shown
from vcuda.names import MIRROR, SCHEDULER
from vcuda.pod import PodSpec, Resources
from vcuda.policy import Policy
from vcuda.request import walk
from vcuda.wishes import annotation_at
from webhook.advising import advice
from webhook.mutating import NONE_VISIBLE, VISIBLE, is_reserved, rewrite
from webhook.objects import AdmittedContainer, Binding, Pod, Variable
from webhook.reading import Asked
from webhook.review import User
from webhook.rules import Rules

NODES_GROUP = "system:nodes"
NODE_PREFIX = "system:node:"


class Bound(Struct, frozen=True):
    """A pod that somebody wants to put on a node."""

    uid: str
    annotations: dict[str, str]
    spec: PodSpec


def check_created(pod: Pod, asked: Asked, rules: Rules, policy: Policy, user: User) -> Decision:
    """Check a pod that is to be created."""
    if MIRROR in pod.metadata.noted:
        return check_mirror(pod, asked, rules, user)
    reasons = wrong_with(pod, asked, rules, policy)
    if not reasons:
        reasons = not_rewritten(pod, asked, rules, policy)
    return Decision(tuple(reasons)) if reasons else Decision(warnings=tuple(advice(pod, asked, rules)))


def wrong_with(pod: Pod, asked: Asked, rules: Rules, policy: Policy, path: str = "") -> list[Reason]:
    """Find what its author has to change on a pod, or on a template that stands at `path`."""
    reasons = list(asked.reasons)
    if asked.is_gpu:
        reasons += check_scheduling(pod, rules)
        reasons += check_pools(policy)
    return [moved(reason, path) for reason in reasons] if path else reasons


def moved(reason: Reason, path: str) -> Reason:
    """Say where a reason stands in the object that holds the pod's template."""
    return replace(reason, field=path + reason.field)


def check_scheduling(pod: Pod, rules: Rules) -> list[Reason]:
    """Refuse what goes past the scheduler, which alone knows which GPUs are free."""
    reasons = []
    if pod.spec.node_name:
        reasons.append(
            Reason(
                code=Code.NODE_CHOSEN,
                field="spec.nodeName",
                value=shown(pod.spec.node_name),
                message="a pod with GPUs is put on a node by Quotient's scheduler alone",
                remedy="remove nodeName; to choose a node, write nodeSelector: {kubernetes.io/hostname: "
                f"{shown(pod.spec.node_name)}}}",
            )
        )
    name = pod.spec.scheduler_name
    if name != SCHEDULER and not rules.replaces_scheduler(name):
        reasons.append(
            Reason(
                code=Code.SCHEDULER_FOREIGN,
                field="spec.schedulerName",
                value=shown(name),
                message=f"a pod with GPUs is scheduled by {SCHEDULER}, which knows which of them are free",
                remedy=f"remove schedulerName, or write {SCHEDULER}",
            )
        )
    return reasons


def check_pools(policy: Policy) -> list[Reason]:
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


def check_mirror(pod: Pod, asked: Asked, rules: Rules, user: User) -> Decision:
    """Believe that a pod runs on a node already only if that node says so: it is shown as it is, forged or not."""
    node = pod.spec.node_name or ""
    if not asked.is_gpu and not any(map(rules.owns, pod.metadata.noted)):
        return Decision()
    if NODES_GROUP in user.groups and node and user.username == f"{NODE_PREFIX}{node}":
        return Decision(warnings=("a static pod with GPUs runs outside quotas and placement",))
    return Decision(
        (
            Reason(
                code=Code.MIRROR_FORGED,
                field=annotation_at(MIRROR),
                value=shown(pod.metadata.noted[MIRROR]),
                message=f"only the kubelet of node {shown(node) or 'spec.nodeName'} may show a pod that it runs itself",
                remedy="remove the annotation",
            ),
        )
    )


def not_rewritten(pod: Pod, asked: Asked, rules: Rules, policy: Policy) -> list[Reason]:
    """Refuse a pod that is not as the mutating webhook leaves it."""
    return [
        Reason(
            code=Code.NOT_REWRITTEN,
            field=str(operation["path"])[1:].replace("/", ".").replace("~1", "/"),
            value=shown(operation.get("value", "")),
            message="not as Quotient's mutating webhook leaves it"
            + (", which would take it out" if operation["op"] == "remove" else ""),
            remedy="try again; if it stays so, another webhook changes the pod after Quotient's, or Quotient's "
            "mutating webhook is not registered",
        )
        for operation in rewrite(pod, asked, rules, policy).operations
    ]


def check_updated(new: Pod, old: Pod, rules: Rules, user: User) -> Decision:
    """Check what an update changes of a pod; Quotient itself may change what it owns."""
    if rules.is_quotient(user.username):
        return Decision()
    now, before = new.metadata.noted, old.metadata.noted
    if now == before:
        return Decision()
    owned = [key for key in {**before, **now} if rules.owns(key) and now.get(key) != before.get(key)]
    # Also on a pod that was there before Quotient: it is charged by what its annotations say.
    frozen = [key for key in rules.frozen if now.get(key) != before.get(key)] if is_charged(old, rules) else []
    return Decision(
        tuple(
            [annotation_owned(key, now, before) for key in owned]
            + [annotation_frozen(key, now, before, rules.language.renamed.get(key, key)) for key in frozen]
        )
    )


def is_charged(pod: Pod, rules: Rules) -> bool:
    """Tell whether a pod holds something of its namespace's quota."""
    return has_gpu(pod.metadata.noted, pod.spec, rules)


def is_governed(pod: Pod, rules: Rules) -> bool:
    """Tell whether a pod was admitted by Quotient, and charged."""
    return rules.names.limits in pod.metadata.noted


def annotation_owned(key: str, now: Mapping[str, str], before: Mapping[str, str]) -> Reason:
    """Say that an annotation is not the user's."""
    return Reason(
        code=Code.ANNOTATION_OWNED,
        field=annotation_at(key),
        value=shown(now.get(key, "")),
        message="written by Quotient alone",
        remedy=f"leave it as it is: {shown(before[key])}" if key in before else "remove it",
    )


def annotation_frozen(key: str, now: Mapping[str, str], before: Mapping[str, str], canonical: str) -> Reason:
    """Say that an annotation cannot change any more; an ancestor's was kept under its canonical name."""
    kept = before.get(key, before.get(canonical))
    return Reason(
        code=Code.ANNOTATION_FROZEN,
        field=annotation_at(key),
        value=shown(now.get(key, "")),
        message="the pod was charged and placed with " + ("no such annotation" if kept is None else f"{shown(kept)!r}"),
        remedy="delete the pod and create it anew, or leave the annotation as it was",
    )


def check_ephemeral(new: Pod, old: Pod, asked: Asked, rules: Rules) -> Decision:
    """Check containers that are added to a running pod: they see the GPUs of none."""
    if not asked.is_gpu and not is_governed(old, rules):
        return Decision()
    known = {container.name for container in old.spec.ephemeral_containers or ()}
    return Decision(
        tuple(
            Reason(
                code=Code.NOT_REWRITTEN,
                field=f"spec.ephemeralContainers[{index}].env[{shown(variable.name)}]",
                value=shown(variable.value or ""),
                message="which GPUs a container sees follows from its request, and such a container can have none",
                remedy=f"leave such variables out, or write {VISIBLE}={NONE_VISIBLE}",
            )
            for index, container in enumerate(new.spec.ephemeral_containers or ())
            if container.name not in known
            for variable in reserved_in(container)
        )
    )


def reserved_in(container: AdmittedContainer) -> list[Variable]:
    """Find what keeps a container from being one that sees no GPU; that it is not said at all counts as well."""
    found = [variable for variable in container.env or () if is_reserved(variable.name)]
    blind = [variable for variable in found if (variable.name, variable.value) == (VISIBLE, NONE_VISIBLE)]
    wrong = [variable for variable in found if variable not in blind]
    return wrong or ([] if blind else [Variable(VISIBLE)])


def check_binding(binding: Binding, bound: Bound | None, rules: Rules, user: User) -> Decision:
    """Check that nobody but the scheduler puts a GPU pod on a node, nor writes placements on any pod.

    A pod that is not there yet may be there, with GPUs, when the binding takes effect; and so may another of its name.
    """
    if rules.may_bind(user.username):
        return Decision()
    reasons = [annotation_owned(key, binding.metadata.noted, {}) for key in binding.metadata.noted if rules.owns(key)]
    if bound is None or (binding.metadata.uid and binding.metadata.uid != bound.uid):
        reasons.append(
            foreign(
                "metadata.name" if bound is None else "metadata.uid",
                binding.metadata.name if bound is None else binding.metadata.uid,
                "there is no such pod to put on a node",
                "bind a pod that exists, by its uid",
            )
        )
    elif has_gpu(bound.annotations, bound.spec, rules):
        reasons.append(
            foreign(
                "target.name",
                binding.target.name,
                f"{shown(user.username)} may not put a pod with GPUs on a node: {SCHEDULER} alone knows which GPUs are "
                "free there",
                "leave the pod to its scheduler; another scheduler may be allowed in webhook.binders",
            )
        )
    return Decision(tuple(reasons))


def foreign(field: str, value: str, message: str, remedy: str) -> Reason:
    """Say why a binding is refused."""
    return Reason(code=Code.BINDING_FOREIGN, field=field, value=shown(value), message=message, remedy=remedy)


def has_gpu(annotations: Mapping[str, str], spec: PodSpec, rules: Rules) -> bool:
    """Tell whether any container names a resource of ours, or the pod was admitted as one with GPUs."""
    if rules.names.limits in annotations:
        return True
    for _, _, container in walk(spec):
        resources = container.resources or Resources()
        if any(key in rules.language.by_key for key in (*(resources.limits or ()), *(resources.requests or ()))):
            return True
    return False
