"""Finds out which container an Allocate call is for, by asking the kubelet and, if needed, the API server.

The rules are in `attribution.py`; here is what to ask, when, and what to do without an answer.
"""

from collections.abc import Sequence
from contextlib import suppress

import structlog

from nodeplugin.allocation_store import AllocationStore
from nodeplugin.attribution import (
    Attribution,
    Call,
    ContainerTarget,
    FirstCall,
    KubeletListing,
    ambiguous_message,
    attribute_call,
)
from nodeplugin.kubelet import Kubelet, KubeletError, ListedContainer, UnknownPod
from nodeplugin.pods import NodePods, PodsByUid
from nodeplugin.refusal import RECREATE, AllocationRefused
from vcuda.names import Names
from vcuda.request import Role

# Each is a PodResources call, and the kubelet accepts a burst of 10.
MAX_PODS_ASKED = 8


class CallAttributor:
    """Attributes the kubelet's calls to containers. Has no state of its own."""

    def __init__(self, allocations: AllocationStore, names: Names, *, pods: NodePods, kubelet: Kubelet) -> None:
        self._allocations, self._names, self._pods, self._kubelet = allocations, names, pods, kubelet
        self._log = structlog.get_logger()

    def list_candidates(self, call: Call, previous: FirstCall | None) -> Sequence[ListedContainer]:
        """List the containers that a coming Allocate call may be for; KubeletError if the kubelet does not answer.

        Must be called before the Allocate call, in GetPreferredAllocation: this may use List.
        """
        pods = self._pods.cached_pods()
        waiting = self._waiting_pods(pods)
        # With one waiting pod a Get is enough, and cheaper than a List of all pods.
        if len(waiting) == 1:
            pod = pods[waiting[0]]
            with suppress(KubeletError):
                containers = self._kubelet.get_pod_containers(pod.metadata.namespace, pod.metadata.name)
                if self._attribute(call, previous, KubeletListing(self._names, containers), pods).is_unambiguous:
                    return containers
        return self._kubelet.list_containers()

    def find_target(
        self, call: Call, previous: FirstCall | None, listed: Sequence[ListedContainer] | None
    ) -> tuple[ContainerTarget | None, frozenset[str]]:
        """Return the container that gets everything with this call.

        If this is a first call, return None and the UIDs of the pods it may be for. `listed` is the result of
        `list_candidates` for this call, None if there is none. Raises AllocationRefused if there is no clear answer.
        """
        attribution = self._attribute_with_retry(call, previous, listed)
        if attribution is None:
            return self._attribute_unlisted(call, previous)
        last, first = attribution.last_call_of, attribution.first_call_of
        if len(last) == 1 and not first:
            self._check_init_containers(last[0])
            return last[0], frozenset()
        if last:
            raise AllocationRefused(ambiguous_message((*last, *first)))
        if not first:
            raise AllocationRefused(
                f"no pod on this node is waiting for {call.count} {call.resource.name_in(self._names)}; "
                f"static pods cannot use GPUs; for any other pod: {RECREATE}"
            )
        return None, frozenset(each.pod.uid for each in first)

    def _attribute_with_retry(
        self, call: Call, previous: FirstCall | None, listed: Sequence[ListedContainer] | None
    ) -> Attribution | None:
        """Attribute by the informer's cache, then, if that is not conclusive, by a fresh list of pods.

        The kubelet may know a pod before the informer does, or a newer pod under the same name. None if the kubelet
        lists nothing.
        """
        attribution: Attribution | None = None
        for use_cache in (True, False):
            pods = self._pods.cached_pods() if use_cache else self._pods.fetch_pods()
            if pods is None:
                continue
            listing = self._get_listing(call, pods) if listed is None else KubeletListing(self._names, listed)
            if listing is None:
                continue
            attribution = self._attribute(call, previous, listing, pods)
            targets = (*attribution.last_call_of, *attribution.first_call_of)
            # A call for an allocated container is either a repetition, by a kubelet that lost the response, or for a
            # new pod of the same name that is not in the cache yet. A fresh list tells which.
            if attribution.is_unambiguous and not any(self._is_allocated(each) for each in targets):
                break
        return attribution

    def _attribute(
        self, call: Call, previous: FirstCall | None, listing: KubeletListing, pods: PodsByUid
    ) -> Attribution:
        allocated = {uid: allocation.containers for uid, allocation in self._allocations.all().items()}
        return attribute_call(
            call, previous, listing, pods, allocated, checkpointed=self._kubelet.checkpointed_containers
        )

    def _is_allocated(self, target: ContainerTarget) -> bool:
        return target.container in self._allocations.allocated_containers(target.pod.uid)

    def _get_listing(self, call: Call, pods: PodsByUid) -> KubeletListing | None:
        """Ask the kubelet for single pods, which is allowed during Allocate; None if it answers for none of them.

        The kubelet skips GetPreferredAllocation when it reuses an init container's IDs: then the call is for the pod
        that had them. Otherwise ask for the pods that wait.
        """
        reusing = [
            allocation.uid
            for allocation in self._allocations.all().values()
            if call.ids & {each for one in allocation.containers.values() for each in one.ids.get(call.resource, ())}
        ]
        containers: list[ListedContainer] = []
        answered = False
        for uid in (reusing or self._waiting_pods(pods))[:MAX_PODS_ASKED]:
            if (pod := pods.get(uid)) is None:
                continue
            try:
                containers += self._kubelet.get_pod_containers(pod.metadata.namespace, pod.metadata.name)
                answered = True
            except UnknownPod:
                answered = True
            except KubeletError as error:
                self._log.warning("pod_resources_get_failed", pod=pod.title, error=str(error))
        if answered:
            return KubeletListing(self._names, containers)
        # Kubelets before 1.34 have no Get. The owners of reused IDs are known to be admitted even so.
        pod_keys = [(pods[uid].metadata.namespace, pods[uid].metadata.name) for uid in reusing if uid in pods]
        return KubeletListing(self._names, pod_keys=pod_keys) if pod_keys else None

    def _attribute_unlisted(self, call: Call, previous: FirstCall | None) -> tuple[None, frozenset[str]]:
        """Answer without PodResources: a first call needs no container, a second one does."""
        if previous is not None and previous.call.resource is call.resource.other:
            raise AllocationRefused(
                "the kubelet's PodResources API does not answer, so the container of this allocation is unknown; "
                f"check the kubelet, then {RECREATE}"
            )
        return None, frozenset(self._pods.cached_pods())

    def _check_init_containers(self, target: ContainerTarget) -> None:
        """Refuse a pod with an init container that got an empty response for both of its calls.

        That happens if this plugin started between the two: it took the second call for a first one.
        """
        if not any(each.role is Role.INIT for each in target.pod.request.containers):
            return
        # The kubelet writes its checkpoint after each container, so earlier containers of this pod are in there.
        done = self._kubelet.checkpointed_containers(target.pod.uid) or set()
        if missing := done.difference(self._allocations.allocated_containers(target.pod.uid)):
            names = ", ".join(sorted(missing))
            raise AllocationRefused(
                f"pod {target.pod.title}, init container {names}: got no GPU, because the node plugin was restarted "
                f"during its allocation; {RECREATE}"
            )

    def _waiting_pods(self, pods: PodsByUid) -> list[str]:
        """Return the UIDs of pods with a GPU container that has no allocation yet."""
        return [
            pod.uid
            for pod in pods.values()
            if not pod.has_ended and pod.counts.keys() - self._allocations.allocated_containers(pod.uid)
        ]
