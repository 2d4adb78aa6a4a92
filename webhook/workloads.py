"""Workloads: their pods' mistakes are told when they are applied, not when their pods fail to appear.

Templates are not rewritten, which would fight those who keep them in Git. One exception: parts of a card, which the
API server would refuse in a template before any pod is made of it.
"""

from collections.abc import Collection, Sequence

from msgspec import Raw, Struct

from vcuda.amounts import Amounts
from vcuda.decision import Decision
from vcuda.pod import Container, Resources, Written
from vcuda.policy import Policy
from vcuda.quantity import QuantityError, parse
from vcuda.quota import Quota, fit
from vcuda.request import ContainerRequest, Role, read_container
from webhook.advising import advice, misplaced
from webhook.drafting import Draft, escaped, shortened
from webhook.mutating import containers_of, rewrite, with_names
from webhook.objects import AdmittedContainer, CronJob, Metadata, Pod, Template, Workload
from webhook.reading import Asked, read
from webhook.review import Request, decode_object
from webhook.rules import Rules
from webhook.validating import wrong_with

TEMPLATE = "/spec/template"
CRON_TEMPLATE = "/spec/jobTemplate/spec/template"
CRON_JOB = ("batch", "CronJob")
KINDS = (
    ("apps", "Deployment"),
    ("apps", "StatefulSet"),
    ("apps", "DaemonSet"),
    ("apps", "ReplicaSet"),
    ("", "ReplicationController"),
    ("batch", "Job"),
    CRON_JOB,
)


class PodMaker(Struct, frozen=True):
    """A workload of any kind: its own metadata, its template, and how many pods it makes at once."""

    metadata: Metadata
    template: Raw
    count: int
    root: str

    def decoded(self) -> Template:
        """Read the template."""
        return decode_object(self.template, Template, f"object{self.root.replace('/', '.')}")


def read_workload(raw: Raw, request: Request, where: str) -> PodMaker:
    """Read a workload under review."""
    if (request.kind.group, request.kind.kind) == CRON_JOB:
        cron = decode_object(raw, CronJob, where)
        job = cron.spec.job_template or Workload(Metadata())
        return PodMaker(cron.metadata, template_of(job), job.spec.parallelism or 1, CRON_TEMPLATE)
    found = decode_object(raw, Workload, where)
    chosen = [number for number in (found.spec.replicas, found.spec.parallelism) if number is not None]
    return PodMaker(found.metadata, template_of(found), chosen[0] if chosen else 1, TEMPLATE)


def template_of(workload: Workload) -> Raw:
    """Give the template, empty if there is none; the API server refuses such workloads itself."""
    return Raw(b"{}") if bytes(workload.spec.template) == b"null" else workload.spec.template


def rewrite_fractions(maker: PodMaker, before: PodMaker | None, rules: Rules) -> Draft:
    """Draft canonical amounts for parts of a card."""
    draft = Draft(maker.root)
    if maker.metadata.is_controlled:
        return draft
    template = maker.decoded()
    known = before.decoded().as_pod() if before else None
    old = {container.name: container for _, container in containers_of(known.spec)} if known else {}
    follow: list[str] = []
    for place, container in containers_of(template.spec):
        written = container.resources or Resources()
        if not is_part((rules.names.cards,), written) or asks_anew(container, old.get(container.name), rules):
            continue
        share = share_of_cards(container, rules)
        if share is None:
            continue
        follow.append(container.name)
        for part, amounts in (("limits", written.limits), ("requests", written.requests)):
            if amounts is None:
                continue
            inside = f"{place}/resources/{part}"
            draft.add(f"{inside}/{escaped(rules.names.core)}", str(share.share.cores))
            draft.add(f"{inside}/{escaped(rules.names.memory)}", str(share.share.memory_count))
            if rules.names.cards in amounts:
                draft.remove(f"{inside}/{escaped(rules.names.cards)}")
    if follow:
        key = rules.names.memory_follows_core
        noted = template.metadata.noted if template.metadata else {}
        draft.annotate(key, with_names(noted.get(key, ""), follow))
    return draft.finish(template.metadata)


def is_part(keys: Collection[str], resources: Resources) -> bool:
    """Tell whether an amount under one of these keys is no whole number, which Kubernetes allows for none of them."""
    for amounts in (resources.limits or {}, resources.requests or {}):
        for key, amount in amounts.items():
            try:
                if key in keys and not parse(amount).is_whole:
                    return True
            except QuantityError:
                continue
    return False


def asks_anew(container: AdmittedContainer, before: AdmittedContainer | None, rules: Rules) -> bool:
    """Tell whether canonical amounts beside the cards are the author's, not those of an earlier rewriting."""
    own = canonical(container, rules)
    return bool(own) and (before is None or own != canonical(before, rules))


def canonical(container: Container, rules: Rules) -> list[Written]:
    """Give the canonical amounts of a container."""
    resources = container.resources or Resources()
    keys = (rules.names.core, rules.names.memory)
    found = [{key: part[key] for key in keys if key in part} for part in (resources.limits, resources.requests) if part]
    return [part for part in found if part]


def share_of_cards(container: AdmittedContainer, rules: Rules) -> ContainerRequest | None:
    """Read a container by its cards alone; None if they cannot be read."""
    resources = container.resources or Resources()
    key = rules.names.cards
    alone = AdmittedContainer(
        name=container.name,
        resources=Resources(
            *({key: part[key]} if part and key in part else None for part in (resources.limits, resources.requests))
        ),
    )
    return read_container(alone, "", Role.APP, rules.language, follows=False)[0]


class Governance(Struct, frozen=True):
    """What a namespace is held to, and what it uses already."""

    policy: Policy
    quotas: Sequence[Quota]
    used: Amounts


def check_workload(maker: PodMaker, before: PodMaker | None, rules: Rules, held: Governance) -> Decision:
    """Check a workload's template, unless a controller made it or it did not change."""
    policy = held.policy
    if maker.metadata.is_controlled:
        return Decision()
    same_template = before is not None and bytes(before.template) == bytes(maker.template)
    if same_template and before is not None and before.count >= maker.count:
        return Decision()
    pod = maker.decoded().as_pod()
    asked = read(pod, rules, policy)
    if not asked.is_gpu:
        return Decision()
    path = Draft(maker.root).path
    reasons = [] if same_template else wrong_with(pod, asked, rules, policy, path)
    if reasons:
        return Decision(tuple(reasons))
    warnings = [] if same_template else [*warn(pod, asked, rules, policy, maker)]
    return Decision(warnings=tuple(shortened(each) for each in (*warnings, *beyond_quota(asked, maker, rules, held))))


def warn(pod: Pod, asked: Asked, rules: Rules, policy: Policy, maker: PodMaker) -> list[str]:
    """Tell what will become of the pods, and what the author may not have meant."""
    draft = rewrite(pod, asked, rules, policy, maker.root)
    return [*draft.warnings, *advice(pod, asked, rules), *misplaced(maker.metadata, rules, draft.path)]


def beyond_quota(asked: Asked, maker: PodMaker, rules: Rules, held: Governance) -> list[str]:
    """Tell that not all of the pods will find room."""
    if not held.quotas or not asked.request.is_gpu or maker.count < 1:
        return []
    each = asked.request.demand(0, rules.language.unit_mib)
    total = Amounts((key, amount * maker.count) for key, amount in each.items())
    _, reasons = fit(held.quotas, held.used, total, asked.wishes)
    if not reasons:
        return []
    return [f"the {maker.count} pods of this workload will not all fit the quota: {reasons[0].message}"]
