"""`quotient quota`: usage of GPU quotas by namespace; `quotient quota lint`: problems of quotas that are valid."""

from collections.abc import Iterable, Mapping
from typing import Any

import click
import msgspec

from console.connecting import connect_cluster
from console.errors import CommandError
from console.manifests import Document, decode_document, read_objects
from console.printing import count_of
from console.quota_files import RefusedPods, SourcedDocument, find_quotas, statuses_from_files
from console.quota_status_view import show_status, statuses_in_cluster
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.catalogue import CardModel
from vcuda.decision import Unavailable
from vcuda.names import LEGACY_NAME, LEGACY_NAMESPACE
from vcuda.quantity import QuantityError, parse_quantity
from vcuda.quota_lint import CardCapacity, lint_quotas
from vcuda.vocabulary import CORES_PER_CARD
from webhook.service import admission_config_of

SHOW = "show"


class QuotaGroup(click.Group):
    """A group whose first word may be a namespace instead of a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args.insert(0, SHOW)
        return super().parse_args(ctx, args)


@click.group(
    cls=QuotaGroup,
    options_metavar="",
    subcommand_metavar="[NAMESPACE | lint] [OPTIONS]...",
    short_help="Show GPU quotas and their usage; find problems.",
)
def quota() -> None:
    """Show the GPU quotas of namespaces: hard, used, reserved, free, and who holds most.

    Reads the cluster, one namespace or all of them; or with -f files of quotas, pods and workloads. `quotient quota
    lint` finds problems in quotas.
    """


@quota.command(SHOW, hidden=True)
@click.argument("namespace", required=False)
@click.option("-f", "--file", "files", multiple=True, metavar="FILE", help="Files of quotas, pods and workloads.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_context
def show(context: click.Context, namespace: str | None, files: tuple[str, ...], output: str) -> None:
    """Show the GPU quotas of namespaces.

    Exit code: 0 shown, 1 no quota to show, 2 wrong usage or no cluster.
    """
    loaded: Loaded = context.obj
    refused: RefusedPods = {}
    if files:
        statuses, refused = statuses_from_files(files, loaded)
    else:
        statuses = statuses_in_cluster(loaded.configuration, namespace)
    statuses = {name: status for name, status in sorted(statuses.items()) if namespace in (None, name)}
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(statuses), indent=2).decode())
    elif statuses:
        for name, status in statuses.items():
            show_status(name, status, refused=refused.get(name, ()))
    else:
        click.echo(f"no GPU quota in {f'namespace {namespace}' if namespace else 'any namespace'}", err=True)
    context.exit(0 if statuses else 1)


@quota.command(short_help="Find problems in quotas.")
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def lint(context: click.Context, files: tuple[str, ...], output: str) -> None:
    """Find problems in quotas: more than the cluster has, unknown models, quotas that exclude each other.

    FILE holds quotas, and Node objects to compare them with; without files, both are read from the cluster. Exit code:
    0 no problem, or warnings only; 1 an invalid quota; 2 wrong usage or no cluster.
    """
    loaded: Loaded = context.obj
    documents = read_objects(files) if files else read_cluster(loaded.configuration)
    found = find_quotas(documents, loaded.configuration)
    nodes = [document for _, document in documents if document.get("kind") == "Node"]
    capacities = card_capacities(nodes, loaded.configuration) if nodes or not files else None
    warnings = [*found.warnings, *lint_quotas(found.quotas, capacities)]
    for mistake in found.mistakes:
        print_finding({"level": "error", **msgspec.to_builtins(mistake)}, str(mistake), output)
    for warning in warnings:
        print_finding({"level": "warning", **msgspec.to_builtins(warning)}, f"warning: {warning}", output)
    if output == "text" and not found.mistakes and not warnings:
        count = sum(map(len, found.quotas.values()))
        where = ", ".join(files) or "the cluster"
        click.echo(f"{count_of(count, 'quota')}, no problems" if count else f"no quota in {where}", err=True)
    context.exit(1 if found.mistakes else 0)


def print_finding(finding: Mapping[str, Any], text: str, output: str) -> None:
    click.echo(msgspec.json.encode(finding) if output == "json" else text)


def read_cluster(configuration: Configuration) -> list[SourcedDocument]:
    """Read all quotas and nodes of the cluster, as documents."""
    from cluster.errors import ApiError  # noqa: PLC0415 - only loaded where a cluster is used
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.objects import CONFIG_MAPS, NODES  # noqa: PLC0415

    cluster = connect_cluster(configuration)
    scheme = admission_config_of(configuration).scheme
    selectors = [Selector(labels=f"{names.quota_label}=true") for names in scheme.all_names]
    try:
        config_maps = [each for selector in selectors for each in cluster.list(CONFIG_MAPS, "", selector).items]
        legacy = Selector(fields=f"metadata.name={LEGACY_NAME}")
        config_maps += cluster.list(CONFIG_MAPS, LEGACY_NAMESPACE, legacy).items
        nodes = cluster.list(NODES).items
    except (ApiError, Unavailable) as error:
        raise CommandError(f"{error}; check files instead: quotient quota lint FILE...") from None
    # A quota may carry the labels of several domains, and is listed once for each.
    by_name = {(each.metadata.namespace, each.metadata.name): each for each in config_maps}
    return [("cluster", {"kind": "ConfigMap", **msgspec.to_builtins(each)}) for each in by_name.values()] + [
        ("cluster", {"kind": "Node", **msgspec.to_builtins(each)}) for each in nodes
    ]


def card_capacities(nodes: Iterable[Document], configuration: Configuration) -> list[CardCapacity]:
    """Count the cards of nodes by model, memory and pool; a node without an inventory counts by its vcuda-core."""
    from cluster.gpu_nodes import gpu_node_of  # noqa: PLC0415
    from cluster.objects import Node  # noqa: PLC0415

    counts: dict[CardModel, int] = {}
    config = admission_config_of(configuration)
    for document in nodes:
        node = decode_document(document, Node)
        gpu_node = gpu_node_of(node, config.scheme)
        try:
            by_cores = parse_quantity(node.status.capacity.get(config.names.core, "0")).whole // CORES_PER_CARD
        except QuantityError:
            by_cores = 0
        for card in gpu_node.cards():
            in_inventory = sum((gpu.model, gpu.memory_mib) == (card.model, card.memory_mib) for gpu in gpu_node.gpus)
            counts[card] = counts.get(card, 0) + (in_inventory or by_cores)
    return [CardCapacity(card.model, count, card.memory_mib, card.pool) for card, count in sorted(counts.items())]
