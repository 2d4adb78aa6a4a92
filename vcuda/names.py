"""Every name that Quotient reads or writes in a cluster: objects, labels, annotations, resources, variables.

Names on pods, nodes and quotas depend on the configured domain (default `inspur.com`), so that existing manifests keep
working; see `Names`. Names of Quotient's own objects are fixed. "Ancestors" are the GPU sharing systems that Quotient
replaces, such as Tencent's gpu-manager; their pods, nodes and quotas are still read.
"""

import re
from dataclasses import dataclass
from functools import cached_property

DEFAULT_DOMAIN = "inspur.com"
API_GROUP = "quotient.dev"
FIELD_MANAGER = "quotient"
SCHEDULER = "quotient-scheduler"

# ConfigMaps that Quotient writes, each with its label and data key. They are in Quotient's own namespace, one ledger
# per governed namespace; only the quota status is written to the governed namespace itself.
LEDGER_PREFIX, LEDGER_LABEL, LEDGER_KEY = "ledger.", f"{API_GROUP}/ledger", "ledger"
CATALOGUE, CATALOGUE_KEY = "gpu-catalogue", "cards"
# What the scheduler has learned of the workload, in the system namespace.
WORKLOAD_CONFIG_MAP, WORKLOAD_KEY = "gpu-workload", "workload"
LEDGER_REGISTRY, LEDGER_REGISTRY_KEY = "known-ledgers", "namespaces"
QUOTA_STATUS, STATUS_LABEL, STATUS_KEY = "gpu-quota-status", f"{API_GROUP}/quota-status", "status.yaml"
# Other objects of Quotient. A component's Deployment, service account, Lease and events share one name.
DEFAULT_SYSTEM_NAMESPACE = "quotient-system"
WEBHOOK, CONTROLLER, NODE_PLUGIN = "quotient-webhook", "quotient-controller", "quotient-nodeplugin"
WEBHOOK_CONFIGURATION = "quotient"
OWNER_CLUSTER_ROLE = "quotient-owner"
# RBAC resource of the API group that represents quotas, and the ValidatingAdmissionPolicy that checks it.
QUOTA_RESOURCE, QUOTA_POLICY = "gpuquotas", "quotient-quota-guard"
APP, APP_LABEL, COMPONENT_LABEL = "quotient", "app.kubernetes.io/name", "app.kubernetes.io/component"
# Annotation of a workload that lacks pods: when the controller last made Kubernetes try again to create them.
RETRIED_ANNOTATION = f"{API_GROUP}/retried-at"
# Annotation of a webhook configuration: `auto` lets the controller set failurePolicy Fail, `never` keeps Ignore.
ARM_ANNOTATION, ARM_AUTO, ARM_NEVER = f"{API_GROUP}/arm", "auto", "never"
# Field managers of a webhook configuration: one for the caBundle, one for the failurePolicy.
CERTIFICATES_MANAGER, FAILURE_POLICY_MANAGER = "quotient-certificates", "quotient-arming"
# Of a webhook configuration: the annotation with the digests of the secrets in the webhook's paths, and the field
# manager of the paths. Of the webhook's Deployment and pods: the annotation of those that read the other one.
PATHS_ANNOTATION, PATHS_MANAGER = f"{API_GROUP}/webhook-paths", "quotient-paths"
SECRET_PATHS_ANNOTATION = f"{API_GROUP}/secret-paths"

# Where users write quotas: this key of a labelled ConfigMap (`Names.quota_label`), or, as the ancestors did, one
# ConfigMap for all namespaces.
QUOTA_KEY = "quota.yaml"
LEGACY_NAMESPACE, LEGACY_NAME, LEGACY_KEY = "kube-system", "gpuquota", "gpu_quota"

# The webhook's certificates. The CA's secret is readable by the controller alone: it holds the CA in use and, during a
# rotation, the next one, each as `<prefix>.crt` and `<prefix>.key`, and the certificates of former CAs.
CA_SECRET, CURRENT_CA, NEXT_CA, FORMER_CAS = "quotient-ca", "ca", "next", "former.crt"
# The leaf's secret is mounted by the webhook: its keys, those of every TLS secret, are the names of the mounted files.
LEAF_SECRET, TLS_SECRET_TYPE = "quotient-webhook-tls", "kubernetes.io/tls"
TLS_CERTIFICATE, TLS_KEY = "tls.crt", "tls.key"
# The certificate of all node plugins, and the CAs that clients trust. Its name is that of their Service, which is
# gpu-manager's.
MONITOR_SECRET, MONITOR_SERVICE, TRUSTED_CAS = "quotient-nodeplugin-tls", "gpu-manager-metric", "ca.crt"
# Annotation of the CA's secret: requests a rotation that is not due yet.
ROTATE_ANNOTATION = f"{API_GROUP}/rotate"
CERTIFICATE_LABELS = {APP_LABEL: APP, COMPONENT_LABEL: "certificates"}

# Resources of other systems; `vcuda.vocabulary` says what they mean.
NANO_PERCENT = "nano-gpu/gpu-percent"
AWS_VGPU = ("k8s.amazonaws.com/vgpu", "eks.amazonaws.com/vgpu")
NVIDIA_GPU = "nvidia.com/gpu"
HAMI_MEMORY = "nvidia.com/gpumem"
HAMI_CORES = "nvidia.com/gpucores"
HAMI_MEMORY_PERCENT = "nvidia.com/gpumem-percentage"
HAMI_PRIORITY = "nvidia.com/priority"

# Node labels written by NVIDIA's GPU feature discovery: the product, and the memory of one card in MiB.
NVIDIA_PRODUCT_LABEL = "nvidia.com/gpu.product"
NVIDIA_MEMORY_LABEL = "nvidia.com/gpu.memory"

# Other systems' resources: under these names, other device plugins offer NVIDIA cards, whole or in parts. On a node
# with capacity of one of them, the same cards would be allocated twice. The prefix covers NVIDIA's resources per MIG
# profile, the suffix the vcuda-core of every domain: gpu-manager and its forks.
OTHER_GPU_RESOURCES = (
    NVIDIA_GPU,
    "nvidia.com/gpu.shared",
    NANO_PERCENT,
    *AWS_VGPU,
    "nano-gpu.io/gpu-core",
    "elasticgpu.io/gpu-core",
    "aliyun.com/gpu-mem",
    "volcano.sh/vgpu-number",
)
MIG_RESOURCE_PREFIX, VCUDA_CORE_SUFFIX = "nvidia.com/mig-", "/vcuda-core"

# Node labels of the ancestors. Their documentation and their code disagree, so nodes may have any of these.
ANCESTOR_MODEL_LABELS = ("gaia.tencent.com/gpu-model", "tkestack.io/gpu-model", "gaia.nvidia.com/gpu-model")
ANCESTOR_POOL_LABELS = ("gaia.tencent.com/gpu-pool", "tkestack.io/gpu-pool")
# Value of a node's model label if its cards are of several models.
MIXED_MODELS = "mixed"

# Container environment variables that set which GPUs a container sees, and how much of them.
VISIBLE_DEVICES, NO_DEVICES = "NVIDIA_VISIBLE_DEVICES", "void"
SHARING_VARIABLE_PREFIXES = ("CUDA_MPS_", "NVIDIA_GPU_MEMORY_")
# NVIDIA's runtime can be configured to read which GPUs a container sees from mounts of /dev/null in these folders.
DEVICE_LIST = "nvidia-container-devices"
DEVICE_LIST_FOLDERS = (f"/var/run/{DEVICE_LIST}", f"/run/{DEVICE_LIST}")

# Domains of the ancestors' pods; their annotations are read like those of the configured domain.
ANCESTOR_DOMAINS = ("tencent.com", "nvidia.com")
# Pod annotations, under those domains, that the ancestors' schedulers and node agents wrote. A trailing dash means
# that the index of a container follows.
ANCESTOR_ANNOTATIONS = ("predicate-gpu-idx-", "predicate-node", "predicate-time", "gpu-assigned")

# Pod annotations of Kubernetes: the first marks the mirror of a static pod, the second is JSON that `kubectl apply`
# applied last.
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
LAST_APPLIED_ANNOTATION = "kubectl.kubernetes.io/last-applied-configuration"
DEFAULT_SCHEDULER = "default-scheduler"
# Value of a Job's `managedBy` that means Kubernetes' own controller, as no value does.
JOB_CONTROLLER = "kubernetes.io/job-controller"
# The immutable label with the namespace's name that the API server sets on every namespace.
NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"
# Label of an EndpointSlice: the Service it belongs to. Label of a Node: its host name.
SERVICE_NAME_LABEL, HOSTNAME_LABEL = "kubernetes.io/service-name", "kubernetes.io/hostname"

# Node plugin: annotations on its Allocate responses. The kubelet stores responses in its own checkpoint, so a lost
# allocation checkpoint can be rebuilt from them: the pod's placement, the allocation's token, "uid/container", and what
# enforces the limits.
RESPONSE_PLACEMENT = f"{API_GROUP}/placement"
RESPONSE_TOKEN = f"{API_GROUP}/allocation"
RESPONSE_OWNER = f"{API_GROUP}/container"
RESPONSE_ISOLATION = f"{API_GROUP}/isolation"
# Node plugin: the kind of its CDI devices, and the start of its CDI file names (CDI's convention: vendor-class_name).
CDI_KIND, CDI_FILE_PREFIX = f"{API_GROUP}/gpu", f"{API_GROUP}-gpu_"

DNS_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
DOMAIN = re.compile(rf"{DNS_LABEL}(\.{DNS_LABEL})+", re.ASCII)
# A DNS subdomain has at most 253 characters and the name after the slash 63: both together stay within 253.
MAX_DOMAIN = 190
# Kubernetes does not accept extended resources under these: native resources, and keys of a ResourceQuota.
RESERVED_ENDINGS, RESERVED_PREFIX = ("kubernetes.io", ".k8s.io"), "requests."


@dataclass(frozen=True)
class Names:
    """The names under one domain. `names_for` builds one from user input and checks the domain.

    The properties are cached because every admission reads them many times.
    """

    domain: str = DEFAULT_DOMAIN

    def _under(self, name: str) -> str:
        return f"{self.domain}/{name}"

    @cached_property
    def core(self) -> str:
        """Resource: 100 is one GPU."""
        return self._under("vcuda-core")

    @cached_property
    def memory(self) -> str:
        """Resource: 1 is one memory unit."""
        return self._under("vcuda-memory")

    @cached_property
    def cards(self) -> str:
        """Resource: "0.3" is part of a card, "2" is two whole cards."""
        return self._under("gpu")

    @cached_property
    def core_limit(self) -> str:
        """Pod annotation: up to how many cores a container that shares a card may burst."""
        return self._under("vcuda-core-limit")

    @cached_property
    def use_models(self) -> str:
        """Pod annotation: the GPU models the pod may run on, separated by commas."""
        return self._under("use-gputype")

    @cached_property
    def avoid_models(self) -> str:
        """Pod annotation: the GPU models the pod must not run on, separated by commas."""
        return self._under("nouse-gputype")

    @cached_property
    def use_uuids(self) -> str:
        """Pod annotation: the GPUs the pod may run on, by UUID, separated by commas."""
        return self._under("use-gpuuuid")

    @cached_property
    def avoid_uuids(self) -> str:
        """Pod annotation: the GPUs the pod must not run on, by UUID, separated by commas."""
        return self._under("nouse-gpuuuid")

    @cached_property
    def min_isolation(self) -> str:
        """Pod annotation: the weakest mechanism that may enforce the pod's shares of GPUs."""
        return self._under("min-isolation")

    @cached_property
    def spread_members(self) -> str:
        """Pod annotation: `gpu` or `node`, of which no two pods of the same workload share one."""
        return self._under("spread-members")

    @cached_property
    def placement_policy(self) -> str:
        """Pod annotation: which nodes and GPUs are preferred for the pod."""
        return self._under("placement-policy")

    @cached_property
    def requeue(self) -> str:
        """Pod annotation, written by the scheduler to requeue a pending pod: when there was room for it."""
        return self._under("requeued-at")

    @cached_property
    def memory_follows_core(self) -> str:
        """Pod annotation: containers that get the same share of the card's memory as of its cores."""
        return self._under("memory-follows-core")

    @cached_property
    def cards_rewritten(self) -> str:
        """Pod template annotation, written by the webhook: containers whose part of a card it rewrote."""
        return self._under("cards-rewritten")

    @cached_property
    def limits(self) -> str:
        """Pod annotation, written by the webhook: what each container may use."""
        return self._under("vcuda-limits")

    @cached_property
    def placement(self) -> str:
        """Pod annotation, written with the binding: which cards each container got."""
        return self._under("gpu-placement")

    @cached_property
    def inventory(self) -> str:
        """Node annotation, written by the node plugin: the node's cards."""
        return self._under("gpu-inventory")

    @cached_property
    def model_label(self) -> str:
        """Node label: the model of its cards, or `mixed`."""
        return self._under("gpu-model")

    @cached_property
    def pool_label(self) -> str:
        """Node label: the node pool."""
        return self._under("gpu-pool")

    @cached_property
    def cordon(self) -> str:
        """Node annotation, written by administrators: unschedulable cards by UUID or index, separated by commas."""
        return self._under("gpu-cordon")

    @cached_property
    def device_annotation(self) -> str:
        """Node plugin: container annotation for the runtime, as gpu-manager wrote it: device nodes, comma-separated."""
        return self._under("vcuda-device")

    @cached_property
    def quota_label(self) -> str:
        """ConfigMap label: `true` makes the ConfigMap a quota of its namespace."""
        return self._under("gpu-quota")


def names_for(domain: str) -> Names:
    """Return the names under a domain; ValueError if Kubernetes would not accept them."""
    if len(domain) > MAX_DOMAIN or not DOMAIN.fullmatch(domain):
        raise ValueError(f"{domain!r} is not a DNS domain of at most {MAX_DOMAIN} characters, such as {DEFAULT_DOMAIN}")
    if f".{domain}".endswith(RESERVED_ENDINGS) or domain.startswith(RESERVED_PREFIX):
        raise ValueError(f"{domain!r} is reserved by Kubernetes; use a domain of your own, such as {DEFAULT_DOMAIN}")
    return Names(domain)
