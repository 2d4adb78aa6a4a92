"""Every name Quotient reads or writes in a cluster, in one place.

What pods, nodes and quotas carry depends on the configured domain (`inspur.com` unless told otherwise), so
that manifests of a cluster's past keep working. Quotient's own objects do not.
"""

import re
from dataclasses import dataclass
from functools import cached_property

DEFAULT_DOMAIN = "inspur.com"
API_GROUP = "quotient.dev"
FIELD_MANAGER = "quotient"
SCHEDULER = "quotient-scheduler"

# ConfigMaps of Quotient's own, in its own namespace: one ledger for each namespace, the kinds of cards there are, and
# which namespaces had a ledger. Only the last, the status, stands in the namespace it is about.
LEDGER_PREFIX, LEDGER_LABEL, LEDGER_KEY = "ledger.", f"{API_GROUP}/ledger", "ledger"
CATALOGUE, CATALOGUE_KEY = "gpu-catalogue", "cards"
KNOWN_LEDGERS, KNOWN_KEY = "known-ledgers", "namespaces"
QUOTA_STATUS, STATUS_LABEL, STATUS_KEY = "gpu-quota-status", f"{API_GROUP}/quota-status", "status.yaml"
# Where quotas are written: in a labelled ConfigMap, or all together as the ancestors had it.
QUOTA_KEY = "quota.yaml"
LEGACY_NAMESPACE, LEGACY_NAME, LEGACY_KEY = "kube-system", "gpuquota", "gpu_quota"

# Quotient's installation: its namespace if none is configured, the Service that the API server calls for admission, and
# the recommended labels of Kubernetes on everything that Quotient creates for itself.
DEFAULT_SYSTEM_NAMESPACE, WEBHOOK_SERVICE = "quotient-system", "quotient-webhook"
APP_LABEL, COMPONENT_LABEL, APP = "app.kubernetes.io/name", "app.kubernetes.io/component", "quotient"

# The webhook's certificates. The CA's secret is readable by the controller alone: it holds the CA in use and, during a
# rotation, the next one, each as `<prefix>.crt` and `<prefix>.key`, and the certificates of former CAs.
CA_SECRET, CURRENT_CA, NEXT_CA, FORMER_CAS = "quotient-ca", "ca", "next", "former.crt"
# The leaf's secret is mounted by the webhook: its keys, those of every TLS secret, are the names of the mounted files.
LEAF_SECRET, TLS_SECRET_TYPE = "quotient-webhook-tls", "kubernetes.io/tls"
TLS_CERTIFICATE, TLS_KEY = "tls.crt", "tls.key"
# Annotation of the CA's secret: requests a rotation that is not due yet.
ROTATE_ANNOTATION = f"{API_GROUP}/rotate"
CERTIFICATE_LABELS = {APP_LABEL: APP, COMPONENT_LABEL: "certificates"}

NANO_PERCENT = "nano-gpu/gpu-percent"
AWS_VGPU = ("k8s.amazonaws.com/vgpu", "eks.amazonaws.com/vgpu")
NVIDIA_GPU = "nvidia.com/gpu"
HAMI_MEMORY = "nvidia.com/gpumem"
HAMI_CORES = "nvidia.com/gpucores"
HAMI_MEMORY_PERCENT = "nvidia.com/gpumem-percentage"
NVIDIA_PRODUCT_LABEL = "nvidia.com/gpu.product"
# What a node with several models has as its model.
MIXED = "mixed"

# The domains in which the ancestors' pods are written; their annotations are read as if they were ours.
ANCESTOR_DOMAINS = ("tencent.com", "nvidia.com")
# What the ancestors' schedulers and node agents wrote on pods, under their domain; the index of a container follows.
ANCESTOR_OWNED = ("predicate-gpu-idx-", "predicate-node", "predicate-time", "gpu-assigned")

# Kubernetes' own: marks a pod that a kubelet shows for one that it runs from a file.
MIRROR = "kubernetes.io/config.mirror"
# What `kubectl apply` last applied, as JSON.
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
DEFAULT_SCHEDULER = "default-scheduler"
# The immutable label with the namespace's name that the API server sets on every namespace.
NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"

# The ancestors' documentation and code disagree on these; nodes in the field carry either.
ANCESTOR_MODEL_LABELS = ("gaia.tencent.com/gpu-model", "tkestack.io/gpu-model", "gaia.nvidia.com/gpu-model")
ANCESTOR_POOL_LABELS = ("gaia.tencent.com/gpu-pool", "tkestack.io/gpu-pool")

DNS_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
DOMAIN = re.compile(rf"{DNS_LABEL}(\.{DNS_LABEL})+", re.ASCII)
MAX_DOMAIN = 190  # a prefixed name has 253 characters at the most, and our longest suffix takes its part
# Kubernetes takes a name for its own if its domain ends so, and for a quota's if it begins so.
RESERVED_ENDINGS, QUOTA_PREFIX = ("kubernetes.io", ".k8s.io"), "requests."


@dataclass(frozen=True)
class Names:
    """The names under one domain. Build it with `names_for`, which checks the domain.

    Each is put together when first used, and then only looked up: they are asked for many times in every decision.
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
        """Resource for people: "0.3" of a card, or "2" of them."""
        return self._under("gpu")

    @cached_property
    def core_limit(self) -> str:
        """Pod annotation: up to how many cores a fractional container may burst."""
        return self._under("vcuda-core-limit")

    @cached_property
    def use_models(self) -> str:
        """Pod annotation: the GPU models the pod may run on, separated by commas."""
        return self._under("use-gputype")

    @cached_property
    def avoid_models(self) -> str:
        """Pod annotation: the GPU models the pod must not run on."""
        return self._under("nouse-gputype")

    @cached_property
    def memory_follows_core(self) -> str:
        """Pod annotation: containers whose memory is the same share of the card as their cores."""
        return self._under("memory-follows-core")

    @cached_property
    def rewritten(self) -> str:
        """Annotation of a workload's template, written by the webhook: containers whose part of a card it rewrote."""
        return self._under("cards-rewritten")

    @cached_property
    def limits(self) -> str:
        """Pod annotation, written by the webhook: what each container may use."""
        return self._under("vcuda-limits")

    @cached_property
    def placement(self) -> str:
        """Pod annotation, written with the bind: which GPUs each container got."""
        return self._under("gpu-placement")

    @cached_property
    def inventory(self) -> str:
        """Node annotation, written by the node plugin: the node's GPUs."""
        return self._under("gpu-inventory")

    @cached_property
    def model_label(self) -> str:
        """Node label: the model of its GPUs, or `mixed`."""
        return self._under("gpu-model")

    @cached_property
    def pool_label(self) -> str:
        """Node label: the pool the node belongs to."""
        return self._under("gpu-pool")

    @cached_property
    def cordon(self) -> str:
        """Node annotation, written by people: cards that take nothing new, by uuid or index, separated by commas."""
        return self._under("gpu-cordon")

    @cached_property
    def quota_label(self) -> str:
        """ConfigMap label that makes it a quota of its namespace."""
        return self._under("gpu-quota")


def names_for(domain: str) -> Names:
    """Check a domain and give the names under it; a ValueError says what is wrong."""
    if len(domain) > MAX_DOMAIN or not DOMAIN.fullmatch(domain):
        raise ValueError(f"{domain!r} is not a DNS domain of at most {MAX_DOMAIN} characters, such as {DEFAULT_DOMAIN}")
    if f".{domain}".endswith(RESERVED_ENDINGS) or domain.startswith(QUOTA_PREFIX):
        raise ValueError(f"{domain!r} is reserved by Kubernetes, which takes no extended resources there")
    return Names(domain)
