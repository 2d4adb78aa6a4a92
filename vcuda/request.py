"""What a pod requests: the share of each container, and the pod's effective request as Kubernetes counts it."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol, Self, TypeVar

from msgspec import Struct

from vcuda.amounts import Amounts
from vcuda.decision import Code, Reason, printable
from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.names import Names
from vcuda.pod import Container, PodSpec, ResourceList
from vcuda.quantity import Quantity, QuantityError, parse_quantity
from vcuda.scheme import Scheme
from vcuda.vocabulary import CORES_PER_CARD, MAX_CARDS, InvalidAmount, Share, Vocabulary

MAX_CACHED_READS = 4096
MISSING_CODES = (Code.MEMORY_MISSING, Code.CORE_MISSING)

# The amount of memory that the webhook writes on a container whose memory follows its cores. It is no request for
# memory: the node plugin identifies GPU containers by both resources, so neither may be absent.
TOKEN_MEMORY_UNITS = 1
MAX_CORES = MAX_CARDS * CORES_PER_CARD
# To place a pod is a search, whose cost grows with its containers, and all other pods wait for it.
MAX_GPU_CONTAINERS = 64


class Role(StrEnum):
    """When a container runs: with the others, alone before them, or from its start until the pod ends."""

    APP = "app"
    INIT = "init"
    SIDECAR = "sidecar"


class ContainerRequest(Struct, frozen=True):
    """The share one container requests, and the name of the vocabulary it was written in."""

    name: str
    role: Role
    share: Share
    vocabulary: str


class PodRequest(Struct, frozen=True):
    """The GPU containers of a pod, in the order in which the kubelet starts them."""

    containers: tuple[ContainerRequest, ...] = ()

    @property
    def is_gpu(self) -> bool:
        return bool(self.containers)

    def resource_counts(self) -> tuple[int, int]:
        """Return cores and memory units, as the scheduler and the kubelet count the two resources."""
        counts = self._effective(lambda share: Amounts({CORES: share.cores, MEMORY: share.memory_count}))
        return counts[CORES], counts[MEMORY]

    def demand(self, card_mib: int, unit_mib: int) -> Amounts:
        """Return what the pod takes on cards of this size: cores, MiB and pods. Whole cards take all their memory."""
        if not self.containers:
            return Amounts()
        used = self._effective(
            lambda share: Amounts({CORES: share.cores, MEMORY: share_memory_mib(share, card_mib, unit_mib)})
        )
        return used + Amounts({PODS: 1})

    def _effective(self, amount: Callable[[Share], Amounts]) -> Amounts:
        return effective_amounts([(each.role, amount(each.share)) for each in self.containers])


class ParsedRequest(Struct, frozen=True):
    """The valid part of a pod's request, and a reason for every mistake in it."""

    request: PodRequest
    reasons: tuple[Reason, ...] = ()


def share_memory_mib(share: Share, card_mib: int, unit_mib: int) -> int:
    """Return the memory a share takes of cards of this size."""
    if share.whole_cards:
        return share.whole_cards * card_mib
    if share.memory_follows_cores:
        # Rounded down, so that shares that fit by their cores fit by their memory.
        return share.cores * card_mib // CORES_PER_CARD
    return share.memory_units * unit_mib


class Summable(Protocol):
    """Amounts that can be added; `|` is the larger of each."""

    def __add__(self, other: Self, /) -> Self: ...

    def __or__(self, other: Self, /) -> Self: ...


S = TypeVar("S", bound=Summable)


def effective_amounts(parts: Iterable[tuple[Role, Amounts]]) -> Amounts:
    """Return the most a pod needs at any time, for each dimension separately."""
    return most_at_any_time(parts, Amounts())


def most_at_any_time(parts: Iterable[tuple[Role, S]], nothing: S) -> S:
    """Return the most a pod needs at any time, for each kind of amount separately, as Kubernetes computes it.

    Containers and sidecars run together. Each init container runs alone, beside the sidecars started before it. The
    parts are in starting order.
    """
    together = sidecars = peak = nothing
    for role, amount in parts:
        match role:
            case Role.APP:
                together += amount
            case Role.SIDECAR:
                sidecars += amount
            case Role.INIT:
                peak |= sidecars + amount
    return peak | (together + sidecars)


def parse_request(spec: PodSpec, annotations: Mapping[str, str], scheme: Scheme) -> ParsedRequest:
    """Read what a pod requests; the result has every mistake, not only the first."""
    following, reasons = containers_following_core(
        spec, annotations.get(scheme.names.memory_follows_core, ""), scheme.names
    )
    requests: list[ContainerRequest] = []
    for path, role, container in iter_containers(spec):
        request, mistakes = read_container(
            container, path, role, scheme, memory_follows_cores=container.name in following
        )
        reasons += mistakes
        if request is not None:
            requests.append(request)
    if len(requests) > MAX_GPU_CONTAINERS:
        reasons.append(too_many_containers(len(requests)))
    if requests:
        reasons += duplicate_containers(spec)
    return ParsedRequest(PodRequest(tuple(requests)), tuple(reasons))


def too_many_containers(count: int) -> Reason:
    return Reason(
        code=Code.TOO_MANY_CONTAINERS,
        field="spec.containers",
        value=str(count),
        message=f"at most {MAX_GPU_CONTAINERS} containers of a pod may request GPUs",
        remedy="divide them among several pods",
    )


def duplicate_containers(spec: PodSpec) -> list[Reason]:
    """Refuse containers with the name of another: shares are stored by name.

    The API server refuses them too, but only after it has applied the patch of the mutating webhook.
    """
    seen: set[str] = set()
    reasons: list[Reason] = []
    for path, _, container in iter_containers(spec):
        if container.name in seen:
            reasons.append(container_duplicate(f"{path}.name", container.name))
        seen.add(container.name)
    return reasons


def container_duplicate(field: str, name: str) -> Reason:
    return Reason(
        code=Code.CONTAINER_DUPLICATE,
        field=field,
        value=printable(name),
        message="another container of the pod has this name",
        remedy="rename one of them",
    )


def request_held_by(spec: PodSpec, annotations: Mapping[str, str], scheme: Scheme) -> PodRequest:
    """Read what an existing pod holds; a container with an invalid request counts with an estimate.

    A pod that was created while the webhook was not installed may be invalid, but still uses its resources.
    """
    following, _ = containers_following_core(spec, annotations.get(scheme.names.memory_follows_core, ""), scheme.names)
    requests: list[ContainerRequest] = []
    for path, role, container in iter_containers(spec):
        request, mistakes = read_container(
            container, path, role, scheme, memory_follows_cores=container.name in following
        )
        if request is None and mistakes:
            request = ContainerRequest(container.name, role, estimate_share(container, scheme), "")
        if request is not None:
            requests.append(request)
    return PodRequest(tuple(requests))


def estimate_share(container: Container, scheme: Scheme) -> Share:
    """Estimate the share of a container with an invalid request from its plain numbers.

    Where there are none, and for resources other than cores and memory, it counts as one card.
    """
    cores = units = 0
    for resources in resources_of(container):
        for key, value in resources.items():
            if key not in scheme.by_key:
                continue
            kind = key.rpartition("/")[2]
            try:
                amount = min(parse_quantity(value).whole, MAX_CORES)
            except (QuantityError, TypeError):
                amount = CORES_PER_CARD
            if kind == "vcuda-memory":
                units = max(units, amount)
            else:
                cores = max(cores, amount if kind == "vcuda-core" else CORES_PER_CARD)
    return Share(cores, units, memory_follows_cores=not units)


def iter_containers(spec: PodSpec) -> Iterable[tuple[str, Role, Container]]:
    """Yield a pod's containers in starting order, with their field paths and roles."""
    for index, container in enumerate(spec.init_containers or ()):
        role = Role.SIDECAR if container.restart_policy == "Always" else Role.INIT
        yield f"spec.initContainers[{index}]", role, container
    for index, container in enumerate(spec.containers or ()):
        yield f"spec.containers[{index}]", Role.APP, container


def containers_following_core(spec: PodSpec, listed: str, names: Names) -> tuple[frozenset[str], list[Reason]]:
    """Parse the annotation that lists the containers whose memory follows their cores."""
    if not listed:
        return frozenset(), []
    wanted = [name.strip() for name in listed.split(",") if name.strip()]
    existing = [container.name for _, _, container in iter_containers(spec)]
    unknown = sorted(set(wanted).difference(existing))
    if not unknown:
        return frozenset(wanted), []
    # One reason for all: the annotation may have 256 KiB, and `printable` shortens the value.
    reason = Reason(
        code=Code.CONTAINER_UNKNOWN,
        field=f"metadata.annotations[{names.memory_follows_core}]",
        value=printable(", ".join(unknown)),
        message="the pod has no container with this name",
        remedy=f"list containers of the pod: {printable(', '.join(existing))}",
    )
    return frozenset(wanted), [reason]


def read_container(
    container: Container, path: str, role: Role, scheme: Scheme, *, memory_follows_cores: bool
) -> tuple[ContainerRequest | None, list[Reason]]:
    """Read one container's request; neither request nor reasons if it requests no GPU."""
    limits, requests = resources_of(container)
    ours = tuple([(key, value) for part in (limits, requests) for key, value in part.items() if key in scheme.by_key])
    if not ours:
        return None, []
    # Most containers of a cluster have one of a few sizes. Nothing else decides how a size is read: not even which
    # amount is the limit, since a key in both parts is valid only if both amounts are equal. Only valid sizes are
    # cached, because reasons contain the path.
    size = (ours, memory_follows_cores)
    if size in scheme.read_cache:
        return ContainerRequest(container.name, role, *scheme.read_cache[size]), []
    amounts, reasons = read_amounts(path, limits, requests, {key: scheme.by_key[key] for key, _ in ours})
    used = {vocabulary.name: vocabulary for vocabulary in map(scheme.by_key.__getitem__, sorted(amounts))}
    annotation = scheme.names.memory_follows_core
    if len(used) > 1:
        mixed = [vocabulary for vocabulary in scheme.vocabularies if vocabulary.name in used]
        complete = {
            vocabulary.name
            for vocabulary in mixed
            if is_complete(vocabulary, amounts, annotation, listed=memory_follows_cores)
        }
        return None, [*reasons, vocabularies_mixed(f"{path}.resources", mixed, complete, amounts)]
    for vocabulary in used.values():
        try:
            share = check_memory(vocabulary.read(amounts), vocabulary, annotation, listed=memory_follows_cores)
        except InvalidAmount as error:
            # An amount may be missing only because it is invalid, which is a reason already.
            errors = [each for each in (error, *error.others) if not reasons or each.code not in MISSING_CODES]
            return None, [*reasons, *(amount_invalid(path, limits, requests, each) for each in errors)]
        if not reasons:
            cache_read(scheme, size, (share, vocabulary.name))
            return ContainerRequest(container.name, role, share, vocabulary.name), []
    return None, reasons


def cache_read(scheme: Scheme, size: Hashable, read: tuple[Share, str]) -> None:
    # Users choose the sizes, so the cache needs a bound; a full one is rare, and dropping it all is cheap.
    if len(scheme.read_cache) >= MAX_CACHED_READS:
        scheme.read_cache.clear()
    scheme.read_cache[size] = read


def resources_of(container: Container) -> tuple[ResourceList, ResourceList]:
    """Return limits and requests as written; either may be empty."""
    resources = container.resources
    if resources is None:
        return {}, {}
    return resources.limits or {}, resources.requests or {}


def read_amounts(
    path: str, limits: ResourceList, requests: ResourceList, vocabularies: Mapping[str, Vocabulary]
) -> tuple[dict[str, Quantity], list[Reason]]:
    """Parse the amounts under the keys of `vocabularies`; zero counts as absent."""
    amounts: dict[str, Quantity] = {}
    reasons: list[Reason] = []
    for key, vocabulary in sorted(vocabularies.items()):
        parsed: list[Quantity] = []
        for part, written in (("limits", limits), ("requests", requests)):
            if key not in written:
                continue
            try:
                parsed.append(parse_quantity(written[key]))
            except QuantityError as error:
                field = f"{path}.resources.{part}[{key}]"
                reasons.append(quantity_invalid(field, written[key], str(error), vocabulary.advice_for(key)))
        if len(parsed) > 1 and parsed[0].nanos != parsed[1].nanos:
            reasons.append(request_differs(f"{path}.resources.requests[{key}]", str(parsed[1]), str(parsed[0])))
        if parsed and parsed[0].nanos:
            amounts[key] = parsed[0]
    return amounts, reasons


def check_memory(share: Share, vocabulary: Vocabulary, annotation: str, *, listed: bool) -> Share:
    """Return the share with its memory decided; InvalidAmount if part of a card has no memory, or has it twice.

    `listed` says that the container is listed in the annotation: its memory follows its cores.
    """
    if share.whole_cards or share.memory_follows_cores:
        return share
    if not listed and not share.memory_units:
        raise InvalidAmount(
            Code.MEMORY_MISSING,
            vocabulary.keys[0],
            "part of a GPU is requested without memory",
            f"add {vocabulary.keys[1]}, for example 8Gi, or list the container in the annotation {annotation}",
        )
    if listed and share.memory_units > TOKEN_MEMORY_UNITS:
        raise InvalidAmount(
            Code.MEMORY_INVALID,
            vocabulary.keys[1],
            f"conflicts with the annotation {annotation}, which sets the memory of this container",
            f"remove {vocabulary.keys[1]}, or remove the container from the annotation",
        )
    return Share(share.cores, memory_follows_cores=True) if listed else share


def is_complete(vocabulary: Vocabulary, amounts: Mapping[str, Quantity], annotation: str, *, listed: bool) -> bool:
    """Whether the amounts of one vocabulary are a valid request without those of the others."""
    try:
        check_memory(vocabulary.read(amounts), vocabulary, annotation, listed=listed)
    except InvalidAmount:
        return False
    return True


def amount_invalid(path: str, limits: ResourceList, requests: ResourceList, error: InvalidAmount) -> Reason:
    part, written = ("limits", limits) if error.key in limits else ("requests", requests)
    return Reason(
        code=error.code,
        field=f"{path}.resources.{part}[{error.key}]",
        value=printable(written.get(error.key, "")),
        message=error.message,
        remedy=error.remedy,
    )


def quantity_invalid(field: str, value: str | float, message: str, remedy: str) -> Reason:
    return Reason(
        code=Code.QUANTITY_INVALID,
        field=field,
        value=printable(value),
        message=message,
        remedy=remedy,
    )


def request_differs(field: str, request: str, limit: str) -> Reason:
    """Return the reason for a request other than the limit: Kubernetes does not overcommit extended resources."""
    return Reason(
        code=Code.REQUEST_DIFFERS,
        field=field,
        value=request,
        message=f"must be equal to the limit of {limit}",
        remedy="remove the request: it defaults to the limit",
    )


def vocabularies_mixed(
    field: str, mixed: Sequence[Vocabulary], complete: set[str], amounts: Mapping[str, Quantity]
) -> Reason:
    """Refuse several vocabularies. The advice is to keep one that is complete; of several, that with the most keys."""
    keys = {each.name: [key for key in each.keys if key in amounts] for each in mixed}
    # `max` returns the first of equals, and the canonical vocabulary is the first.
    kept = max(keys, key=lambda name: (name in complete, len(keys[name])))
    others = [key for name in keys if name != kept for key in keys[name]]
    return Reason(
        code=Code.VOCABULARIES_MIXED,
        field=field,
        value=", ".join(sorted(amounts)),
        message="the container requests GPUs by resource names of several systems",
        remedy=f"keep {enumerate_words(keys[kept])}, and remove {enumerate_words(others)}",
    )


def enumerate_words(words: Sequence[str]) -> str:
    """Join words as in a sentence: `a, b and c`."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
