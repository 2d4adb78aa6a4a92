"""The configuration of the kube-scheduler that runs beside the extender, in a process of its own.

Never of the cluster's own kube-scheduler: extenders apply to all profiles of a process, and slow all of them down.
"""

from typing import Any

from settings.configuration import Configuration
from vcuda.names import SCHEDULER, names_for

# A rank times this weight exceeds the sum of all scores of kube-scheduler's own plugins, so the order of nodes is ours.
WEIGHT = 1000
# Longer than the extender takes for a binding with all retries.
HTTP_TIMEOUT_S = 30
QPS, BURST = 300, 600
# From 1.33 on kube-scheduler skips the backoff of pods while it is idle. Every pod that ends requeues all pods that an
# extender refused, so those that fit nowhere would be filtered without pause: 6 times a second each, measured with 60.
# Other versions do not know the feature gate, or may not.
POP_FROM_BACKOFF = range(33, 38)


def feature_gates(version: str) -> list[str]:
    """Return the flags of a kube-scheduler of this version, such as v1.36.4, for feature gates."""
    minor = int(version.removeprefix("v").split(".")[1])
    return ["--feature-gates=SchedulerPopFromBackoffQ=false"] if minor in POP_FROM_BACKOFF else []


def kube_scheduler_configuration(configuration: Configuration) -> dict[str, Any]:
    """Return a KubeSchedulerConfiguration."""
    names, settings = names_for(configuration.domain), configuration.scheduler
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {
            "leaderElect": bool(settings.lease),
            "resourceName": settings.lease or SCHEDULER,
            "resourceNamespace": configuration.system_namespace,
        },
        "clientConnection": {"qps": QPS, "burst": BURST},
        "profiles": [{"schedulerName": SCHEDULER}],
        # All nodes are ranked: with fewer, the best one may be missed.
        "percentageOfNodesToScore": 100,
        "podInitialBackoffSeconds": settings.initial_backoff_s,
        "podMaxBackoffSeconds": settings.max_backoff_s,
        "extenders": [
            {
                "urlPrefix": f"http://{settings.address}:{settings.port}/scheduler",
                "filterVerb": "filter",
                "prioritizeVerb": "prioritize",
                "bindVerb": "bind",
                "preemptVerb": "preempt",
                "weight": WEIGHT,
                "nodeCacheCapable": True,
                # An ignorable extender that fails would have its pods bound without a placement.
                "ignorable": False,
                "httpTimeout": f"{HTTP_TIMEOUT_S}s",
                "managedResources": [
                    {"name": name, "ignoredByScheduler": False} for name in (names.core, names.memory)
                ],
            }
        ],
    }
