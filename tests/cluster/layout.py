"""The layout of a test cluster: folders, addresses, identities, and the command line of each program.

Every cluster runs in network, mount and process namespaces of its own. So addresses and ports are the same in each, and
clusters do not interfere with each other.
"""

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import trustme
from msgspec import Struct
from msgspec.structs import replace

from deploy.toolchain import K8S_VERSION
from scheduler.kube_scheduler import feature_gates, kube_scheduler_configuration
from settings.configuration import Configuration, HealthSettings, SchedulerSettings

ROOT = Path(__file__).resolve().parents[2]

NODE_ADDRESS = "10.88.0.1"
POD_NETWORK = "10.88.0.0/16"
SERVICE_NETWORK = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"
API_PORT = 6443
BRIDGE = "cni0"
NODE_NAME = "node-1"
# A second node shares the network namespace of the first, and has a mount namespace of its own.
SECOND_NODE, SECOND_ADDRESS = "node-2", "10.88.0.2"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
RUN = "/run/quotient"
CDI = "/run/cdi"
# If set, the kubelet and the node plugin poll as rarely as on a real node, for measurements at rest.
PATIENT = "QUOTIENT_TEST_PATIENT"
# How often the kubelet reports its node's capacity and updates mounted secrets. Its defaults are too slow for tests.
HASTE = {"nodeStatusUpdateFrequency": "1s", "syncFrequency": "5s"}
DEBIAN_PACKAGES = ("etcd-server", "containerd", "runc", "containernetworking-plugins", "busybox-static", "libseccomp2")
# Environment variable of every process of a cluster outside of its containers; the value is the cluster's ident.
MARK = "QUOTIENT_TEST_CLUSTER"
# In the state folder: what supervisor and first process have to run.
SPEC_FILE = "spec.json"

ADMIN = "admin"
IDENTITIES = {
    ADMIN: ("quotient:admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "node": (f"system:node:{NODE_NAME}", "system:nodes"),
    SECOND_NODE: (f"system:node:{SECOND_NODE}", "system:nodes"),
    "quotient": ("system:serviceaccount:quotient-system:quotient-webhook", "system:masters"),
    "quotient-controller": ("system:serviceaccount:quotient-system:quotient-controller", "system:masters"),
    "quotient-scheduler": ("system:serviceaccount:quotient-system:quotient-scheduler", "system:masters"),
    "quotient-nodeplugin": ("system:serviceaccount:quotient-system:quotient-nodeplugin", "system:masters"),
}

CONTROL_PLANE = ("etcd", "kube-apiserver")
CONTROLLERS = ("kube-controller-manager", "kube-scheduler")
NODE = ("containerd", "kubelet")
PATIENT_CONTROLLERS = "patient-controller-manager"
# The API server with a log of all writes.
AUDITED_API_SERVER = "audited-apiserver"
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "None", "verbs": ["get", "list", "watch"]}, {"level": "Metadata"}],
}
# Quotient's kube-scheduler without the extender, for comparison.
PLAIN_SCHEDULER = "plain-kube-scheduler"
# The first replica's extender with another policy, for comparison.
BINPACK_EXTENDER = "quotient-scheduler-binpack"
SECOND = ("containerd-2", "kubelet-2")
# Folders below the state folder of which the second node has its own, at the same path.
OF_NODE = ("driver", "containerd", "cni")
WEBHOOK, CONTROLLER, NODE_PLUGIN = "quotient-webhook", "quotient-controller", "quotient-nodeplugin"
# Each replica of the scheduler is two programs, which see the same host name, as the containers of a pod do.
REPLICAS = ("a", "b")
WEBHOOK_PORT = 8443
EXTENDER_PORT = 3456
# Pods that are tried again make tests wait.
TEST_BACKOFF_S = 10
# Of the first replica, as the port above; the others have the ports after it.
EXTENDER_OPS_PORT = 8090
MONITOR_PORT = 5678


class Layout(Struct, frozen=True):
    """A cluster's own folder, and the folders of its programs."""

    ident: str
    state: Path
    kubernetes: Path
    debian: Path
    # Folder of a containerd that supports CDI; None: use the one of Debian's release, which may not.
    newer: Path | None = None

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig, for clients on this machine."""
        return self.state / "kubeconfig"

    @property
    def control(self) -> Path:
        """The socket on which the cluster's first process accepts commands."""
        return self.state / "control.sock"

    @property
    def logs(self) -> Path:
        """The folder of logs, one for each program."""
        return self.state / "logs"

    @property
    def driver(self) -> Path:
        """The folder of the node's fake NVIDIA driver."""
        return self.state / "driver"

    @property
    def second_node(self) -> Path:
        """The folder of what the second node sees in place of the first node's folders."""
        return self.state / SECOND_NODE

    @property
    def cgroup(self) -> str:
        """The cgroup, in every hierarchy, under which all pods run."""
        return f"quotient-{self.ident}"


def layout_from(spec: dict[str, Any]) -> Layout:
    """Return the layout of a cluster whose spec was read from its state folder."""
    newer = Path(spec["newer"]) if spec.get("newer") else None
    return Layout(spec["ident"], Path(spec["state"]), Path(spec["kubernetes"]), Path(spec["debian"]), newer)


class Program(Struct, frozen=True):
    """The command line of one program, the variables added to its environment, and the node it runs on.

    Without a node it runs on the first one, whose mount namespace is that of the control plane.
    """

    argv: list[str]
    env: dict[str, str] = {}
    node: str = ""


def prepare(layout: Layout) -> dict[str, Program]:
    """Write keys, identities and configuration into the state folder; returns the programs to run."""
    of_nodes = [root / folder for root in (layout.state, layout.second_node) for folder in OF_NODE]
    for folder in (layout.logs, layout.state / "pki", *of_nodes):
        folder.mkdir(parents=True, exist_ok=True)
    write_pki(layout)
    write_identities(layout)
    write_network(layout.state, "10.88.1.0", "10.88.127.255")
    write_network(layout.second_node, "10.88.128.0", "10.88.255.254")
    write_containerd(layout)
    write_kubelet(layout, "kubelet.json", NODE_ADDRESS, f"/{layout.cgroup}")
    write_kubelet(layout, "kubelet-2.json", SECOND_ADDRESS, f"/{second_cgroup(layout.cgroup)}")
    return programs(layout)


def write_pki(layout: Layout) -> None:
    """Create a CA, the API server's certificate, and the key that signs service account tokens."""
    authority = trustme.CA()
    names = ("127.0.0.1", NODE_ADDRESS, SERVICE_ADDRESS, "localhost", "kubernetes.default.svc")
    server = authority.issue_cert(*names)
    pki = layout.state / "pki"
    authority.cert_pem.write_to_path(str(pki / "ca.crt"))
    server.cert_chain_pems[0].write_to_path(str(pki / "server.crt"))
    server.private_key_pem.write_to_path(str(pki / "server.key"))
    authority.issue_cert("service-accounts").private_key_pem.write_to_path(str(pki / "service-accounts.key"))


def write_identities(layout: Layout) -> None:
    """Write a token for each identity, and a kubeconfig for use inside the cluster's namespaces."""
    rows = []
    for name, (user, groups) in IDENTITIES.items():
        token = secrets.token_hex(16)
        rows.append(f"{token},{user},{name}" + (f',"{groups}"' if groups else ""))
        (layout.state / f"{name}.token").write_text(token)
        write_kubeconfig(layout, layout.state / f"{name}.kubeconfig", token, f"https://127.0.0.1:{API_PORT}")
    (layout.state / "tokens.csv").write_text("\n".join(rows) + "\n")


def write_kubeconfig(layout: Layout, target: Path, token: str, server: str) -> None:
    """Write a kubeconfig, as JSON, which is YAML."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "quotient",
        "clusters": [
            {
                "name": "quotient",
                "cluster": {"server": server, "certificate-authority": str(layout.state / "pki/ca.crt")},
            }
        ],
        "users": [{"name": "quotient", "user": {"token": token}}],
        "contexts": [{"name": "quotient", "context": {"cluster": "quotient", "user": "quotient"}}],
    }
    target.write_text(json.dumps(config, indent=1))
    target.chmod(0o600)


def write_network(root: Path, first: str, last: str) -> None:
    """Write the pod network of a node: all pods are on one bridge, each node assigns addresses from its own range."""
    ranges = [[{"subnet": POD_NETWORK, "gateway": NODE_ADDRESS, "rangeStart": first, "rangeEnd": last}]]
    network = {
        "cniVersion": "0.4.0",
        "name": "quotient",
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": "/run/cni",
                    "ranges": ranges,
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }
    (root / "cni" / "10-quotient.conflist").write_text(json.dumps(network))


def second_cgroup(cgroup: str) -> str:
    """Return the cgroup of the second node's pods, below the cluster's."""
    return f"{cgroup}/{SECOND_NODE}"


def write_containerd(layout: Layout) -> None:
    cdi = f"\n  enable_cdi = true\n  cdi_spec_dirs = [{json.dumps(CDI)}]" if layout.newer else ""
    # The machine may lack CAP_SYS_RESOURCE: without restrict_oom_score_adj runc then dies on its first container.
    (layout.state / "containerd.toml").write_text(f"""
version = 2
root = "{layout.state}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "quotient.test/pause:1"
  restrict_oom_score_adj = true{cdi}
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{layout.debian}/usr/lib/cni"
    conf_dir = "{layout.state}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{layout.debian}/usr/sbin/runc"
        SystemdCgroup = false
""")


def write_kubelet(layout: Layout, file: str, address: str, cgroup: str) -> None:
    """Configure a kubelet without eviction, with a cgroup root of its own, on cgroup v1 or v2."""
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        # The kubelets of two nodes listen on the same port, each at its node's address; so nothing on loopback.
        "address": address,
        "healthzPort": 0,
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup,
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "enforceNodeAllocatable": [],
        "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        "failCgroupV1": False,
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,
        "localStorageCapacityIsolation": False,
        "maxPods": 250,
        "oomScoreAdj": 0,
        "resolvConf": "",
        # Some tests kill a container repeatedly; the default backoff would delay its restart by minutes.
        "featureGates": {"KubeletCrashLoopBackOffMax": True},
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
        "volumePluginDir": f"{RUN}/volume-plugins",
    }
    (layout.state / file).write_text(json.dumps(config | ({} if PATIENT in os.environ else HASTE), indent=1))


def programs(layout: Layout) -> dict[str, Program]:
    state, pki, kubernetes, debian = layout.state, layout.state / "pki", layout.kubernetes, layout.debian
    containerd = (layout.newer or debian) / "usr/bin"
    path = f"{containerd}:{debian}/usr/bin:{debian}/usr/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    folders = [*debian.glob("usr/lib/*-linux-gnu*"), *debian.glob("lib/*-linux-gnu*")]
    libraries = {"PATH": path, "LD_LIBRARY_PATH": ":".join(map(str, folders))}
    apiserver = [
        f"{kubernetes}/kube-apiserver",
        "--etcd-servers=http://127.0.0.1:2379",
        f"--secure-port={API_PORT}",
        f"--advertise-address={NODE_ADDRESS}",
        f"--tls-cert-file={pki}/server.crt",
        f"--tls-private-key-file={pki}/server.key",
        f"--token-auth-file={state}/tokens.csv",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/service-accounts.key",
        f"--service-account-signing-key-file={pki}/service-accounts.key",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--allow-privileged=true",
        # There is no kube-proxy, so webhooks behind a Service are called at their pods' addresses.
        "--enable-aggregator-routing=true",
        "--kubelet-preferred-address-types=InternalIP",
    ]
    controller_manager = [
        f"{kubernetes}/kube-controller-manager",
        f"--kubeconfig={state}/controller-manager.kubeconfig",
        f"--service-account-private-key-file={pki}/service-accounts.key",
        f"--root-ca-file={pki}/ca.crt",
        "--use-service-account-credentials",
        "--leader-elect=false",
    ]
    return {
        "etcd": Program([f"{debian}/usr/bin/etcd", f"--data-dir={RUN}/etcd", "--logger=zap"]),
        "kube-apiserver": Program(apiserver),
        AUDITED_API_SERVER: Program([*apiserver, *audit_flags(layout)]),
        "kube-controller-manager": Program(controller_manager),
        # For nodes that are objects only: without a kubelet's heartbeats they would be tainted after 40 seconds.
        PATIENT_CONTROLLERS: Program([*controller_manager, "--node-monitor-grace-period=24h"]),
        "kube-scheduler": Program(
            [f"{kubernetes}/kube-scheduler", f"--kubeconfig={state}/scheduler.kubeconfig", "--leader-elect=false"]
        ),
        "containerd": Program([f"{containerd}/containerd", f"--config={state}/containerd.toml"], libraries),
        "kubelet": kubelet(layout, "kubelet.json", "node", NODE_NAME, NODE_ADDRESS, libraries),
        "containerd-2": Program(
            [f"{containerd}/containerd", f"--config={state}/containerd.toml"], libraries, SECOND_NODE
        ),
        "kubelet-2": replace(
            kubelet(layout, "kubelet-2.json", SECOND_NODE, SECOND_NODE, SECOND_ADDRESS, libraries), node=SECOND_NODE
        ),
        WEBHOOK: quotient_webhook(layout),
        CONTROLLER: quotient_controller(layout),
        NODE_PLUGIN: quotient_nodeplugin(layout),
        PLAIN_SCHEDULER: plain_kube_scheduler(layout),
        **{extender_name(replica): quotient_extender(layout, replica) for replica in REPLICAS},
        BINPACK_EXTENDER: quotient_extender(layout, "a", "scheduler.policy=binpack"),
        **{kube_scheduler_name(replica): quotient_kube_scheduler(layout, replica) for replica in REPLICAS},
    }


def audit_flags(layout: Layout) -> list[str]:
    policy = layout.state / "audit-policy.json"
    policy.write_text(json.dumps(AUDIT_POLICY))
    return [f"--audit-policy-file={policy}", f"--audit-log-path={layout.logs}/audit.log"]


def kubelet(layout: Layout, config: str, identity: str, name: str, address: str, env: dict[str, str]) -> Program:
    argv = [
        f"{layout.kubernetes}/kubelet",
        f"--config={layout.state}/{config}",
        f"--kubeconfig={layout.state}/{identity}.kubeconfig",
        f"--hostname-override={name}",
        f"--node-ip={address}",
        "--root-dir=/var/lib/kubelet",
    ]
    return Program(argv, env)


def extender_name(replica: str) -> str:
    return f"quotient-scheduler-{replica}"


def kube_scheduler_name(replica: str) -> str:
    return f"quotient-kube-scheduler-{replica}"


def extender_settings(replica: str) -> SchedulerSettings:
    number = REPLICAS.index(replica)
    return SchedulerSettings(
        port=EXTENDER_PORT + number,
        ops_address="127.0.0.1",
        ops_port=EXTENDER_OPS_PORT + number,
        max_backoff_s=TEST_BACKOFF_S,
        evicts=True,
    )


def quotient_extender(layout: Layout, replica: str, *flags: str) -> Program:
    settings = extender_settings(replica)
    program = quotient(
        "scheduler",
        f"cluster.kubeconfig={layout.state}/quotient-scheduler.kubeconfig",
        f"scheduler.port={settings.port}",
        f"scheduler.opsAddress={settings.ops_address}",
        f"scheduler.opsPort={settings.ops_port}",
        f"scheduler.maxBackoffS={settings.max_backoff_s}",
        "scheduler.evicts=true",
        *flags,
    )
    return on_host(f"replica-{replica}", program)


def quotient_kube_scheduler(layout: Layout, replica: str) -> Program:
    """Return Quotient's own kube-scheduler, which calls the extender of the same replica."""
    configuration = replace(Configuration(), scheduler=extender_settings(replica))
    made = kube_scheduler_configuration(configuration)
    # A short lease keeps tests of leader changes short.
    made["leaderElection"] |= {"leaseDuration": "5s", "renewDeadline": "3s", "retryPeriod": "1s"}
    made["clientConnection"]["kubeconfig"] = f"{layout.state}/quotient-scheduler.kubeconfig"
    return on_host(f"replica-{replica}", kube_scheduler(layout, kube_scheduler_name(replica), made))


def plain_kube_scheduler(layout: Layout) -> Program:
    made = kube_scheduler_configuration(Configuration())
    del made["extenders"]
    made["leaderElection"]["leaderElect"] = False
    made["clientConnection"]["kubeconfig"] = f"{layout.state}/quotient-scheduler.kubeconfig"
    return kube_scheduler(layout, PLAIN_SCHEDULER, made)


def kube_scheduler(layout: Layout, name: str, configuration: dict[str, Any]) -> Program:
    file = layout.state / f"{name}.json"
    file.write_text(json.dumps(configuration, indent=1))
    # The probes' port differs, since several run at once.
    port = 10300 + [PLAIN_SCHEDULER, *map(kube_scheduler_name, REPLICAS)].index(name)
    flags = [f"--config={file}", f"--secure-port={port}", "--v=2", *feature_gates(K8S_VERSION)]
    return Program([f"{layout.kubernetes}/kube-scheduler", *flags])


def on_host(name: str, program: Program) -> Program:
    """Return a program that sees another host name."""
    command = f'hostname {name} && exec "$@"'
    return Program(["unshare", "--uts", "sh", "-c", command, "sh", *program.argv], program.env)


def quotient_controller(layout: Layout) -> Program:
    return quotient(
        "controller",
        f"cluster.kubeconfig={layout.state}/quotient-controller.kubeconfig",
        "controller.address=127.0.0.1",
        "controller.opsPort=8081",
    )


def quotient_nodeplugin(layout: Layout) -> Program:
    """Return the node plugin as it runs in a pod, with a fake driver and short intervals."""
    program = quotient(
        "nodeplugin",
        f"nodePlugin.nodeName={NODE_NAME}",
        f"nodePlugin.driverRoot={layout.driver}",
        f"nodePlugin.injection={'cdi' if layout.newer else 'auto'}",
        f"nodePlugin.health.pollS={HealthSettings().poll_s if PATIENT in os.environ else 0.5}",
        "nodePlugin.health.recoverAfterS=6",
        f"nodePlugin.cdi={CDI}",
        "monitor.address=127.0.0.1",
        f"monitor.port={MONITOR_PORT}",
        "log.level=debug",
    )
    where = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(API_PORT), "MALLOC_ARENA_MAX": "2"}
    return Program(program.argv, program.env | where)


def quotient_webhook(layout: Layout) -> Program:
    return quotient(
        "webhook",
        f"cluster.kubeconfig={layout.state}/quotient.kubeconfig",
        f"webhook.certificates={layout.state}/quotient",
        "webhook.address=127.0.0.1",
        f"webhook.port={WEBHOOK_PORT}",
        "webhook.serverName=127.0.0.1",
    )


def quotient(command: str, *settings: str) -> Program:
    """Return a component of Quotient, run from this checkout."""
    flags = [part for setting in settings for part in ("--set", setting)]
    return Program([sys.executable, "-m", "console.main", *flags, command], {"PYTHONPATH": str(ROOT)})
