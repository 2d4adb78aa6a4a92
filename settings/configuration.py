"""The configuration: one versioned YAML file that all components share.

```yaml
apiVersion: quotient.dev/v1
kind: Configuration
domain: inspur.com          # prefix of resources, labels and annotations
memoryUnitMiB: 256          # what 1 of vcuda-memory means
vocabularies:
  vgpuPerGpu: 10            # AWS: so many virtual GPUs make one
  nvidiaGpu: false          # read nvidia.com/gpu as whole cards
  hami: false               # read nvidia.com/gpu, gpumem and gpucores as HAMi does
mode: enforce               # enforce | audit (look on: refuse and rewrite nothing, warn and count)
systemNamespace: quotient-system  # where Quotient itself runs; its service accounts may change what it owns
defaultQuota: ""            # a quota.yaml for namespaces that have none; empty: unlimited
webhook:
  address: 0.0.0.0          # where to listen
  port: 8443                # HTTPS: /mutate and /validate
  opsPort: 8080             # HTTP: /livez, /readyz and /metrics
  certificates: /etc/quotient/tls  # folder of tls.crt and tls.key, read again when they change
  serverName: ""            # name that the certificate must hold; empty: quotient-webhook.<systemNamespace>.svc
  clientCa: ""              # file of CAs; if set, callers need a certificate signed by one of them
  clientNames: []           # common names that such a certificate may have; empty: any
  shortPath: true           # answer the two admission routes before Flask; the answers are the same
  maxBodyMib: 8             # larger reviews are refused
  handshakeTimeoutS: 5      # for the TLS handshake
  bodyTimeoutS: 5           # for the headers, and for the body, of one request
  keepAliveS: 120           # longer than an API server keeps an idle connection, so that it closes first
  answerWithinS: 8          # at the most, and sooner if the API server's own timeout is shorter
  drainS: 15                # after SIGTERM: go on answering, and close each connection after its answer
  schedulerAliases: [gpu-scheduler]  # scheduler names of pods that are given to Quotient's scheduler
  tolerations: []           # added to pods with GPUs, as in [{key: nvidia.com/gpu, operator: Exists}]
  binders: []               # users beside Quotient's scheduler that may bind pods with GPUs
controller:
  address: 0.0.0.0          # where to listen
  opsPort: 8080             # HTTP: /livez, /readyz and /metrics
  identity: ""              # under which it strives for leadership; empty: host name and process
certificates:
  manage: true              # make and keep the webhook's certificates; false: cert-manager does, or you
  settleS: 30               # how long API servers may take to hear of a new CA
nodePlugin:
  nodeName: ""              # empty: the host's name
  folder: /var/lib/quotient # what must survive: allocations, one folder for each container, the driver's files
  devicePlugins: /var/lib/kubelet/device-plugins  # the kubelet's folder of sockets
  podResources: /var/lib/kubelet/pod-resources    # the kubelet's folder of another one
  hostRoot: /               # where the host's files are seen from here
  driverRoot: ""            # where the driver is on the host; empty: installed, or in /run/nvidia/driver
  injection: auto           # native | cdi | nvidia-runtime | auto (cdi where runtime and kubelet have it, else native)
  cdi: /var/run/cdi         # folder of CDI files
  policy: binpack           # binpack | spread: where shares go that the scheduler has not placed
  health:
    pollS: 5                # how often each card is looked at
    recoverAfterS: 60       # a card is well again after so long without an error
    ignoredXids: [13, 31, 43, 45, 68, 109]  # errors of applications, not of cards
monitor:
  address: 0.0.0.0          # where to listen
  port: 5678                # HTTP: /metrics, /metric, /usage, /livez, /readyz
  open: false               # true: whoever asks gets an answer; false: on loopback, or with a token that may
cluster:
  kubeconfig: ""            # empty: the pod's own account, or the user's kubeconfig
  context: ""               # empty: the kubeconfig's current one
log:
  level: info               # debug | info | warning | error
  format: auto              # json | console | auto (console on a terminal)
```
Every value can be overridden: by an environment variable named after its path (`log.level` is
`QUOTIENT_LOG_LEVEL`), and over that by a flag (`--set log.level=debug`).
"""

import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from vcuda.memory_units import DEFAULT_UNIT_MIB
from vcuda.names import DEFAULT_DOMAIN, DNS_LABEL, names_for
from vcuda.namespace_policy import Mode
from vcuda.placement_strategies import PlacementStrategy
from vcuda.quota import Quota, QuotaError, parse_quota
from vcuda.vocabulary import VocabularyOptions
from vcuda.xids import APPLICATION_XIDS

API_VERSION: Final = "quotient.dev/v1"
KIND: Final = "Configuration"
DEFAULT_QUOTA = "configuration/defaultQuota"
MAX_UNIT_MIB = 1024 * 1024
# What runs in Quotient's own namespace is held to no quota, and its quotas are not guarded.
SHARED_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
WEBHOOK_SERVICE = "quotient-webhook"
NAMESPACE = re.compile(DNS_LABEL, re.ASCII)


class LogSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """How a process tells what it does."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=3600)]


class Toleration(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A toleration, as Kubernetes has it."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


class WebhookSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """How reviews are served, and what pods with GPUs are given."""

    address: str = "0.0.0.0"  # noqa: S104 - in a pod of its own, behind a Service
    port: Port = 8443
    ops_port: Port = 8080
    certificates: str = "/etc/quotient/tls"
    server_name: str = ""
    client_ca: str = ""
    client_names: tuple[str, ...] = ()
    short_path: bool = True
    max_body_mib: Annotated[int, Meta(ge=1, le=1024)] = 8
    handshake_timeout_s: PositiveSeconds = 5
    body_timeout_s: PositiveSeconds = 5
    keep_alive_s: PositiveSeconds = 120
    answer_within_s: PositiveSeconds = 8
    drain_s: Seconds = 15
    scheduler_aliases: tuple[str, ...] = ("gpu-scheduler",)
    tolerations: tuple[Toleration, ...] = ()
    binders: tuple[str, ...] = ()


class ControllerSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """How the controller is watched, and told from its replicas."""

    address: str = "0.0.0.0"  # noqa: S104 - in a pod of its own
    ops_port: Port = 8080
    identity: str = ""


class HealthSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """When a card is sick, and when it is well again."""

    poll_s: PositiveSeconds = 5
    recover_after_s: Seconds = 60
    ignored_xids: tuple[int, ...] = tuple(APPLICATION_XIDS)


class NodePluginSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """How a node's cards are found and given to containers."""

    node_name: str = ""
    folder: str = "/var/lib/quotient"
    device_plugins: str = "/var/lib/kubelet/device-plugins"
    pod_resources: str = "/var/lib/kubelet/pod-resources"
    host_root: str = "/"
    driver_root: str = ""
    injection: Literal["auto", "native", "cdi", "nvidia-runtime"] = "auto"
    cdi: str = "/var/run/cdi"
    policy: PlacementStrategy = PlacementStrategy.BINPACK
    health: HealthSettings = HealthSettings()


class MonitorSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Where a node is looked at, and by whom."""

    address: str = "0.0.0.0"  # noqa: S104 - Prometheus comes from elsewhere
    port: Port = 5678
    open: bool = False


class CertificateSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Who makes the webhook's certificates."""

    manage: bool = True
    settle_s: Seconds = 30


class ClusterSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Which cluster, and as whom."""

    kubeconfig: str = ""
    context: str = ""


class Configuration(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """All settings; a field that is not here is an error."""

    api_version: Literal["quotient.dev/v1"] = API_VERSION
    kind: Literal["Configuration"] = KIND
    domain: str = DEFAULT_DOMAIN
    memory_unit_mib: Annotated[int, Meta(ge=1, le=MAX_UNIT_MIB)] = msgspec.field(
        name="memoryUnitMiB", default=DEFAULT_UNIT_MIB
    )
    vocabularies: VocabularyOptions = VocabularyOptions()
    mode: Mode = Mode.ENFORCE
    system_namespace: str = "quotient-system"
    default_quota: str = ""
    webhook: WebhookSettings = WebhookSettings()
    controller: ControllerSettings = ControllerSettings()
    certificates: CertificateSettings = CertificateSettings()
    node_plugin: NodePluginSettings = NodePluginSettings()
    monitor: MonitorSettings = MonitorSettings()
    cluster: ClusterSettings = ClusterSettings()
    log: LogSettings = LogSettings()

    def served_names(self) -> tuple[str, ...]:
        """Give the names that a certificate is made for: one that is configured, and those of the webhook's Service."""
        service = f"{WEBHOOK_SERVICE}.{self.system_namespace}.svc"
        return (*filter(None, (self.webhook.server_name,)), service, f"{service}.cluster.local")

    def quota_by_default(self) -> Quota | None:
        """Give the quota of namespaces that have none; a QuotaError says what is wrong with it."""
        return parse_quota(self.default_quota, DEFAULT_QUOTA, self.memory_unit_mib) if self.default_quota else None

    def mistake(self) -> tuple[str, str] | None:
        """Find what types alone cannot exclude: the path and what is wrong there."""
        try:
            names_for(self.domain)
        except ValueError as wrong:
            return "domain", str(wrong)
        if not NAMESPACE.fullmatch(self.system_namespace):
            return "systemNamespace", "not the name of a namespace: lower-case letters, digits and dashes"
        if self.system_namespace in SHARED_NAMESPACES:
            return "systemNamespace", "others work there; name one that is Quotient's alone, as quotient-system"
        for path, folder in {
            "nodePlugin.folder": self.node_plugin.folder,
            "nodePlugin.devicePlugins": self.node_plugin.device_plugins,
            "nodePlugin.podResources": self.node_plugin.pod_resources,
            "nodePlugin.hostRoot": self.node_plugin.host_root,
            "nodePlugin.cdi": self.node_plugin.cdi,
        }.items():
            if not folder.startswith("/"):
                return path, "not an absolute path"
        try:
            self.quota_by_default()
        except QuotaError as wrong:
            return "defaultQuota", str(wrong)
        return None
