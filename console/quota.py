"""`quotient quota`: how namespaces stand with their quotas; `quotient quota lint`: what is questionable about them."""

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec
from msgspec import Struct
from rich.markup import escape
from rich.table import Table

from console.admit import read_text
from console.offline_admission import OfflineQuotas, admit_offline, objects_of, quotas_in
from console.printing import wide_console
from ledger.quota_cache import is_quota
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.catalogue import CardModel, card_sizes_mib
from vcuda.charging import Holder, RemedyContext
from vcuda.decision import Reason, Unavailable
from vcuda.decoding import converted
from vcuda.ledger import Ledger, PodKey
from vcuda.names import (
    LEGACY_KEY,
    LEGACY_NAME,
    LEGACY_NAMESPACE,
    QUOTA_KEY,
    QUOTA_STATUS,
    STATUS_KEY,
    STATUS_LABEL,
)
from vcuda.quantity import QuantityError, parse
from vcuda.quota import Quota, QuotaError, QuotaMistake
from vcuda.quota_lint import CardCapacity, QuotaWarning, lint_quotas
from vcuda.scheme import Scheme
from vcuda.strict_yaml import DocumentError, parse_documents
from vcuda.vocabulary import CORES_PER_CARD
from webhook.service import admission_config_of
from webhook.workloads import WORKLOAD_KINDS

if TYPE_CHECKING:
    from cluster.objects import Object
    from controller.pod_usage import PodUsage

SHOW = "show"
# Of a workload with more pods, the first show what becomes of them.
MOST_REPLICAS = 1000
TEMPLATES = {"CronJob": ("jobTemplate", "spec", "template")}

Status = dict[str, Any]
Document = dict[str, Any]


class QuotaGroup(click.Group):
    """A group whose first word may be a namespace instead of a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take whatever is no command for what is to be shown."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args.insert(0, SHOW)
        return super().parse_args(ctx, args)


@click.group(cls=QuotaGroup, options_metavar="", subcommand_metavar="[NAMESPACE | lint] [OPTIONS]...")
def quota() -> None:
    """Show how namespaces stand with their GPU quotas: hard, used, reserved, free, and who holds most.

    From the cluster, one namespace or all; or with -f from files of quotas, pods and workloads. `quotient quota lint`
    says what is questionable about quotas.
    """


@quota.command(SHOW, hidden=True)
@click.argument("namespace", required=False)
@click.option("-f", "--file", "files", multiple=True, metavar="FILE", help="Files of quotas, pods and workloads.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_context
def show(context: click.Context, namespace: str | None, files: tuple[str, ...], output: str) -> None:
    """Show how namespaces stand with their GPU quotas.

    Exit code: 0 shown, 1 there is no quota to show, 2 bad usage or no cluster.
    """
    loaded: Loaded = context.obj
    found = from_files(files, loaded) if files else from_cluster(loaded.configuration, namespace)
    found = {name: status for name, status in sorted(found.items()) if namespace in (None, name)}
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    elif found:
        for name, status in found.items():
            show_status(name, status)
    else:
        click.echo(f"no GPU quota in {f'namespace {namespace}' if namespace else 'any namespace'}", err=True)
    context.exit(0 if found else 1)


def from_cluster(configuration: Configuration, namespace: str | None) -> dict[str, Status]:
    """Read what the controller shows in each namespace: whoever may read it there may see it here."""
    from cluster.errors import ApiError  # noqa: PLC0415 - only what runs is loaded
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.objects import CONFIG_MAPS  # noqa: PLC0415

    cluster = connected(configuration)
    try:
        listing = cluster.list(CONFIG_MAPS, namespace or "", Selector(labels=STATUS_LABEL))
    except (ApiError, Unavailable) as refused:
        hint = "" if namespace else "; name a namespace of yours: quotient quota NAMESPACE"
        raise click.UsageError(f"{refused}{hint}") from None
    return {
        each.metadata.namespace: read_status(each.data.get(STATUS_KEY, ""))
        for each in listing.items
        if each.metadata.name == QUOTA_STATUS
    }


def connected(configuration: Configuration) -> Any:  # noqa: ANN401 - a cluster, loaded when it is needed
    """Connect to the configured cluster."""
    from cluster.api import connect  # noqa: PLC0415

    try:
        return connect(configuration.cluster.kubeconfig, configuration.cluster.context).with_timeout(15)
    except Unavailable as away:
        raise click.UsageError(str(away)) from None


def read_status(text: str) -> Status:
    """Read a status as the controller wrote it."""
    try:
        (found,) = parse_documents(text)
    except (DocumentError, ValueError):
        return {"notes": ["the status cannot be read"]}
    return dict(found) if isinstance(found, dict) else {}


def show_status(namespace: str, status: Status, heading: str = "") -> None:
    """Print how one namespace stands."""
    console = wide_console()
    mode = f" ({status['mode']})" if status.get("mode") == "audit" else ""
    console.print(f"{heading}[bold]{escape(namespace)}[/bold]{mode}", highlight=False)
    table = Table("quota", "type", "resource", "hard", "used", "reserved", "free", box=None, padding=(0, 2, 0, 2))
    for each in status.get("quotas", []):
        for line, dimensions in each["types"].items():
            for dimension, numbers in dimensions.items():
                row = (each["name"], line, dimension, *(str(numbers[key]) for key in NUMBERS))
                full = numbers["free"] == 0
                table.add_row(*map(escape, row), style="red" if full else None)
    console.print(table)
    for holder in status.get("holders", []):
        told = f"{holder['name']}: {holder['cores']} cores, {holder['memoryMiB']} MiB of {holder['model']}"
        console.print(f"    held by {escape(told)} in {holder['pods']} pods", highlight=False)
    for each in status.get("waiting", []):
        console.print(f"    [yellow]waiting[/yellow] {escape(each['name'])}: {escape(each['reason'])}", soft_wrap=True)
    for note in status.get("notes", []):
        console.print(f"    [yellow]note[/yellow] {escape(note)}", highlight=False, soft_wrap=True)


NUMBERS = ("hard", "used", "reserved", "free")
AMOUNTS = ("capacity", "allocatable")


def documents_in(files: Iterable[str]) -> list[tuple[str, Document]]:
    """Read all objects of some files."""
    found: list[tuple[str, Document]] = []
    for file in files:
        try:
            found += [(file, document) for document in objects_of(read_text(file))]
        except DocumentError as wrong:
            raise click.UsageError(f"{file}: {wrong}") from None
    return found


def from_files(files: tuple[str, ...], loaded: Loaded) -> dict[str, Status]:
    """Charge the pods of files to the quotas in them, one after another."""
    from controller.accounting import top_holders  # noqa: PLC0415
    from controller.quota_status import status_of  # noqa: PLC0415

    rules = admission_config_of(loaded.configuration)
    documents = documents_in(files)
    found = quotas_among(documents, loaded.configuration)
    if found.mistakes:
        raise click.UsageError("\n".join(map(str, found.mistakes)))
    quotas = OfflineQuotas(found.quotas)
    there = existing_in(documents, loaded.configuration)
    owners: dict[str, dict[PodKey, str]] = {name: {} for name in quotas.namespaces}
    refused: dict[str, dict[str, str]] = {name: {} for name in quotas.namespaces}
    for name in quotas.namespaces:
        held = {key: each for key, each in there.items() if each.metadata.namespace == name}
        waiting = count_existing(quotas.ledger(name), held, documents, loaded.configuration)
        owners[name] |= {key: each.owner for key, each in held.items()}
        refused[name] |= {held[key].metadata.name: str(reasons[0]) for key, reasons in waiting.items()}
    known = {(each.metadata.namespace, each.owner) for each in there.values()}
    for _, document in documents:
        if is_existing(document):
            continue
        for owner, pod in pods_of(document):
            namespace = str(pod["metadata"].get("namespace") or "default")
            if namespace not in owners or (namespace, owner) in known:
                continue
            before = set(quotas.ledger(namespace).pods())
            verdict = admit_offline(pod, rules, quotas, namespace, "somebody")
            owners[namespace] |= dict.fromkeys(quotas.ledger(namespace).pods() - before, owner)
            if verdict.reasons:
                refused[namespace][str(pod["metadata"].get("name", owner))] = str(verdict.reasons[0])
    mode = loaded.configuration.mode
    for name, by_pod in owners.items():
        quotas.ledger(name).set_holders(top_holders(holders_of(quotas.ledger(name), by_pod)))
    return {name: status_of(quotas.ledger(name), mode, refused[name], {}) for name in owners}


def is_existing(document: Document) -> bool:
    """Tell a pod that some cluster has from one that is yet to be created."""
    created = part_of(document, "metadata").get("uid") and part_of(document, "status").get("phase")
    return document.get("kind") == "Pod" and bool(created)


def existing_in(documents: Iterable[tuple[str, Document]], configuration: Configuration) -> "dict[PodKey, PodUsage]":
    """Read what pods hold that some cluster has already."""
    from cluster.objects import Pod  # noqa: PLC0415 - only what runs is loaded
    from controller.pod_usage import pod_usage_of  # noqa: PLC0415

    scheme = admission_config_of(configuration).scheme
    pods = [read_object(document, Pod) for _, document in documents if is_existing(document)]
    return {held.key: held for pod in pods if (held := pod_usage_of(pod, scheme)) is not None}


def count_existing(
    ledger: Ledger,
    held: "Mapping[PodKey, PodUsage]",
    documents: Iterable[tuple[str, Document]],
    configuration: Configuration,
) -> Mapping[PodKey, tuple[Reason, ...]]:
    """Charge pods that exist as the controller does; gives those that find no room, and why."""
    from cluster.objects import Node  # noqa: PLC0415
    from controller.accounting import NamespaceView, reconcile  # noqa: PLC0415
    from controller.pod_usage import actual_charge, counts_against_quota, gpu_node_of  # noqa: PLC0415

    rules, now_s = admission_config_of(configuration), time.time()
    nodes = [read_object(document, Node) for _, document in documents if document.get("kind") == "Node"]
    machines = {node.metadata.name: gpu_node_of(node, rules.scheme) for node in nodes}
    cards = {card for machine in machines.values() for card in machine.cards()}
    unit_mib = configuration.memory_unit_mib
    view = NamespaceView(
        holdings={
            key: each for key, each in held.items() if counts_against_quota(each, machines.get(each.node), now_s)
        },
        gone=frozenset(),
        actual=lambda each: actual_charge(each, machines.get(each.node), unit_mib),
        cards=card_sizes_mib(cards, ledger.policy.pools),
        unit_mib=unit_mib,
        cluster_mode=configuration.mode,
        remedies=RemedyContext(rules.names.use_models, unit_mib),
    )
    return reconcile(ledger, view, now_s, lambda *_: False).waiting


def holders_of(ledger: Ledger, owners: Mapping[PodKey, str]) -> list[Holder]:
    """Say what each pod holds, for whom."""
    found = []
    for pod, owner in owners.items():
        if (place := ledger.place(pod)) is not None:
            charge = place[0]
            found.append(Holder(owner, charge.model, cores=charge.cores, pods=1, memory_mib=charge.memory_mib))
    return found


class QuotasInFiles(Struct):
    """What files hold of quotas: those in force, by namespace; what is wrong with others, and what is doubtful."""

    quotas: dict[str, list[Quota]] = {}
    mistakes: list[QuotaMistake] = []
    warnings: list[QuotaWarning] = []


def quotas_among(documents: Iterable[tuple[str, Document]], configuration: Configuration) -> QuotasInFiles:
    """Find the quotas among documents; other ConfigMaps are nobody's business."""
    scheme = admission_config_of(configuration).scheme
    found = QuotasInFiles()
    for file, document in documents:
        if document.get("kind", "ConfigMap") != "ConfigMap" or not may_be_quota(document, scheme):
            continue
        try:
            for namespace, each in quotas_in(document, file, configuration.memory_unit_mib):
                found.quotas.setdefault(namespace or "default", []).append(each)
                if document.get("kind") and not is_in_force(document, scheme):
                    remedy = f'add the label {scheme.names.quota_label}: "true"'
                    found.warnings.append(
                        QuotaWarning(each.name, "metadata.labels", "it is no quota without its label", remedy)
                    )
        except QuotaError as wrong:
            found.mistakes += wrong.mistakes
    return found


def part_of(document: Document, field: str) -> dict[str, Any]:
    """Give a part of a document that should be a mapping; an empty one if it is not."""
    found = document.get(field)
    return found if isinstance(found, dict) else {}


def is_in_force(document: Document, scheme: Scheme) -> bool:
    """Tell whether a ConfigMap is in force as a quota."""
    metadata = part_of(document, "metadata")
    where = str(metadata.get("namespace") or ""), str(metadata.get("name") or "")
    return is_quota(*where, part_of(metadata, "labels"), scheme)


def may_be_quota(document: Document, scheme: Scheme) -> bool:
    """Tell a quota, or what looks like one, from other ConfigMaps."""
    data = part_of(document, "data")
    return not document.get("kind") or is_in_force(document, scheme) or QUOTA_KEY in data or LEGACY_KEY in data


def pods_of(document: Document) -> Iterable[tuple[str, Document]]:
    """Give the pods that a document stands for, with what people know them by; a few of very many are enough."""
    kind, metadata = str(document.get("kind", "")), part_of(document, "metadata")
    name = str(metadata.get("name") or metadata.get("generateName") or "")
    if kind == "Pod":
        yield f"Pod/{name}", document | {"metadata": metadata}
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    if (group, kind) not in WORKLOAD_KINDS:
        return
    outer = spec = part_of(document, "spec")
    for step in TEMPLATES.get(kind, ("template",)):
        outer, spec = spec, part_of(spec, step)
    count = outer.get("replicas", outer.get("parallelism", 1))
    for number in range(min(count, MOST_REPLICAS) if isinstance(count, int) else 1):
        made = {**part_of(spec, "metadata"), "name": f"{name}-{number}"}
        if metadata.get("namespace"):
            made["namespace"] = metadata["namespace"]
        yield f"{kind}/{name}", {"apiVersion": "v1", "kind": "Pod", "metadata": made, "spec": part_of(spec, "spec")}


@quota.command()
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def lint(context: click.Context, files: tuple[str, ...], output: str) -> None:
    """Say what is questionable about quotas: beyond what the cluster has, unknown models, contradictions.

    FILE holds quotas, and Node objects to compare them with; without any, both are read from the cluster. Exit code:
    0 nothing to say, or warnings only; 1 a quota cannot be read; 2 bad usage or no cluster.
    """
    loaded: Loaded = context.obj
    documents = documents_in(files) if files else live(loaded.configuration)
    found = quotas_among(documents, loaded.configuration)
    errors = found.mistakes
    nodes = [document for _, document in documents if document.get("kind") == "Node"]
    stocks = stocks_of(nodes, loaded.configuration) if nodes or not files else None
    warnings = [*found.warnings, *lint_quotas(found.quotas, stocks)]
    for mistake in errors:
        tell({"level": "error", **msgspec.to_builtins(mistake)}, str(mistake), output)
    for doubt in warnings:
        tell({"level": "warning", **msgspec.to_builtins(doubt)}, f"warning: {doubt}", output)
    if output == "text" and not errors and not warnings:
        click.echo(f"{sum(map(len, found.quotas.values()))} quotas, nothing to say", err=True)
    context.exit(1 if errors else 0)


def tell(finding: Mapping[str, Any], text: str, output: str) -> None:
    """Print one finding."""
    click.echo(msgspec.json.encode(finding) if output == "json" else text)


def live(configuration: Configuration) -> list[tuple[str, Document]]:
    """Read all quotas and nodes of the cluster."""
    from cluster.errors import ApiError  # noqa: PLC0415
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.objects import CONFIG_MAPS, NODES  # noqa: PLC0415

    cluster = connected(configuration)
    selectors = [
        Selector(labels=f"{names.quota_label}=true") for names in admission_config_of(configuration).scheme.all_names
    ]
    try:
        maps = [each for selector in selectors for each in cluster.list(CONFIG_MAPS, "", selector).items]
        maps += cluster.list(CONFIG_MAPS, LEGACY_NAMESPACE, Selector(fields=f"metadata.name={LEGACY_NAME}")).items
        nodes = cluster.list(NODES).items
    except (ApiError, Unavailable) as refused:
        raise click.UsageError(f"{refused}; lint files instead: quotient quota lint FILE...") from None
    by_name = {(each.metadata.namespace, each.metadata.name): each for each in maps}
    return [("cluster", {"kind": "ConfigMap", **msgspec.to_builtins(each)}) for each in by_name.values()] + [
        ("cluster", {"kind": "Node", **msgspec.to_builtins(each)}) for each in nodes
    ]


def stocks_of(nodes: Iterable[Document], configuration: Configuration) -> list[CardCapacity]:
    """Count the cards of nodes, by model and memory; of a node with labels alone, by the cores it offers."""
    from cluster.objects import Node  # noqa: PLC0415
    from controller.pod_usage import gpu_node_of  # noqa: PLC0415

    counts: dict[CardModel, int] = {}
    rules = admission_config_of(configuration)
    for document in nodes:
        node = read_object(document, Node)
        machine = gpu_node_of(node, rules.scheme)
        try:
            offered = parse(node.status.capacity.get(rules.names.core, "0")).whole // CORES_PER_CARD
        except QuantityError:
            offered = 0
        for card in machine.cards():
            held = sum((gpu.model, gpu.memory_mib) == (card.model, card.memory_mib) for gpu in machine.gpus)
            counts[card] = counts.get(card, 0) + (held or offered)
    return [CardCapacity(card.model, count, card.memory_mib, card.pool) for card, count in sorted(counts.items())]


T = TypeVar("T", bound="Object")


def read_object(document: Document, into: type[T]) -> T:
    """Read an object as a file has it: numbers that an API server would quote are quoted."""
    status = part_of(document, "status")
    amounts = {key: {name: str(value) for name, value in part_of(status, key).items()} for key in AMOUNTS}
    meant = document | {"status": status | {key: value for key, value in amounts.items() if value}}
    try:
        return converted(meant, into)
    except msgspec.ValidationError as wrong:
        name = part_of(document, "metadata").get("name", "")
        raise click.UsageError(f"{document.get('kind', '')} {name}: {wrong}") from None
