"""Admission decisions: `mutate` returns the patch of an object, `validate` whether it is allowed.

Both are functions of the review, the configuration and the namespace's quotas, and return data. Both HTTP paths call
them and nothing else, so no rule depends on how a review arrived. What a decision needs of the namespace's ledger is
returned as a `LedgerRequest`; `Admission.apply` is what the ledger's writer runs for it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from vcuda.catalogue import CardModel, card_sizes_mib
from vcuda.charging import PodDemand
from vcuda.decision import BadRequest, Code, Decision, Reason, printable
from vcuda.ledger import ChargeRequest, ChargeResult, Ledger, pack_uid, reserve
from vcuda.ledger_quotas import merge_newer_quotas
from vcuda.names import MIRROR_ANNOTATION
from vcuda.namespace_policy import Mode, NamespacePolicy
from vcuda.quota import Quota
from vcuda.quota_refusals import RemedyContext
from vcuda.workload_kinds import BY_GROUP_KIND
from webhook.admission_config import AdmissionConfig
from webhook.mutating import clean_environment, containers_of, rewrite, was_admitted_by_quotient
from webhook.objects import Binding, ConfigMap, Pod
from webhook.patching import PatchBuilder, truncate_warning
from webhook.pod_parsing import ParsedPod, parse_pod
from webhook.reapplying import restore
from webhook.review import NULL, Request, decode_object, encode_answer
from webhook.size_limits import size_mistakes
from webhook.template_fractions import gpu_amounts, is_fraction
from webhook.validating import (
    PodToBind,
    check_binding,
    check_created,
    check_ephemeral,
    check_updated,
    pod_mistakes,
)
from webhook.validating_quotas import check_quota
from webhook.value_limit import ObjectTooLarge
from webhook.workloads import (
    PlannedPods,
    apply_operations,
    check_workload,
    quota_warnings,
    read_workload,
    rewrite_workload_fractions,
    template_mistakes,
    template_size_mistakes,
)

CREATE, UPDATE = "CREATE", "UPDATE"
POD, BINDING, CONFIG_MAP = ("", "Pod"), ("", "Binding"), ("", "ConfigMap")
EPHEMERAL = "ephemeralcontainers"
# The API server rejects these itself before it calls validating webhooks, with a message that names no remedy. So the
# mutating webhook refuses them.
REFUSED_EARLY = (Code.QUANTITY_INVALID, Code.REQUEST_DIFFERS)

ALLOWED = Decision()


class QuotaSource(Protocol):
    """The quotas of all namespaces, and the card models of the cluster."""

    def policy(self, namespace: str) -> NamespacePolicy:
        """Return the policy of a namespace; raises Unavailable until quotas are synced."""
        ...

    def quotas(self, namespace: str) -> tuple[Sequence[Quota], Mapping[str, int]]:
        """Return the quotas of a namespace, and the resource version of each by name."""
        ...

    @property
    def cards(self) -> Sequence[CardModel]:
        """The card models that the cluster's nodes have."""
        ...


class LedgerRequest(Struct, frozen=True):
    """What a decision needs of the namespace's ledger: a charge for a pod, or how many planned pods would fit."""

    namespace: str
    charge: ChargeRequest | None = None
    planned: PlannedPods | None = None
    # Others are told no names.
    is_known: bool = False

    @property
    def is_read_only(self) -> bool:
        return self.charge is None or self.charge.dry_run

    @property
    def is_optional(self) -> bool:
        """Whether the decision is valid without the ledger's answer: planned pods only get a warning."""
        return self.charge is None


class AdmissionOutcome(Struct, frozen=True):
    """A decision with its patch. `audited` has the reasons that would refuse the object if its mode were enforce."""

    decision: Decision
    operations: list[dict[str, object]]
    audited: Decision = ALLOWED
    ledger_request: LedgerRequest | None = None

    def with_charge(self, result: ChargeResult) -> "AdmissionOutcome":
        """Return the final outcome, given the ledger's answer."""
        if result.reasons:
            return AdmissionOutcome(Decision(result.reasons, self.decision.warnings), [])
        warnings = (*self.decision.warnings, *result.warnings, *map(audit_warning, result.audited))
        audited = self.audited + Decision(result.audited)
        return AdmissionOutcome(Decision(warnings=warnings), self.operations, audited)


def audit_warning(reason: Reason) -> str:
    return truncate_warning(f"audit: would be refused: {reason.problem}")


class Admission:
    """Decides on reviews."""

    def __init__(
        self, config: AdmissionConfig, quota_source: QuotaSource, now: Callable[[], float] = time.time
    ) -> None:
        self.config, self.quota_source, self._now = config, quota_source, now

    def mutate(self, request: Request) -> AdmissionOutcome:
        # First, because it raises Unavailable until the quotas are synced: no decision is made without them.
        policy = self.quota_source.policy(request.namespace)
        if request.operation not in (CREATE, UPDATE) or self._only_observes(policy):
            return AdmissionOutcome(ALLOWED, [])
        try:
            patch, early = self._build_patch(request, policy)
        except ObjectTooLarge as error:
            patch, early = PatchBuilder(), Decision((error.reason,))
        if early.reasons and self._is_enforced(policy):
            return AdmissionOutcome(early, [])
        return AdmissionOutcome(Decision(warnings=tuple(patch.warnings)), patch.operations)

    def validate(
        self, request: Request, pod_to_bind: PodToBind | None = None, *, is_known: bool = False
    ) -> AdmissionOutcome:
        """Decide whether an object is allowed. `pod_to_bind` is the pod of a Binding, if it exists.

        `is_known`: the caller is an API server. Others are told no names, and may reserve less.
        """
        policy = self.quota_source.policy(request.namespace)
        if request.operation not in (CREATE, UPDATE):
            return AdmissionOutcome(ALLOWED, [])
        try:
            decision, ledger_request = self._check(request, policy, pod_to_bind, is_known=is_known)
        except ObjectTooLarge as error:
            decision, ledger_request = Decision((error.reason,)), None
        if decision.allowed or self._is_enforced(policy):
            return AdmissionOutcome(decision, [], ledger_request=ledger_request if decision.allowed else None)
        warnings = [audit_warning(reason) for reason in decision.reasons]
        return AdmissionOutcome(Decision(warnings=(*decision.warnings, *warnings)), [], decision)

    def apply(self, request: LedgerRequest, ledger: Ledger) -> ChargeResult:
        """Charge a pod to a ledger, or count planned pods against it.

        The ledger holds the quotas it was last charged with. Quotas that this process has seen in a newer version are
        merged first, so that a lowered quota applies at once.
        """
        merge_newer_quotas(ledger, *self.quota_source.quotas(request.namespace))
        if request.charge is not None:
            return reserve(ledger, request.charge, int(self._now()), self.config.cluster_mode)
        usage = ledger.usage if request.is_known else ledger.usage.without_holders()
        return ChargeResult(warnings=quota_warnings(request.planned, usage) if request.planned else ())

    def binding_pod(self, request: Request) -> tuple[str, str] | None:
        """Return namespace and name of the pod that has to be read before a Binding can be decided on."""
        # Schedulers may bind any pod, so their Bindings are decided without a call to the API server.
        if not is_binding(request) or self.config.may_bind(request.user_info.username):
            return None
        try:
            binding = decode_object(request.object, Binding, "request.object")
        except ObjectTooLarge:
            return None  # it is refused without its pod
        return request.namespace, binding.metadata.name or request.name

    def _is_enforced(self, policy: NamespacePolicy) -> bool:
        return policy.effective_mode(self.config.cluster_mode) is Mode.ENFORCE

    def _only_observes(self, policy: NamespacePolicy) -> bool:
        """Whether pods are left unchanged: the cluster is in audit mode, and the namespace has not opted in."""
        return policy.mode is None and self.config.cluster_mode is Mode.AUDIT

    def _build_patch(self, request: Request, policy: NamespacePolicy) -> tuple[PatchBuilder, Decision]:
        """Return the patch, and what has to be refused before the API server's own validation does."""
        kind = (request.kind.group, request.kind.kind)
        if kind == POD and request.sub_resource == EPHEMERAL:
            return self._patch_ephemeral(request), ALLOWED
        if kind == POD and not request.sub_resource:
            if request.operation == UPDATE:
                patch, reasons = restore(new_pod(request), old_pod(request), self.config)
                return patch, Decision(tuple(reasons))
            pod = new_pod(request)
            parsed = parse_pod(pod, self.config, policy)
            if parsed.is_too_large:
                return PatchBuilder(), ALLOWED if is_mirror(pod) else Decision(parsed.reasons)
            early = pod_mistakes(pod, parsed, self.config, policy) if self._is_refused_early(pod, parsed) else []
            return rewrite(pod, parsed, self.config, policy), Decision(tuple(early)) if early else ALLOWED
        if kind in BY_GROUP_KIND and not request.sub_resource:
            return self._patch_workload(request, policy)
        return PatchBuilder(), ALLOWED

    def _is_refused_early(self, pod: Pod, parsed: ParsedPod) -> bool:
        """Whether the API server would reject a pod before it calls a validating webhook.

        A pod with mistakes is not rewritten, so a fraction such as `0.3` stays in it, and no extended resource may be
        a fraction.
        """
        return bool(parsed.reasons) and (
            any(reason.code in REFUSED_EARLY for reason in parsed.reasons)
            or any(
                is_fraction(amount)
                for _, container in containers_of(pod.spec)
                for amounts in gpu_amounts(container, self.config).lists
                for amount in amounts.values()
            )
        )

    def _patch_ephemeral(self, request: Request) -> PatchBuilder:
        """Hide the GPUs from containers that are added to a running GPU pod."""
        new, old, patch = new_pod(request), old_pod(request), PatchBuilder()
        if size_mistakes(new, self.config):
            return patch  # the validating webhook refuses it
        # Ephemeral containers are immutable once they are added.
        known = {container.name for container in old.spec.ephemeral_containers or ()}
        if was_admitted_by_quotient(old, self.config):
            for index, container in enumerate(new.spec.ephemeral_containers or ()):
                if container.name not in known:
                    clean_environment(f"/spec/ephemeralContainers/{index}", container, patch, hides_gpus=True)
        return patch

    def _patch_workload(self, request: Request, policy: NamespacePolicy) -> tuple[PatchBuilder, Decision]:
        workload = read_workload(request.object, request, "request.object")
        before = read_workload(request.old_object, request, "request.oldObject") if is_update(request) else None
        if workload.metadata.is_controlled:
            return PatchBuilder(), ALLOWED
        if mistakes := template_size_mistakes(workload, before, self.config):
            return PatchBuilder(), Decision(tuple(mistakes))
        patch = rewrite_workload_fractions(workload, before, request, self.config)
        if patch.operations:
            # The mistakes have to be those of the template that will be stored.
            patched = apply_operations(request.object, patch.operations, "request.object")
            workload = read_workload(patched, request, "request.object")
        pod, parsed, mistakes = template_mistakes(workload, self.config, policy)
        early = any(reason.code is Code.LIMIT_MISSING for reason in mistakes) or self._is_refused_early(pod, parsed)
        return patch, Decision(tuple(mistakes)) if early else ALLOWED

    def _check(
        self, request: Request, policy: NamespacePolicy, pod_to_bind: PodToBind | None, *, is_known: bool
    ) -> tuple[Decision, LedgerRequest | None]:
        kind = (request.kind.group, request.kind.kind)
        if is_binding(request):
            binding = decode_object(request.object, Binding, "request.object")
            return check_binding(binding, pod_to_bind, self.config, request.user_info), None
        if kind == POD and request.operation == UPDATE:
            return self._check_update(request, policy), None
        if kind == POD and not request.sub_resource:
            return self._check_creation(request, policy, is_known=is_known)
        if kind == CONFIG_MAP:
            config_map = decode_object(request.object, ConfigMap, "request.object")
            return check_quota(config_map, request.namespace, request.name, self.config), None
        if kind in BY_GROUP_KIND and not request.sub_resource:
            return self._check_workload(request, policy, is_known=is_known)
        return ALLOWED, None

    def _check_update(self, request: Request, policy: NamespacePolicy) -> Decision:
        """Check an update of a pod, by any subresource: annotations can be changed through `pods/status` as well."""
        new, old = new_pod(request), old_pod(request)
        if request.sub_resource == EPHEMERAL:
            return check_ephemeral(new, old, parse_pod(old, self.config, policy), self.config, policy)
        return check_updated(new, old, self.config, request.user_info)

    def _check_workload(
        self, request: Request, policy: NamespacePolicy, *, is_known: bool
    ) -> tuple[Decision, LedgerRequest | None]:
        workload = read_workload(request.object, request, "request.object")
        before = read_workload(request.old_object, request, "request.oldObject") if is_update(request) else None
        decision, parsed, more = check_workload(workload, before, self.config, policy, self.quota_source.cards)
        if parsed is None:
            return decision, None
        planned = PlannedPods(self._demand(parsed), parsed.options, self._cards(policy), more)
        return decision, LedgerRequest(request.namespace, planned=planned, is_known=is_known)

    def _check_creation(
        self, request: Request, policy: NamespacePolicy, *, is_known: bool
    ) -> tuple[Decision, LedgerRequest | None]:
        pod = new_pod(request)
        parsed = parse_pod(pod, self.config, policy)
        if self._only_observes(policy):
            # The pod was not rewritten, so it is only checked for mistakes of its author.
            decision = Decision(tuple(pod_mistakes(pod, parsed, self.config, policy)))
        else:
            decision = check_created(pod, parsed, self.config, policy, request.user_info, cards=self.quota_source.cards)
        if decision.reasons or not parsed.request.is_gpu or is_mirror(pod):
            return decision, None
        # The charge is filed under the UID, which the API server sets before it calls validating webhooks.
        try:
            key = pack_uid(pod.metadata.uid)
        except ValueError:
            raise BadRequest(f"request.object.metadata.uid: {printable(pod.metadata.uid)!r} is not a UID") from None
        charge = ChargeRequest(
            pod=key,
            demand=self._demand(parsed),
            options=parsed.options,
            cards=self._cards(policy),
            dry_run=bool(request.dry_run),
            is_known=is_known,
            remedies=RemedyContext(self.config.names.use_models, self.config.scheme.unit_mib),
            name=pod.metadata.name,
        )
        return decision, LedgerRequest(request.namespace, charge=charge)

    def _demand(self, parsed: ParsedPod) -> PodDemand:
        return PodDemand(parsed.request, self.config.scheme.unit_mib)

    def _cards(self, policy: NamespacePolicy) -> Mapping[str, int]:
        return card_sizes_mib(self.quota_source.cards, policy.pools)


def is_update(request: Request) -> bool:
    return request.operation == UPDATE and bytes(request.old_object) != bytes(NULL)


def is_binding(request: Request) -> bool:
    return (request.kind.group, request.kind.kind) == BINDING


def is_mirror(pod: Pod) -> bool:
    return MIRROR_ANNOTATION in pod.metadata.annotations_or_empty


def new_pod(request: Request) -> Pod:
    return decode_object(request.object, Pod, "request.object")


def old_pod(request: Request) -> Pod:
    if bytes(request.old_object) == bytes(NULL):
        raise BadRequest("request.oldObject is missing: an UPDATE has one")
    return decode_object(request.old_object, Pod, "request.oldObject")


def encode_outcome(request: Request, outcome: AdmissionOutcome) -> bytes:
    """Encode the AdmissionReview that answers a request."""
    return encode_answer(request.uid, outcome.decision, outcome.operations)
