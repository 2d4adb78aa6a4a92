"""The two questions an API server asks, answered: what an object needs, and whether it may be.

Both serving paths call these functions and nothing else, so that no rule depends on how a review arrived.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from msgspec import Struct

from vcuda.amounts import Amounts
from vcuda.catalogue import CardModel, card_sizes_mib
from vcuda.charging import RemedyContext
from vcuda.decision import BadRequest, Code, Decision, Reason
from vcuda.ledger import ChargeRequest, ChargeResult, Ledger, merge_newer_quotas, pack_uid, reserve
from vcuda.names import MIRROR
from vcuda.namespace_policy import Mode, NamespacePolicy
from vcuda.quota import Quota
from vcuda.workload_kinds import BY_GROUP_KIND
from webhook.admission_config import AdmissionConfig
from webhook.mutating import clean_environment, containers_of, rewrite
from webhook.objects import Binding, ConfigMap, Pod
from webhook.patching import PatchBuilder, truncate_warning
from webhook.pod_parsing import ParsedPod, parse_pod
from webhook.reapplying import restore
from webhook.review import NULL, Request, decode_object, encode_answer
from webhook.template_fractions import is_fraction, ours_of
from webhook.validating import (
    PodToBind,
    check_binding,
    check_created,
    check_ephemeral,
    check_updated,
    is_governed,
    pod_mistakes,
)
from webhook.validating_quotas import check_quota
from webhook.workloads import (
    PlannedPods,
    beyond_quota,
    check_workload,
    patched,
    read_workload,
    rewrite_workload_fractions,
    template_mistakes,
)

CREATE, UPDATE = "CREATE", "UPDATE"
POD, BINDING, CONFIG_MAP = ("", "Pod"), ("", "Binding"), ("", "ConfigMap")
EPHEMERAL = "ephemeralcontainers"
# The API server itself refuses these before it asks a validating webhook, and in words that help nobody.
REFUSED_EARLY = (Code.QUANTITY_INVALID, Code.REQUEST_DIFFERS)


ALLOWED = Decision()


class QuotaSource(Protocol):
    """What namespaces are held to."""

    def policy(self, namespace: str) -> NamespacePolicy:
        """Give the policy of a namespace; Unavailable while it is not known."""
        ...

    def quotas(self, namespace: str) -> tuple[Sequence[Quota], Mapping[str, int]]:
        """Give the quotas of a namespace, and the version of each."""
        ...

    @property
    def cards(self) -> Sequence[CardModel]:
        """Give the kinds of cards that the cluster has."""
        ...


class Wanted(Struct, frozen=True):
    """What has to be done to the namespace's ledger before a decision counts.

    A dry run only looks at it. Advice does so, too, and if there is none, the decision stands all the same.
    """

    change: Callable[[Ledger], ChargeResult]
    only_looks: bool = False
    is_advice: bool = False


class AdmissionOutcome(Struct, frozen=True):
    """What was decided on one review, as it is counted and shown. `audited` are reasons that did not refuse."""

    decision: Decision
    operations: list[dict[str, object]]
    audited: Decision = ALLOWED
    wanted: Wanted | None = None

    def settled(self, verdict: ChargeResult) -> "AdmissionOutcome":
        """Give what is decided after the ledger has spoken."""
        if verdict.reasons:
            return AdmissionOutcome(Decision(verdict.reasons, self.decision.warnings), [])
        told = (*self.decision.warnings, *verdict.warnings, *map(audit_of, verdict.audited))
        audited = self.audited + Decision(verdict.audited)
        return AdmissionOutcome(Decision(warnings=told), self.operations, audited)


def audit_of(reason: Reason) -> str:
    """Tell what would be refused."""
    return truncate_warning(f"audit: would be refused: {reason}")


class Admission:
    """Answers reviews by the rules of a cluster and the policies of its namespaces."""

    def __init__(
        self, config: AdmissionConfig, quota_source: QuotaSource, now: Callable[[], float] = time.time
    ) -> None:
        self.config, self.quota_source, self._now = config, quota_source, now

    def mutate(self, request: Request) -> AdmissionOutcome:
        """Say what an object needs."""
        policy = self.quota_source.policy(request.namespace)
        if request.operation not in (CREATE, UPDATE) or self._looks_on(policy):
            return AdmissionOutcome(ALLOWED, [])
        draft, early = self._draft(request, policy)
        if early.reasons and self._is_enforced(policy):
            return AdmissionOutcome(early, [])
        return AdmissionOutcome(Decision(warnings=tuple(draft.warnings)), draft.operations)

    def validate(self, request: Request, pod_to_bind: PodToBind | None = None) -> AdmissionOutcome:
        """Say whether an object may be. `bound` is the pod of a binding, if it is known."""
        policy = self.quota_source.policy(request.namespace)
        if request.operation not in (CREATE, UPDATE):
            return AdmissionOutcome(ALLOWED, [])
        decision, wanted = self._check(request, policy, pod_to_bind)
        if decision.allowed or self._is_enforced(policy):
            return AdmissionOutcome(decision, [], wanted=wanted if decision.allowed else None)
        told = [audit_of(reason) for reason in decision.reasons]
        return AdmissionOutcome(Decision(warnings=(*decision.warnings, *told)), [], decision)

    def pod_to_bind(self, request: Request) -> tuple[str, str] | None:
        """Name the pod that has to be looked up before a binding can be judged."""
        if not is_binding(request) or self.config.may_bind(request.user_info.username):
            return None
        binding = decode_object(request.object, Binding, "request.object")
        return request.namespace, binding.metadata.name or request.name

    def _is_enforced(self, policy: NamespacePolicy) -> bool:
        return policy.effective_mode(self.config.cluster_mode) is Mode.ENFORCE

    def _looks_on(self, policy: NamespacePolicy) -> bool:
        """Tell whether the cluster is only being watched: then nothing is rewritten either."""
        return policy.mode is None and self.config.cluster_mode is Mode.AUDIT

    def _draft(self, request: Request, policy: NamespacePolicy) -> tuple[PatchBuilder, Decision]:
        """Draft the patch, and find what has to be refused before the API server does."""
        kind = (request.kind.group, request.kind.kind)
        if kind == POD and request.sub_resource == EPHEMERAL:
            return self._draft_ephemeral(request), Decision()
        if kind == POD and not request.sub_resource:
            if request.operation == UPDATE:
                draft, reasons = restore(new_pod(request), old_pod(request), self.config)
                return draft, Decision(tuple(reasons))
            pod = new_pod(request)
            parsed = parse_pod(pod, self.config, policy)
            early = pod_mistakes(pod, parsed, self.config, policy) if self._is_refused_early(pod, parsed) else []
            return rewrite(pod, parsed, self.config, policy), Decision(tuple(early)) if early else ALLOWED
        if kind in BY_GROUP_KIND and not request.sub_resource:
            return self._draft_workload(request, policy)
        return PatchBuilder(), Decision()

    def _is_refused_early(self, pod: Pod, parsed: ParsedPod) -> bool:
        """Tell whether the API server would refuse a pod before it asks a validating webhook.

        A pod with mistakes is not rewritten, so that a part of a card in it stays one.
        """
        return bool(parsed.reasons) and (
            any(reason.code in REFUSED_EARLY for reason in parsed.reasons)
            or any(
                is_fraction(amount)
                for _, container in containers_of(pod.spec)
                for part in ours_of(container, self.config).parts
                for amount in part.values()
            )
        )

    def _draft_ephemeral(self, request: Request) -> PatchBuilder:
        """Blind the containers that are added to a running GPU pod."""
        new, old, draft = new_pod(request), old_pod(request), PatchBuilder()
        known = {container.name for container in old.spec.ephemeral_containers or ()}
        if is_governed(old, self.config):
            for index, container in enumerate(new.spec.ephemeral_containers or ()):
                if container.name not in known:
                    clean_environment(f"/spec/ephemeralContainers/{index}", container, draft, has_gpu=False)
        return draft

    def _draft_workload(self, request: Request, policy: NamespacePolicy) -> tuple[PatchBuilder, Decision]:
        maker = read_workload(request.object, request, "request.object")
        before = read_workload(request.old_object, request, "request.oldObject") if is_update(request) else None
        draft = rewrite_workload_fractions(maker, before, request, self.config)
        if maker.metadata.is_controlled:
            return draft, ALLOWED
        if draft.operations:
            maker = read_workload(patched(request.object, draft.operations), request, "request.object")
        pod, parsed, wrong = template_mistakes(maker, self.config, policy)
        early = any(reason.code is Code.LIMIT_MISSING for reason in wrong) or self._is_refused_early(pod, parsed)
        return draft, Decision(tuple(wrong)) if early else ALLOWED

    def _check_update(self, request: Request, policy: NamespacePolicy) -> Decision:
        """Check a change to a pod, by whichever way it comes: its annotations can be changed by its status, too."""
        new, old = new_pod(request), old_pod(request)
        if request.sub_resource == EPHEMERAL:
            return check_ephemeral(new, old, parse_pod(old, self.config, policy), self.config)
        return check_updated(new, old, self.config, request.user_info)

    def _check(
        self, request: Request, policy: NamespacePolicy, pod_to_bind: PodToBind | None
    ) -> tuple[Decision, Wanted | None]:
        kind = (request.kind.group, request.kind.kind)
        if is_binding(request):
            binding = decode_object(request.object, Binding, "request.object")
            return check_binding(binding, pod_to_bind, self.config, request.user_info), None
        if kind == POD and request.operation == UPDATE:
            return self._check_update(request, policy), None
        if kind == POD and not request.sub_resource:
            return self._check_creation(request, policy)
        if kind == CONFIG_MAP:
            found = decode_object(request.object, ConfigMap, "request.object")
            return check_quota(found, request.namespace, request.name, self.config), None
        if kind in BY_GROUP_KIND and not request.sub_resource:
            return self._check_workload(request, policy)
        return ALLOWED, None

    def _check_workload(self, request: Request, policy: NamespacePolicy) -> tuple[Decision, Wanted | None]:
        """Check a workload, and ask how many of its pods find room."""
        maker = read_workload(request.object, request, "request.object")
        before = read_workload(request.old_object, request, "request.oldObject") if is_update(request) else None
        decision, more = check_workload(maker, before, self.config, policy)
        if more is None:
            return decision, None
        count = self._counting(more, request.namespace, policy)
        return decision, Wanted(count, only_looks=True, is_advice=True)

    def _check_creation(self, request: Request, policy: NamespacePolicy) -> tuple[Decision, Wanted | None]:
        """Check a new pod, and say what it has to be charged."""
        pod = new_pod(request)
        parsed = parse_pod(pod, self.config, policy)
        if self._looks_on(policy):
            # Nobody rewrote it, and nobody will: what counts is what its author would have to change.
            decision = Decision(tuple(pod_mistakes(pod, parsed, self.config, policy)))
        else:
            decision = check_created(pod, parsed, self.config, policy, request.user_info)
        if decision.reasons or not parsed.request.is_gpu or MIRROR in pod.metadata.noted:
            return decision, None
        try:
            key = pack_uid(pod.metadata.uid)
        except ValueError:
            raise BadRequest(f"request.object.metadata.uid is {pod.metadata.uid!r}: a new pod has one") from None
        claim = ChargeRequest(
            pod=key,
            demand=self._demand(parsed),
            options=parsed.options,
            cards=card_sizes_mib(self.quota_source.cards, policy.pools),
            dry_run=bool(request.dry_run),
            remedies=RemedyContext(self.config.names.use_models, self.config.scheme.unit_mib),
        )
        return decision, Wanted(self._reserving(claim, request.namespace), only_looks=claim.dry_run)

    def _demand(self, parsed: ParsedPod) -> Callable[[int], Amounts]:
        return partial(parsed.request.demand, unit_mib=self.config.scheme.unit_mib)

    def _reserving(self, claim: ChargeRequest, namespace: str) -> Callable[[Ledger], ChargeResult]:
        """Charge a pod, to the quotas in the ledger or to those that are newer."""

        def change(ledger: Ledger) -> ChargeResult:
            merge_newer_quotas(ledger, *self.quota_source.quotas(namespace))
            return reserve(ledger, claim, int(self._now()), self.config.cluster_mode)

        return change

    def _counting(
        self, making: PlannedPods, namespace: str, policy: NamespacePolicy
    ) -> Callable[[Ledger], ChargeResult]:
        """Count how many of a workload's pods find room."""
        cards = card_sizes_mib(self.quota_source.cards, policy.pools)
        demand = self._demand(making.parsed)

        def count(ledger: Ledger) -> ChargeResult:
            merge_newer_quotas(ledger, *self.quota_source.quotas(namespace))
            return ChargeResult(warnings=beyond_quota(making, ledger.usage, demand, cards))

        return count


def is_update(request: Request) -> bool:
    """Tell whether there was an object before."""
    return request.operation == UPDATE and bytes(request.old_object) != bytes(NULL)


def is_binding(request: Request) -> bool:
    """Tell whether a review is about putting a pod on a node."""
    return (request.kind.group, request.kind.kind) == BINDING


def new_pod(request: Request) -> Pod:
    """Give the pod under review."""
    return decode_object(request.object, Pod, "request.object")


def old_pod(request: Request) -> Pod:
    """Give the pod as it was."""
    if bytes(request.old_object) == bytes(NULL):
        raise BadRequest("request.oldObject is missing: an UPDATE has one")
    return decode_object(request.old_object, Pod, "request.oldObject")


def encode_outcome(request: Request, outcome: AdmissionOutcome) -> bytes:
    """Write the answer to a review."""
    return encode_answer(request.uid, outcome.decision, outcome.operations)
