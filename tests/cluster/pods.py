"""Pods that run a script, to test that a cluster works."""

import json
import time

from tests.cluster.images import BUSYBOX
from tests.cluster.real import ClusterError, RealCluster

RUN_S = 60.0


def run_to_end(cluster: RealCluster, name: str, script: str) -> str:
    """Run a script in a pod until it has succeeded; returns its output."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": BUSYBOX, "command": ["sh", "-c", script]}],
        },
    }
    cluster.kubectl("apply", "-f-", stdin=json.dumps(pod))
    deadline = time.monotonic() + RUN_S
    while (phase := cluster.kubectl("get", "pod", name, "-o=jsonpath={.status.phase}")) != "Succeeded":
        if phase == "Failed" or time.monotonic() > deadline:
            raise ClusterError(f"pod {name} is {phase}: {cluster.kubectl('describe', 'pod', name)[-2000:]}")
        time.sleep(0.2)
    log = cluster.kubectl("logs", name)
    cluster.kubectl("delete", "pod", name, "--wait=false")
    return log
