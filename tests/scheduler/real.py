"""A real API server with webhook, controller, and Quotient's scheduler: a real kube-scheduler with the extender."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.api import ApiCluster, connect
from cluster.errors import AlreadyExists, ApiError
from cluster.objects import CONFIG_MAPS, NODES, PODS, Kind, Object, Pod
from tests.cluster import layout
from tests.cluster.objects import new_namespace
from tests.cluster.quotient import SYSTEM, run_beside, scheduler_metric
from tests.cluster.real import RealCluster
from tests.scheduler.overcommit import OvercommitChecker
from tests.waiting import eventually
from vcuda.decision import Unavailable
from vcuda.inventory import Gpu, encode_inventory
from vcuda.ledger import Ledger, decode_ledger
from vcuda.names import LEDGER_KEY, LEDGER_PREFIX, SCHEDULER, Names

NAMES = Names()
REPLICA_SETS = Kind("apps/v1", "ReplicaSet", "replicasets", Object, partial=True)
SIZES = {"A100-SXM4-40GB": 40960, "T4": 15360}
UNIT_MIB = 256


class SchedulerCluster:
    """One cluster with the scheduler as processes; `replicas` of it run."""

    def __init__(self, real: RealCluster, *replicas: str) -> None:
        self.real = real
        real.kill("kube-controller-manager")
        real.run(layout.PATIENT_CONTROLLERS)
        run_beside(real)
        self.cluster: ApiCluster = connect(str(real.kubeconfig))
        self.sizes: dict[str, int] = {}
        self.checker = OvercommitChecker(self.cluster, self.sizes)
        self._replicas: list[str] = []
        for replica in replicas:
            self.start_replica(replica)

    def start_replica(self, replica: str) -> None:
        self._replicas.append(replica)
        self.real.run(layout.extender_name(replica))
        self.real.run(layout.kube_scheduler_name(replica))

    def set_max_backoff(self, replica: str, seconds: int) -> None:
        """Configure a replica's kube-scheduler before it is started."""
        file = self.real.layout.state / f"{layout.kube_scheduler_name(replica)}.json"
        configuration = json.loads(file.read_text())
        file.write_text(json.dumps(configuration | {"podMaxBackoffSeconds": seconds}))

    def start_ended(self) -> None:
        """Start each kube-scheduler that has ended, as the kubelet would: it ends when it loses its Lease."""
        running = self.real.running()
        for replica in self._replicas:
            if (name := layout.kube_scheduler_name(replica)) not in running:
                self.real.run(name)

    def is_led_by_another(self, leader: str) -> bool:
        """Whether a replica other than this one leads, started again if its kube-scheduler had ended."""
        self.start_ended()
        return self.holder() not in ("", leader)

    def has_bound(self, namespace: str, count: int) -> bool:
        """Whether this many pods are bound, by kube-schedulers that are started again when they have ended."""
        self.start_ended()
        pods = self.pods(namespace)
        bound = len(self.bound(namespace))
        if bound == len(pods) < count:
            # A ReplicaSet waits for minutes after a create that failed, as during a restart of the API server.
            changed = f"quotient.test/changed={time.time()}"
            self.real.kubectl("annotate", "replicasets", "--all", "-n", namespace, "--overwrite", changed, check=False)
        return bound == count

    def stop(self) -> None:
        self.checker.stop()
        self.real.stop()

    def add_node(self, name: str, gpus: int, model: str = "T4", labels: Mapping[str, str] | None = None) -> None:
        """Create a node as a kubelet and the node plugin would have: Ready, with GPUs."""
        cards = tuple(
            Gpu(uuid=f"GPU-{name}-{index}", index=index, model=model, memory_mib=SIZES[model], healthy=True)
            for index in range(gpus)
        )
        self.sizes.update({card.uuid: card.memory_mib for card in cards})
        metadata = {
            "name": name,
            "annotations": {NAMES.inventory: encode_inventory(cards)},
            "labels": {"kubernetes.io/hostname": name, **(labels or {})},
        }
        self.cluster.create(NODES, {"metadata": metadata})
        self.report_ready(name, gpus, model)

    def report_ready(self, name: str, gpus: int, model: str) -> None:
        resources = {
            "cpu": "64",
            "memory": "256Gi",
            "pods": "500",
            NAMES.core: str(100 * gpus),
            NAMES.memory: str(gpus * SIZES[model] // UNIT_MIB),
        }
        status = {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2038-01-01T00:00:00Z"}],
        }
        self.cluster.patch(NODES, name, "", {"status": status}, subresource="status")
        self.cluster.patch(NODES, name, "", {"spec": {"taints": None}})

    def namespace(self, name: str, quota: str = "") -> str:
        new_namespace(self.cluster, name)
        if quota:
            metadata = {"name": "gpu-quota", "namespace": name, "labels": {NAMES.quota_label: "true"}}
            self.cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {"quota.yaml": quota}})
            eventually(lambda: self.ledger(name).quotas, "the quota in the ledger")
        return name

    def pod(self, namespace: str, name: str, cores: int = 50, memory: int = 8, **spec: Any) -> Pod:
        metadata = {"name": name, "namespace": namespace, **spec.pop("metadata", {})}
        return self.cluster.create(PODS, {"metadata": metadata, "spec": pod_spec(cores, memory, **spec)})

    def replica_set(self, namespace: str, name: str, count: int, cores: int, memory: int, **spec: Any) -> None:
        """Create pods with an owner, which replaces those that are deleted."""
        labels = {"set": name}
        template = {"metadata": {"labels": labels}, "spec": pod_spec(cores, memory, **spec)}
        wanted = {"replicas": count, "selector": {"matchLabels": labels}, "template": template}
        body = {"metadata": {"name": name, "namespace": namespace}, "spec": wanted}
        retry(lambda: self.cluster.create(REPLICA_SETS, body))

    def pods(self, namespace: str) -> list[Pod]:
        return [pod for pod in self.cluster.list(PODS, namespace).items if not pod.metadata.deletion_timestamp]

    def bound(self, namespace: str) -> list[Pod]:
        return [pod for pod in self.pods(namespace) if pod.spec.node_name]

    def describe(self, namespace: str) -> str:
        """Return what is missing: pods without a node, ReplicaSets, and the ends of the scheduler's logs."""
        unbound = [pod for pod in self.pods(namespace) if not pod.spec.node_name]
        conditions = [f"{pod.metadata.name}: {each.message}" for pod in unbound[:5] for each in pod.status.conditions]
        sets = self.real.kubectl("get", "replicasets", "-n", namespace, check=False)
        logs = [self.real.log_end(layout.extender_name(replica), 5) for replica in layout.REPLICAS]
        return "\n".join([f"{len(unbound)} unbound", *conditions, sets, *logs])

    def ledger(self, namespace: str) -> Ledger:
        try:
            config_map = self.cluster.get(CONFIG_MAPS, LEDGER_PREFIX + namespace, SYSTEM)
        except ApiError:
            return Ledger()
        return decode_ledger(config_map.data[LEDGER_KEY])

    def metric(self, replica: str, name: str) -> float:
        return scheduler_metric(self.real, name, replica)

    def requests(self, replica: str, verb: str) -> float:
        """Return how many requests of kube-scheduler an extender has answered."""
        return scheduler_metric(self.real, f'requests_total{{result="answered",verb="{verb}"}}', replica)

    def holder(self) -> str:
        """Return the replica whose kube-scheduler holds the Lease; empty if there is none."""
        found = re.match(r"replica-(\w)_", self._lease())
        return found[1] if found else ""

    def _lease(self) -> str:
        path = "jsonpath={.spec.holderIdentity} {.spec.renewTime}"
        return self.real.kubectl("get", "lease", SCHEDULER, "-n", SYSTEM, "-o", path, check=False)

    def is_led_since(self, lease: str) -> bool:
        """Whether the Lease was renewed since it was read: a holder that was killed holds it for a while."""
        return bool(self.holder()) and self._lease() != lease

    def leader(self) -> str:
        """Wait until a replica holds the Lease, and return it."""
        eventually(self.holder, "a leader", 60)
        return self.holder()

    def renewing_leader(self) -> str:
        """The same, but not one that has ended and still holds it."""
        lease = self._lease()
        eventually(lambda: self.is_led_since(lease), "a leader", 60)
        return self.holder()

    def create_volume_claim(self, namespace: str, name: str) -> None:
        """Create a volume claim that is provisioned when a pod needs it: by `provision`, and not before."""
        storage = {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": "quotient.test/slow",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
        size = {"requests": {"storage": "1Gi"}}
        spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": name, "resources": size}
        metadata = {"name": name, "namespace": namespace}
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
        for each in (storage, claim):
            self.real.kubectl("apply", "-f-", stdin=json.dumps(each))

    def selected_node(self, namespace: str, claim: str) -> str:
        """Return the node that kube-scheduler chose for a volume claim."""
        path = r"jsonpath={.metadata.annotations.volume\.kubernetes\.io/selected-node}"
        return self.real.kubectl("get", "pvc", claim, "-n", namespace, "-o", path)

    def provision(self, namespace: str, claim: str) -> None:
        """Create the volume of a claim, as its provisioner would."""
        uid = self.real.kubectl("get", "pvc", claim, "-n", namespace, "-o", "jsonpath={.metadata.uid}")
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": claim,
            "hostPath": {"path": "/tmp/volume"},
            "claimRef": {"kind": "PersistentVolumeClaim", "namespace": namespace, "name": claim, "uid": uid},
        }
        volume = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": claim}, "spec": spec}
        self.real.kubectl("apply", "-f-", stdin=json.dumps(volume))

    def audit_log(self) -> list[dict[str, Any]]:
        """Return the successful writes that the API server logged, if it is the audited one."""
        file = self.real.layout.logs / "audit.log"
        entries = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [each for each in entries if each["responseStatus"]["code"] < 300 and "objectRef" in each]

    def events(self, namespace: str, name: str, reason: str) -> list[str]:
        listed = json.loads(
            self.real.kubectl(
                "get", "events", "-n", namespace, "-o", "json", f"--field-selector=involvedObject.name={name}"
            )
        )
        return [each["message"] for each in listed["items"] if each["reason"] == reason]


def pod_spec(cores: int, memory: int, **spec: Any) -> dict[str, Any]:
    limits = {NAMES.core: str(cores), NAMES.memory: str(memory)}
    containers: Sequence[Any] = [{"name": "c", "image": "i", "resources": {"limits": limits}}]
    return {"containers": containers, "terminationGracePeriodSeconds": 0, **spec}


def retry(action: Any, timeout_s: float = 60.0) -> None:
    """Do something while parts of the cluster are being killed."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            action()
        except AlreadyExists:
            return
        except (ApiError, Unavailable):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        else:
            return
