"""What to do about a pod that waits or does not start, by parts of the messages about it."""

from collections.abc import Iterable

DOCTOR = "run `quotient doctor` as an administrator"

# Part of a message of Quotient's scheduler (vcuda/fit_summary.py, vcuda/node_fit.py) -> what to do. A message lists the
# problems of all nodes, so those that end by themselves come first: a node of another model matters less than one where
# memory becomes free.
GPU_ADVICE = (
    ("not charged to the GPU quota", f"wait some seconds: the controller charges the pod; if it does not, {DOCTOR}"),
    ("free together", "wait until a pod that uses {models} ends, or ask for less (vcuda-core, vcuda-memory)"),
    (" cores free, the best has", "wait until a pod that uses {models} ends, or ask for fewer cores (vcuda-core)"),
    (" free, the best has", "wait until a pod that uses {models} ends, or ask for less memory (vcuda-memory)"),
    (" unused GPU", "wait until the pods on whole GPUs of {models} end, or ask for part of a GPU"),
    ("do not fit on the free GPUs together", "wait until a pod that uses {models} ends, or give containers less each"),
    ("used by other pods of the workload", "wait, run fewer replicas, or remove the annotation spread-members"),
    ("not searched yet", "wait: the scheduler tries a part of the nodes at a time for pods with several containers"),
    ("not known to the GPU scheduler yet", f"wait some seconds: the node is new; if it stays, {DOCTOR}"),
    ("exceeded quota", "wait until pods of the namespace end, or have an administrator raise the quota"),
    ("unhealthy or cordoned", "wait until the GPUs recover, or have an administrator look at them: `quotient doctor`"),
    ("quota", "name models that the quota grants (annotation use-gputype), or have an administrator grant others"),
    ("fewer than ", "ask for fewer GPUs per pod: no node has that many of a model that the pod may use"),
    ("no GPU has ", "ask for less memory (vcuda-memory), or allow larger models (annotation use-gputype)"),
    (
        "isolation",
        "lower min-isolation (annotation) or minIsolation (quota), or ask for whole GPUs: they are exclusive",
    ),
    ("requested GPUs not on this node", "check the annotations use-gpuuuid and nouse-gpuuuid"),
    ("which the pod excludes", "allow more models: see the annotation nouse-gputype"),
    ("node pool", "ask an administrator for a node pool with such GPUs (`pools` of the quota)"),
    ("no node passed the scheduler's other filters", "see what kube-scheduler reports: kubectl describe pod {pod}"),
    ("not enough CPU or memory on this node", "wait until other pods end, or ask for less CPU and memory of the node"),
    ("no GPUs on this node", f"no node has GPUs: {DOCTOR}"),
)
# What remains of a message in which no part was found: nodes lack the models.
OTHER_GPU_ADVICE = "allow models that the cluster has (annotation use-gputype), or wait for a node with {models}"

# Part of a message of kube-scheduler -> what to do.
KUBE_SCHEDULER_ADVICE = (
    ("/scheduler/", f"Quotient's extender does not answer kube-scheduler: {DOCTOR}"),
    ("vcuda-", f"wait until pods with GPUs end, or ask for less; if nodes have more GPUs than they offer, {DOCTOR}"),
    ("Insufficient ", "wait until other pods end, or ask for less of it in the pod's requests"),
    ("untolerated taint", "add a toleration for the taint to the pod, or remove the taint"),
    ("affinity", "check nodeSelector and affinity of the pod against the labels of nodes with GPUs"),
    ("unschedulable", "wait until the nodes are uncordoned (kubectl uncordon), or add nodes"),
    ("topology spread", "check topologySpreadConstraints of the pod"),
    ("olume", "check the pod's PersistentVolumeClaims: kubectl get pvc -n {namespace}"),
)
OTHER_KUBE_SCHEDULER_ADVICE = "kubectl describe pod {pod} -n {namespace}"

# Reason of a container that does not run -> what to do.
CONTAINER_ADVICE = (
    ("ImagePull", "check the image's name and the pull secret"),
    ("InvalidImageName", "correct the image's name"),
    ("CreateContainerConfigError", "check the ConfigMaps and Secrets that the container refers to"),
    ("CrashLoopBackOff", "see why it ends: kubectl logs {pod} -n {namespace} -c {container} --previous"),
    ("OOMKilled", "raise the container's memory limit (main memory, not vcuda-memory)"),
    ("ContainerCreating", "wait; if it takes minutes: kubectl describe pod {pod} -n {namespace}"),
    ("PodInitializing", "wait for the init containers: kubectl logs {pod} -n {namespace} --all-containers"),
)
OTHER_CONTAINER_ADVICE = "kubectl describe pod {pod} -n {namespace}"


def advice_for(text: str, table: Iterable[tuple[str, str]], default: str, **names: str) -> str:
    """Return the first advice of the table whose part is in the text."""
    found = next((advice for part, advice in table if part in text), default)
    return found.format(**names)
