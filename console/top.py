"""`quotient top`: what containers use of their GPUs now, and whether their limits hold, as node plugins measure it."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import click
import msgspec
from rich.markup import escape
from rich.table import Table

from console.connecting import connect_cluster
from console.errors import CommandError
from console.printing import show_warnings, wide_console
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.decision import Unavailable
from vcuda.decode_errors import DECODE_ERRORS
from vcuda.decoding import decoder_for
from vcuda.isolation import COMPUTE, MEMORY
from vcuda.names import APP, APP_LABEL, COMPONENT_LABEL

READERS, TIMEOUT_S = 16, 10.0
HEAD = ("node", "GPU", "namespace", "pod", "container", "cores", "used %", "MiB", "used MiB", "memory", "compute")
RIGHTS = "it takes the rights to list pods, and to get and create pods/portforward, in namespace"


class LimitState(msgspec.Struct, frozen=True, rename="camel"):
    rung: str
    enforced: bool
    holds: bool | None = None
    over_mib: int | None = msgspec.field(name="overMiB", default=None)


class MemoryState(msgspec.Struct, frozen=True):
    limit: int
    used: int | None = None


class ContainerUse(msgspec.Struct, frozen=True):
    """A container on one of its cards, as `/usage` of a node plugin describes it."""

    node: str
    namespace: str
    pod: str
    container: str
    uuid: str
    index: int
    cores: int
    memory: MemoryState = msgspec.field(name="memoryMiB")
    limits: Mapping[str, LimitState]
    utilization: int | None = None


class NodeReport(msgspec.Struct, frozen=True):
    containers: list[ContainerUse]


@click.command(short_help="Show what containers use of their GPUs, and whether their limits hold.")
@click.option("-n", "--namespace", metavar="NAMESPACE", help="Only containers of this namespace.")
@click.option("--node", metavar="NODE", help="Only containers on this node.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_context
def top(context: click.Context, namespace: str | None, node: str | None, output: str) -> None:
    """Show what containers use of their GPUs now, and whether their limits hold, and by what they are enforced.

    Reads /usage of the node plugins by port forwarding, with your own rights. Exit code: 0 all limits hold or are not
    known to be broken, 1 some are broken or some nodes could not be read, 2 wrong usage or no cluster.
    """
    loaded: Loaded = context.obj
    states, warnings = read_states(loaded.configuration, node)
    states = [each for each in states if namespace in (None, each.namespace)]
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(states), indent=2).decode())
    elif states:
        wide_console().print(table_of(states))
    else:
        click.echo("no container uses a GPU", err=True)
    show_warnings(warnings)
    context.exit(1 if warnings or any(is_broken(each) for each in states) else 0)


def read_states(configuration: Configuration, node: str | None) -> tuple[list[ContainerUse], list[str]]:
    """Return the containers of all nodes or of one, ordered, and a warning for each node that could not be read."""
    from cluster.errors import ApiError  # noqa: PLC0415 - only loaded where a cluster is used
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.objects import PODS  # noqa: PLC0415

    namespace = configuration.system_namespace
    labels = f"{APP_LABEL}={APP},{COMPONENT_LABEL}=nodeplugin"
    try:
        pods = connect_cluster(configuration).list(PODS, namespace, Selector(labels=labels)).items
        read = usage_reader(configuration)
    except (ApiError, Unavailable) as error:
        raise CommandError(f"{error}; {RIGHTS} {namespace}") from None
    plugins = {each.metadata.name: each.spec.node_name or "" for each in pods if node in (None, each.spec.node_name)}
    if node is not None and not plugins:
        raise CommandError(f"no node plugin runs on a node {node}")
    states: list[ContainerUse] = []
    warnings: list[str] = []
    with ThreadPoolExecutor(READERS) as pool:
        reading = {pod: pool.submit(read, pod) for pod in plugins}
    for pod, where in plugins.items():
        try:
            states += decoder_for(NodeReport).decode(reading[pod].result()).containers
        except ApiError as error:
            warnings.append(f"node {where}: {error}; {RIGHTS} {namespace}")
        except Unavailable as error:
            warnings.append(f"node {where}: {error}")
        except DECODE_ERRORS:
            warnings.append(f"node {where}: its node plugin {pod} is of another release")
    return sorted(states, key=lambda each: (each.node, each.index, each.namespace, each.pod, each.container)), warnings


def usage_reader(configuration: Configuration) -> Callable[[str], bytes]:
    from cluster.port_forwarding import PodAddress, port_forwarding_settings, read_from_pod  # noqa: PLC0415 - see above

    settings = port_forwarding_settings(configuration.cluster.kubeconfig, configuration.cluster.context)
    namespace, port = configuration.system_namespace, configuration.monitor.port
    return lambda pod: read_from_pod(settings, PodAddress(namespace, pod, port), "/usage", TIMEOUT_S)


def is_broken(state: ContainerUse) -> bool:
    """Whether a limit is exceeded, whether anything enforces it or not."""
    return any(limit.holds is False for limit in state.limits.values())


def describe_limit(limit: LimitState | None) -> str:
    if limit is None:
        return "unknown"
    over = f", {limit.over_mib} MiB over" if limit.over_mib else ""
    if not limit.enforced:
        return f"not enforced{over}"
    return f"{limit.rung}: {'unknown' if limit.holds is None else 'holds' if limit.holds else 'broken'}{over}"


def table_of(states: Iterable[ContainerUse]) -> Table:
    table = Table(*HEAD, box=None)
    for each in states:
        place = each.node, each.index, each.namespace, each.pod, each.container
        amounts = each.cores, each.utilization, each.memory.limit, each.memory.used
        limits = (describe_limit(each.limits.get(dimension)) for dimension in (MEMORY, COMPUTE))
        cells = ("unknown" if cell is None else escape(str(cell)) for cell in (*place, *amounts, *limits))
        table.add_row(*cells, style="red" if is_broken(each) else None)
    return table
