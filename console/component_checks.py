"""Checks of `quotient doctor`: whether the components of Quotient run, in the version that was installed last."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from console.check_results import ERROR, OK, WARNING, CheckResult, shorten_list
from console.printing import count_of
from settings.configuration import Configuration
from vcuda.names import APP, APP_LABEL, CONTROLLER, NODE_PLUGIN, SCHEDULER, WEBHOOK
from vcuda.namespace_policy import Mode

if TYPE_CHECKING:
    from cluster.object_details import ContainerStatusDetails
    from cluster.objects import Workload

OWN_PODS, NODE_PLUGINS, ROLLOUTS, RESTARTS = "quotient's pods", "node plugin", "rollouts", "restarts"
# A component may restart a few times while it is installed: until its certificate, its Lease or its driver is there.
MAX_RESTARTS = 3


def check_own_pods(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    from cluster.errors import NotFound  # noqa: PLC0415 - only loaded where a cluster is used
    from cluster.objects import DEPLOYMENTS  # noqa: PLC0415

    namespace = configuration.system_namespace
    for name in (WEBHOOK, CONTROLLER, SCHEDULER):
        try:
            deployment = cluster.get(DEPLOYMENTS, name, namespace)
        except NotFound:
            yield missing_deployment(name, configuration)
            continue
        ready, wanted = deployment.status.ready_replicas, deployment.spec.replicas
        level = OK if ready >= wanted else WARNING if ready else ERROR
        remedy = (
            "" if level == OK else f"kubectl -n {namespace} describe pods; kubectl -n {namespace} logs deploy/{name}"
        )
        yield CheckResult(level, OWN_PODS, f"{name}: {ready} of {wanted} ready", remedy)


def missing_deployment(name: str, configuration: Configuration) -> CheckResult:
    message = f"Deployment {configuration.system_namespace}/{name} does not exist"
    remedy = "install the chart, or set systemNamespace to the namespace it is in"
    if name != SCHEDULER:
        return CheckResult(ERROR, OWN_PODS, message, remedy)
    # In audit mode pods keep their schedulers; in enforce mode all GPU pods wait for this one.
    level = ERROR if configuration.mode is Mode.ENFORCE else WARNING
    return CheckResult(level, OWN_PODS, f"{message}: pods with schedulerName {SCHEDULER} stay Pending", remedy)


def check_node_plugin(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    from cluster.errors import NotFound  # noqa: PLC0415
    from cluster.objects import DAEMON_SETS  # noqa: PLC0415

    namespace = configuration.system_namespace
    try:
        status = cluster.get(DAEMON_SETS, NODE_PLUGIN, namespace).status
    except NotFound:
        remedy = "set nodePlugin.enabled in the chart's values, unless another device plugin allocates the GPUs"
        yield CheckResult(WARNING, NODE_PLUGINS, f"DaemonSet {namespace}/{NODE_PLUGIN} does not exist", remedy)
        return
    ready, wanted = status.number_ready, status.desired_number_scheduled
    message = f"{ready} of {wanted} ready"
    if not wanted:
        remedy = "check the node selector and tolerations (nodePlugin in the chart's values) against nodes with GPUs"
        yield CheckResult(WARNING, NODE_PLUGINS, "no node is selected to run it", remedy)
    elif ready < wanted:
        remedy = f"kubectl -n {namespace} get pods -o wide; kubectl -n {namespace} logs ds/{NODE_PLUGIN}"
        yield CheckResult(WARNING if ready else ERROR, NODE_PLUGINS, message, remedy)
    else:
        yield CheckResult(OK, NODE_PLUGINS, message)


def check_rollouts(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Find replicas of an older version: different versions must not run together for long."""
    from cluster.errors import NotFound  # noqa: PLC0415
    from cluster.objects import DAEMON_SETS, DEPLOYMENTS  # noqa: PLC0415

    namespace = configuration.system_namespace
    for kind, name in (*((DEPLOYMENTS, each) for each in (WEBHOOK, CONTROLLER, SCHEDULER)), (DAEMON_SETS, NODE_PLUGIN)):
        try:
            old = count_old_replicas(cluster.get(kind, name, namespace))
        except NotFound:
            continue  # reported by another check
        if old:
            remedy = f"kubectl -n {namespace} rollout status {kind.name.lower()}/{name} says what it waits for"
            yield CheckResult(WARNING, ROLLOUTS, f"{name}: {count_of(old, 'replica')} of an older version", remedy)


def count_old_replicas(workload: "Workload") -> int:
    status = workload.status
    return max(
        status.replicas - status.updated_replicas, status.desired_number_scheduled - status.updated_number_scheduled, 0
    )


def check_restarts(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.object_details import POD_DETAILS  # noqa: PLC0415

    namespace = configuration.system_namespace
    pods = cluster.list(POD_DETAILS, namespace, Selector(labels=f"{APP_LABEL}={APP}")).items
    restarting = [
        (pod.metadata.name, describe_restarts(each))
        for pod in pods
        for each in pod.status.all_containers
        if each.restart_count > MAX_RESTARTS
    ]
    if restarting:
        remedy = f"kubectl -n {namespace} logs {restarting[0][0]} --all-containers --previous"
        listed = shorten_list([f"{name}: {text}" for name, text in restarting])
        yield CheckResult(WARNING, RESTARTS, listed, remedy)


def describe_restarts(status: "ContainerStatusDetails") -> str:
    end = status.last_state.terminated
    cause = f", last with code {end.exit_code}" + (f" ({end.reason})" if end.reason else "") if end else ""
    return f"{status.name} restarted {status.restart_count} times{cause}"
