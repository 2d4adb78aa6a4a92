"""A cluster in memory with GPU nodes and charged pods, and the scheduler's real process parts on it."""

import http.client
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from cluster.errors import NotFound
from cluster.in_memory import InMemoryCluster
from cluster.objects import EVENTS, LEASES, NAMESPACES, NODES, PODS, Pod
from ledger.ledger_store import LedgerStore
from scheduler.service import Service
from settings.configuration import Configuration, SchedulerSettings
from tests.waiting import eventually
from vcuda.charging import PodDemand
from vcuda.inventory import Gpu, encode_inventory
from vcuda.ledger import Ledger, LedgerState, pack_uid
from vcuda.names import Names
from vcuda.placement_annotation import GpuSlice, decode_placement
from vcuda.quota import Quota, parse_quota
from vcuda.quota_usage import Charge
from vcuda.request import request_held_by
from vcuda.scheme import build_scheme

SYSTEM, TEAM = "quotient-system", "team"
NAMES = Names()
SCHEME = build_scheme()
SIZES = {"A100-SXM4-40GB": 40960, "T4": 15360, "V100": 16384}
ADMITTED = "T4"


def gpu(node: str, index: int, model: str = "T4", **changes: Any) -> Gpu:
    made: dict[str, Any] = {
        "uuid": f"GPU-{node}-{index}",
        "index": index,
        "model": model,
        "memory_mib": SIZES[model],
        "healthy": True,
    }
    return Gpu(**(made | changes))


def container(
    name: str = "c0", cores: int = 50, memory: int = 8, *, sidecar: bool = False, **extra: Any
) -> dict[str, Any]:
    """A container that requests cores, and memory in units of 256 MiB."""
    limits = {NAMES.core: str(cores), NAMES.memory: str(memory)}
    always = {"restartPolicy": "Always"} if sidecar else {}
    return {"name": name, "image": "i", "resources": {"limits": limits, "requests": limits}, **always, **extra}


class World:
    """One cluster and one scheduler."""

    def __init__(self, *, lease: str = "", quota: str = "", **settings: Any) -> None:
        self.cluster = InMemoryCluster()
        for name in (SYSTEM, TEAM):
            self.cluster.create(NAMESPACES, {"metadata": {"name": name}})
        self.store = LedgerStore(self.cluster, SYSTEM)
        quotas: list[Quota] = [parse_quota(quota, "team/q")] if quota else []
        self.open_ledger(TEAM, quotas)
        chosen = SchedulerSettings(
            port=0, ops_port=0, ops_address="127.0.0.1", lease=lease, identity="own-pod", bind_timeout_s=2
        )
        self.configuration = replace(Configuration(), scheduler=replace(chosen, **settings))
        self.service = Service(self.configuration, self.cluster)

    def start(self) -> "World":
        self.service.start()
        eventually(lambda: self.service.synced)
        return self

    def stop(self) -> None:
        self.service.stop()

    def restart(self) -> None:
        """Replace the scheduler's process by a new one."""
        self.service.stop()
        self.service = Service(self.configuration, self.cluster)
        self.start()

    # What is in the cluster.

    def open_ledger(self, namespace: str, quotas: Sequence[Quota] = ()) -> None:
        ledger = Ledger("uid", LedgerState.OPEN)
        ledger.set_quotas(quotas, 1)
        self.store.create(namespace, ledger)

    def change_quota(self, quota: str) -> None:
        """Change the quota of the team, as the controller writes it into its ledger."""
        stored = self.store.read(TEAM)
        assert stored is not None
        ledger = stored.ledger.copy()
        ledger.set_quotas([parse_quota(quota, "team/q")], 2)
        self.store.write(stored, ledger)

    def add_node(self, name: str, gpus: int | Sequence[Gpu] = 1, model: str = "T4", pool: str = "") -> None:
        listed = [gpu(name, index, model) for index in range(gpus)] if isinstance(gpus, int) else gpus
        metadata = {
            "name": name,
            "annotations": {NAMES.inventory: encode_inventory(tuple(listed))},
            "labels": {NAMES.pool_label: pool} if pool else {},
        }
        try:
            self.cluster.patch(NODES, name, "", {"metadata": metadata})
        except NotFound:
            self.cluster.create(NODES, {"metadata": metadata})
        eventually(lambda: self.service.state.table.gpus(name) == tuple(listed))

    def add_pod(
        self,
        name: str,
        *containers: Mapping[str, Any],
        charged_for: str | None = ADMITTED,
        namespace: str = TEAM,
        annotations: Mapping[str, str] | None = None,
        init: Sequence[Mapping[str, Any]] = (),
        owner: str = "",
        **spec: Any,
    ) -> Pod:
        """Create a pod as the webhook would have admitted it, with its charge in the ledger."""
        metadata: dict[str, Any] = {"name": name, "namespace": namespace, "annotations": dict(annotations or {})}
        if owner:
            metadata["ownerReferences"] = [
                {"apiVersion": "v1", "kind": "Job", "name": owner, "uid": owner, "controller": True}
            ]
        body = {"containers": list(containers) or [container()], "initContainers": list(init), **spec}
        pod = self.cluster.create(PODS, {"metadata": metadata, "spec": body})
        if charged_for:
            self.charge(pod, charged_for)
        eventually(lambda: self.service.state.pod(pod.metadata.uid) is not None)
        return pod

    def charge(self, pod: Pod, model: str) -> None:
        amounts = PodDemand(request_held_by(pod.spec, pod.metadata.annotations, SCHEME), SCHEME.unit_mib)(SIZES[model])
        stored = self.store.read(pod.metadata.namespace)
        assert stored is not None
        ledger = stored.ledger.copy()
        ledger.put(pack_uid(pod.metadata.uid), Charge(model, amounts["cores"], amounts["memory"]), None)
        written = self.store.write(stored, ledger)
        version = written.config_map.metadata.resource_version
        eventually(lambda: self.service.ledgers.version(pod.metadata.namespace) == version)

    def charge_of(self, pod: Pod) -> Charge | None:
        stored = self.store.read(pod.metadata.namespace)
        entry = stored.ledger.entry(pack_uid(pod.metadata.uid)) if stored else None
        return entry[0] if entry else None

    def read(self, pod: Pod) -> Pod:
        return self.cluster.get(PODS, pod.metadata.name, pod.metadata.namespace)

    def placed(self, pod: Pod) -> dict[str, tuple[GpuSlice, ...]]:
        return decode_placement(self.read(pod).metadata.annotations.get(NAMES.placement, "")) or {}

    def end(self, pod: Pod, phase: str = "Succeeded") -> None:
        """Let a pod end."""
        metadata = pod.metadata
        self.cluster.patch(PODS, metadata.name, metadata.namespace, {"status": {"phase": phase}}, subresource="status")
        eventually(lambda: self.service.state.holding(metadata.uid) is None)

    def events(self, pod: Pod) -> list[str]:
        return [
            f"{each.reason}: {each.message}"
            for each in self.cluster.list(EVENTS).items
            if each.involved_object.uid == pod.metadata.uid
        ]

    def hold_lease(self, holder: str) -> None:
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 15}
        name = self.configuration.scheduler.lease
        try:
            self.cluster.patch(LEASES, name, SYSTEM, {"spec": spec})
        except NotFound:
            self.cluster.create(LEASES, {"metadata": {"name": name, "namespace": SYSTEM}, "spec": spec})

    # What kube-scheduler does.

    def names(self) -> list[str]:
        return [node.metadata.name for node in self.cluster.list(NODES).items]

    def call(self, verb: str, body: Any, *, status: int = 200) -> Any:
        """Send a request to the extender over HTTP; returns the decoded answer, or the text of a failure."""
        connection = http.client.HTTPConnection("127.0.0.1", self.service.server.port, timeout=30)
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", f"/scheduler/{verb}", data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        assert answer.status == status, text
        return json.loads(text) if status == 200 else text.decode()

    def raw(self, pod: Pod) -> Any:
        """The pod as kube-scheduler sends it."""
        return msgspec.json.decode(
            msgspec.json.encode(self.cluster._existing(("pods", pod.metadata.namespace, pod.metadata.name)))
        )

    def filter(self, pod: Pod, names: Sequence[str] | None = None) -> dict[str, Any]:
        asked = self.names() if names is None else list(names)
        answer: dict[str, Any] = self.call("filter", {"Pod": self.raw(pod), "NodeNames": asked})
        return answer

    def prioritize(self, pod: Pod, names: Sequence[str]) -> dict[str, int]:
        scores = self.call("prioritize", {"Pod": self.raw(pod), "NodeNames": list(names)})
        return {each["Host"]: each["Score"] for each in scores}

    def bind(self, pod: Pod, node: str) -> str:
        """Bind a pod; returns the error, empty if it was bound."""
        metadata = pod.metadata
        args = {"PodName": metadata.name, "PodNamespace": metadata.namespace, "PodUID": metadata.uid, "Node": node}
        return str(self.call("bind", args)["Error"])

    def schedule(self, pod: Pod, names: Sequence[str] | None = None) -> str:
        """Do what kube-scheduler does with a pod; returns its node, empty if there is none."""
        answer = self.filter(pod, names)
        assert not answer["Error"], answer
        fitting = answer["NodeNames"]
        if not fitting:
            return ""
        scores = self.prioritize(pod, fitting) if len(fitting) > 1 else {fitting[0]: 0}
        node: str = max(fitting, key=lambda name: scores[name])
        assert not self.bind(pod, node)
        eventually(lambda: self.service.state.claim(pod.metadata.uid) is None, "the bound pod in the watch")
        return node
