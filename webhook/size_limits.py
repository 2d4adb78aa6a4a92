"""Bounds on what is read of a pod or a template, checked before anything else is done with it.

All pods of a cluster wait for the same event loop, and an object may have 3 MiB. Counting is cheap, and what a GPU pod
needs stays far below these numbers. An object beyond them is refused, never passed on unread. What an
object may have in all is bounded before it is decoded (`value_limit`).
"""

from collections.abc import Iterator, Mapping
from itertools import chain

from msgspec import Struct

from vcuda.decision import MAX_KEY_LENGTH, Code, Reason
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


# Below this nothing of a pod is too large: one comparison for almost all pods.
SMALLEST_MAXIMUM = min(MAX_CONTAINERS, MAX_TERMS, MAX_OWNED_ANNOTATIONS)


class SizeLimit(Struct, frozen=True):
    """How many of something an object may have at a field, and how it can have fewer."""

    field: str
    maximum: int
    unit: str
    remedy: str


SPLIT = "divide them among several pods"
SELECT_LABELS = "label nodes, and select them by the label"
AFFINITY = "spec.affinity.nodeAffinity"
# In the order of `count_containers`, `count_in_containers` and `count_in_spec`.
CONTAINER_LIMITS = (
    SizeLimit("spec.initContainers", MAX_CONTAINERS, "init containers", "do more in one of them"),
    SizeLimit("spec.containers", MAX_CONTAINERS, "containers", SPLIT),
    SizeLimit("spec.ephemeralContainers", MAX_CONTAINERS, "ephemeral containers", "add fewer"),
)
IN_CONTAINERS_LIMITS = (
    SizeLimit(
        "spec.containers[*].env",
        MAX_VARIABLES,
        "variables in all containers",
        "put them into a ConfigMap, and refer to it in envFrom",
    ),
    SizeLimit("spec.containers[*].envFrom", MAX_SOURCES, "sources in all containers", "merge them"),
    SizeLimit("spec.containers[*].volumeMounts", MAX_MOUNTS, "mounts in all containers", SPLIT),
)
SPEC_LIMITS = (
    SizeLimit("spec.volumes", MAX_VOLUMES, "volumes", SPLIT),
    SizeLimit("spec.tolerations", MAX_TOLERATIONS, "tolerations", "remove some"),
    SizeLimit(AFFINITY, MAX_TERMS, "node selector terms", SELECT_LABELS),
    SizeLimit(AFFINITY, MAX_EXPRESSIONS, "expressions", SELECT_LABELS),
)
ANNOTATIONS = "metadata.annotations"
ANNOTATION_LIMIT = SizeLimit(ANNOTATIONS, MAX_ANNOTATIONS, "annotations", "remove some")
OWNED_LIMIT = SizeLimit(ANNOTATIONS, MAX_OWNED_ANNOTATIONS, "annotations that only Quotient may write", "remove them")
# They are written into patches and messages before the API server checks their length.
KEY_LIMIT = SizeLimit(ANNOTATIONS, MAX_KEY_LENGTH, "characters in a key", "remove the annotation")


def size_mistakes(pod: Pod, config: AdmissionConfig) -> list[Reason]:
    """Return a reason for everything of which a pod has more than is read."""
    containers = mistakes_of(CONTAINER_LIMITS, count_containers(pod.spec))
    in_containers = [] if containers else mistakes_of(IN_CONTAINERS_LIMITS, count_in_containers(pod.spec))
    in_spec = mistakes_of(SPEC_LIMITS, count_in_spec(pod.spec))
    return [*containers, *in_containers, *in_spec, *annotation_mistakes(pod.metadata.annotations_or_empty, config)]


def mistakes_of(limits: tuple[SizeLimit, ...], counts: tuple[int, ...]) -> list[Reason]:
    if max(counts) <= SMALLEST_MAXIMUM:
        return []
    return [too_large(limit, count) for limit, count in zip(limits, counts, strict=True) if count > limit.maximum]


def count_containers(spec: AdmittedSpec) -> tuple[int, ...]:
    return len(spec.init_containers or ()), len(spec.containers or ()), len(spec.ephemeral_containers or ())


def count_in_containers(spec: AdmittedSpec) -> tuple[int, ...]:
    variables = sources = mounts = 0
    for container in chain(spec.init_containers or (), spec.containers or (), spec.ephemeral_containers or ()):
        variables += len(container.env or ())
        sources += len(container.env_from or ())
        mounts += len(container.volume_mounts or ())
    return variables, sources, mounts


def count_in_spec(spec: AdmittedSpec) -> tuple[int, ...]:
    terms = required_terms(spec)
    expressions = sum(len(listed or ()) for term in terms for listed in term.values()) if terms else 0
    return len(spec.volumes or ()), len(spec.tolerations or ()), len(terms), expressions


def annotation_mistakes(annotations: Mapping[str, str], config: AdmissionConfig) -> Iterator[Reason]:
    if len(annotations) > MAX_ANNOTATIONS:
        yield too_large(ANNOTATION_LIMIT, len(annotations))
    elif len(owned := list(filter(config.owns_annotation, annotations))) > MAX_OWNED_ANNOTATIONS:
        yield too_large(OWNED_LIMIT, len(owned))
    elif (longest := max(map(len, owned), default=0)) > MAX_KEY_LENGTH:
        yield too_large(KEY_LIMIT, longest)
    for key in config.read_annotations & annotations.keys():
        if len(annotations[key]) > MAX_ANNOTATION_LENGTH:
            limit = SizeLimit(annotation_field(key), MAX_ANNOTATION_LENGTH, "characters", "shorten or remove it")
            yield too_large(limit, len(annotations[key]))


def too_large(limit: SizeLimit, count: int) -> Reason:
    return Reason(
        code=Code.TOO_LARGE,
        field=limit.field,
        value=str(count),
        message=f"a pod with GPUs may have at most {limit.maximum} {limit.unit} here",
        remedy=limit.remedy,
    )
