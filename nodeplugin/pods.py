"""The GPU pods bound to this node: what each requests, how it was placed, and whether it still runs.

An informer keeps them current. They are also saved to `pods.json`, so that a plugin which starts while the API server
is unavailable can serve the pods already bound. The JSON keys of that file are fixed, as in `checkpoint.py`.
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
from cluster.objects import PODS, Kind, Object, Pod
from nodeplugin.checkpoint import replace_file
from nodeplugin.device_ids import Resource
from vcuda.decision import Code, Unavailable
from vcuda.decoding import decoder_for
from vcuda.limits import ContainerLimits, admitted_options, decode_limits
from vcuda.names import MIRROR_ANNOTATION
from vcuda.placement_annotation import GpuSlice, decode_placement
from vcuda.pod_options import PodOptions
from vcuda.predicates import predicate_minors
from vcuda.quantity import QuantityError, parse_quantity
from vcuda.request import PodRequest, Role, iter_containers, parse_request, request_held_by, resources_of
from vcuda.scheme import Scheme

RUNNING = "Running"
# An allocation waits for this list; the kubelet admits no other pod until the allocation is answered.
LIST_TIMEOUT_S = 2.0
MAX_REASONS = 5

DeviceCounts = dict[Resource, int]


class BoundPod(Object, frozen=True, kw_only=True):
    """A GPU pod bound to this node.

    `counts` is how many devices the kubelet will request for each container. `request_error` says why the pod can get
    no GPU: an invalid request that bypassed the webhook. `predicate_minors` are the minor numbers of the cards that
    gpu-manager gave to each container. `has_started` is set once a container was created, which the kubelet does only
    after it has allocated for all of them.
    """

    request: PodRequest = PodRequest()
    request_error: str = field(name="mistake", default="")
    options: PodOptions = field(name="wishes", default=PodOptions())
    counts: dict[str, DeviceCounts] = field(default_factory=dict)
    placed: dict[str, tuple[GpuSlice, ...]] | None = None
    limits: dict[str, ContainerLimits] = field(default_factory=dict)
    predicate_minors: dict[str, tuple[int, ...]] = field(name="predicates", default_factory=dict)
    # Container names by the runtime's container ID.
    container_ids: dict[str, str] = field(default_factory=dict)
    has_started: bool = False
    has_ended: bool = False
    created: str = ""

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def title(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"

    def role_of(self, container: str) -> Role:
        return next(each.role for each in self.request.containers if each.name == container)


PodsByUid = Mapping[str, BoundPod]


def parse_bound_pod(pod: Pod, scheme: Scheme) -> BoundPod | None:
    """Read what this node needs of a pod; None if it requests no GPU, or is the mirror of a static pod."""
    annotations = pod.metadata.annotations
    request = request_held_by(pod.spec, annotations, scheme)
    if not request.is_gpu or MIRROR_ANNOTATION in annotations:
        return None
    limits = decode_limits(annotations.get(scheme.names.limits, ""))
    # A share without memory is served with the same share of the card's memory; the webhook would have added the
    # annotation that says so.
    reasons = [
        each for each in parse_request(pod.spec, annotations, scheme).reasons if each.code is not Code.MEMORY_MISSING
    ]
    metadata = pod.metadata
    statuses = (*pod.status.init_container_statuses, *pod.status.container_statuses)
    container_ids = {each.container_id.rpartition("/")[2]: each.name for each in statuses if each.container_id}
    return BoundPod(
        metadata=metadata.identity(),
        request=request,
        # Stored, and shown in an event of the pod, in which a few say enough.
        request_error="; ".join(map(str, reasons[:MAX_REASONS])),
        options=admitted_options(annotations, scheme),
        counts=device_counts(pod, scheme),
        placed=decode_placement(annotations.get(scheme.names.placement, "")),
        limits=dict(limits.containers) if limits else {},
        # gpu-manager's scheduler writes them before the pod runs; until then they are only a plan.
        predicate_minors=predicate_minors(pod.spec, annotations, scheme) if pod.status.phase == RUNNING else {},
        container_ids=container_ids,
        has_started=bool(container_ids) or pod.status.phase == RUNNING,
        has_ended=pod.status.has_ended,
        created=metadata.creation_timestamp or "",
    )


def device_counts(pod: Pod, scheme: Scheme) -> dict[str, DeviceCounts]:
    """Count the devices that the kubelet will request for each container; containers without any are left out."""
    by_container: dict[str, DeviceCounts] = {}
    for _, _, container in iter_containers(pod.spec):
        limits, _ = resources_of(container)
        counts: DeviceCounts = {}
        for resource in Resource:
            try:
                amount = parse_quantity(limits.get(resource.name_in(scheme.names), 0)).whole
            except QuantityError:
                continue
            if amount > 0:
                counts[resource] = amount
        if counts:
            by_container[container.name] = counts
    return by_container


class NodePods:
    """Follows the GPU pods of a node."""

    def __init__(self, cluster: Cluster, node: str, scheme: Scheme, file: Path) -> None:
        self._cluster, self._scheme, self._file = cluster, scheme, file
        self._selector = Selector(fields=f"spec.nodeName={node}")
        self.informer: Informer[BoundPod] = Informer(
            cluster,
            cast("Kind[BoundPod]", PODS),
            selector=self._selector,
            convert=lambda pod: parse_bound_pod(pod, scheme),
        )
        self._saved = read_pods(file)
        self._log = structlog.get_logger()

    def start(self, on_change: Callable[[], None]) -> None:
        """Start the informer; `on_change` is called, on its thread, for every change that matters to this node."""

        def handle(old: BoundPod | None, new: BoundPod | None) -> None:
            # Kubelets from 1.34 on keep rewriting the status of pods with several resources, only in another order:
            # such an update changes nothing but the metadata.
            if old is None or new is None or replace(old, metadata=new.metadata) != new:
                on_change()

        self.informer.on_change(handle)
        self.informer.start()

    def stop(self) -> None:
        self.informer.stop()

    def cached_pods(self) -> PodsByUid:
        """Return the informer's pods; before its first list, those that the previous plugin saved."""
        return index_by_uid(self.informer.all()) if self.informer.synced else self._saved

    def fetch_pods(self) -> PodsByUid | None:
        """List the pods from the API server; None if it does not answer in time."""
        try:
            pods = self._cluster.with_timeout(LIST_TIMEOUT_S).list(PODS, selector=self._selector).items
        except (ApiError, Unavailable) as error:
            self._log.warning("pod_list_failed", error=str(error))
            return None
        return index_by_uid(each for each in (parse_bound_pod(pod, self._scheme) for pod in pods) if each is not None)

    def save(self) -> None:
        """Write the pods to disk. A failure is only logged: the file is a help for the next start, no more."""
        if not self.informer.synced:
            return
        pods = [pod for pod in self.informer.all() if not pod.has_ended]
        try:
            replace_file(self._file, msgspec.json.encode(pods))
        except OSError as error:
            self._log.warning("pods_not_saved", error=str(error))


def index_by_uid(pods: Iterable[BoundPod]) -> dict[str, BoundPod]:
    return {pod.uid: pod for pod in pods}


def read_pods(file: Path) -> dict[str, BoundPod]:
    """Read the saved pods; empty if the file is missing or damaged."""
    try:
        return index_by_uid(decoder_for(list[BoundPod]).decode(file.read_bytes()))
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return {}
