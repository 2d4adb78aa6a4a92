"""The GPU pods of this node: what each asks for, how it was placed, and whether it still runs.

What is known of them is kept in a file as well, so that a plugin that starts while the API server is away can serve the
pods that are already bound.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import cast

import msgspec
import structlog
from msgspec import field
from msgspec.structs import replace

from cluster.errors import ApiError
from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import PODS, Kind, Metadata, Object, ObjectReference, Pod
from nodeplugin.checkpoint import replace_file
from nodeplugin.device_ids import Resource
from vcuda.decision import Code, Unavailable
from vcuda.decoding import decoder_for
from vcuda.limits import ContainerLimits, decode_limits
from vcuda.names import ANCESTOR_OWNED, MIRROR
from vcuda.placement_annotation import GpuSlice, decode_placement
from vcuda.pod_options import PodOptions, read_pod_options
from vcuda.quantity import QuantityError, parse
from vcuda.request import PodRequest, Role, iter_containers, parse_request, request_held_by, resources_of
from vcuda.scheme import Scheme

RUNNING = "Running"
REFRESH_S = 2.0
PREDICATE = ANCESTOR_OWNED[0]

Counts = dict[Resource, int]


class BoundPod(Object, frozen=True, kw_only=True):
    """A GPU pod on this node. `counts` is what the kubelet asks for each container, in the configured names.

    `mistake` says why it can get nothing: it slipped past the webhook with a request that means nothing.
    `predicates` are the minor numbers that an ancestor's node agent gave to its containers.
    """

    request: PodRequest = PodRequest()
    mistake: str = ""
    # The key of pods.json files written by earlier versions.
    options: PodOptions = field(name="wishes", default=PodOptions())
    counts: dict[str, Counts] = field(default_factory=dict)
    placed: dict[str, tuple[GpuSlice, ...]] | None = None
    limits: dict[str, ContainerLimits] = field(default_factory=dict)
    predicates: dict[str, tuple[int, ...]] = field(default_factory=dict)
    container_ids: dict[str, str] = field(default_factory=dict)
    has_ended: bool = False
    created: str = ""

    @property
    def uid(self) -> str:
        """Its uid."""
        return self.metadata.uid

    @property
    def title(self) -> str:
        """Name it for people."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    def role_of(self, container: str) -> Role:
        """Say when a container runs."""
        return next(each.role for each in self.request.containers if each.name == container)

    def reference(self) -> ObjectReference:
        """Name it for events."""
        return ObjectReference("v1", "Pod", self.metadata.namespace, self.metadata.name, self.uid)


PodsByUid = Mapping[str, BoundPod]


def bound_pod(pod: Pod, scheme: Scheme) -> BoundPod | None:
    """Read a pod as far as it concerns this node; None if it asks for no GPU."""
    annotations = pod.metadata.annotations
    request = request_held_by(pod.spec, annotations, scheme)
    if not request.is_gpu or MIRROR in annotations:
        return None
    options, _ = read_pod_options(annotations, scheme)
    limits = decode_limits(annotations.get(scheme.names.limits, ""))
    if limits is not None:
        options = PodOptions(models=limits.models, avoided=limits.avoid_models)
    # One that asks for a part of a card and no memory is served, with as much of its memory; the webhook would have
    # had it say so.
    wrong = [
        each for each in parse_request(pod.spec, annotations, scheme).reasons if each.code is not Code.MEMORY_MISSING
    ]
    metadata = pod.metadata
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    return BoundPod(
        metadata=Metadata(
            name=metadata.name,
            namespace=metadata.namespace,
            uid=metadata.uid,
            resource_version=metadata.resource_version,
        ),
        request=request,
        mistake="; ".join(map(str, wrong)),
        options=options,
        counts=counts_in(pod, scheme),
        placed=decode_placement(annotations.get(scheme.names.placement, "")),
        limits=dict(limits.containers) if limits else {},
        predicates=predicates_in(pod, scheme),
        container_ids={each.container_id.rpartition("/")[2]: each.name for each in statuses if each.container_id},
        has_ended=pod.status.has_ended,
        created=metadata.creation_timestamp or "",
    )


def counts_in(pod: Pod, scheme: Scheme) -> dict[str, Counts]:
    """Count what the kubelet will ask for, container by container."""
    found: dict[str, Counts] = {}
    for _, _, container in iter_containers(pod.spec):
        limits, _ = resources_of(container)
        counts: Counts = {}
        for resource in Resource:
            try:
                amount = parse(limits.get(resource.name_in(scheme.names), 0)).whole
            except QuantityError:
                continue
            if amount > 0:
                counts[resource] = amount
        if counts:
            found[container.name] = counts
    return found


def predicates_in(pod: Pod, scheme: Scheme) -> dict[str, tuple[int, ...]]:
    """Read which cards an ancestor gave to the containers of a pod that runs; it counted containers, not names."""
    found: dict[str, tuple[int, ...]] = {}
    if pod.status.phase != RUNNING:
        return found
    for index, container in enumerate(pod.spec.containers or ()):
        for names in scheme.all_names:
            text = pod.metadata.annotations.get(f"{names.domain}/{PREDICATE}{index}", "")
            parts = [part.strip() for part in text.split(",")]
            if text and all(part.isdecimal() and len(part) < 4 for part in parts):  # noqa: PLR2004 - a minor number
                found[container.name] = tuple(map(int, parts))
    return found


class NodePods:
    """Follows the GPU pods of a node."""

    def __init__(self, cluster: Cluster, node: str, scheme: Scheme, file: Path) -> None:
        self._cluster, self._scheme, self._file = cluster, scheme, file
        self._selector = Selector(fields=f"spec.nodeName={node}")
        self.informer: Informer[BoundPod] = Informer(
            cluster, cast("Kind[BoundPod]", PODS), selector=self._selector, convert=lambda pod: bound_pod(pod, scheme)
        )
        self._before = read_pods(file)
        self._log = structlog.get_logger()

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin to follow, and tell of every change that matters here.

        Kubelets from 1.34 on rewrite the status of pods with several resources again and again, in another order.
        """

        def heard(old: BoundPod | None, new: BoundPod | None) -> None:
            if old is None or new is None or replace(old, metadata=new.metadata) != new:
                on_change()

        self.informer.on_change(heard)
        self.informer.start()

    def stop(self) -> None:
        """End."""
        self.informer.stop()

    def known(self) -> PodsByUid:
        """Give the pods by uid: as the API server last said, or as the last plugin knew them."""
        return by_uid(self.informer.all()) if self.informer.synced else self._before

    def asked(self) -> PodsByUid | None:
        """Ask the API server itself; None if it does not answer in time."""
        try:
            found = self._cluster.with_timeout(REFRESH_S).list(PODS, selector=self._selector).items
        except (ApiError, Unavailable) as away:
            self._log.warning("pods_not_asked", cause=str(away))
            return None
        return by_uid(each for each in (bound_pod(pod, self._scheme) for pod in found) if each is not None)

    def keep(self) -> None:
        """Write down what is known, for a plugin that starts while the API server is away."""
        if not self.informer.synced:
            return
        pods = [pod for pod in self.informer.all() if not pod.has_ended]
        try:
            replace_file(self._file, msgspec.json.encode(pods))
        except OSError as wrong:
            self._log.warning("pods_not_kept", cause=str(wrong))


def by_uid(pods: Iterable[BoundPod]) -> dict[str, BoundPod]:
    """File pods by their uid."""
    return {pod.uid: pod for pod in pods}


def read_pods(file: Path) -> dict[str, BoundPod]:
    """Read the pods that were known; none if the file is not there or broken."""
    try:
        return by_uid(decoder_for(list[BoundPod]).decode(file.read_bytes()))
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return {}
