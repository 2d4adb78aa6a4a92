"""Bounds on what is read of a pod or a template, checked before anything else is done with it.

All pods of a cluster wait for the same event loop, and an object may have 3 MiB. Counting is cheap, and what a GPU pod
needs stays far below these numbers. An object beyond them is refused, never passed on unread.
"""

from collections.abc import Iterator

from msgspec import Struct

from vcuda.decision import Code, Reason
from vcuda.pod_options import annotation_field
from webhook.admission_config import AdmissionConfig
from webhook.objects import AdmittedSpec, Pod, required_terms

MAX_CONTAINERS = 256
MAX_VARIABLES, MAX_SOURCES, MAX_MOUNTS = 4096, 1024, 4096
MAX_VOLUMES = 1024
MAX_TOLERATIONS = 1024
# The webhook itself makes three of each, to restrict them to the pools of the namespace.
MAX_TERMS, MAX_EXPRESSIONS = 512, 4096
MAX_ANNOTATIONS, MAX_OWNED_ANNOTATIONS = 4096, 256
# Of an annotation that Quotient reads. The longest that it writes itself, the limits of 64 containers with 64 models,
# has 20 kB.
MAX_ANNOTATION_LENGTH = 32 * 1024


class Amount(Struct, frozen=True):
    """How many of something an object has at a field, how many are read, and how it can have fewer."""

    field: str
    count: int
    maximum: int
    unit: str
    remedy: str


def size_mistakes(pod: Pod, config: AdmissionConfig) -> list[Reason]:
    """Return a reason for everything of which a pod has more than is read."""
    return [
        too_large(each) for each in (*spec_amounts(pod.spec), *annotation_amounts(pod, config)) if is_too_large(each)
    ]


def is_too_large(amount: Amount) -> bool:
    return amount.count > amount.maximum


def spec_amounts(spec: AdmittedSpec) -> Iterator[Amount]:
    split = "divide them among several pods"
    ephemeral = spec.ephemeral_containers or ()
    init, app = spec.init_containers or (), spec.containers or ()
    yield Amount("spec.initContainers", len(init), MAX_CONTAINERS, "init containers", "do more in one of them")
    yield Amount("spec.containers", len(app), MAX_CONTAINERS, "containers", split)
    yield Amount("spec.ephemeralContainers", len(ephemeral), MAX_CONTAINERS, "ephemeral containers", "add fewer")
    if max(len(init), len(app), len(ephemeral)) <= MAX_CONTAINERS:
        containers = [*init, *app, *ephemeral]
        variables = sum(len(each.env or ()) for each in containers)
        sources = sum(len(each.env_from or ()) for each in containers)
        mounts = sum(len(each.volume_mounts or ()) for each in containers)
        remedy = "put them into a ConfigMap, and refer to it in envFrom"
        yield Amount("spec.containers[*].env", variables, MAX_VARIABLES, "variables in all containers", remedy)
        yield Amount("spec.containers[*].envFrom", sources, MAX_SOURCES, "sources in all containers", "merge them")
        yield Amount("spec.containers[*].volumeMounts", mounts, MAX_MOUNTS, "mounts in all containers", split)
    yield Amount("spec.volumes", len(spec.volumes or ()), MAX_VOLUMES, "volumes", split)
    yield Amount("spec.tolerations", len(spec.tolerations or ()), MAX_TOLERATIONS, "tolerations", "remove some")
    terms, field = required_terms(spec), "spec.affinity.nodeAffinity"
    expressions = sum(len(listed or ()) for term in terms for listed in term.values())
    yield Amount(field, len(terms), MAX_TERMS, "node selector terms", "label nodes, and select them by the label")
    yield Amount(field, expressions, MAX_EXPRESSIONS, "expressions", "label nodes, and select them by the label")


def annotation_amounts(pod: Pod, config: AdmissionConfig) -> Iterator[Amount]:
    annotations = pod.metadata.annotations_or_empty
    yield Amount("metadata.annotations", len(annotations), MAX_ANNOTATIONS, "annotations", "remove some")
    if len(annotations) <= MAX_ANNOTATIONS:
        owned = sum(map(config.owns_annotation, annotations))
        what = "annotations that only Quotient may write"
        yield Amount("metadata.annotations", owned, MAX_OWNED_ANNOTATIONS, what, "remove them")
    for key in config.read_annotations:
        length = len(annotations.get(key, ""))
        yield Amount(annotation_field(key), length, MAX_ANNOTATION_LENGTH, "characters", "shorten or remove it")


def too_large(amount: Amount) -> Reason:
    return Reason(
        code=Code.TOO_LARGE,
        field=amount.field,
        value=str(amount.count),
        message=f"a pod with GPUs may have at most {amount.maximum} {amount.unit} here",
        remedy=amount.remedy,
    )
