"""Checks the pod templates of workloads, so that mistakes show at `kubectl apply`, not when no pod appears.

Templates are not rewritten: that would cause a permanent difference to manifests kept in Git, and new rollouts. The
exception is fractions of a card, which the API server rejects in a template (see `template_fractions`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jsonpatch
import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from vcuda.catalogue import CardModel
from vcuda.charging import PodDemand, common_limits, fill, fit_charge
from vcuda.decision import BadRequest, Code, Decision, Reason, printable
from vcuda.names import LAST_APPLIED_ANNOTATION
from vcuda.namespace_policy import NamespacePolicy
from vcuda.pod_options import PodOptions
from vcuda.quota_refusals import EXCEEDED, limit_field
from vcuda.quota_usage import QuotaUsage
from vcuda.workload_kinds import BY_GROUP_KIND, CRON_JOB_TEMPLATE
from webhook.admission_config import AdmissionConfig
from webhook.mutating import containers_of, rewrite
from webhook.objects import AdmittedMetadata, AdmittedWorkload, CronJob, Pod, Template
from webhook.patching import PatchBuilder, field_of, field_prefix, truncate_warning
from webhook.pod_parsing import ParsedPod, parse_pod
from webhook.pod_warnings import misplaced_annotations, pod_warnings, unread_name_warnings
from webhook.review import Request, decode_object
from webhook.size_limits import size_mistakes
from webhook.template_fractions import recorded_rewrites, rewrite_fractions
from webhook.validating import pod_mistakes, with_field_prefix
from webhook.withdrawn_requests import Declaration, withdrawn_requests


class TemplatedWorkload(Struct, frozen=True):
    """A workload of any kind.

    `root` is the JSON pointer of its pod template, `field` the same in errors about the review, and `count` the number
    of pods that it runs at the same time.
    """

    metadata: AdmittedMetadata
    template: Raw
    count: int
    root: str
    field: str

    def decode_template(self) -> Template:
        return decode_object(self.template, Template, self.field)


def read_workload(raw: Raw, request: Request, field: str) -> TemplatedWorkload:
    """Decode the workload in a field of the review; raises BadRequest if it is malformed."""
    kind = BY_GROUP_KIND[request.kind.group, request.kind.kind]
    root = kind.template_pointer
    if kind.template == CRON_JOB_TEMPLATE:
        cron_job = decode_object(raw, CronJob, field)
        metadata, workload = cron_job.metadata, cron_job.spec.job_template or AdmittedWorkload()
        count = workload.spec.parallelism
    else:
        workload = decode_object(raw, AdmittedWorkload, field)
        metadata = workload.metadata
        count = workload.spec.parallelism if workload.spec.replicas is None else workload.spec.replicas
    # Both default to 1 in Kubernetes; a DaemonSet has neither, and how many nodes it will run on is not known here.
    count = 1 if count is None else count
    return TemplatedWorkload(metadata, template_or_empty(workload), count, root, f"{field}.{field_of(root)}")


def template_or_empty(workload: AdmittedWorkload) -> Raw:
    """Return the template; an empty one if it is absent, because the API server rejects such workloads itself."""
    return Raw(b"{}") if bytes(workload.spec.template) == b"null" else workload.spec.template


def rewrite_workload_fractions(
    workload: TemplatedWorkload, before: TemplatedWorkload | None, request: Request, config: AdmissionConfig
) -> PatchBuilder:
    """Return the patch for fractions of a card in the template."""
    template, old_template = workload.decode_template(), before.decode_template() if before else None
    recorded = recorded_rewrites(template, old_template, config)
    withdrawn: set[str] = set()
    if recorded:
        declared_before = declaration_of(before, request, config) if before else None
        withdrawn = withdrawn_requests(declaration_of(workload, request, config), declared_before, config)
    return rewrite_fractions(template, recorded, withdrawn, config).with_root(workload.root)


def declaration_of(workload: TemplatedWorkload, request: Request, config: AdmissionConfig) -> Declaration:
    manifest = last_applied_template(workload.metadata, request, config)
    return Declaration(manifest.spec if manifest else None, workload.metadata, workload.root)


def last_applied_template(metadata: AdmittedMetadata, request: Request, config: AdmissionConfig) -> Template | None:
    """Return the template of the manifest that `kubectl apply` applied last; None if it is absent or malformed."""
    try:
        manifest = Raw(metadata.annotations_or_empty[LAST_APPLIED_ANNOTATION].encode())
        template = read_workload(manifest, request, LAST_APPLIED_ANNOTATION).decode_template()
    except (KeyError, BadRequest, UnicodeError):
        return None  # users can write anything into this annotation
    return None if size_mistakes(template.as_pod(), config) else template


def apply_operations(raw: Raw, operations: list[dict[str, Any]], field: str) -> Raw:
    """Return an object with a JSON patch applied; `field` is where it is in the review."""
    # Slow, but only templates with fractions of a card are patched. In place: a copy takes longer than all the rest.
    plain = jsonpatch.apply_patch(decode_object(raw, dict, field), operations, in_place=True)
    return Raw(msgspec.json.encode(plain))


def template_size_mistakes(
    workload: TemplatedWorkload, before: TemplatedWorkload | None, config: AdmissionConfig
) -> list[Reason]:
    """Return of what a template has more than is read. One that was stored before stays: its pods are refused."""
    if before is not None and bytes(before.template) == bytes(workload.template):
        return []
    mistakes = size_mistakes(workload.decode_template().as_pod(), config)
    return [with_field_prefix(reason, field_prefix(workload.root)) for reason in mistakes]


def limits_missing(pod: Pod, config: AdmissionConfig) -> list[Reason]:
    """Return requests without limits, which the API server rejects; a pod's are completed by the mutating webhook."""
    return [
        Reason(
            code=Code.LIMIT_MISSING,
            field=f"{field_of(pointer)}.resources.requests[{key}]",
            value=printable(value),
            message="has no limit, and Kubernetes requires one for extended resources in a pod template",
            remedy=f"set it under resources.limits: {{{key}: {printable(value)}}}",
        )
        for pointer, container in containers_of(pod.spec)
        if container.resources is not None
        for key, value in (container.resources.requests or {}).items()
        if key in config.scheme.by_key and key not in (container.resources.limits or {})
    ]


def template_mistakes(
    workload: TemplatedWorkload, config: AdmissionConfig, policy: NamespacePolicy
) -> tuple[Pod, ParsedPod, list[Reason]]:
    """Return the template as a pod, unparsed and parsed, and what the user has to change on it."""
    pod = workload.decode_template().as_pod()
    parsed = parse_pod(pod, config, policy)
    prefix = field_prefix(workload.root)
    missing = [with_field_prefix(reason, prefix) for reason in limits_missing(pod, config)]
    return pod, parsed, [*pod_mistakes(pod, parsed, config, policy, prefix), *missing]


class PlannedPods(Struct, frozen=True):
    """Pods that a workload is about to create: what one of them needs, where they may run, and how many."""

    demand: PodDemand
    options: PodOptions
    cards: Mapping[str, int]
    count: int


def check_workload(
    workload: TemplatedWorkload,
    before: TemplatedWorkload | None,
    config: AdmissionConfig,
    policy: NamespacePolicy,
    cards: Sequence[CardModel] = (),
) -> tuple[Decision, ParsedPod | None, int]:
    """Check a workload's template, unless a controller owns the workload or the template did not change.

    Returns the parsed template and the number of pods that are about to be created, if there are any.
    """
    if workload.metadata.is_controlled:
        return Decision(), None, 0
    same_template = before is not None and bytes(before.template) == bytes(workload.template)
    if same_template and before is not None and before.count >= workload.count:
        return Decision(), None, 0
    pod, parsed, reasons = template_mistakes(workload, config, policy)
    if not parsed.is_gpu:
        return Decision(warnings=() if same_template else tuple(unread_name_warnings(pod, config))), None, 0
    # Scaling up a workload from before Quotient is not refused here; its pods are, each with the same message.
    if reasons and not same_template:
        return Decision(tuple(reasons)), None, 0
    warnings = [] if same_template else template_warnings(pod, parsed, config, policy, workload, cards=cards)
    # A rollout replaces pods one by one: what the old ones hold is released for the new ones.
    more = workload.count - (before.count if before else 0)
    decision = Decision(warnings=tuple(map(truncate_warning, warnings)))
    return (decision, parsed, more) if more > 0 and parsed.request.is_gpu else (decision, None, 0)


def template_warnings(
    pod: Pod,
    parsed: ParsedPod,
    config: AdmissionConfig,
    policy: NamespacePolicy,
    workload: TemplatedWorkload,
    *,
    cards: Sequence[CardModel],
) -> list[str]:
    """Return the warnings that the pods will get when they are created; their author does not see those."""
    patch = rewrite(pod, parsed, config, policy, workload.root)
    return [
        *patch.warnings,
        *pod_warnings(pod, parsed, config, cards),
        *misplaced_annotations(workload.metadata, config, patch.field_prefix),
    ]


def quota_warnings(planned: PlannedPods, usage: QuotaUsage) -> tuple[str, ...]:
    """Warn if the namespace's quota has no capacity for all of the pods now."""
    fitting, filled = fill(usage, planned.demand, planned.options, planned.cards, planned.count)
    if not usage.quotas or fitting >= planned.count:
        return ()
    together = replace(planned.demand, count=planned.count)
    reasons = fit_charge(usage, together, planned.options, planned.cards).reasons
    # All pods together may exceed more limits than the next one does: those are not what has to be raised first.
    next_reasons = fit_charge(filled, planned.demand, planned.options, planned.cards).reasons
    binding = {each.field for each in next_reasons}
    reasons = tuple(each for each in reasons if each.field in binding) or reasons
    # Nor does it help to raise the limit of one model, if one of all models is exceeded as well.
    common = set(map(limit_field, common_limits(filled, planned.demand, planned.options, planned.cards)))
    reasons = tuple(sorted(reasons, key=lambda each: each.field not in common))
    if planned.count == 1:
        fact = "the pod does not fit the namespace's quota now"
    elif not fitting:
        fact = f"none of the {planned.count} pods fits the namespace's quota now"
    else:
        fact = f"only {fitting} of {planned.count} pods fit the namespace's quota now"
    detail = f": {reasons[0].problem.replace(EXCEEDED, '', 1)}" if reasons else ""
    return (truncate_warning(fact + detail),)
