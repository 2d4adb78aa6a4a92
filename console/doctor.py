"""`quotient doctor`: checks an installation in a live cluster, and names a remedy for every problem."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click
import msgspec
from rich.markup import escape
from rich.table import Table

from console.certs import certificate_report
from console.check_results import ERROR, OK, WARNING, Check, CheckResult
from console.component_checks import (
    NODE_PLUGINS,
    OWN_PODS,
    RESTARTS,
    ROLLOUTS,
    check_node_plugin,
    check_own_pods,
    check_restarts,
    check_rollouts,
)
from console.connecting import connect_cluster
from console.errors import CommandError
from console.pod_checks import GPU_PODS, PENDING, check_pending, check_pods
from console.printing import wide_console
from console.quota_status_view import read_status
from console.scheduling_checks import (
    GPU_NODES,
    KUBE_SCHEDULER,
    LEADERSHIP,
    check_gpu_nodes,
    check_kube_scheduler,
    check_lease,
    minor_version,
)
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.decision import Unavailable
from vcuda.names import (
    APP,
    APP_LABEL,
    ARM_ANNOTATION,
    ARM_AUTO,
    ARM_NEVER,
    CONTROLLER,
    NVIDIA_GPU,
    QUOTA_STATUS,
    SCHEDULER,
    STATUS_KEY,
    STATUS_LABEL,
    WEBHOOK,
    WEBHOOK_CONFIGURATION,
    names_for,
)

# ValidatingAdmissionPolicy and matchConditions are stable from here on.
OLDEST_KUBERNETES = (1, 30)
# Device plugins and schedulers that allocate the same cards, by a part of their image names.
CONFLICTING_IMAGES = {
    "gpu-manager": "gpu-manager",
    "gpu-admission": "gpu-admission",
    "hami": "HAMi",
    "k8s-device-plugin": "NVIDIA's device plugin",
    "aws-virtual-gpu": "the AWS virtual GPU plugin",
    "nano-gpu": "nano-gpu",
    "volcano-vgpu": "Volcano's vGPU plugin",
}


@click.command(short_help="Check the installation in a cluster.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_context
def doctor(context: click.Context, output: str) -> None:
    """Check the installation in a cluster, and name a remedy for every problem.

    Checks versions, Quotient's own pods, its scheduler, webhook configurations, certificates and RBAC, quotas, pods
    with GPUs that are pending or not charged to a quota, other systems that allocate GPUs, nodes and clocks. Exit code:
    0 no errors (warnings do not count), 1 errors, 2 wrong usage or no cluster.
    """
    loaded: Loaded = context.obj
    cluster = connect_cluster(loaded.configuration)
    results = [result for name in CHECKS for result in run_check(name, cluster, loaded.configuration)]
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(results), indent=2).decode())
    else:
        show_results(results)
    context.exit(1 if any(result.level == ERROR for result in results) else 0)


def show_results(results: list[CheckResult]) -> None:
    colours = {OK: "green", WARNING: "yellow", ERROR: "red"}
    table = Table("", "check", "result", box=None)
    for each in results:
        text = each.message + (f"; {each.remedy}" if each.remedy else "")
        table.add_row(f"[{colours[each.level]}]{each.level}[/]", escape(each.check), escape(text))
    wide_console().print(table)


def run_check(name: str, cluster: Any, configuration: Configuration) -> list[CheckResult]:  # noqa: ANN401
    """Run one check; one that RBAC forbids is reported, and the others still run."""
    from cluster.errors import ApiError  # noqa: PLC0415 - only loaded where a cluster is used

    try:
        return list(CHECKS[name](cluster, configuration)) or [CheckResult(OK, name, "no problems")]
    except ApiError as error:
        return [CheckResult(WARNING, name, f"could not be checked: {error}", "run it as a user who may read this")]
    except Unavailable as error:
        raise CommandError(str(error)) from None


def check_versions(cluster: Any, _: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    version = cluster.version()
    if (minor_version(version) or (0, 0)) < OLDEST_KUBERNETES:
        remedy = "Quotient needs Kubernetes 1.30 or newer"
        yield CheckResult(ERROR, "versions", f"the API server is {version}", remedy)
    else:
        yield CheckResult(OK, "versions", f"the API server is {version}")


def check_webhook_configurations(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    from controller.webhook_configurations import WEBHOOK_KINDS, WebhookConfigurations, secret_of  # noqa: PLC0415

    check = "webhook configurations"
    configurations = WebhookConfigurations(cluster, configuration.system_namespace)
    existing = configurations.read()
    for kind in WEBHOOK_KINDS:
        name = f"{kind.name} {WEBHOOK_CONFIGURATION}"
        if kind not in existing:
            remedy = "helm upgrade creates it; until then pods with GPUs are not checked"
            yield CheckResult(ERROR, check, f"{name} does not exist", remedy)
            continue
        policies = {webhook.failure_policy for webhook in configurations.own_webhooks(existing[kind])}
        if not policies:
            message = f"{name} calls no Service in {configuration.system_namespace}"
            yield CheckResult(ERROR, check, message, "helm upgrade repairs it, or set systemNamespace")
        elif existing[kind].metadata.annotations.get(ARM_ANNOTATION) == ARM_NEVER:
            remedy = f"kubectl annotate --overwrite {kind.plural} {WEBHOOK_CONFIGURATION} {ARM_ANNOTATION}={ARM_AUTO}"
            message = f"{kind.name}: failurePolicy is kept at Ignore by the annotation {ARM_ANNOTATION}"
            yield CheckResult(WARNING, check, message, remedy)
        elif policies - {"Fail"}:
            remedy = "the controller sets Fail as soon as the webhook answers: see its log"
            yield CheckResult(WARNING, check, f"{kind.name}: failurePolicy is Ignore", remedy)
        elif not all(map(secret_of, configurations.own_webhooks(existing[kind]))):
            remedy = "the controller writes one as soon as all replicas accept it: see `webhook_path_step` in its log"
            yield CheckResult(WARNING, check, f"{kind.name}: the webhook's path has no secret", remedy)
        else:
            yield CheckResult(OK, check, f"{kind.name}: failurePolicy is Fail")


def check_certificates(_: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    rows, problems = certificate_report(configuration)
    for problem in problems:
        yield CheckResult(ERROR, "certificates", problem, "see `quotient certs` and the controller's log")
    if not problems:
        expiry = ", ".join(f"{row['certificate']} until {row['until']}" for row in rows)
        yield CheckResult(OK, "certificates", expiry)


def check_quotas(cluster: Any, _: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.objects import CONFIG_MAPS  # noqa: PLC0415

    config_maps = cluster.list(CONFIG_MAPS, "", Selector(labels=STATUS_LABEL)).items
    statuses = [each for each in config_maps if each.metadata.name == QUOTA_STATUS]
    for each in statuses:
        for note in read_status(each.data.get(STATUS_KEY, "")).get("notes", []):
            yield CheckResult(WARNING, "quotas", f"{each.metadata.namespace}: {note}", "see `quotient quota lint`")
    yield CheckResult(OK, "quotas", f"{len(statuses)} namespaces have a quota")


def check_other_systems(cluster: Any, _: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    from cluster.objects import DAEMON_SETS, DEPLOYMENTS  # noqa: PLC0415

    for kind in (DAEMON_SETS, DEPLOYMENTS):
        for each in cluster.list(kind).items:
            images = " ".join(container.image for container in each.spec.template.spec.containers)
            systems = [name for image, name in CONFLICTING_IMAGES.items() if image in images]
            if systems and each.metadata.labels.get(APP_LABEL) != APP:
                where = f"{each.metadata.namespace}/{each.metadata.name}"
                remedy = "run the two on different nodes, or remove the other: both would allocate the same cards"
                yield CheckResult(WARNING, "other systems", f"{kind.name} {where} is {systems[0]}", remedy)


def check_nodes(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    from cluster.objects import NODES  # noqa: PLC0415

    core = names_for(configuration.domain).core
    for node in cluster.list(NODES).items:
        offered = {key for key in node.status.allocatable if key in (core, NVIDIA_GPU)}
        info = node.status.node_info
        if offered == {core, NVIDIA_GPU} and node.status.allocatable[NVIDIA_GPU] != "0":
            message = f"{node.metadata.name} offers {core} and {NVIDIA_GPU}: its cards are allocated twice"
            yield CheckResult(ERROR, "nodes", message, "remove NVIDIA's device plugin from it")
        elif offered:
            versions = f"{node.metadata.name}: {info.kubelet_version}, {info.container_runtime_version}"
            yield CheckResult(OK, "nodes", versions)


def check_clocks(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    from cluster.objects import CONFIG_MAPS, LEASES  # noqa: PLC0415
    from controller.reconciling import SKEW_S  # noqa: PLC0415

    # A dry run stores nothing, and its answer carries the API server's time.
    metadata = {"generateName": "clock-", "namespace": configuration.system_namespace}
    stamp = cluster.create(CONFIG_MAPS, {"metadata": metadata}, dry_run=True).metadata.creation_timestamp
    server_s, local_s = datetime.fromisoformat(stamp).timestamp(), datetime.now(UTC).timestamp()
    if abs(local_s - server_s) > SKEW_S:
        yield CheckResult(WARNING, "clocks", f"this machine differs from the API server by {local_s - server_s:.0f} s")
    for lease in cluster.list(LEASES, "kube-node-lease").items:
        if not lease.spec.renew_time:
            continue
        ahead_s = datetime.fromisoformat(lease.spec.renew_time).timestamp() - server_s
        if ahead_s > SKEW_S:
            message = f"node {lease.metadata.name} is {ahead_s:.0f} s ahead of the API server"
            yield CheckResult(WARNING, "clocks", message, "synchronize the clocks of all machines (NTP)")


def check_rbac(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    from cluster.objects import ACCESS_REVIEWS, DEPLOYMENTS  # noqa: PLC0415

    installed = {each.metadata.name for each in cluster.list(DEPLOYMENTS, configuration.system_namespace).items}
    for account, verb, group, resource, in_own_namespace in NEEDED_PERMISSIONS:
        if account == SCHEDULER and SCHEDULER not in installed:
            continue  # that it is missing is another check's result
        namespace = configuration.system_namespace if in_own_namespace else ""
        user = f"system:serviceaccount:{configuration.system_namespace}:{account}"
        attributes = {"verb": verb, "group": group, "resource": resource, "namespace": namespace}
        review = {"spec": {"user": user, "resourceAttributes": attributes}}
        if not cluster.create(ACCESS_REVIEWS, review).status.allowed:
            message = f"{account} may not {verb} {resource}"
            yield CheckResult(ERROR, "rbac", message, "helm upgrade restores its roles; see docs/rbac.md")


# Service account, verb, group, resource, and whether only in Quotient's namespace. A sample of docs/rbac.md: without
# any of these the component does not work at all.
NEEDED_PERMISSIONS = (
    (WEBHOOK, "list", "", "configmaps", False),
    (WEBHOOK, "update", "", "configmaps", True),
    (WEBHOOK, "get", "", "pods", False),
    (CONTROLLER, "list", "discovery.k8s.io", "endpointslices", True),
    (CONTROLLER, "list", "", "pods", False),
    (CONTROLLER, "list", "", "nodes", False),
    (CONTROLLER, "create", "", "configmaps", False),
    (CONTROLLER, "create", "coordination.k8s.io", "leases", True),
    (SCHEDULER, "list", "", "pods", False),
    (SCHEDULER, "list", "", "nodes", False),
    (SCHEDULER, "patch", "", "pods", False),
    (SCHEDULER, "update", "", "configmaps", True),
)
CHECKS: dict[str, Check] = {
    "versions": check_versions,
    OWN_PODS: check_own_pods,
    NODE_PLUGINS: check_node_plugin,
    ROLLOUTS: check_rollouts,
    RESTARTS: check_restarts,
    LEADERSHIP: check_lease,
    KUBE_SCHEDULER: check_kube_scheduler,
    "webhook configurations": check_webhook_configurations,
    "certificates": check_certificates,
    "rbac": check_rbac,
    "quotas": check_quotas,
    GPU_PODS: check_pods,
    PENDING: check_pending,
    "other systems": check_other_systems,
    "nodes": check_nodes,
    GPU_NODES: check_gpu_nodes,
    "clocks": check_clocks,
}
