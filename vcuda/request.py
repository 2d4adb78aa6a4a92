"""What a pod asks for: the request of each container, and of the pod as Kubernetes counts it."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from vcuda.amounts import Amounts
from vcuda.decision import Code, Reason, printable
from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.names import Names
from vcuda.pod import Container, PodSpec, ResourceList
from vcuda.quantity import Quantity, QuantityError, parse
from vcuda.scheme import Scheme
from vcuda.vocabulary import CORES_PER_CARD, InvalidAmount, Share, Vocabulary

MAX_CACHED_READS = 4096
ABSENT = (Code.MEMORY_MISSING, Code.CORE_MISSING)

# One unit of memory beside a fraction that follows is the token by which the node knows the container.
TOKEN = 1
MAX_COUNTED_CORES = 1024 * CORES_PER_CARD


class Role(StrEnum):
    """When a container runs: with the others, before them, or from its turn on until the pod ends."""

    APP = "app"
    INIT = "init"
    SIDECAR = "sidecar"


class ContainerRequest(Struct, frozen=True):
    """The share that one container asks for, and the vocabulary it was written in."""

    name: str
    role: Role
    share: Share
    vocabulary: str


class PodRequest(Struct, frozen=True):
    """The GPU containers of a pod, in the order in which the kubelet starts them."""

    containers: tuple[ContainerRequest, ...] = ()

    @property
    def is_gpu(self) -> bool:
        """Whether the pod concerns Quotient at all."""
        return bool(self.containers)

    def resources(self) -> tuple[int, int]:
        """Count cores and memory units as the scheduler and the kubelet count the two resources."""
        counted = self._effective(lambda share: Amounts({CORES: share.cores, MEMORY: share.memory_count}))
        return counted[CORES], counted[MEMORY]

    def demand(self, card_mib: int, unit_mib: int) -> Amounts:
        """Give cores, MiB and pods that it takes on cards of this size, whole cards with all their memory."""
        if not self.containers:
            return Amounts()
        used = self._effective(
            lambda share: Amounts({CORES: share.cores, MEMORY: memory_mib(share, card_mib, unit_mib)})
        )
        return used + Amounts({PODS: 1})

    def _effective(self, amount: Callable[[Share], Amounts]) -> Amounts:
        return effective_amounts([(each.role, amount(each.share)) for each in self.containers])


class ParsedRequest(Struct, frozen=True):
    """A pod's request as far as it could be read, and everything that is wrong with it."""

    request: PodRequest
    reasons: tuple[Reason, ...] = ()


def memory_mib(share: Share, card_mib: int, unit_mib: int) -> int:
    """Give the memory a share takes of cards of this size; a part that follows is rounded down to fit."""
    if share.cards:
        return share.cards * card_mib
    if share.follows:
        return share.cores * card_mib // CORES_PER_CARD
    return share.memory_units * unit_mib


def effective_amounts(parts: Iterable[tuple[Role, Amounts]]) -> Amounts:
    """Count a pod's containers as Kubernetes does, for each dimension by itself.

    Sidecars and containers run together. Each init container runs alone, beside the sidecars that were started
    before it. The pod needs the most that is ever needed at once.
    """
    together, sidecars, peak = Amounts(), Amounts(), Amounts()
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
    """Read what a pod asks for; all of its mistakes come back at once."""
    follows, reasons = containers_following_core(
        spec, annotations.get(scheme.names.memory_follows_core, ""), scheme.names
    )
    found: list[ContainerRequest] = []
    for path, role, container in iter_containers(spec):
        request, wrong = read_container(container, path, role, scheme, follows=container.name in follows)
        reasons += wrong
        if request is not None:
            found.append(request)
    return ParsedRequest(PodRequest(tuple(found)), tuple(reasons))


def request_held_by(spec: PodSpec, annotations: Mapping[str, str], scheme: Scheme) -> PodRequest:
    """Read what a pod that exists holds, whatever is wrong with how it asks: it has its resources all the same.

    What cannot be read as a share is counted by its plain numbers.
    """
    follows, _ = containers_following_core(spec, annotations.get(scheme.names.memory_follows_core, ""), scheme.names)
    found: list[ContainerRequest] = []
    for path, role, container in iter_containers(spec):
        request, wrong = read_container(container, path, role, scheme, follows=container.name in follows)
        if request is None and wrong:
            request = ContainerRequest(container.name, role, rough_share(container, scheme), "")
        if request is not None:
            found.append(request)
    return PodRequest(tuple(found))


def rough_share(container: Container, scheme: Scheme) -> Share:
    """Count the plain numbers of a container; what is none of cores and memory counts as one card."""
    cores = units = 0
    for part in resources_of(container):
        for key, value in part.items():
            if key not in scheme.by_key:
                continue
            kind = key.rpartition("/")[2]
            try:
                amount = min(parse(value).whole, MAX_COUNTED_CORES)
            except (QuantityError, TypeError):
                amount = CORES_PER_CARD
            if kind == "vcuda-memory":
                units = max(units, amount)
            else:
                cores = max(cores, amount if kind == "vcuda-core" else CORES_PER_CARD)
    return Share(cores, units, follows=not units)


def iter_containers(spec: PodSpec) -> Iterable[tuple[str, Role, Container]]:
    """Go through a pod's containers in starting order, with their field paths."""
    for index, container in enumerate(spec.init_containers or ()):
        role = Role.SIDECAR if container.restart_policy == "Always" else Role.INIT
        yield f"spec.initContainers[{index}]", role, container
    for index, container in enumerate(spec.containers or ()):
        yield f"spec.containers[{index}]", Role.APP, container


def containers_following_core(spec: PodSpec, listed: str, names: Names) -> tuple[frozenset[str], list[Reason]]:
    """Read the annotation that names the containers whose memory follows their cores."""
    if not listed:
        return frozenset(), []
    wanted = [name.strip() for name in listed.split(",") if name.strip()]
    known = [container.name for _, _, container in iter_containers(spec)]
    unknown = sorted(set(wanted).difference(known))
    if not unknown:
        return frozenset(wanted), []
    reason = Reason(
        code=Code.CONTAINER_UNKNOWN,
        field=f"metadata.annotations[{names.memory_follows_core}]",
        value=printable(", ".join(unknown)),
        message="the pod has no container of this name",
        remedy=f"name containers of the pod: {printable(', '.join(known))}",
    )
    return frozenset(wanted), [reason]


def read_container(
    container: Container, path: str, role: Role, scheme: Scheme, *, follows: bool
) -> tuple[ContainerRequest | None, list[Reason]]:
    """Read one container's request; no request and no reason if it asks for no GPU."""
    limits, requests = resources_of(container)
    ours = tuple([(key, value) for part in (limits, requests) for key, value in part.items() if key in scheme.by_key])
    if not ours:
        return None, []
    # The pods of a cluster ask for the same few sizes over and over, and nothing else decides how one is read: not even
    # which amount stands among the limits, for a key that stands in both is right only if both say the same.
    size = (ours, follows)
    if size in scheme.remembered:
        return ContainerRequest(container.name, role, *scheme.remembered[size]), []
    amounts, reasons = read_amounts(path, limits, requests, {key for key, _ in ours})
    speaking = {vocabulary.name: vocabulary for vocabulary in map(scheme.by_key.__getitem__, sorted(amounts))}
    if len(speaking) > 1:
        inside = [vocabulary for vocabulary in scheme.vocabularies if vocabulary.name in speaking]
        return None, [*reasons, vocabularies_mixed(f"{path}.resources", inside, amounts)]
    for vocabulary in speaking.values():
        rule = scheme.names.memory_follows_core
        try:
            share = check_memory(vocabulary.read(amounts), vocabulary, rule, follows=follows)
        except InvalidAmount as wrong:
            # What is missing may be missing only because it could not be read, which is a reason already.
            told = [each for each in (wrong, *wrong.also) if not reasons or each.code not in ABSENT]
            return None, [*reasons, *(amount_invalid(path, limits, requests, each) for each in told)]
        if not reasons:
            cache_read(scheme, size, (share, vocabulary.name))
            return ContainerRequest(container.name, role, share, vocabulary.name), []
    return None, reasons


def cache_read(scheme: Scheme, size: Hashable, read: tuple[Share, str]) -> None:
    """Keep how a size was read, in a bounded memory."""
    if len(scheme.remembered) >= MAX_CACHED_READS:
        scheme.remembered.clear()
    scheme.remembered[size] = read


def amount_invalid(path: str, limits: ResourceList, requests: ResourceList, wrong: InvalidAmount) -> Reason:
    """Say what a vocabulary does not allow, where it stands."""
    part, written = ("limits", limits) if wrong.key in limits else ("requests", requests)
    return Reason(
        code=wrong.code,
        field=f"{path}.resources.{part}[{wrong.key}]",
        value=printable(written.get(wrong.key, "")),
        message=wrong.message,
        remedy=wrong.remedy,
    )


def resources_of(container: Container) -> tuple[ResourceList, ResourceList]:
    """Give limits and requests as written; requests alone are taken for both, as the webhook makes them."""
    resources = container.resources
    if resources is None:
        return {}, {}
    return resources.limits or {}, resources.requests or {}


def read_amounts(
    path: str, limits: ResourceList, requests: ResourceList, keys: set[str]
) -> tuple[dict[str, Quantity], list[Reason]]:
    """Parse the amounts under these keys; zero counts as absent."""
    amounts: dict[str, Quantity] = {}
    reasons: list[Reason] = []
    for key in sorted(keys):
        parsed: list[Quantity] = []
        for part, written in (("limits", limits), ("requests", requests)):
            if key not in written:
                continue
            try:
                parsed.append(parse(written[key]))
            except QuantityError as wrong:
                reasons.append(quantity_invalid(f"{path}.resources.{part}[{key}]", written[key], str(wrong)))
        if len(parsed) > 1 and parsed[0].nanos != parsed[1].nanos:
            reasons.append(request_differs(f"{path}.resources.requests[{key}]", str(parsed[1]), str(parsed[0])))
        if parsed and parsed[0].nanos:
            amounts[key] = parsed[0]
    return amounts, reasons


def check_memory(share: Share, vocabulary: Vocabulary, rule: str, *, follows: bool) -> Share:
    """Apply the rule that a fraction says its memory, or that it follows the cores; whole cards need neither."""
    if share.cards or share.follows:
        return share
    if not follows and not share.memory_units:
        key = vocabulary.keys[0]
        raise InvalidAmount(
            Code.MEMORY_MISSING,
            key,
            "a fraction of a GPU without memory",
            f"add {vocabulary.keys[1]}, or name the container in the annotation {rule}",
        )
    if follows and share.memory_units > TOKEN:
        raise InvalidAmount(
            Code.MEMORY_INVALID,
            vocabulary.keys[1],
            f"memory is given, and the annotation {rule} as well",
            "leave one of the two out",
        )
    return Share(share.cores, follows=True) if follows else share


def quantity_invalid(field: str, value: str | float, message: str) -> Reason:
    """Say that an amount is no quantity."""
    return Reason(
        code=Code.QUANTITY_INVALID,
        field=field,
        value=printable(value),
        message=message,
        remedy="write a number such as 50, or 8Gi",
    )


def request_differs(field: str, request: str, limit: str) -> Reason:
    """Say that request and limit differ, which Kubernetes does not allow for such resources."""
    return Reason(
        code=Code.REQUEST_DIFFERS,
        field=field,
        value=request,
        message=f"differs from the limit, {limit}",
        remedy="leave requests out: they follow the limits",
    )


def vocabularies_mixed(where: str, speaking: Sequence[Vocabulary], amounts: Mapping[str, Quantity]) -> Reason:
    """Say that a container asks in two vocabularies at once."""
    keys = sorted(key for vocabulary in speaking for key in vocabulary.keys if key in amounts)
    return Reason(
        code=Code.VOCABULARIES_MIXED,
        field=where,
        value=", ".join(keys),
        message="one container asks in several vocabularies",
        remedy=f"keep those of {speaking[0].name} and remove the others",
    )
