"""Quotient on a real cluster: installed with its chart, as users do, or as processes beside the control plane."""

import json
import subprocess
from pathlib import Path

import trustme

from deploy.image import build_image
from deploy.render import CHART
from deploy.toolchain import K8S_VERSION, helm
from settings.configuration import Configuration
from tests.cluster import images
from tests.cluster.layout import (
    API_PORT,
    CONTROLLER,
    EXTENDER_OPS_PORT,
    NODE_ADDRESS,
    REPLICAS,
    WEBHOOK,
    WEBHOOK_PORT,
    extender_name,
    kube_scheduler_name,
)
from tests.cluster.real import ClusterError, RealCluster
from webhook.registration import registration
from webhook.service import admission_config_of

REJECTED = "a multiple of 100 (whole GPUs)"
IMAGE = "quotient.test/quotient:0.1.0"
# The chart appends the cluster's version.
KUBE_SCHEDULER_IMAGE = "quotient.test/kube-scheduler"
SYSTEM = Configuration().system_namespace
# Without kube-proxy, pods reach the API server only at its own address. Short times keep the tests fast.
VALUES = (
    f"image={json.dumps(IMAGE)}",
    f'kubernetesService={{"host": "{NODE_ADDRESS}", "port": "{API_PORT}"}}',
    f"scheduler.kubeScheduler.image={json.dumps(KUBE_SCHEDULER_IMAGE)}",
    'config={"certificates": {"settleS": 2}, "webhook": {"drainS": 3}}',
)


def give_images(cluster: RealCluster, folder: Path) -> None:
    """Build the images of Quotient and of its kube-scheduler, and load them into the node."""
    build_image(IMAGE, folder / "quotient-image.tar")
    program, tag = cluster.layout.kubernetes / "kube-scheduler", f"{KUBE_SCHEDULER_IMAGE}:v{K8S_VERSION}"
    images.program_archive(program, tag, folder / "kube-scheduler-image.tar")
    for name in ("quotient-image.tar", "kube-scheduler-image.tar"):
        cluster.import_image(folder / name)
        (folder / name).unlink()


def run_helm(cluster: RealCluster, *arguments: str, values: tuple[str, ...] = ()) -> str:
    """Run Helm and return its output."""
    flags = [flag for value in values for flag in ("--set-json", value)]
    target = ["--kubeconfig", str(cluster.kubeconfig), "--namespace", SYSTEM]
    done = subprocess.run([str(helm()), *arguments, *target, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"helm {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def install_chart(cluster: RealCluster, *values: str) -> None:
    """Install the chart, and wait until the webhooks' failure policy is Fail."""
    command = ["install", "quotient", str(CHART), "--create-namespace", "--wait", "--timeout", "3m"]
    try:
        run_helm(cluster, *command, values=(*VALUES, *values))
    except ClusterError as error:
        # Helm says only that it waited too long.
        state = [cluster.kubectl("get", what, "-n", SYSTEM, "-o=wide", check=False) for what in ("pods", "events")]
        raise ClusterError(f"{error}\n{state[0]}\n{state[1][-3000:]}") from None
    cluster.until("the webhook to be armed", lambda: is_armed(cluster), "kubelet")


def is_armed(cluster: RealCluster) -> bool:
    """Return whether every webhook has failure policy Fail, and is called."""
    return all(each == {"Fail"} for each in failure_policies(cluster)) and is_called(cluster)


def failure_policies(cluster: RealCluster) -> list[set[str]]:
    """Return the failure policies of the mutating and of the validating webhooks."""
    path = "{.webhooks[*].failurePolicy}"
    kinds = ("mutatingwebhookconfiguration", "validatingwebhookconfiguration")
    answers = [cluster.kubectl("get", kind, "quotient", f"-o=jsonpath={path}", check=False) for kind in kinds]
    return [set(each.split()) for each in answers]


def run_beside(cluster: RealCluster) -> None:
    """Start controller and webhook as processes beside the control plane, and register the webhook."""
    authority = trustme.CA()
    folder = cluster.layout.state / "quotient"
    folder.mkdir(exist_ok=True)
    made = authority.issue_cert("127.0.0.1")
    made.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    made.private_key_pem.write_to_path(str(folder / "tls.key"))
    cluster.kubectl("create", "namespace", SYSTEM)
    cluster.run(CONTROLLER)
    cluster.run(WEBHOOK)
    target = f"https://127.0.0.1:{WEBHOOK_PORT}"
    for each in registration(admission_config_of(Configuration()), target, authority.cert_pem.bytes()):
        cluster.kubectl("apply", "-f-", stdin=json.dumps(each))
    cluster.until("the webhook to be called", lambda: is_called(cluster), WEBHOOK)


def run_scheduler(cluster: RealCluster) -> None:
    """Start one replica of the scheduler as processes beside the control plane, and wait until it leads."""
    for program in (extender_name("a"), kube_scheduler_name("a")):
        cluster.run(program)
    cluster.until("the scheduler to lead", lambda: scheduler_metric(cluster, "active") == 1.0, extender_name("a"))


def scheduler_metric(cluster: RealCluster, name: str, replica: str = "a") -> float:
    """Return a metric of a scheduler that runs beside the control plane; -1 while it cannot be read."""
    address = f"http://127.0.0.1:{EXTENDER_OPS_PORT + REPLICAS.index(replica)}/metrics"
    text = cluster.enter(str(cluster.layout.debian / "bin/busybox"), "wget", "-qO-", address).stdout
    values = [line.split()[1] for line in text.splitlines() if line.startswith(f"quotient_scheduler_{name} ")]
    return float(values[0]) if values else -1.0


def is_called(cluster: RealCluster, domain: str = Configuration().domain) -> bool:
    """Return whether the API server calls the webhook; it reads a registration with some delay."""
    invalid = {"name": "c", "image": "i", "resources": {"limits": {f"{domain}/vcuda-core": "150"}}}
    metadata = {"name": "probe", "namespace": "default"}
    probe = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [invalid]}}
    # In audit mode the webhook warns instead of rejecting.
    flags = ["--dry-run=server", "--warnings-as-errors"]
    return REJECTED in cluster.kubectl("create", *flags, "-f-", stdin=json.dumps(probe), check=False)
