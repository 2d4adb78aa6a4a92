"""The configuration: one versioned YAML file that all components share.

```yaml
apiVersion: quotient.dev/v1
kind: Configuration
domain: inspur.com          # prefix of resources, labels and annotations
memoryUnitMiB: 256          # MiB in one unit of vcuda-memory
vocabularies:
  vgpuPerGpu: 10            # AWS: number of virtual GPUs in one GPU
  nvidiaGpu: false          # read nvidia.com/gpu as whole cards
  hami: false               # read nvidia.com/gpu, gpumem, gpucores as HAMi does, as far as docs/requests.md says
mode: enforce               # enforce | audit (requests are neither rejected nor rewritten; warn and count only)
systemNamespace: quotient-system  # namespace of Quotient itself; its service accounts may change what Quotient owns
defaultQuota: ""            # quota.yaml of namespaces that have no quota; empty: unlimited
webhook:
  address: 0.0.0.0          # address to listen on
  port: 8443                # HTTPS: /mutate/<secret> and /validate/<secret>
  opsPort: 8080             # HTTP: /livez, /readyz and /metrics
  certificates: /etc/quotient/tls  # folder with tls.crt and tls.key, reloaded when they change
  serverName: ""            # name that the certificate must be valid for; empty: quotient-webhook.<systemNamespace>.svc
  clientCa: ""              # file of CAs; if set, clients need a certificate signed by one of them
  clientNames: []           # common names that client certificates may have; empty: any; needs clientCa
  apiServerCidrs: []        # addresses of the API servers, as in [10.0.0.0/28]; if set, others are not served
  pathRotationS: 3600       # how often the secret in the webhook's path is replaced; also after a call that failed
  shortPath: true           # answer /mutate and /validate without Flask: faster, with the same answers
  maxBodyMib: 8             # larger requests are rejected
  handshakeTimeoutS: 5      # for the TLS handshake
  bodyTimeoutS: 5           # for the headers of a request, and again for its body
  keepAliveS: 120           # for idle connections; longer than that of API servers, so that they close them first
  answerWithinS: 8          # for an answer; less if the API server's own timeout is shorter
  drainS: 15                # after SIGTERM: continue to answer, and close each connection after its next answer
  schedulerAliases: [gpu-scheduler]  # scheduler names that are replaced by the name of Quotient's scheduler
  tolerations: []           # added to GPU pods, for example [{key: nvidia.com/gpu, operator: Exists}]
  binders: []               # users that may bind GPU pods, beside Quotient's scheduler
  privileged: deny          # deny | allow: privileged containers in GPU pods, where the namespace's quota does not say
controller:
  address: 0.0.0.0          # address to listen on
  opsPort: 8080             # HTTP: /livez, /readyz and /metrics
  identity: ""              # name in the leader election; empty: host name and process id
  retryWorkloads: true      # make workloads create refused pods as soon as there is room: see docs/quotas.md
scheduler:
  address: 127.0.0.1        # address of the extender: kube-scheduler's container in the same pod calls it
  port: 3456                # HTTP: /scheduler/filter, /scheduler/prioritize, /scheduler/bind
  opsAddress: 0.0.0.0       # address of the operations port
  opsPort: 8080             # HTTP: /livez, /readyz, /metrics and /decisions
  lease: quotient-scheduler # answer while our pod's kube-scheduler holds this Lease in systemNamespace; empty: always
  identity: ""              # what the holder of that Lease begins with; empty: the host name
  policy: fragmentation     # fragmentation | binpack | spread | topology: which nodes and GPUs are preferred, see
                            # docs/placement.md; to compare with: fgd | bestfit | random
  evicts: false             # evict pods of lower priority where kube-scheduler finds none: see docs/scheduler.md
  loadAware: false          # rank GPUs last whose measured utilization is busyPercent or more
  busyPercent: 80
  loadIntervalS: 15         # time between two reads of the node plugins' /usage, with loadAware
  claimTimeoutS: 60         # how long a filtered pod holds its GPUs until it is bound
  volumeTimeoutS: 660       # the same, for pods with volumes or resource claims, which kube-scheduler may wait for
  bindTimeoutS: 20          # for a binding with all retries; shorter than kube-scheduler's timeout for the extender
  initialBackoffS: 1        # how long kube-scheduler waits before it tries a pod again; twice as long each time,
  maxBackoffS: 60           # and at most this long: shorter if few pods wait, longer if thousands do
certificates:
  manage: true              # issue and renew the webhook's certificates; false: you or cert-manager do
  settleS: 30               # time for all API servers to read a new CA bundle
nodePlugin:
  nodeName: ""              # empty: the host name
  folder: /var/lib/quotient # what must survive restarts: allocations, a folder for each container, driver files
  devicePlugins: /var/lib/kubelet/device-plugins  # the kubelet's folder of device plugin sockets
  podResources: /var/lib/kubelet/pod-resources    # the kubelet's folder of the pod resources socket
  hostRoot: /               # where the host's root file system is mounted
  driverRoot: ""            # where the driver is on the host; empty: the known places, see docs/nodeplugin.md
  injection: auto           # native | cdi | nvidia-runtime | auto (cdi if runtime and kubelet support it, else native)
  isolation: auto           # none | preload | driver | auto (the strongest that a card offers, see docs/nodeplugin.md)
  cdi: /var/run/cdi         # folder of CDI specifications
  policy: binpack           # the same, for shares that the scheduler did not place
  health:
    pollS: 5                # time between two checks of a card
    recoverAfterS: 60       # a card is healthy again after this time without an error
    ignoredXids: [13, 31, 43, 45, 68, 109]  # errors of applications, not of cards
monitor:
  address: 0.0.0.0          # address to listen on
  port: 5678                # HTTP and HTTPS: /metrics, /metric, /usage, /livez, /readyz
  certificates: /etc/quotient/monitor-tls  # folder of tls.crt and tls.key; the scheduler reads ca.crt there
  open: false               # true: answer every client; false: on loopback, or by HTTPS with an authorized bearer token
cluster:
  kubeconfig: ""            # empty: the pod's service account, or the user's kubeconfig
  context: ""               # empty: the kubeconfig's current context
log:
  level: info               # debug | info | warning | error
  format: auto              # json | console | auto (console on a terminal)
```
Every value can be overridden by an environment variable named after its path (`log.level` is `QUOTIENT_LOG_LEVEL`), and
that by a flag (`--set log.level=debug`).
"""

import re
from contextlib import suppress
from ipaddress import ip_network
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from vcuda.injection_modes import InjectionSetting
from vcuda.isolation import IsolationSetting
from vcuda.memory_units import DEFAULT_UNIT_MIB
from vcuda.names import (
    DEFAULT_DOMAIN,
    DEFAULT_SYSTEM_NAMESPACE,
    DNS_LABEL,
    MONITOR_SERVICE,
    SCHEDULER,
    WEBHOOK,
    names_for,
)
from vcuda.namespace_policy import Mode, PrivilegedPolicy
from vcuda.placement_strategies import PlacementStrategy
from vcuda.quota import Quota, QuotaError, parse_quota
from vcuda.vocabulary import VocabularyOptions
from vcuda.xids import APPLICATION_XIDS

API_VERSION: Final = "quotient.dev/v1"
KIND: Final = "Configuration"
# The name under which messages and statuses show the default quota, beside `namespace/name` of a ConfigMap.
DEFAULT_QUOTA = "configuration/defaultQuota"
MAX_UNIT_MIB = 1024 * 1024
# Pods in the system namespace are not charged, and its quotas are not protected: workloads of users must not run there.
SHARED_NAMESPACES = ("default", "kube-system", "kube-public", "kube-node-lease")
NAMESPACE = re.compile(DNS_LABEL, re.ASCII)


class LogSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


# With port 0 the system chooses one, which tests use.
Port = Annotated[int, Meta(ge=0, le=65535)]
# An hour at most: a larger value is probably meant in milliseconds.
Seconds = Annotated[float, Meta(ge=0, le=3600)]
WholeSeconds = Annotated[int, Meta(ge=1, le=3600)]
PositiveSeconds = Annotated[float, Meta(gt=0, le=3600)]


class Toleration(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A toleration, with the fields of Kubernetes' own."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


class WebhookSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    address: str = "0.0.0.0"  # noqa: S104 - in a pod of its own, behind a Service
    port: Port = 8443
    ops_port: Port = 8080
    certificates: str = "/etc/quotient/tls"
    server_name: str = ""
    client_ca: str = ""
    client_names: tuple[str, ...] = ()
    api_server_cidrs: tuple[str, ...] = ()
    path_rotation_s: Annotated[float, Meta(ge=60, le=86400)] = 3600
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
    privileged: PrivilegedPolicy = PrivilegedPolicy.DENY


class ControllerSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    address: str = "0.0.0.0"  # noqa: S104 - in a pod of its own
    ops_port: Port = 8080
    identity: str = ""
    retry_workloads: bool = True


class SchedulerSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    address: str = "127.0.0.1"
    port: Port = 3456
    ops_address: str = "0.0.0.0"  # noqa: S104 - in a pod of its own
    ops_port: Port = 8080
    lease: str = SCHEDULER
    identity: str = ""
    policy: PlacementStrategy = PlacementStrategy.FRAGMENTATION
    evicts: bool = False
    load_aware: bool = False
    busy_percent: Annotated[int, Meta(ge=1, le=100)] = 80
    load_interval_s: PositiveSeconds = 15
    claim_timeout_s: PositiveSeconds = 60
    volume_timeout_s: PositiveSeconds = 660
    bind_timeout_s: PositiveSeconds = 20
    initial_backoff_s: WholeSeconds = 1
    max_backoff_s: WholeSeconds = 60


class HealthSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """When a card counts as unhealthy, and when it has recovered."""

    poll_s: PositiveSeconds = 5
    recover_after_s: Seconds = 60
    ignored_xids: tuple[int, ...] = tuple(APPLICATION_XIDS)


class NodePluginSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    node_name: str = ""
    folder: str = "/var/lib/quotient"
    device_plugins: str = "/var/lib/kubelet/device-plugins"
    pod_resources: str = "/var/lib/kubelet/pod-resources"
    host_root: str = "/"
    driver_root: str = ""
    injection: InjectionSetting = "auto"
    isolation: IsolationSetting = "auto"
    cdi: str = "/var/run/cdi"
    policy: PlacementStrategy = PlacementStrategy.BINPACK
    health: HealthSettings = HealthSettings()


class MonitorSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """The node plugin's HTTP endpoint. `certificates` is a folder; without files, TLS is not served."""

    address: str = "0.0.0.0"  # noqa: S104 - Prometheus comes from elsewhere
    port: Port = 5678
    certificates: str = "/etc/quotient/monitor-tls"
    open: bool = False


class CertificateSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    manage: bool = True
    settle_s: Seconds = 30


class ClusterSettings(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The cluster to connect to, and as which user."""

    kubeconfig: str = ""
    context: str = ""


class Configuration(Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """All settings; an unknown field is an error."""

    api_version: Literal["quotient.dev/v1"] = API_VERSION
    kind: Literal["Configuration"] = KIND
    domain: str = DEFAULT_DOMAIN
    memory_unit_mib: Annotated[int, Meta(ge=1, le=MAX_UNIT_MIB)] = msgspec.field(
        name="memoryUnitMiB", default=DEFAULT_UNIT_MIB
    )
    vocabularies: VocabularyOptions = VocabularyOptions()
    mode: Mode = Mode.ENFORCE
    system_namespace: str = DEFAULT_SYSTEM_NAMESPACE
    default_quota: str = ""
    webhook: WebhookSettings = WebhookSettings()
    controller: ControllerSettings = ControllerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    certificates: CertificateSettings = CertificateSettings()
    node_plugin: NodePluginSettings = NodePluginSettings()
    monitor: MonitorSettings = MonitorSettings()
    cluster: ClusterSettings = ClusterSettings()
    log: LogSettings = LogSettings()

    def served_names(self) -> tuple[str, ...]:
        """Return the names of the webhook's certificate: the configured one first, then those of its Service."""
        # The API server calls `<service>.<namespace>.svc`; other clients may use the full name.
        service = f"{WEBHOOK}.{self.system_namespace}.svc"
        return (*filter(None, (self.webhook.server_name,)), service, f"{service}.cluster.local")

    def monitor_names(self) -> tuple[str, ...]:
        """Return the names of the certificate of all node plugins: those of their Service."""
        service = f"{MONITOR_SERVICE}.{self.system_namespace}.svc"
        return service, f"{service}.cluster.local"

    def parse_default_quota(self) -> Quota | None:
        """Return the quota of namespaces that have none; None if they are unlimited, QuotaError if it is invalid."""
        return parse_quota(self.default_quota, DEFAULT_QUOTA, self.memory_unit_mib) if self.default_quota else None

    def problem(self) -> tuple[str, str] | None:
        """Return the path and the message of a mistake that the types cannot express; None if there is none."""
        if mistake := self._name_problem() or self._caller_problem():
            return mistake
        if self.scheduler.max_backoff_s < self.scheduler.initial_backoff_s:
            return "scheduler.maxBackoffS", f"must be at least initialBackoffS, {self.scheduler.initial_backoff_s}"
        if path := self._relative_path():
            return path, "must be an absolute path"
        try:
            self.parse_default_quota()
        except QuotaError as error:
            mistakes = (": ".join(filter(None, (each.path, each.value, each.remedy))) for each in error.mistakes)
            return "defaultQuota", "\n".join(mistakes)
        return None

    def _name_problem(self) -> tuple[str, str] | None:
        try:
            names_for(self.domain)
        except ValueError as error:
            # The value is shown with the path already.
            return "domain", str(error).removeprefix(f"{self.domain!r} ")
        if not NAMESPACE.fullmatch(self.system_namespace):
            return "systemNamespace", "must be a namespace's name: lower-case letters, digits and dashes"
        if self.system_namespace in SHARED_NAMESPACES:
            remedy = f"use a namespace for Quotient alone, such as {DEFAULT_SYSTEM_NAMESPACE}"
            return "systemNamespace", f"is shared with other workloads; {remedy}"
        return None

    def _caller_problem(self) -> tuple[str, str] | None:
        if self.webhook.client_names and not self.webhook.client_ca:
            # Without a CA no client certificate is requested, and every client would be accepted.
            return "webhook.clientNames", "needs webhook.clientCa"
        for index, cidr in enumerate(self.webhook.api_server_cidrs):
            if not is_network(cidr):
                return f"webhook.apiServerCidrs[{index}]", "must be addresses in CIDR notation, such as 10.0.0.0/28"
        return None

    def _relative_path(self) -> str | None:
        """Return the first setting of the node plugin that is not an absolute path."""
        # Relative paths would depend on the working directory, which differs between image and checkout.
        paths = {
            "nodePlugin.folder": self.node_plugin.folder,
            "nodePlugin.devicePlugins": self.node_plugin.device_plugins,
            "nodePlugin.podResources": self.node_plugin.pod_resources,
            "nodePlugin.hostRoot": self.node_plugin.host_root,
            "nodePlugin.cdi": self.node_plugin.cdi,
        }
        return next((path for path, folder in paths.items() if not folder.startswith("/")), None)


def is_network(cidr: str) -> bool:
    with suppress(ValueError):
        ip_network(cidr, strict=False)
        return True
    return False
