"""Why a pod does not fit on a node."""

from enum import IntEnum


class NodeProblem(IntEnum):
    """Why a pod does not fit on a node. Kubernetes groups nodes by equal texts, so each problem has a constant one."""

    NONE = 0
    NODE_UNKNOWN = 1
    NO_GPUS = 2
    POOL = 3
    MODEL = 4
    QUOTA = 5
    UUID = 6
    UNAVAILABLE = 7
    ISOLATION = 8
    TOO_FEW = 9
    TOO_SMALL = 10
    MEMBERS = 11
    IN_USE = 12
    MEMORY = 13
    CORES = 14
    CORES_AND_MEMORY = 15
    COMBINATION = 16
    NOT_SEARCHED = 17
    UNCHARGED = 18
    HOST = 19

    @property
    def text(self) -> str:
        return TEXTS[self]

    @property
    def is_resolvable(self) -> bool:
        """Whether eviction of other pods could make room: only then kube-scheduler may look for pods to preempt."""
        return NodeProblem.IN_USE <= self <= NodeProblem.NOT_SEARCHED

    @property
    def is_shortage(self) -> bool:
        """Whether something is not free: on a busy cluster, what it is changes with every pod that ends."""
        return NodeProblem.IN_USE <= self <= NodeProblem.COMBINATION


TEXTS = {
    NodeProblem.NONE: "",
    NodeProblem.NODE_UNKNOWN: "node not known to the GPU scheduler yet",
    NodeProblem.NO_GPUS: "no GPUs on this node",
    NodeProblem.POOL: "node pool not allowed for this namespace",
    NodeProblem.MODEL: "model not on this node",
    NodeProblem.QUOTA: "GPU quota does not grant the models of this node",
    NodeProblem.UUID: "requested GPUs not on this node",
    NodeProblem.UNAVAILABLE: "GPUs unhealthy or cordoned",
    NodeProblem.ISOLATION: "isolation weaker than requested",
    NodeProblem.TOO_FEW: "not enough GPUs on this node",
    NodeProblem.TOO_SMALL: "no GPU with enough memory",
    NodeProblem.MEMBERS: "used by other pods of the workload",
    NodeProblem.IN_USE: "not enough unused GPUs",
    NodeProblem.MEMORY: "no GPU with enough free memory",
    NodeProblem.CORES: "no GPU with enough free cores",
    NodeProblem.CORES_AND_MEMORY: "no GPU with enough free cores and memory",
    NodeProblem.COMBINATION: "containers do not fit on the free GPUs together",
    NodeProblem.NOT_SEARCHED: "not searched yet",
    NodeProblem.HOST: "not enough CPU or memory on this node",
    NodeProblem.UNCHARGED: "pod not charged to the GPU quota of its namespace",
}
