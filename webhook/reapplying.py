"""The same manifest applied again: what the API server merged over a pod that was rewritten is taken back.

`kubectl apply` compares the live pod with the manifest, and puts back whatever the webhook had rewritten: a key of
another vocabulary, a memory in bytes, the default scheduler. Most of that can never change on a living pod, so the
API server would refuse. What means the same as before is undone here; what means something else is refused.
"""

from collections.abc import Iterator, Mapping

import msgspec

from vcuda.decision import Code, Reason, printable
from vcuda.decoding import decoder_for
from vcuda.names import ANCESTOR_POOL_LABELS, LAST_APPLIED_ANNOTATION, SCHEDULER
from vcuda.pod import Container, ResourceList, Resources
from vcuda.pod_options import read_pod_options
from vcuda.request import ContainerRequest, Role, parse_request, read_container
from vcuda.scheme import option_keys
from webhook.admission_config import AdmissionConfig
from webhook.mutating import (
    clean_environment,
    containers_of,
    dotted,
    neutralise_node,
    rename_wishes,
    tolerate,
)
from webhook.objects import Pod, Term
from webhook.patching import PatchBuilder, escape_pointer


class ManifestMetadata(msgspec.Struct, frozen=True):
    """The annotations of a manifest."""

    annotations: dict[str, str] | None = None


class Manifest(msgspec.Struct, frozen=True):
    """What `kubectl apply` remembers having applied."""

    metadata: ManifestMetadata = ManifestMetadata()


def restore(new: Pod, old: Pod, config: AdmissionConfig) -> tuple[PatchBuilder, list[Reason]]:
    """Draft what makes an update leave a governed pod as it was rewritten; pods that never were are left alone."""
    draft = PatchBuilder()
    if config.names.limits not in old.metadata.noted:
        return draft, []
    before = {container.name: container for _, container in containers_of(old.spec)}
    reading = parse_request(old.spec, old.metadata.noted, config.scheme)
    shares = {each.name: each for each in reading.request.containers}
    reasons: list[Reason] = []
    for place, container in containers_of(new.spec):
        known = before.get(container.name)
        if known is None:
            continue
        if known.resources != container.resources:
            reasons += restore_resources(
                place, container, known, shares.get(container.name), config=config, draft=draft
            )
        if known.env != container.env:
            clean_environment(place, container, draft, has_gpu=container.name in shares)
    restore_annotations(new, old, config, draft)
    if old.spec.scheduler_name == SCHEDULER and config.replaces_scheduler(new.spec.scheduler_name):
        draft.add("/spec/schedulerName", SCHEDULER)
    neutralise_node(new, draft)
    restore_terms(new, old, config, draft)
    if old.spec.tolerations != new.spec.tolerations:
        tolerate(new, config, draft)
    return draft.finish(new.metadata), reasons


def restore_resources(
    place: str,
    new: Container,
    old: Container,
    share: ContainerRequest | None,
    *,
    config: AdmissionConfig,
    draft: PatchBuilder,
) -> list[Reason]:
    """Take back a container's amounts that mean what it has; refuse those that mean something else."""
    reasons: list[Reason] = []
    for part, now, then in parts(new, old):
        for key in [key for key in now if key in config.scheme.by_key and then.get(key) != now[key]]:
            inside = f"{place}/resources/{part}/{escape_pointer(key)}"
            if not means_the_same(now, key, share, config):
                reasons.append(request_frozen(f"{dotted(place)}.resources.{part}[{key}]", now[key]))
            elif key in then:
                draft.add(inside, then[key])
            else:
                draft.remove(inside)
    return reasons


def parts(new: Container, old: Container) -> Iterator[tuple[str, ResourceList, ResourceList]]:
    """Pair limits with limits and requests with requests."""
    now, before = new.resources or Resources(), old.resources or Resources()
    yield "limits", now.limits or {}, before.limits or {}
    yield "requests", now.requests or {}, before.requests or {}


def means_the_same(written: ResourceList, key: str, before: ContainerRequest | None, config: AdmissionConfig) -> bool:
    """Tell whether limits, or requests, read in the vocabulary of this key alone, ask for what the container has."""
    if before is None:
        return False
    keys = config.scheme.by_key[key].keys
    alone = Container(before.name, Resources(limits={k: v for k, v in written.items() if k in keys}))
    follows = before.share.memory_follows_cores and config.names.core in keys
    again, _ = read_container(alone, "", Role.APP, config.scheme, memory_follows_cores=follows)
    return again is not None and measured(again) == measured(before)


def measured(request: ContainerRequest) -> tuple[int, int, bool]:
    """Give what counts of a share, tokens included."""
    return request.share.cores, request.share.memory_count, request.share.memory_follows_cores


def request_frozen(field: str, value: str | float) -> Reason:
    """Say that a living pod keeps its request."""
    return Reason(
        code=Code.REQUEST_FROZEN,
        field=field,
        value=printable(value),
        message="a pod keeps the share it was admitted with",
        remedy="delete the pod and create it anew with the new share",
    )


def restore_annotations(new: Pod, old: Pod, config: AdmissionConfig, draft: PatchBuilder) -> None:
    """Take back annotations of the manifest that were rewritten when it was first applied."""
    now, before = new.metadata.noted, old.metadata.noted
    if now == before:
        return
    was, wrong = read_pod_options(before, config.scheme)
    again, wrong_now = read_pod_options({**now, **canonical_wishes(before, config)}, config.scheme)
    if not wrong and not wrong_now and was == again:
        # An ancestor's annotation beside the canonical one, with the same value: renamed before, and again.
        rename_wishes(new, config, draft)
    applied, applied_before = manifest_of(now), manifest_of(before)
    for key in (*config.frozen, *(key for key in now if config.owns(key))):
        same_manifest = key in applied and applied.get(key) == applied_before.get(key) == now.get(key)
        if now.get(key) != before.get(key) and same_manifest:
            draft.annotate(key, before.get(key))


def canonical_wishes(annotations: Mapping[str, str], config: AdmissionConfig) -> dict[str, str]:
    """Give the wishes as they stand under the canonical names."""
    return {key: annotations[key] for key in option_keys(config.names) if key in annotations}


def manifest_of(annotations: Mapping[str, str]) -> dict[str, str]:
    """Give the annotations that the manifest itself had, as `kubectl apply` remembers it."""
    try:
        return decoder_for(Manifest).decode(annotations.get(LAST_APPLIED_ANNOTATION, "{}")).metadata.annotations or {}
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return {}


def restore_terms(new: Pod, old: Pod, config: AdmissionConfig, draft: PatchBuilder) -> None:
    """Keep a pod in its pools: terms that are the old ones without the pools are made the old ones again."""
    now, before = terms_of(new), terms_of(old)
    labels = (config.names.pool_label, *ANCESTOR_POOL_LABELS)
    without: list[Term] = []
    for term in before:
        own = [each for each in term.get("matchExpressions") or [] if each.get("key") not in labels]
        bare: Term = {key: value for key, value in term.items() if key != "matchExpressions"}
        stripped = {**bare, "matchExpressions": own} if own else bare
        if stripped not in without:
            without.append(stripped)
    if now and now != before and now == without:
        required = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution"
        draft.add(f"{required}/nodeSelectorTerms", before)


def terms_of(pod: Pod) -> list[Term]:
    """Give the terms of the nodes that a pod must be on."""
    affinity = pod.spec.affinity
    required = affinity.node_affinity.required if affinity and affinity.node_affinity else None
    return list(required.node_selector_terms or ()) if required else []
