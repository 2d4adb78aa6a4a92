"""`quotient doctor`: looks at a living cluster, and says what is wrong and what to do about it."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import Struct
from rich.markup import escape
from rich.table import Table

from console.certs import standing
from console.printing import wide_console
from console.quota import connected
from ledger.ledger_store import LEDGER_SELECTOR, read_ledger
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
    STATUS_KEY,
    STATUS_LABEL,
    names_for,
)
from vcuda.scheme import build_scheme
from vcuda.vocabulary import VocabularyOptions

if TYPE_CHECKING:
    from cluster.objects import Pod

OLDEST = (1, 30)
# Device plugins and schedulers that hand out the same cards, by a part of their images' names.
RIVALS = {
    "gpu-manager": "gpu-manager",
    "gpu-admission": "gpu-admission",
    "hami": "HAMi",
    "k8s-device-plugin": "NVIDIA's device plugin",
    "aws-virtual-gpu": "the AWS virtual GPU plugin",
    "nano-gpu": "nano-gpu",
    "volcano-vgpu": "Volcano's vGPU plugin",
}
OK, WARNING, ERROR = "ok", "warning", "error"
MOST_TOLD = 5


class CheckResult(Struct, frozen=True):
    """One thing that was looked at: how it is, and what to do if it is not well."""

    level: str
    check: str
    message: str
    remedy: str = ""


Check = Callable[[Any, Configuration], Iterator[CheckResult]]


@click.command()
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_context
def doctor(context: click.Context, output: str) -> None:
    """Look at the cluster, and say what is wrong and what to do about it.

    Looks at versions, at Quotient's own pods, webhook configurations, certificates and rights, at quotas, at pods with
    GPUs that no quota knows, at other systems that hand out GPUs, and at clocks. Exit code: 0 nothing is wrong (there
    may be warnings), 1 something is, 2 bad usage or no cluster.
    """
    loaded: Loaded = context.obj
    cluster = connected(loaded.configuration)
    findings = [finding for check in CHECKS for finding in looked(check, cluster, loaded.configuration)]
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        show(findings)
    context.exit(1 if any(finding.level == ERROR for finding in findings) else 0)


def show(findings: list[CheckResult]) -> None:
    """Print what was found."""
    colours = {OK: "green", WARNING: "yellow", ERROR: "red"}
    table = Table("", "looked at", "found", box=None)
    for each in findings:
        told = each.message + (f"; {each.remedy}" if each.remedy else "")
        table.add_row(f"[{colours[each.level]}]{each.level}[/]", escape(each.check), escape(told))
    wide_console().print(table)


def looked(check: Check, cluster: Any, configuration: Configuration) -> list[CheckResult]:  # noqa: ANN401
    """Make one check; what may not be looked at is said, and hides nothing else."""
    from cluster.errors import ApiError  # noqa: PLC0415 - only what runs is loaded

    name = (check.__doc__ or "").partition(".")[0].lower()
    try:
        return list(check(cluster, configuration)) or [CheckResult(OK, name, "all is well")]
    except ApiError as refused:
        return [CheckResult(WARNING, name, f"could not be looked at: {refused}", "ask with more rights")]
    except Unavailable as away:
        raise click.UsageError(str(away)) from None


def versions(cluster: Any, _: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Versions."""
    found = cluster.version()
    numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in found.removeprefix("v").split(".")[:2])
    if numbers < OLDEST:
        yield CheckResult(ERROR, "versions", f"the API server is {found}", "Quotient needs Kubernetes 1.30 or newer")
    else:
        yield CheckResult(OK, "versions", f"the API server is {found}")


def own_pods(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Quotient's pods."""
    from cluster.errors import NotFound  # noqa: PLC0415
    from cluster.objects import DEPLOYMENTS  # noqa: PLC0415
    from controller.webhook_configurations import WEBHOOK  # noqa: PLC0415

    namespace = configuration.system_namespace
    for name in (WEBHOOK, CONTROLLER):
        try:
            found = cluster.get(DEPLOYMENTS, name, namespace)
        except NotFound:
            remedy = "install the chart, or set systemNamespace to where it is"
            yield CheckResult(ERROR, "quotient's pods", f"there is no Deployment {namespace}/{name}", remedy)
            continue
        ready, wanted = found.status.ready_replicas, found.spec.replicas
        level = OK if ready >= wanted else WARNING if ready else ERROR
        remedy = (
            "" if level == OK else f"kubectl -n {namespace} describe pods; kubectl -n {namespace} logs deploy/{name}"
        )
        yield CheckResult(level, "quotient's pods", f"{name}: {ready} of {wanted} ready", remedy)


def registered(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Webhook configurations."""
    from controller.webhook_configurations import WEBHOOK_KINDS, WebhookConfigurations  # noqa: PLC0415

    hooks = WebhookConfigurations(cluster, configuration.system_namespace)
    found = hooks.read()
    for kind in WEBHOOK_KINDS:
        if kind not in found:
            remedy = "helm upgrade brings it back; until then pods with GPUs are not checked"
            yield CheckResult(ERROR, "webhook configurations", f"there is no {kind.name} quotient", remedy)
            continue
        policies = {hook.failure_policy for hook in hooks.own_webhooks(found[kind])}
        if not policies:
            message = f"{kind.name} quotient calls nothing in {configuration.system_namespace}"
            yield CheckResult(
                ERROR, "webhook configurations", message, "helm upgrade puts it right, or set systemNamespace"
            )
        elif found[kind].metadata.annotations.get(ARM_ANNOTATION) == ARM_NEVER:
            remedy = f"kubectl annotate --overwrite {kind.plural} quotient {ARM_ANNOTATION}={ARM_AUTO}"
            yield CheckResult(WARNING, "webhook configurations", f"{kind.name}: the emergency exit is open", remedy)
        elif policies - {"Fail"}:
            remedy = "the controller arms it as soon as the webhook answers: see its log"
            yield CheckResult(WARNING, "webhook configurations", f"{kind.name}: not armed", remedy)
        else:
            yield CheckResult(OK, "webhook configurations", f"{kind.name}: armed")


def certificates(_: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Certificates."""
    rows, wrong = standing(configuration)
    for each in wrong:
        yield CheckResult(ERROR, "certificates", each, "see `quotient certs` and the controller's log")
    if not wrong:
        until = ", ".join(f"{row['certificate']} until {row['until']}" for row in rows)
        yield CheckResult(OK, "certificates", until)


def quotas(cluster: Any, _: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Quotas."""
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.objects import CONFIG_MAPS  # noqa: PLC0415
    from console.quota import read_status  # noqa: PLC0415

    shown = cluster.list(CONFIG_MAPS, "", Selector(labels=STATUS_LABEL)).items
    governed = [each for each in shown if each.metadata.name == QUOTA_STATUS]
    for each in governed:
        status = read_status(each.data.get(STATUS_KEY, ""))
        for note in status.get("notes", []):
            yield CheckResult(WARNING, "quotas", f"{each.metadata.namespace}: {note}", "see `quotient quota lint`")
    yield CheckResult(OK, "quotas", f"{len(governed)} namespaces are held to one")


def unmanaged(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Pods with GPUs."""
    from cluster.objects import CONFIG_MAPS, PODS  # noqa: PLC0415
    from controller.pod_usage import pod_usage_of  # noqa: PLC0415

    names = names_for(configuration.domain)
    scheme = build_scheme(names, configuration.memory_unit_mib, configuration.vocabularies)
    every = build_scheme(names, configuration.memory_unit_mib, VocabularyOptions(nvidia_gpu=True, hami=True))
    ledgers = cluster.list(CONFIG_MAPS, configuration.system_namespace, LEDGER_SELECTOR).items
    charged = {pod for each in ledgers for pod in read_ledger(each).ledger.pods()}
    uncharged, foreign = [], []
    pods: list[Pod] = cluster.list(PODS).items
    for pod in pods:
        held = pod_usage_of(pod, scheme)
        if held is not None and held.node and not held.is_terminal and held.key not in charged:
            uncharged.append(f"{held.metadata.namespace}/{held.metadata.name}")
        if held is None and (other := pod_usage_of(pod, every)) is not None and not other.is_terminal:
            foreign.append(f"{other.metadata.namespace}/{other.metadata.name}")
    if uncharged:
        remedy = "the controller charges them within seconds: does it run?"
        yield CheckResult(WARNING, "pods with gpus", f"not in any ledger: {some(uncharged)}", remedy)
    if foreign:
        remedy = f"set vocabularies.nvidiaGpu, so that {NVIDIA_GPU} counts against quotas"
        yield CheckResult(WARNING, "pods with gpus", f"beyond all quotas: {some(foreign)}", remedy)


def rivals(cluster: Any, _: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Other systems."""
    from cluster.objects import DAEMON_SETS, DEPLOYMENTS  # noqa: PLC0415

    for kind in (DAEMON_SETS, DEPLOYMENTS):
        for each in cluster.list(kind).items:
            images = " ".join(container.image for container in each.spec.template.spec.containers)
            known = [name for mark, name in RIVALS.items() if mark in images]
            if known and each.metadata.labels.get(APP_LABEL) != APP:
                where = f"{each.metadata.namespace}/{each.metadata.name}"
                remedy = "keep them to different nodes, or remove the other: both would hand out the same cards"
                yield CheckResult(WARNING, "other systems", f"{kind.name} {where} is {known[0]}", remedy)


def nodes(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Nodes."""
    from cluster.objects import NODES  # noqa: PLC0415

    core = names_for(configuration.domain).core
    for node in cluster.list(NODES).items:
        offered = {key for key in node.status.allocatable if key in (core, NVIDIA_GPU)}
        info = node.status.node_info
        if offered == {core, NVIDIA_GPU} and node.status.allocatable[NVIDIA_GPU] != "0":
            message = f"{node.metadata.name} offers {core} and {NVIDIA_GPU}: its cards are handed out twice"
            yield CheckResult(ERROR, "nodes", message, "remove NVIDIA's device plugin from it")
        elif offered:
            yield CheckResult(
                OK, "nodes", f"{node.metadata.name}: {info.kubelet_version}, {info.container_runtime_version}"
            )


def clocks(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Clocks."""
    from cluster.objects import CONFIG_MAPS, LEASES  # noqa: PLC0415
    from controller.reconciling import SKEW_S  # noqa: PLC0415

    metadata = {"generateName": "clock-", "namespace": configuration.system_namespace}
    stamp = cluster.create(CONFIG_MAPS, {"metadata": metadata}, dry_run=True).metadata.creation_timestamp
    there = datetime.fromisoformat(stamp).timestamp()
    here = datetime.now(UTC).timestamp()
    if abs(here - there) > SKEW_S:
        yield CheckResult(WARNING, "clocks", f"this machine's differs from the API server's by {here - there:.0f} s")
    for lease in cluster.list(LEASES, "kube-node-lease").items:
        if not lease.spec.renew_time:
            continue
        ahead = datetime.fromisoformat(lease.spec.renew_time).timestamp() - there
        if ahead > SKEW_S:
            message = f"node {lease.metadata.name} is {ahead:.0f} s ahead of the API server"
            yield CheckResult(WARNING, "clocks", message, "let all machines follow one clock (NTP)")


def rights(cluster: Any, configuration: Configuration) -> Iterator[CheckResult]:  # noqa: ANN401
    """Rights."""
    from cluster.objects import ACCESS_REVIEWS  # noqa: PLC0415

    for account, verb, group, resource, namespace in NEEDED:
        where = configuration.system_namespace if namespace else ""
        user = f"system:serviceaccount:{configuration.system_namespace}:{account}"
        attributes = {"verb": verb, "group": group, "resource": resource, "namespace": where}
        review = {"spec": {"user": user, "resourceAttributes": attributes}}
        if not cluster.create(ACCESS_REVIEWS, review).status.allowed:
            message = f"{account} may not {verb} {resource}"
            yield CheckResult(ERROR, "rights", message, "helm upgrade brings its roles back; see docs/rights.md")


# Without these nothing works: account, verb, group, resource, and whether in Quotient's namespace alone.
NEEDED = (
    ("quotient-webhook", "list", "", "configmaps", False),
    ("quotient-webhook", "update", "", "configmaps", True),
    ("quotient-webhook", "get", "", "pods", False),
    ("quotient-controller", "list", "discovery.k8s.io", "endpointslices", True),
    ("quotient-controller", "list", "", "pods", False),
    ("quotient-controller", "list", "", "nodes", False),
    ("quotient-controller", "create", "", "configmaps", False),
    ("quotient-controller", "create", "coordination.k8s.io", "leases", True),
)
CHECKS: tuple[Check, ...] = (
    versions,
    own_pods,
    registered,
    certificates,
    rights,
    quotas,
    unmanaged,
    rivals,
    nodes,
    clocks,
)


def some(names: list[str]) -> str:
    """Name a few of many."""
    more = len(names) - MOST_TOLD
    return ", ".join(names[:MOST_TOLD]) + (f" and {more} more" if more > 0 else "")
