"""Warnings about pods that are valid, but probably not what the user intended."""

from collections.abc import Iterator, Sequence

from vcuda.catalogue import CardModel
from vcuda.decision import enumerate_some, printable
from vcuda.gpu_model import matches, parse_model
from vcuda.memory_units import MIN_USEFUL_MIB, units_for
from vcuda.names import Names
from vcuda.pod_options import PodOptions
from vcuda.request import ContainerRequest
from vcuda.unread_names import unread_annotations, unread_resources
from webhook.admission_config import AdmissionConfig
from webhook.mutating import containers_of
from webhook.objects import AdmittedMetadata, Pod
from webhook.patching import field_of, truncate_warning
from webhook.pod_parsing import ParsedPod

# Named in a warning; the API server truncates longer ones.
MAX_MODELS_NAMED = 3
# No card has that much: the user counted MiB where the resource counts memory units.
MAX_PLAUSIBLE_MIB = 512 * 1024


def pod_warnings(pod: Pod, parsed: ParsedPod, config: AdmissionConfig, cards: Sequence[CardModel]) -> list[str]:
    """Return the warnings about a pod with GPUs; `cards` are the models that the cluster has."""
    unread = unread_name_warnings(pod, config)
    if not parsed.request.is_gpu:
        return unread
    warnings = [memory_warning(each, config) for each in parsed.request.containers]
    warnings += unknown_model_warnings(parsed.options, cards, config.names)
    if parsed.options.core_limit is not None and all(each.share.whole_cards for each in parsed.request.containers):
        warnings.append(
            f"metadata.annotations[{config.names.core_limit}] has no effect: it limits fractions of a GPU, and this "
            "pod requests whole GPUs"
        )
    asked, required = parsed.options.min_isolation, parsed.limits.min_isolation
    if asked and asked != required:
        warnings.append(
            f"metadata.annotations[{config.names.min_isolation}] {asked} counts as {required}, because a quota of this "
            "namespace requires that"
        )
    for pointer, container in containers_of(pod.spec):
        if container.security_context is not None and container.security_context.privileged:
            warnings.append(
                f"{field_of(pointer)}.securityContext.privileged: a privileged container can access every GPU of its "
                "node"
            )
    if pod.spec.resource_claims:
        warnings.append("spec.resourceClaims: GPUs allocated by resource claims are not charged to any Quotient quota")
    return [*unread, *filter(None, warnings)]


def unread_name_warnings(pod: Pod, config: AdmissionConfig) -> list[str]:
    """Return warnings about resources and annotations that were probably meant for Quotient."""
    resources = unread_resources(pod.spec, config.scheme)
    annotations = unread_annotations(pod.metadata.annotations_or_empty, config.scheme)
    return list(map(truncate_warning, (*resources, *annotations)))


def memory_warning(request: ContainerRequest, config: AdmissionConfig) -> str:
    """Return a warning about a container's amount of memory, or an empty string."""
    share = request.share
    if share.whole_cards:
        # One unit per card is what the webhook itself adds to whole cards.
        is_usual = share.memory_units <= share.whole_cards
    else:
        memory_mib = share.memory_units * config.scheme.unit_mib
        is_usual = share.memory_follows_cores or MIN_USEFUL_MIB <= memory_mib <= MAX_PLAUSIBLE_MIB
    return "" if is_usual else f"container {printable(request.name)}: {memory_problem(request, config)}"


def memory_problem(request: ContainerRequest, config: AdmissionConfig) -> str:
    units, unit_mib, key = request.share.memory_units, config.scheme.unit_mib, config.names.memory
    memory_mib = units * unit_mib
    size = f"{memory_mib} MiB of GPU memory"
    if request.share.whole_cards:
        return f"{size} is a minimum, not a limit: whole GPUs come with all of their memory"
    if memory_mib < MIN_USEFUL_MIB:
        return f"{size} is less than a CUDA context needs; 1 {key} is {unit_mib} MiB"
    if unit_mib == 1 or request.vocabulary != config.scheme.vocabularies[0].name:
        # In other vocabularies the number was not written as a count of these units.
        return f"{size} is more than any GPU has"
    return (
        f"{key}: {units} is {memory_mib} MiB (1 is {unit_mib} MiB), more than any GPU has; "
        f"for {units} MiB write {units_for(units, unit_mib)}"
    )


def unknown_model_warnings(options: PodOptions, cards: Sequence[CardModel], names: Names) -> Iterator[str]:
    """Warn about models that no card of the cluster has: the pod stays pending, or nothing is excluded."""
    if not options.models and not options.avoided_models:
        return
    models = sorted({card.model for card in cards})
    parsed = [parse_model(model) for model in models]
    for key, listed, effect in (
        (names.use_models, options.models, "the pod waits for a node with one"),
        (names.avoid_models, options.avoided_models, "excludes nothing"),
    ):
        unknown = [each for each in listed if not any(matches(each, model) for model in parsed)]
        # Without a catalogue, nothing is known of the cluster.
        if models and unknown:
            named = enumerate_some(unknown, MAX_MODELS_NAMED)
            subject = f"annotation {key}: {named} matches no GPU model of this cluster"
            yield truncate_warning(f"{subject} ({enumerate_some(models, MAX_MODELS_NAMED)}): {effect}")


def misplaced_annotations(metadata: AdmittedMetadata, config: AdmissionConfig, field_prefix: str) -> Iterator[str]:
    """Warn about pod options on a workload itself: they count on its pod template only."""
    for key in config.frozen_annotations:
        if key in metadata.annotations_or_empty:
            yield f"metadata.annotations[{key}] has no effect here: move it to {field_prefix}metadata.annotations"
