"""The node plugin installed by the chart: it works on its node, and cannot change anything beyond it."""

import base64
import json
import subprocess
import sys
from typing import Any

from cluster.objects import PODS, SECRETS
from tests.cluster.layout import CDI, NODE_NAME
from tests.cluster.quotient import SYSTEM
from tests.cluster.real import RealCluster
from tests.node.driver import uuid
from tests.node.node import CONTROL, NAMES, GpuNode, container
from tests.waiting import eventually
from vcuda.names import MONITOR_SECRET, MONITOR_SERVICE, TRUSTED_CAS
from vcuda.placement_annotation import decode_placement

TEAM = "team"
ACCOUNT = "quotient-nodeplugin"
MAX_MEMORY_KIB = 80 * 1024


def prepare_node(cluster: RealCluster) -> tuple[GpuNode, list[str]]:
    """Add two simulated cards and the label to the node; returns it with the chart values for them."""
    node = GpuNode(cluster, "A100", "A100")
    cluster.kubectl("label", "node", NODE_NAME, "nvidia-device-enable=enable")
    settings = {"driverRoot": str(cluster.layout.driver), "cdi": CDI}
    return node, [f"config.nodePlugin={json.dumps(settings)}"]


def check_node(node: GpuNode) -> None:
    eventually(lambda: node.allocatable().get(NAMES.core) == "200", "the cards to be allocatable", 60)
    # The kubelet mounts the certificate with its next synchronization, as it did not exist when the pod started.
    eventually(lambda: get_from_monitor(node, "/livez").startswith("200"), "the monitor's certificate", 180)
    check_pod_with_other_vocabulary(node)
    check_monitor_authorization(node)
    check_memory(node)
    check_token_limits(node)


def check_pod_with_other_vocabulary(node: GpuNode) -> None:
    """A pod written for gpu-manager is admitted and rewritten, scheduled, allocated its card, and measured."""
    limits = {"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "8"}
    spec = container("c0", 0, 0) | {"resources": {"limits": limits}}
    body = {
        "metadata": {"name": "old", "namespace": "default"},
        "spec": {"containers": [spec], "terminationGracePeriodSeconds": 0},
    }
    node.api.create(PODS, body)
    node.wait_phase("old", "Running")
    placed = decode_placement(node.pod("old").metadata.annotations[NAMES.placement])
    assert placed is not None
    (card,) = placed["c0"]
    minors = {gpu.uuid: gpu.minor for gpu in node.inventory()}
    assert minors == {uuid(0): 1, uuid(1): 0}
    seen = node.seen("old")
    assert seen.limits is not None
    assert (seen.limits.cores, seen.limits.memory_mib) == (card.cores, card.memory_mib) == (30, 2048)
    assert (seen.devices.keys() - CONTROL, seen.visible) == ({f"/dev/nvidia{minors[card.uuid]}"}, card.uuid)
    assert f'uuid="{seen.visible}"' in get_from_monitor(node, "/metrics")
    node.delete("old")


# Run in the node's network: a request by TLS, with nothing but the CA, the name and the headers it is given.
GET_BY_TLS = """
import http.client, json, socket, ssl, sys
address, name, ca, path, headers = json.loads(sys.argv[1])
context = ssl.create_default_context(cadata=ca)
connection = http.client.HTTPConnection(address, 5678, timeout=20)
connection.connect()
connection.sock = context.wrap_socket(connection.sock, server_hostname=name)
connection.request("GET", path, headers=headers)
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""


def get_from_monitor(node: GpuNode, path: str, headers: dict[str, str] | None = None) -> str:
    """Send a request by TLS, by default with a token, from the node's network: not the loopback of the plugin's pod."""
    secret = node.api.get(SECRETS, MONITOR_SECRET, SYSTEM)
    if headers is None:
        headers = {"Authorization": f"Bearer {viewer_token(node)}"}
    authority = base64.b64decode(secret.data[TRUSTED_CAS]).decode()
    arguments = [monitor_address(node), f"{MONITOR_SERVICE}.{SYSTEM}.svc", authority, path, headers]
    done = node.cluster.enter(sys.executable, "-c", GET_BY_TLS, json.dumps(arguments))
    return done.stdout + done.stderr


def get_in_the_clear(node: GpuNode, path: str) -> str:
    busybox = str(node.cluster.layout.debian / "bin/busybox")
    header = f"Authorization: Bearer {viewer_token(node)}"
    url = f"http://{monitor_address(node)}:5678{path}"
    done = node.cluster.enter(busybox, "wget", "-q", "-S", "-O-", "--header", header, url)
    return done.stdout + done.stderr


def monitor_address(node: GpuNode) -> str:
    (pod,) = [each for each in node.api.list(PODS, SYSTEM).items if each.metadata.name.startswith(ACCOUNT)]
    return pod.status.pod_ip


def viewer_token(node: GpuNode) -> str:
    """A token of a service account that may read the metrics."""
    token = node.cluster.kubectl("create", "token", "viewer", "-n", TEAM, check=False).strip()
    if "not found" in token:
        node.cluster.kubectl("create", "serviceaccount", "viewer", "-n", TEAM)
        node.cluster.kubectl(
            "create",
            "clusterrolebinding",
            "viewer",
            "--clusterrole=quotient-metrics-viewer",
            f"--serviceaccount={TEAM}:viewer",
        )
        token = node.cluster.kubectl("create", "token", "viewer", "-n", TEAM).strip()
    return token


def check_monitor_authorization(node: GpuNode) -> None:
    """No token, an unknown token, one without permission, and one with it; probes need neither it nor TLS."""
    unauthorized = node.cluster.kubectl("create", "token", "default", "-n", TEAM).strip()
    assert get_from_monitor(node, "/usage", {}).startswith("401")
    assert get_from_monitor(node, "/metrics", {"Authorization": "Bearer nonsense"}).startswith("401")
    assert get_from_monitor(node, "/usage", {"Authorization": f"Bearer {unauthorized}"}).startswith("403")
    assert '"cards":' in get_from_monitor(node, "/usage")
    assert "403" in get_in_the_clear(node, "/usage")
    assert "200 OK" in get_in_the_clear(node, "/livez")


def check_memory(node: GpuNode) -> None:
    pids = node.cluster.enter("sh", "-c", "pgrep -f 'console.main nodeplugin'").stdout.split()
    status = [node.cluster.enter("cat", f"/proc/{pid}/status").stdout for pid in pids]
    resident_kib = [int(line.split()[1]) for text in status for line in text.splitlines() if line.startswith("VmRSS")]
    assert resident_kib
    assert max(resident_kib) < MAX_MEMORY_KIB


def kubectl_as_plugin(node: GpuNode, *arguments: str, token: str, stdin: str | None = None) -> str:
    """Run kubectl with a token of the plugin's service account; returns its output and errors."""
    kubectl = str(node.cluster.layout.kubernetes / "kubectl")
    server = json.loads(node.cluster.kubeconfig.read_text())["clusters"][0]["cluster"]
    flags = [
        f"--server={server['server']}",
        f"--certificate-authority={server['certificate-authority']}",
        f"--token={token}",
    ]
    done = subprocess.run(
        [kubectl, "--kubeconfig=/dev/null", *flags, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def check_token_limits(node: GpuNode) -> None:
    """A token bound to the plugin's pod may only write its Node and the placement of its pods; others nothing."""
    cluster = node.cluster
    (pod,) = [each for each in node.api.list(PODS, SYSTEM).items if each.metadata.name.startswith(ACCOUNT)]
    bound = cluster.kubectl(
        "create", "token", ACCOUNT, "-n", SYSTEM, "--bound-object-kind=Pod", f"--bound-object-name={pod.metadata.name}"
    ).strip()
    unbound = cluster.kubectl("create", "token", ACCOUNT, "-n", SYSTEM).strip()
    other: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other"}}
    cluster.kubectl("create", "-f-", stdin=json.dumps(other))
    assert node.run("mine", container("c0", 0, 0)).metadata.name == "mine"
    theirs = node.create("theirs", container("c0", 0, 0))
    node.api.bind("theirs", "default", "other", uid=theirs.metadata.uid, annotations={})
    annotate = ("annotate", "--overwrite")
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e", "namespace": "default"},
        "involvedObject": {"kind": "Node", "name": "other"},
        "reason": "R",
    }
    # Token and command to a part of the expected output.
    cases: dict[str, tuple[str, tuple[str, ...], str]] = {
        "inventory of its node": (bound, (*annotate, "node", NODE_NAME, f"{NAMES.inventory}={{}}"), "annotated"),
        "placement of its pod": (bound, (*annotate, "pod", "mine", f"{NAMES.placement}={{}}"), "annotated"),
        "an unbound token": (
            unbound,
            (*annotate, "node", NODE_NAME, f"{NAMES.inventory}=x"),
            "token without node name",
        ),
        "another node": (bound, (*annotate, "node", "other", f"{NAMES.inventory}=x"), "may only update its own Node"),
        "a pod of another node": (
            bound,
            (*annotate, "pod", "theirs", f"{NAMES.placement}=x"),
            "may only update pods on its own node",
        ),
        "another annotation": (bound, (*annotate, "node", NODE_NAME, "x=y"), "may only change the annotations"),
        "another annotation of a pod": (bound, (*annotate, "pod", "mine", "x=y"), "may only change the annotations"),
        "a label of a pod": (bound, ("label", "pod", "mine", "x=y"), "may only change the label"),
        "a label of its node": (bound, ("label", "node", NODE_NAME, "x=y"), "may only change the label"),
        "a taint of its node": (bound, ("taint", "node", NODE_NAME, "x=y:NoSchedule"), "may not change spec"),
    }
    unexpected = {
        name: output
        for name, (token, command, expected) in cases.items()
        if expected not in (output := kubectl_as_plugin(node, *command, token=token))
    }
    assert unexpected == {}
    create = ("create", "-f-", "--validate=false")
    assert "own Node" in kubectl_as_plugin(node, *create, token=bound, stdin=json.dumps(event))
    assert "forbidden" in kubectl_as_plugin(node, "delete", "pod", "mine", token=bound)
    cluster.kubectl("delete", "pod", "theirs", "--force", "--grace-period=0")
    cluster.kubectl("delete", "node", "other")
    node.delete("mine")
