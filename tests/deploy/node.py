"""The node plugin installed by the chart: privileged on its node, powerless beyond it."""

import json
import subprocess
from typing import Any

from cluster.objects import PODS
from tests.cluster.layout import ADMIN, CDI, IDENTITIES, NODE_NAME
from tests.cluster.quotient import SYSTEM
from tests.cluster.real import RealCluster
from tests.node.driver import uuid
from tests.node.node import CONTROL, NAMES, GpuNode, container, placement
from tests.waiting import eventually

TEAM = "team"
ACCOUNT = "quotient-nodeplugin"
MEMORY_KIB = 80 * 1024


def prepare_node(cluster: RealCluster) -> tuple[GpuNode, list[str]]:
    """Give the node two cards and the label, and say what the chart has to know of them."""
    found = GpuNode(cluster, "A100", "A100")
    cluster.kubectl("label", "node", NODE_NAME, "nvidia-device-enable=enable")
    settings = {"driverRoot": str(cluster.layout.driver), "cdi": CDI}
    # The test binds, as the scheduler will.
    binders = [IDENTITIES[ADMIN][0]]
    return found, [f"config.nodePlugin={json.dumps(settings)}", f"config.webhook.binders={json.dumps(binders)}"]


def check_node(node: GpuNode) -> None:
    """Everything that the installed plugin should do."""
    eventually(lambda: node.allocatable().get(NAMES.core) == "200", "the cards to be offered", 60)
    check_a_pod(node)
    check_the_monitor(node)
    check_memory(node)
    check_tokens(node)


def check_a_pod(node: GpuNode) -> None:
    """Admitted and rewritten, bound, given its card, measured; written for an ancestor, as people have them."""
    limits = {"tencent.com/vcuda-core": "30", "tencent.com/vcuda-memory": "8"}
    spec = container("c0", 0, 0) | {"resources": {"limits": limits}}
    body = {
        "metadata": {"name": "old", "namespace": "default"},
        "spec": {"containers": [spec], "terminationGracePeriodSeconds": 0},
    }
    node.bind(node.api.create(PODS, body), placement(c0=[(uuid(1), 30, 2048)]))
    node.wait_phase("old", "Running")
    seen = node.seen("old")
    assert seen.limits is not None
    assert (seen.limits.cores, seen.limits.memory_mib) == (30, 2048)
    assert (seen.devices.keys() - CONTROL, seen.visible) == ({"/dev/nvidia0"}, uuid(1))
    assert f'uuid="{seen.visible}"' in inside(node, "/metrics")
    assert [gpu.uuid for gpu in node.inventory()] == [uuid(0), uuid(1)]
    node.delete("old")


def inside(node: GpuNode, path: str, *flags: str) -> str:
    """Ask the monitor from the node, which is elsewhere than in the plugin's pod."""
    (pod,) = [each for each in node.api.list(PODS, SYSTEM).items if each.metadata.name.startswith(ACCOUNT)]
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
    sent = flags or ("--header", f"Authorization: Bearer {token}")
    busybox = str(node.cluster.layout.debian / "bin/busybox")
    done = node.cluster.enter(busybox, "wget", "-q", "-S", "-O-", *sent, f"http://{pod.status.pod_ip}:5678{path}")
    return done.stdout + done.stderr


def check_the_monitor(node: GpuNode) -> None:
    """Without one, with nobody's, with one that may not, with one that may."""
    stranger = node.cluster.kubectl("create", "token", "default", "-n", TEAM).strip()
    assert "401" in inside(node, "/usage", "--header", "X: y")
    assert "401" in inside(node, "/metrics", "--header", "Authorization: Bearer nonsense")
    assert "403" in inside(node, "/usage", "--header", f"Authorization: Bearer {stranger}")
    assert '"cards":' in inside(node, "/usage")
    assert "200 OK" in inside(node, "/livez", "--header", "X: y")


def check_memory(node: GpuNode) -> None:
    """Every node has to spare what it takes."""
    pids = node.cluster.enter("sh", "-c", "pgrep -f 'console.main nodeplugin'").stdout.split()
    status = [node.cluster.enter("cat", f"/proc/{pid}/status").stdout for pid in pids]
    taken = [int(line.split()[1]) for text in status for line in text.splitlines() if line.startswith("VmRSS")]
    assert taken
    assert max(taken) < MEMORY_KIB


def as_plugin(node: GpuNode, *arguments: str, token: str, stdin: str | None = None) -> str:
    """Run kubectl with a token of the plugin's account."""
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


def check_tokens(node: GpuNode) -> None:
    """Bound to its pod it may write its Node and its pods' placement, and nothing else; unbound, nothing."""
    cluster = node.cluster
    (pod,) = [each for each in node.api.list(PODS, SYSTEM).items if each.metadata.name.startswith(ACCOUNT)]
    bound = cluster.kubectl(
        "create", "token", ACCOUNT, "-n", SYSTEM, "--bound-object-kind=Pod", f"--bound-object-name={pod.metadata.name}"
    ).strip()
    loose = cluster.kubectl("create", "token", ACCOUNT, "-n", SYSTEM).strip()
    other: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "other"}}
    cluster.kubectl("create", "-f-", stdin=json.dumps(other))
    mine = node.run("mine", container("c0", 0, 0))
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
    assert mine.metadata.name == "mine"
    table: dict[str, tuple[str, tuple[str, ...], str]] = {
        "its inventory": (bound, (*annotate, "node", NODE_NAME, f"{NAMES.inventory}={{}}"), "annotated"),
        "its pod's placement": (bound, (*annotate, "pod", "mine", f"{NAMES.placement}={{}}"), "annotated"),
        "without a claim": (
            loose,
            (*annotate, "node", NODE_NAME, f"{NAMES.inventory}=x"),
            "does not say on which node",
        ),
        "another node": (bound, (*annotate, "node", "other", f"{NAMES.inventory}=x"), "its own Node alone"),
        "another node's pod": (
            bound,
            (*annotate, "pod", "theirs", f"{NAMES.placement}=x"),
            "pods of its own node alone",
        ),
        "another annotation": (bound, (*annotate, "node", NODE_NAME, "x=y"), "no other annotation"),
        "another annotation of a pod": (bound, (*annotate, "pod", "mine", "x=y"), "no other annotation"),
        "a label of a pod": (bound, ("label", "pod", "mine", "x=y"), "no other label"),
        "a label of its node": (bound, ("label", "node", NODE_NAME, "x=y"), "no other label"),
        "a taint of its node": (bound, ("taint", "node", NODE_NAME, "x=y:NoSchedule"), "does not change what runs"),
    }
    wrong = {
        what: told
        for what, (token, command, expected) in table.items()
        if expected not in (told := as_plugin(node, *command, token=token))
    }
    assert wrong == {}
    assert "own Node" in as_plugin(node, "create", "-f-", "--validate=false", token=bound, stdin=json.dumps(event))
    assert "forbidden" in as_plugin(node, "delete", "pod", "mine", token=bound)
    cluster.kubectl("delete", "pod", "theirs", "--force", "--grace-period=0")
    cluster.kubectl("delete", "node", "other")
    node.delete("mine")
