"""Workloads: their pods' mistakes are told when they are applied, not when their pods fail to appear.

Templates are not rewritten, which would fight those who keep them in Git. One exception: parts of a card, which the
API server would refuse in a template before any pod is made of it.
"""

import json
from collections.abc import Mapping
from typing import Any

import jsonpatch
from msgspec import Raw, Struct
from msgspec.structs import replace

from vcuda.charging import PodDemand, count_fitting, fit_charge
from vcuda.decision import BadRequest, Code, Decision, Reason, printable
from vcuda.names import LAST_APPLIED_ANNOTATION
from vcuda.namespace_policy import NamespacePolicy
from vcuda.pod_options import PodOptions
from vcuda.quota_usage import QuotaUsage
from vcuda.workload_kinds import BY_GROUP_KIND, CRON_JOB_TEMPLATE
from webhook.admission_config import AdmissionConfig
from webhook.mutating import containers_of, dotted, rewrite
from webhook.objects import CronJob, Metadata, Pod, Template, Workload
from webhook.patching import PatchBuilder, truncate_warning
from webhook.pod_parsing import ParsedPod, parse_pod
from webhook.pod_warnings import misplaced_annotations, pod_warnings
from webhook.review import Request, decode_object
from webhook.template_fractions import rewrite_fractions
from webhook.validating import moved, pod_mistakes


class TemplatedWorkload(Struct, frozen=True):
    """A workload of any kind: its own metadata, its template, and how many pods it makes at once."""

    metadata: Metadata
    template: Raw
    count: int
    root: str

    def decoded(self) -> Template:
        """Read the template."""
        return decode_object(self.template, Template, f"object{self.root.replace('/', '.')}")


def read_workload(raw: Raw, request: Request, where: str) -> TemplatedWorkload:
    """Read a workload under review."""
    kind = BY_GROUP_KIND[request.kind.group, request.kind.kind]
    if kind.template == CRON_JOB_TEMPLATE:
        cron = decode_object(raw, CronJob, where)
        job = cron.spec.job_template or Workload(Metadata())
        return TemplatedWorkload(cron.metadata, template_of(job), job.spec.parallelism or 1, kind.template_pointer)
    found = decode_object(raw, Workload, where)
    chosen = [number for number in (found.spec.replicas, found.spec.parallelism) if number is not None]
    return TemplatedWorkload(found.metadata, template_of(found), chosen[0] if chosen else 1, kind.template_pointer)


def template_of(workload: Workload) -> Raw:
    """Give the template, empty if there is none; the API server refuses such workloads itself."""
    return Raw(b"{}") if bytes(workload.spec.template) == b"null" else workload.spec.template


def rewrite_workload_fractions(
    maker: TemplatedWorkload, before: TemplatedWorkload | None, request: Request, config: AdmissionConfig
) -> PatchBuilder:
    """Draft what the parts of a card in a workload's template need, unless a controller made it."""
    if maker.metadata.is_controlled:
        return PatchBuilder(maker.root)
    draft = rewrite_fractions(
        maker.decoded(), before.decoded() if before else None, applied(maker.metadata, request), config
    )
    return draft.moved(maker.root)


def applied(metadata: Metadata, request: Request) -> Template | None:
    """Give the template that `kubectl apply` remembers to have applied, if it can be read."""
    try:
        return read_workload(Raw(metadata.noted[LAST_APPLIED_ANNOTATION].encode()), request, "manifest").decoded()
    except (KeyError, BadRequest):
        return None


def patched(raw: Raw, operations: list[dict[str, Any]]) -> Raw:
    """Give an object as a patch leaves it."""
    return Raw(json.dumps(jsonpatch.apply_patch(json.loads(bytes(raw)), operations)).encode())


def limits_missing(pod: Pod, config: AdmissionConfig) -> list[Reason]:
    """Find requests without limits: a pod's are completed, a template's are refused by the API server."""
    return [
        Reason(
            code=Code.LIMIT_MISSING,
            field=f"{dotted(place)}.resources.requests[{key}]",
            value=printable(value),
            message="a request without a limit, which Kubernetes does not take in a template",
            remedy=f"write it under limits, as {key}: {printable(value)}",
        )
        for place, container in containers_of(pod.spec)
        if container.resources is not None
        for key, value in (container.resources.requests or {}).items()
        if key in config.scheme.by_key and key not in (container.resources.limits or {})
    ]


def template_mistakes(
    maker: TemplatedWorkload, config: AdmissionConfig, policy: NamespacePolicy
) -> tuple[Pod, ParsedPod, list[Reason]]:
    """Find what is wrong with the pods of a workload, and with its template as such."""
    pod = maker.decoded().as_pod()
    parsed = parse_pod(pod, config, policy)
    path = PatchBuilder(maker.root).path
    missing = [moved(reason, path) for reason in limits_missing(pod, config)]
    return pod, parsed, [*pod_mistakes(pod, parsed, config, policy, path), *missing]


class PlannedPods(Struct, frozen=True):
    """Pods that a workload is about to create: what one of them needs, where they may run, and how many."""

    demand: PodDemand
    options: PodOptions
    cards: Mapping[str, int]
    count: int


def check_workload(
    maker: TemplatedWorkload, before: TemplatedWorkload | None, config: AdmissionConfig, policy: NamespacePolicy
) -> tuple[Decision, ParsedPod | None, int]:
    """Check a workload's template, unless a controller owns the workload or the template did not change.

    Returns the parsed template and the number of pods that are about to be created, if there are any.
    """
    if maker.metadata.is_controlled:
        return Decision(), None, 0
    same_template = before is not None and bytes(before.template) == bytes(maker.template)
    if same_template and before is not None and before.count >= maker.count:
        return Decision(), None, 0
    pod, parsed, reasons = template_mistakes(maker, config, policy)
    if not parsed.is_gpu:
        return Decision(), None, 0
    if reasons and not same_template:
        return Decision(tuple(reasons)), None, 0
    warnings = [] if same_template else warn(pod, parsed, config, policy, maker)
    # A rollout replaces pods one by one: what the old ones hold is released for the new ones.
    more = maker.count - (before.count if before else 0)
    decision = Decision(warnings=tuple(map(truncate_warning, warnings)))
    return (decision, parsed, more) if more > 0 and parsed.request.is_gpu else (decision, None, 0)


def warn(
    pod: Pod, parsed: ParsedPod, config: AdmissionConfig, policy: NamespacePolicy, maker: TemplatedWorkload
) -> list[str]:
    """Tell what will become of the pods, and what the author may not have meant."""
    draft = rewrite(pod, parsed, config, policy, maker.root)
    return [
        *draft.warnings,
        *pod_warnings(pod, parsed, config),
        *misplaced_annotations(maker.metadata, config, draft.path),
    ]


def quota_warnings(planned: PlannedPods, usage: QuotaUsage) -> tuple[str, ...]:
    """Warn that the quota has no capacity for some of the pods."""
    fitting = count_fitting(usage, planned.demand, planned.options, planned.cards, planned.count)
    if not usage.quotas or fitting >= planned.count:
        return ()
    together = replace(planned.demand, count=planned.count)
    short = fit_charge(usage, together, planned.options, planned.cards).reasons
    detail = f": {short[0].message}" if short else ""
    return (truncate_warning(f"{fitting} of {planned.count} pods of this workload fit the quota now{detail}"),)
