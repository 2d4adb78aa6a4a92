"""What is rewritten on a pod: into the canonical vocabulary, with what is missing filled in and what harms taken out.

Everything here is a pure function of the pod, the cluster's rules and the namespace's policy, and doing it twice is
doing it once: other webhooks may come in between, and the API server then asks again.
"""

import posixpath
from collections.abc import Iterator, Sequence
from typing import Any

from vcuda.decision import printable
from vcuda.names import (
    ANCESTOR_POOL_LABELS,
    MIRROR_ANNOTATION,
    NO_DEVICES,
    SCHEDULER,
    SHARING_VARIABLE_PREFIXES,
    VISIBLE_DEVICES,
    Names,
)
from vcuda.namespace_policy import NamespacePolicy
from vcuda.pod import Resources
from vcuda.quantity import NANO, QuantityError, parse_quantity
from vcuda.vocabulary import Share
from webhook.admission_config import AdmissionConfig
from webhook.objects import AdmittedContainer, AdmittedSpec, Pod, Term
from webhook.patching import PatchBuilder, escape_pointer
from webhook.pod_parsing import ParsedPod

RESERVED_VARIABLES = (VISIBLE_DEVICES, *SHARING_VARIABLE_PREFIXES)
MPS_FOLDER = "/tmp/nvidia-mps"  # noqa: S108 - where AWS's plugin has its users mount it


def rewrite(
    pod: Pod, parsed: ParsedPod, config: AdmissionConfig, policy: NamespacePolicy, root: str = ""
) -> PatchBuilder:
    """Draft what a new pod needs. A pod with mistakes is left as it is, so that they are told in its author's terms."""
    draft = PatchBuilder(root)
    if MIRROR_ANNOTATION in pod.metadata.noted:
        return draft  # A kubelet shows what it runs already; nothing can be changed.
    strip_owned(pod, parsed, config, draft)
    if parsed.request.is_gpu and not parsed.reasons:
        shares = {each.name: each.share for each in parsed.request.containers}
        for place, container in containers_of(pod.spec):
            share = shares.get(container.name)
            if share is not None:
                rewrite_resources(place, container, share, config, draft)
            clean_environment(place, container, draft, has_gpu=share is not None)
        rewrite_annotations(pod, parsed, config, draft)
        if config.replaces_scheduler(pod.spec.scheduler_name):
            draft.add("/spec/schedulerName", SCHEDULER)
        neutralise_node(pod, draft)
        if policy.pools:
            restrict_to_pools(pod, policy.pools, config, draft)
        tolerate(pod, config, draft)
    return draft.finish(pod.metadata)


def containers_of(spec: AdmittedSpec) -> Iterator[tuple[str, AdmittedContainer]]:
    """Go through the containers that are there from the start, with a pointer to each."""
    for index, container in enumerate(spec.init_containers or ()):
        yield f"/spec/initContainers/{index}", container
    for index, container in enumerate(spec.containers or ()):
        yield f"/spec/containers/{index}", container


def dotted(pointer: str) -> str:
    """Name a container's place as messages do."""
    _, spec, kind, index = pointer.split("/")
    return f"{spec}.{kind}[{index}]"


def strip_owned(pod: Pod, parsed: ParsedPod, config: AdmissionConfig, draft: PatchBuilder) -> None:
    """Take away annotations by which a tenant would speak for Quotient; limits are computed anew for GPU pods."""
    for key in pod.metadata.noted:
        if not config.owns(key) or (key == config.names.limits and parsed.request.is_gpu):
            continue
        draft.annotate(key, None)
        draft.warn(f"{draft.path}metadata.annotations[{key}] is written by Quotient alone: yours is removed")


def rewrite_resources(
    place: str, container: AdmittedContainer, share: Share, config: AdmissionConfig, draft: PatchBuilder
) -> None:
    """Ask for both canonical resources, in limits and requests, and in no other vocabulary."""
    resources, by_key = container.resources or Resources(), config.scheme.by_key
    wanted = {config.names.core: str(share.cores), config.names.memory: str(share.memory_count)}
    for part, written in (("limits", resources.limits), ("requests", resources.requests)):
        if written is None:
            draft.add(f"{place}/resources/{part}", wanted)
            continue
        for key in written:
            if key in by_key and key not in wanted:
                draft.remove(f"{place}/resources/{part}/{escape_pointer(key)}")
        for key, value in wanted.items():
            if key not in written or not is_count(written[key], value):
                draft.add(f"{place}/resources/{part}/{escape_pointer(key)}", value)


def is_count(written: str | float, wanted: str) -> bool:
    """Tell whether a quantity says this count, however it is spelled."""
    if written == wanted:
        return True
    try:
        return parse_quantity(written).nanos == int(wanted) * NANO
    except QuantityError:
        return False


def rewrite_annotations(pod: Pod, parsed: ParsedPod, config: AdmissionConfig, draft: PatchBuilder) -> None:
    """Write what each container may use, and the author's wishes under the canonical names."""
    names, noted = config.names, pod.metadata.noted
    if noted.get(names.limits, parsed.written) != parsed.written:
        draft.warn(f"{draft.path}metadata.annotations[{names.limits}] is computed by Quotient: yours is replaced")
    draft.annotate(names.limits, parsed.written)
    rename_wishes(pod, config, draft)
    if parsed.options.core_limit is None:
        draft.annotate(names.core_limit, None if parsed.core_limit is None else str(parsed.core_limit))
    follow = [each.name for each in parsed.request.containers if each.share.memory_follows_cores]
    if follow:
        draft.annotate(names.memory_follows_core, with_names(noted.get(names.memory_follows_core, ""), follow))


def with_names(listed: str, names: Sequence[str]) -> str:
    """Put names into a list separated by commas; one that has them all stays as it was written."""
    present = [name.strip() for name in listed.split(",") if name.strip()]
    missing = [name for name in names if name not in present]
    return ",".join([*present, *missing]) if missing else listed


def rename_wishes(pod: Pod, config: AdmissionConfig, draft: PatchBuilder) -> None:
    """Move wishes from an ancestor's domain to the canonical one."""
    noted = pod.metadata.noted
    for key, canonical in config.scheme.canonical_keys.items():
        if key in noted:
            draft.annotate(key, None)
            if canonical not in noted:
                draft.annotate(canonical, noted[key])


def neutralise_node(pod: Pod, draft: PatchBuilder) -> None:
    """Take out what reaches into the node to share GPUs past Quotient."""
    if pod.spec.host_ipc:
        draft.remove("/spec/hostIPC")
        draft.warn(f"{draft.path}spec.hostIPC is removed from pods with GPUs: they need it no more")
    for index, volume in enumerate(pod.spec.volumes or ()):
        if volume.host_path is not None and is_mps_folder(volume.host_path.path):
            draft.remove(f"/spec/volumes/{index}/hostPath")
            draft.add(f"/spec/volumes/{index}/emptyDir", {})
            draft.warn(
                f"{draft.path}spec.volumes[{index}]: {MPS_FOLDER} of the node is replaced by an empty folder: "
                "Quotient connects containers to MPS itself"
            )


def is_mps_folder(path: str) -> bool:
    """Tell whether a path of the node is the folder of MPS, or in it."""
    clean = posixpath.normpath("/" + path.lstrip("/"))
    return clean == MPS_FOLDER or clean.startswith(f"{MPS_FOLDER}/")


def clean_environment(place: str, container: AdmittedContainer, draft: PatchBuilder, *, has_gpu: bool) -> None:
    """Take reserved variables out; a container without GPU is told that it has none.

    Where NVIDIA's runtime is the default it would otherwise see every GPU of the node.
    """
    removed: list[int] = []
    blind = has_gpu
    for index, variable in enumerate(container.env or ()):
        if not variable.name.startswith(RESERVED_VARIABLES) or not is_reserved(variable.name):
            continue
        if not has_gpu and not blind and variable.name == VISIBLE_DEVICES and variable.value == NO_DEVICES:
            blind = True
        else:
            removed.append(index)
            draft.warn(
                f"{draft.path}{dotted(place)}.env[{printable(variable.name)}] is removed: "
                "which GPUs a container sees, and how much of them, follows from its request"
            )
    for index in reversed(removed):
        draft.remove(f"{place}/env/{index}")
    if not blind:
        entry = {"name": VISIBLE_DEVICES, "value": NO_DEVICES}
        if container.env is None:
            draft.add(f"{place}/env", [entry])
        else:
            draft.add(f"{place}/env/-", entry)


def is_reserved(name: str) -> bool:
    """Tell whether a variable would decide which GPUs a container sees, or how much of them."""
    return name == VISIBLE_DEVICES or name.startswith(SHARING_VARIABLE_PREFIXES)


def restrict_to_pools(pod: Pod, pools: Sequence[str], config: AdmissionConfig, draft: PatchBuilder) -> None:
    """Let a pod run only on nodes of its namespace's pools, beside what it wants itself."""
    affinity = pod.spec.affinity
    node_affinity = affinity.node_affinity if affinity else None
    required = node_affinity.required if node_affinity else None
    terms = list(required.node_selector_terms or ()) if required else []
    wanted = in_pools(terms, pools, config.names)
    if wanted == terms:
        return
    value: Any = wanted
    steps = ["affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"]
    # Only what is missing is put in; what stands beside it stays untouched.
    present = 1 + sum(part is not None for part in (affinity, node_affinity, required))
    for step in reversed(steps[present:]):
        value = {step: value}
    draft.add("/".join(("/spec", *steps[:present])), value)


def in_pools(terms: Sequence[Term], pools: Sequence[str], names: Names) -> list[Term]:
    """Narrow each term to the pools, which nodes may carry under the canonical label or an ancestor's.

    An empty term matches no node and must stay empty.
    """
    expressions = [
        {"key": label, "operator": "In", "values": list(pools)} for label in (names.pool_label, *ANCESTOR_POOL_LABELS)
    ]
    if not terms:
        return [{"matchExpressions": [expression]} for expression in expressions]
    narrowed: list[Term] = []
    for term in terms:
        own = term.get("matchExpressions") or []
        if not (own or term.get("matchFields")) or any(expression in own for expression in expressions):
            narrowed.append(term)
        else:
            narrowed += [{**term, "matchExpressions": [*own, expression]} for expression in expressions]
    return narrowed


def tolerate(pod: Pod, config: AdmissionConfig, draft: PatchBuilder) -> None:
    """Let a pod onto nodes that are kept for GPUs."""
    if not config.tolerations:
        return
    present = [plain(each) for each in pod.spec.tolerations or ()]
    missing = [each for each in config.tolerations if plain(each) not in present]
    if missing and pod.spec.tolerations is None:
        draft.add("/spec/tolerations", missing)
        return
    for each in missing:
        draft.add("/spec/tolerations/-", each)


def plain(toleration: dict[str, Any]) -> dict[str, Any]:
    """Write a toleration without what is understood."""
    return {"operator": "Equal"} | {key: value for key, value in toleration.items() if value not in (None, "")}
