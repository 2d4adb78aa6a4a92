"""Handles updates of a rewritten pod by the manifest it was created from.

`kubectl apply` compares the live pod with the manifest and writes back what the webhook had rewritten: keys of another
vocabulary, memory in bytes, the default scheduler. Most of these fields are immutable on a pod, so the API server
would reject the update. Changes that mean the same as the stored pod are undone here; others are refused.
"""

from collections.abc import Collection, Iterator, Mapping

import msgspec

from vcuda.decision import Code, Reason, printable
from vcuda.decoding import decoder_for
from vcuda.names import ANCESTOR_POOL_LABELS, LAST_APPLIED_ANNOTATION, SCHEDULER
from vcuda.pod import Container, ResourceList, Resources
from vcuda.pod_options import read_pod_options
from vcuda.request import ContainerRequest, Role, parse_request, read_container
from vcuda.scheme import option_keys
from webhook.admission_config import AdmissionConfig
from webhook.managed_fields import applied_annotations
from webhook.mutating import (
    TERMS_POINTER,
    add_tolerations,
    clean_environment,
    containers_of,
    has_hidden_gpus,
    remove_node_access,
    rename_option_annotations,
    split_names,
    was_admitted_by_quotient,
)
from webhook.objects import AdmittedSpec, Pod, Term, required_terms
from webhook.patching import PatchBuilder, escape_pointer, field_of
from webhook.size_limits import size_mistakes
from webhook.withdrawn_requests import Declaration, withdrawn_requests


class ManifestMetadata(msgspec.Struct, frozen=True):
    annotations: dict[str, str] | None = None


class Manifest(msgspec.Struct, frozen=True):
    """The manifest that `kubectl apply` stores in an annotation."""

    metadata: ManifestMetadata = ManifestMetadata()
    spec: AdmittedSpec = AdmittedSpec()

    @property
    def annotations(self) -> dict[str, str]:
        return self.metadata.annotations or {}


def restore(new: Pod, old: Pod, config: AdmissionConfig) -> tuple[PatchBuilder, list[Reason]]:
    """Return the patch that undoes changes without meaning, and a reason for each change of the GPU request.

    Of a pod that was not admitted as one with GPUs, only annotations that are Quotient's are restored.
    """
    patch = PatchBuilder()
    restore_owned_annotations(new, old, config, patch)
    if not was_admitted_by_quotient(old, config):
        return patch.finish(new.metadata), []
    if size_mistakes(old, config):
        return patch.finish(new.metadata), []  # from a time when no webhook was registered
    if mistakes := size_mistakes(new, config):
        return patch.finish(new.metadata), mistakes
    old_containers = {container.name: container for _, container in containers_of(old.spec)}
    parsed = parse_request(old.spec, old.metadata.annotations_or_empty, config.scheme)
    requests = {each.name: each for each in parsed.request.containers}
    reasons: list[Reason] = []
    for pointer, container in containers_of(new.spec):
        before = old_containers.get(container.name)
        if before is None:
            continue  # the API server rejects added and renamed containers
        if before.resources != container.resources:
            reasons += restore_resources(
                pointer, container, before, requests.get(container.name), config=config, patch=patch
            )
        if before.env != container.env:
            clean_environment(pointer, container, patch, hides_gpus=has_hidden_gpus(before))
    reasons += refuse_withdrawn(new, old, requests.keys(), config)
    restore_annotations(new, old, config, patch)
    # These fields are immutable too, except that tolerations can be added.
    if old.spec.scheduler_name == SCHEDULER and config.replaces_scheduler(new.spec.scheduler_name):
        patch.add("/spec/schedulerName", SCHEDULER)
    remove_node_access(new, patch)
    restore_terms(new, old, config, patch)
    if old.spec.tolerations != new.spec.tolerations:
        add_tolerations(new, config, patch)
    return patch.finish(new.metadata), reasons


def restore_resources(
    pointer: str,
    new: Container,
    old: Container,
    request: ContainerRequest | None,
    *,
    config: AdmissionConfig,
    patch: PatchBuilder,
) -> list[Reason]:
    """Undo amounts that mean what the container has; return a reason for each that means something else."""
    reasons: list[Reason] = []
    for part, now, before in pair_resources(new, old):
        for key in [key for key in now if key in config.scheme.by_key and before.get(key) != now[key]]:
            key_pointer = f"{pointer}/resources/{part}/{escape_pointer(key)}"
            if not means_the_same(now, key, request, config):
                reasons.append(request_frozen(field_of(key_pointer), now[key]))
            elif key in before:
                patch.add(key_pointer, before[key])
            else:
                patch.remove(key_pointer)
    return reasons


def pair_resources(new: Container, old: Container) -> Iterator[tuple[str, ResourceList, ResourceList]]:
    """Yield limits and requests, each as name, new amounts and old amounts."""
    now, before = new.resources or Resources(), old.resources or Resources()
    yield "limits", now.limits or {}, before.limits or {}
    yield "requests", now.requests or {}, before.requests or {}


def means_the_same(amounts: ResourceList, key: str, request: ContainerRequest | None, config: AdmissionConfig) -> bool:
    """Whether amounts, read in the vocabulary of `key` alone, are the request that the container has."""
    if request is None:
        return False
    follows = request.share.memory_follows_cores
    applied = read_alone(request.name, amounts, key, config, memory_follows_cores=follows)
    return applied is not None and comparable_share(applied) == comparable_share(request)


def read_alone(
    name: str, amounts: ResourceList, key: str, config: AdmissionConfig, *, memory_follows_cores: bool
) -> ContainerRequest | None:
    """Read amounts in the vocabulary of `key` alone: those of the manifest are merged with the canonical ones."""
    keys = config.scheme.by_key[key].keys
    alone = Container(name, Resources(limits={key: value for key, value in amounts.items() if key in keys}))
    return read_container(alone, "", Role.APP, config.scheme, memory_follows_cores=memory_follows_cores)[0]


def comparable_share(request: ContainerRequest) -> tuple[int, int, bool]:
    """Return what two requests for the same share have in common, however their memory was written."""
    return request.share.cores, request.share.memory_count, request.share.memory_follows_cores


def refuse_withdrawn(new: Pod, old: Pod, requesting: Collection[str], config: AdmissionConfig) -> list[Reason]:
    """Return a reason for each container that has GPUs, and whose manifest requests none any more."""
    now, before = (Declaration(last_applied(each).spec, each.metadata) for each in (new, old))
    withdrawn = withdrawn_requests(now, before, config).intersection(requesting)
    return [
        request_frozen(field_of(f"{pointer}/resources"), "no GPU")
        for pointer, container in containers_of(new.spec)
        if container.name in withdrawn
    ]


def request_frozen(field: str, value: str | float) -> Reason:
    return Reason(
        code=Code.REQUEST_FROZEN,
        field=field,
        value=printable(value),
        message="the GPU request of an existing pod cannot change",
        remedy="delete the pod and create it again with the new request",
    )


def restore_annotations(new: Pod, old: Pod, config: AdmissionConfig, patch: PatchBuilder) -> None:
    """Undo changes of the user's options that the manifest had when the pod was created, and that were rewritten."""
    now, before = new.metadata.annotations_or_empty, old.metadata.annotations_or_empty
    if now == before:
        return
    old_options, old_mistakes = read_pod_options(before, config.scheme)
    new_options, new_mistakes = read_pod_options({**now, **canonical_options(before, config)}, config.scheme)
    if not old_mistakes and not new_mistakes and old_options == new_options:
        # The manifest's annotation is back under the domain of an ancestor, with the value it had on CREATE.
        rename_option_annotations(new, config, patch)
    key = config.names.memory_follows_core
    if now.get(key) != before.get(key) and following_again(new, config) == set(split_names(before.get(key, ""))):
        patch.annotate(key, before.get(key))


def following_again(new: Pod, config: AdmissionConfig) -> set[str]:
    """Return the containers whose memory would follow their cores if the pod were rewritten again."""
    following = set(split_names(new.metadata.annotations_or_empty.get(config.names.memory_follows_core, "")))
    for _, container in containers_of(new.spec):
        limits = container.resources.limits or {} if container.resources else {}
        for key in limits.keys() & config.scheme.by_key.keys():
            applied = read_alone(container.name, limits, key, config, memory_follows_cores=False)
            if applied is not None and applied.share.memory_follows_cores:
                following.add(container.name)
    return following


def restore_owned_annotations(new: Pod, old: Pod, config: AdmissionConfig, patch: PatchBuilder) -> None:
    """Undo changes of Quotient's annotations that come from a manifest which has had them before.

    They were removed or replaced then. What was set by hand is left to the validating webhook, which refuses it.
    """
    now, before = new.metadata.annotations_or_empty, old.metadata.annotations_or_empty
    changed = [key for key in now.keys() | before.keys() if now.get(key) != before.get(key)]
    owned = {key for key in changed if config.owns_annotation(key)}
    if not owned:
        return
    manifest, manifest_before = last_applied(new).annotations, last_applied(old).annotations
    applied, applied_before = applied_annotations(new.metadata), applied_annotations(old.metadata)
    for key in owned:
        same_manifest = key in manifest_before and manifest.get(key) in (None, manifest_before[key])
        by_client = same_manifest and now.get(key) == manifest.get(key)
        # Managed fields do not tell the value that was declared.
        by_server = key in applied_before and (key in applied or key not in now)
        if by_client or by_server:
            patch.annotate(key, before.get(key))


def canonical_options(annotations: Mapping[str, str], config: AdmissionConfig) -> dict[str, str]:
    """Return the options under the configured domain."""
    return {key: annotations[key] for key in option_keys(config.names) if key in annotations}


def last_applied(pod: Pod) -> Manifest:
    """Return the manifest that `kubectl apply` applied last; an empty one if it is absent or malformed."""
    try:
        return decoder_for(Manifest).decode(pod.metadata.annotations_or_empty.get(LAST_APPLIED_ANNOTATION, "{}"))
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return Manifest()  # users can write anything into this annotation


def restore_terms(new: Pod, old: Pod, config: AdmissionConfig, patch: PatchBuilder) -> None:
    """Put the pools back into a node affinity that is the old one without them."""
    now, before = required_terms(new.spec), required_terms(old.spec)
    labels = (config.names.pool_label, *ANCESTOR_POOL_LABELS)
    without_pools: dict[bytes, Term] = {}
    for term in before:
        own = [each for each in term.get("matchExpressions") or [] if each.get("key") not in labels]
        rest: Term = {key: value for key, value in term.items() if key != "matchExpressions"}
        stripped = {**rest, "matchExpressions": own} if own else rest
        # The rewrite had made one term per pool label of each.
        without_pools.setdefault(msgspec.json.encode(stripped, order="sorted"), stripped)
    if now and now != before and now == list(without_pools.values()):
        patch.add(TERMS_POINTER, before)
