"""Rewrites GPU pods on CREATE: canonical resources, computed annotations, Quotient's scheduler, no bypass of limits.

Pure functions of the pod, the configuration and the namespace's policy. They are idempotent, because the API server
calls a mutating webhook again (reinvocationPolicy IfNeeded) after another webhook has changed the pod.
"""

import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

from vcuda.decision import printable
from vcuda.memory_units import MIN_USEFUL_MIB, bytes_from, is_in_bytes
from vcuda.names import (
    ANCESTOR_POOL_LABELS,
    HAMI_CORES,
    HAMI_MEMORY,
    HAMI_MEMORY_PERCENT,
    HAMI_PRIORITY,
    MIRROR_ANNOTATION,
    NO_DEVICES,
    SCHEDULER,
    SHARING_VARIABLE_PREFIXES,
    VISIBLE_DEVICES,
    Names,
)
from vcuda.namespace_policy import NamespacePolicy
from vcuda.pod import ResourceList, Resources
from vcuda.quantity import Family, QuantityError, parse_quantity
from vcuda.request import resources_of
from vcuda.vocabulary import Share
from webhook.admission_config import AdmissionConfig
from webhook.gpu_access import selects_gpus_by_env_from
from webhook.objects import AdmittedContainer, AdmittedSpec, Pod, Term, affinity_levels, required_terms
from webhook.patching import PatchBuilder, escape_pointer, field_of
from webhook.pod_parsing import ParsedPod

# Variables that select GPUs, as prefixes for one call of startswith.
RESERVED_VARIABLES = (VISIBLE_DEVICES, *SHARING_VARIABLE_PREFIXES)
MPS_DIRECTORY = "/tmp/nvidia-mps"  # noqa: S108 - pods for AWS's device plugin mount it
TERMS_STEPS = ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
TERMS_POINTER = "/".join(("/spec", *TERMS_STEPS))


def rewrite(
    pod: Pod, parsed: ParsedPod, config: AdmissionConfig, policy: NamespacePolicy, root: str = ""
) -> PatchBuilder:
    """Return the patch of a new pod, or of a template at `root`.

    Pods with mistakes are not rewritten, so that the refusal quotes what the user wrote.
    """
    patch = PatchBuilder(root)
    if MIRROR_ANNOTATION in pod.metadata.annotations_or_empty:
        return patch  # it only shows a static pod, which the kubelet runs from a file
    remove_owned_annotations(pod, parsed, config, patch)
    if parsed.request.is_gpu and not parsed.reasons:
        shares = {each.name: each.share for each in parsed.request.containers}
        # All containers: GPUs have to be hidden from those without a share.
        for pointer, container in containers_of(pod.spec):
            share = shares.get(container.name)
            if share is not None:
                warn_of_bytes(pointer, container, share, config, patch)
                warn_of_hami(pointer, container, share, config, patch)
                warn_of_common_burst(pointer, share, parsed, patch)
                rewrite_resources(pointer, container, share, config, patch)
            clean_environment(pointer, container, patch, hides_gpus=hides_gpus(container, share, config))
        rewrite_annotations(pod, parsed, config, patch)
        if config.replaces_scheduler(pod.spec.scheduler_name):
            patch.add("/spec/schedulerName", SCHEDULER)
        remove_node_access(pod, patch)
        if policy.pools:
            restrict_to_pools(pod, policy.pools, config, patch)
        add_tolerations(pod, config, patch)
    return patch.finish(pod.metadata)


def containers_of(spec: AdmittedSpec) -> Iterator[tuple[str, AdmittedContainer]]:
    """Yield init containers and containers, each after its JSON pointer; ephemeral ones can have no resources."""
    for index, container in enumerate(spec.init_containers or ()):
        yield f"/spec/initContainers/{index}", container
    for index, container in enumerate(spec.containers or ()):
        yield f"/spec/containers/{index}", container


def was_admitted_by_quotient(pod: Pod, config: AdmissionConfig) -> bool:
    """Whether Quotient has admitted a pod as one with GPUs, and charged it: only Quotient can write the limits."""
    return config.names.limits in pod.metadata.annotations_or_empty


def remove_owned_annotations(pod: Pod, parsed: ParsedPod, config: AdmissionConfig, patch: PatchBuilder) -> None:
    """Remove annotations that only Quotient may write; on GPU pods the limits are replaced later instead."""
    for key in pod.metadata.annotations_or_empty:
        if not config.owns_annotation(key) or (key == config.names.limits and parsed.request.is_gpu):
            continue
        patch.annotate(key, None)
        if key in (config.names.limits, config.names.placement):
            why = "only Quotient may write it"
        else:
            why = "it belongs to gpu-manager's scheduler, which Quotient replaces"
        patch.warn(f"{patch.field_prefix}metadata.annotations[{key}] is removed: {why}")


def warn_of_bytes(
    pointer: str, container: AdmittedContainer, share: Share, config: AdmissionConfig, patch: PatchBuilder
) -> None:
    """Warn about a plain number that is read as bytes because of its size, and is a useless amount of them.

    Here and not with the other warnings about memory: those see the rewritten pod, which no longer has the number.
    """
    unit_mib, key = config.scheme.unit_mib, config.names.memory
    memory_mib = share.memory_units * unit_mib
    if share.whole_cards or share.memory_follows_cores or memory_mib >= MIN_USEFUL_MIB:
        return
    limits, requests = resources_of(container)
    written = limits.get(key, requests.get(key))
    if written is None:
        return
    amount = parse_quantity(written)
    if amount.family is not Family.BINARY and is_in_bytes(amount, unit_mib):
        # As a plain number: the API server has rewritten 1000000 to 1M.
        patch.warn(
            f"{patch.field_prefix}{field_of(pointer)}.resources: {key} '{amount.whole}' is read as bytes (numbers from "
            f"{bytes_from(unit_mib)} on are), rounded up to {memory_mib} MiB; 1 is {unit_mib} MiB"
        )


def warn_of_hami(
    pointer: str, container: AdmittedContainer, share: Share, config: AdmissionConfig, patch: PatchBuilder
) -> None:
    """Warn where a request for HAMi does not get what HAMi would give."""
    limits, requests = resources_of(container)
    written = {key for key in (HAMI_PRIORITY, HAMI_CORES, HAMI_MEMORY_PERCENT) if key in limits or key in requests}
    if not written & config.scheme.by_key.keys():
        return
    field = f"{patch.field_prefix}{field_of(pointer)}.resources"
    if HAMI_PRIORITY in written:
        patch.warn(f"{field}: {HAMI_PRIORITY} is removed: containers that share a GPU have no priorities")
    if HAMI_CORES in written and HAMI_MEMORY_PERCENT not in written and share.memory_follows_cores:
        patch.warn(
            f"{field}: {HAMI_CORES} without {HAMI_MEMORY}: the container gets {share.cores} % of its GPU's memory too; "
            "HAMi would give all of it"
        )


def warn_of_common_burst(pointer: str, share: Share, parsed: ParsedPod, patch: PatchBuilder) -> None:
    """Warn where a container may use more cores than it requests, because another one of its pod has no limit."""
    bursting = [each.name for each in parsed.request.containers if each.share.bursts]
    if bursting and not share.bursts and not share.whole_cards and parsed.options.core_limit != share.cores:
        patch.warn(
            f"{patch.field_prefix}{field_of(pointer)}.resources: {share.cores} cores are no hard limit, because "
            f"container {printable(bursting[0])} requests none, and a pod has one limit: request cores for both"
        )


def rewrite_resources(
    pointer: str, container: AdmittedContainer, share: Share, config: AdmissionConfig, patch: PatchBuilder
) -> None:
    """Request both canonical resources, in limits and requests, and nothing in another vocabulary."""
    wanted: ResourceList = {config.names.core: str(share.cores), config.names.memory: str(share.memory_count)}
    patch_amounts(pointer, container, wanted, wanted, config=config, patch=patch)


def patch_amounts(
    pointer: str,
    container: AdmittedContainer,
    limits: ResourceList,
    requests: ResourceList | None,
    *,
    config: AdmissionConfig,
    patch: PatchBuilder,
) -> None:
    """Give a container exactly these GPU resources, and leave its other resources alone.

    Requests that are None are not added.
    """
    gpu_keys = config.scheme.by_key
    resources = container.resources or Resources()
    for part, present, wanted in (("limits", resources.limits, limits), ("requests", resources.requests, requests)):
        if wanted is None or (present is None and not wanted):
            continue
        if present is None:
            patch.add(f"{pointer}/resources/{part}", wanted)
            continue
        for key in present:
            if key in gpu_keys and key not in wanted:
                patch.remove(f"{pointer}/resources/{part}/{escape_pointer(key)}")
        for key, value in wanted.items():
            if key not in present or not is_same_amount(present[key], value):
                patch.add(f"{pointer}/resources/{part}/{escape_pointer(key)}", value)


def is_same_amount(first: str | float, second: str | float) -> bool:
    """Whether two quantities are equal, however they are written: the API server stores 1000 as 1k."""
    if first == second:
        return True
    try:
        return parse_quantity(first).nanos == parse_quantity(second).nanos
    except QuantityError:
        return False


def rewrite_annotations(pod: Pod, parsed: ParsedPod, config: AdmissionConfig, patch: PatchBuilder) -> None:
    """Write the computed limits, and the user's options under the canonical names."""
    names, annotations = config.names, pod.metadata.annotations_or_empty
    if annotations.get(names.limits, parsed.limits_annotation) != parsed.limits_annotation:
        patch.warn(
            f"{patch.field_prefix}metadata.annotations[{names.limits}] is replaced: Quotient computes it from the "
            "containers' resources"
        )
    patch.annotate(names.limits, parsed.limits_annotation)
    rename_option_annotations(pod, config, patch)
    if parsed.options.core_limit is None:
        # None removes one that an earlier call has injected, for containers that have changed since.
        patch.annotate(names.core_limit, None if parsed.core_limit is None else str(parsed.core_limit))
    elif names.core_limit not in annotations and any(each.share.bursts for each in parsed.request.containers):
        patch.annotate(names.core_limit, str(parsed.options.core_limit))
    following = [each.name for each in parsed.request.containers if each.share.memory_follows_cores]
    if following:
        present = annotations.get(names.memory_follows_core, "")
        patch.annotate(names.memory_follows_core, merge_names(present, following))


def split_names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


def merge_names(listed: str, names: Sequence[str]) -> str:
    """Add names to a list separated by commas. A list that has them all is returned unchanged, spaces included."""
    present = split_names(listed)
    missing = dict.fromkeys(names).keys() - present
    return ",".join([*present, *(name for name in names if name in missing)]) if missing else listed


def rename_option_annotations(pod: Pod, config: AdmissionConfig, patch: PatchBuilder) -> None:
    """Move options from the domain of an ancestor to the configured one."""
    annotations = pod.metadata.annotations_or_empty
    for key, canonical in config.scheme.canonical_keys.items():
        if key in annotations:
            patch.annotate(key, None)
            if canonical not in annotations:
                patch.annotate(canonical, annotations[key])


def remove_node_access(pod: Pod, patch: PatchBuilder) -> None:
    """Remove what AWS's device plugin has its users set to share GPUs: with it, a pod could bypass its limits."""
    if pod.spec.host_ipc:
        patch.remove("/spec/hostIPC")
        patch.warn(f"{patch.field_prefix}spec.hostIPC is removed: pods do not need it to share GPUs")
    for index, volume in enumerate(pod.spec.volumes or ()):
        if volume.host_path is not None and is_mps_directory(volume.host_path.path):
            # The volume stays, because containers mount it by name.
            patch.remove(f"/spec/volumes/{index}/hostPath")
            patch.add(f"/spec/volumes/{index}/emptyDir", {})
            patch.warn(
                f"{patch.field_prefix}spec.volumes[{index}].hostPath {MPS_DIRECTORY} is replaced by an emptyDir: "
                "Quotient connects containers to MPS itself"
            )


def is_mps_directory(path: str) -> bool:
    """Whether a path is the directory of MPS, or inside it."""
    clean = posixpath.normpath("/" + path.lstrip("/"))
    return clean == MPS_DIRECTORY or clean.startswith(f"{MPS_DIRECTORY}/")


def hides_gpus(container: AdmittedContainer, share: Share | None, config: AdmissionConfig) -> bool:
    """Whether NVIDIA's runtime, where a node has it, must not give a container any GPU.

    Where it is the default runtime, a container without `NVIDIA_VISIBLE_DEVICES` in its spec can see every GPU of the
    node: most CUDA images set it to `all`. A container with GPUs gets the variable from the node plugin, but `envFrom`
    wins over that, and an entry of `env` over both. By CDI or natively it has its GPUs without NVIDIA's runtime.
    """
    if share is None:
        return True
    return config.injection != "nvidia-runtime" and selects_gpus_by_env_from(container)


def has_hidden_gpus(container: AdmittedContainer) -> bool:
    return any((variable.name, variable.value) == (VISIBLE_DEVICES, NO_DEVICES) for variable in container.env or ())


def clean_environment(pointer: str, container: AdmittedContainer, patch: PatchBuilder, *, hides_gpus: bool) -> None:
    """Remove reserved variables, and set the one that hides the node's GPUs if `hides_gpus`."""
    removed: list[int] = []
    is_done = not hides_gpus
    for index, variable in enumerate(container.env or ()):
        # One call with a tuple of prefixes skips nearly all variables; the exact check is for the few others.
        if not variable.name.startswith(RESERVED_VARIABLES) or not is_reserved_variable(variable.name):
            continue
        if not is_done and variable.name == VISIBLE_DEVICES and variable.value == NO_DEVICES:
            is_done = True  # of an earlier call, or the user's; duplicates of it are removed
        else:
            removed.append(index)
            patch.warn(
                f"{patch.field_prefix}{field_of(pointer)}.env[{printable(variable.name)}] is removed: Quotient sets "
                "the GPUs of a container from its resources"
            )
    # From the end: removing an entry shifts the indices of those after it.
    for index in reversed(removed):
        patch.remove(f"{pointer}/env/{index}")
    if not is_done:
        entry = {"name": VISIBLE_DEVICES, "value": NO_DEVICES}
        if container.env is None:
            patch.add(f"{pointer}/env", [entry])
        else:
            patch.add(f"{pointer}/env/-", entry)


def is_reserved_variable(name: str) -> bool:
    """Whether an environment variable decides which GPUs a container sees, or how much of them."""
    return name == VISIBLE_DEVICES or name.startswith(SHARING_VARIABLE_PREFIXES)


def restrict_to_pools(pod: Pod, pools: Sequence[str], config: AdmissionConfig, patch: PatchBuilder) -> None:
    """Require a node of the namespace's pools, in addition to the pod's own node affinity."""
    terms = required_terms(pod.spec)
    wanted = terms_in_pools(terms, pools, config.names)
    if wanted == terms:
        return
    value: Any = wanted
    # Only the levels that are absent are added; a preferred affinity beside the required one stays.
    present = 1 + sum(level is not None for level in affinity_levels(pod.spec))
    for step in reversed(TERMS_STEPS[present:]):
        value = {step: value}
    patch.add("/".join(("/spec", *TERMS_STEPS[:present])), value)


def terms_in_pools(terms: Sequence[Term], pools: Sequence[str], names: Names) -> list[Term]:
    """Restrict each term to the pools; a node may carry its pool under the canonical label or an ancestor's.

    Terms are alternatives, so each becomes one term per label. An empty term matches no node, and has to stay empty.
    """
    expressions = [
        {"key": label, "operator": "In", "values": list(pools)} for label in (names.pool_label, *ANCESTOR_POOL_LABELS)
    ]
    if not terms:
        return [{"matchExpressions": [expression]} for expression in expressions]
    restricted: list[Term] = []
    for term in terms:
        own = term.get("matchExpressions") or []
        # A term that has a pool expression was restricted by an earlier call.
        if not (own or term.get("matchFields")) or any(expression in own for expression in expressions):
            restricted.append(term)
        else:
            restricted += [{**term, "matchExpressions": [*own, expression]} for expression in expressions]
    return restricted


def add_tolerations(pod: Pod, config: AdmissionConfig, patch: PatchBuilder) -> None:
    """Add the configured tolerations, so that pods can run on nodes that are tainted for GPUs."""
    if not config.tolerations:
        return
    present = [normalize_toleration(each) for each in pod.spec.tolerations or ()]
    missing = [each for each in config.tolerations if normalize_toleration(each) not in present]
    if missing and pod.spec.tolerations is None:
        patch.add("/spec/tolerations", missing)
        return
    for each in missing:
        patch.add("/spec/tolerations/-", each)


def normalize_toleration(toleration: dict[str, Any]) -> dict[str, Any]:
    """Set the default operator and drop empty fields, so that equal tolerations compare equal."""
    return {"operator": "Equal"} | {key: value for key, value in toleration.items() if value not in (None, "")}
