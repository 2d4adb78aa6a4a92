"""`quotient local`: Quotient on this machine, without a cluster and without GPUs."""

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.errors import AlreadyExists, ApiError
from cluster.in_memory import InMemoryCluster
from cluster.informer import Informer
from cluster.objects import CONFIG_MAPS, NAMESPACES, NODES, PODS, Node, Pod
from console.local_admission import LocalAdmission
from console.local_kubelet import FAILED, RUNNING, choose
from console.local_node import SIMULATED_MACHINES, SimulatedNode, node
from console.printing import wide_console
from console.quota import show_status
from nodeplugin.fake import NoCompiler, library
from settings.configuration import Configuration
from settings.loading import Loaded
from settings.logs import configure_logs
from vcuda.decision import Unavailable
from vcuda.decoding import convert
from vcuda.inventory import decode_inventory
from vcuda.names import Names
from vcuda.placement_annotation import decode_placement, encode_placement
from vcuda.pod import PodSpec
from vcuda.request import ParsedRequest, parse_request
from vcuda.strict_yaml import DocumentError, parse_documents
from vcuda.vocabulary import Share
from webhook.service import admission_config_of

SYNC_S = 10.0
LOOK_EVERY_S = 1.0
CATCH_UP_S = 0.01
NOTE = (
    "Pods are admitted, charged and given their cards here by Quotient's own code, the node plugin included; "
    "the driver, the kubelet and the scheduler are small stand-ins, and nothing runs."
)
NO_PLUGIN = "No C compiler here, so there is no fake driver for the node plugin: pods are admitted and charged only."
DENIED = " denied the request: "

Seen = dict[Path, float]


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--once", is_flag=True, help="Show the cluster and end, instead of waiting for changes.")
@click.pass_obj
def local(loaded: Loaded, files: tuple[Path, ...], *, once: bool) -> None:
    """Run Quotient on this machine, on a simulated cluster.

    FILES are manifests of pods; they are read again whenever they change. Without any, some samples are shown.
    """
    if "log.level" not in loaded.sources:
        # What happens is shown; what the components say to their operators would only be in between.
        configure_logs("error", loaded.configuration.log.format)
    run = LocalRun(loaded.configuration, wide_console())
    try:
        run.start(files)
        if not once:
            run.follow(files)
    finally:
        run.stop()


class LocalRun:
    """An in-memory cluster with simulated nodes, and everything of Quotient that exists."""

    def __init__(self, configuration: Configuration, console: Console) -> None:
        rules = admission_config_of(configuration)
        self._names, self._unit_mib, self._scheme = rules.names, rules.scheme.unit_mib, rules.scheme
        self._console = console
        self._cluster = InMemoryCluster()
        self._configuration = configuration
        self._machines: list[SimulatedNode] = []
        self._admission = LocalAdmission(self._cluster, configuration)
        # Why pods are on no node.
        self._waiting: dict[str, str] = {}
        self._quotas: list[tuple[str, str]] = []
        # How each container was written, before it was rewritten.
        self._written: dict[str, dict[str, str]] = {}
        self._nodes: Informer[Node] = Informer(self._cluster, NODES)
        self._pods: Informer[Pod] = Informer(self._cluster, PODS)
        self._ending = threading.Event()

    def start(self, files: tuple[Path, ...]) -> None:
        """Fill the cluster and show it."""
        self._start_nodes()
        self._admission.start()
        self._apply(files)
        for informer in (self._nodes, self._pods):
            informer.start()
            informer.wait_synced(SYNC_S)
        self._show()

    def _start_nodes(self) -> None:
        """Start a node plugin for each machine; without a driver for them, only say what there would be."""
        try:
            library()
        except NoCompiler:
            for machine in SIMULATED_MACHINES:
                self._cluster.create(NODES, node(machine, self._names, self._unit_mib))
            return
        self._machines = [SimulatedNode(self._cluster, machine, self._configuration) for machine in SIMULATED_MACHINES]
        for started in self._machines:
            started.start()
        self._until(lambda: all(each.ready for each in self._machines))

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SYNC_S
        while not condition() and time.monotonic() < deadline:
            self._ending.wait(CATCH_UP_S)

    def follow(self, files: tuple[Path, ...]) -> None:
        """Wait until interrupted; apply files again when they change."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._ending.set())
        watched = f"; edit {', '.join(map(str, files))} and see" if files else ""
        self._console.print(f"[dim]Running until Ctrl-C{watched}.[/dim]")
        before = changed_at(files)
        while not self._ending.wait(LOOK_EVERY_S):
            if before != (now := changed_at(files)):
                before = now
                self._apply(files)
                self._show()

    def stop(self) -> None:
        """End the informers, and Quotient."""
        self._admission.stop()
        for started in self._machines:
            started.end()
        for started in self._machines:
            started.stop()
        for informer in (self._nodes, self._pods):
            informer.stop()

    def _apply(self, files: tuple[Path, ...]) -> None:
        """Make the cluster's quotas and pods those of the files."""
        while self._quotas:
            self._cluster.delete(CONFIG_MAPS, *self._quotas.pop())
        for pod in self._cluster.list(PODS).items:
            address = pod.metadata.name, pod.metadata.namespace
            if pod.metadata.finalizers:
                self._cluster.patch(PODS, *address, {"metadata": {"finalizers": None}})
            self._cluster.delete(PODS, *address, grace_s=0)
        for started in self._machines:
            started.sync()
            started.plugin.book.collect()
        self._admission.calm_down()
        if not files:
            self._apply_text("samples", self._samples())
        for file in files:
            try:
                self._apply_text(str(file), file.read_text())
            except (OSError, UnicodeDecodeError) as wrong:
                self._complain(f"{file}: cannot be read: {wrong}")

    def _apply_text(self, source: str, text: str) -> None:
        try:
            documents = parse_documents(text)
        except DocumentError as wrong:
            self._complain(f"{source}: {wrong}")
            return
        # Quotas first: they are to hold the pods beside them.
        for document in sorted(documents, key=lambda each: not is_config_map(each)):
            self._create(source, document)

    def _complain(self, message: str) -> None:
        self._console.print(f"[red]{escape(message)}[/red]", highlight=False, soft_wrap=True)

    def _samples(self) -> str:
        """Give the samples, in the domain that is configured."""
        text = resources.files("console").joinpath("samples.yaml").read_text()
        return text.replace(Names().domain, self._names.domain)

    def _create(self, source: str, document: Any) -> None:  # noqa: ANN401 - whatever the file holds
        if is_config_map(document):
            self._create_quota(source, document)
            return
        if not isinstance(document, dict) or document.get("kind") != "Pod":
            kind = document.get("kind") if isinstance(document, dict) else type(document).__name__
            self._complain(f"{source}: {kind} is passed over: only pods run here so far, and quotas")
            return
        metadata = document.get("metadata")
        try:
            if isinstance(metadata, dict):
                metadata = {"namespace": "default", **metadata}
                document = document | {"metadata": metadata}
                self._make_namespace(metadata["namespace"])
            made = self._cluster.create(PODS, document)
            self._remember(title(made), document)
        except (ApiError, Unavailable) as wrong:
            self._tell(source, document, str(wrong))

    def _create_quota(self, source: str, document: dict[str, Any]) -> None:
        """Write a quota, and wait until it is in force."""
        try:
            metadata = {"namespace": "default", **document["metadata"]}
            self._make_namespace(metadata["namespace"])
            made = self._cluster.create(CONFIG_MAPS, document | {"metadata": metadata})
        except (ApiError, KeyError, TypeError) as wrong:
            self._complain(f"{source}: {wrong}")
            return
        self._quotas.append((made.metadata.name, made.metadata.namespace))
        self._admission.calm_down()

    def _remember(self, pod: str, document: dict[str, Any]) -> None:
        """Note in which vocabulary each container of a pod was written."""
        spec = convert(document["spec"], PodSpec, strict=False)
        request = parse_request(spec, document["metadata"].get("annotations") or {}, self._scheme).request
        self._written[pod] = {each.name: each.vocabulary for each in request.containers}

    def _tell(self, source: str, document: dict[str, Any], wrong: str) -> None:
        """Say why a pod is not there: refused by Quotient, or not even a pod."""
        _, denied, reasons = wrong.partition(DENIED)
        if not denied:
            self._complain(f"{source}: {wrong}")
            return
        metadata = document["metadata"]
        name = named(str(metadata.get("name", "")), str(metadata.get("namespace", "")))
        told = f"[bold red]refused[/bold red] {escape(name)}: {escape(reasons)}"
        self._console.print(told, highlight=False, soft_wrap=True)

    def _make_namespace(self, name: Any) -> None:  # noqa: ANN401 - whatever the file holds
        """Make the namespace a pod wants to be in; a manifest seldom brings its own."""
        with suppress(AlreadyExists):
            self._cluster.create(NAMESPACES, {"metadata": {"name": name}})

    def _show(self) -> None:
        """Print nodes and pods as Quotient sees them now."""
        self._run_pods()
        self._catch_up()
        pods = sorted(self._pods.all(), key=title)
        readings = {title(pod): parse_request(pod.spec, pod.metadata.annotations, self._scheme) for pod in pods}
        self._console.print(self._node_table())
        self._console.print(self._pod_table(readings))
        self._admission.calm_down()
        for namespace, status in sorted(self._admission.status(self._cluster).items()):
            show_status(namespace, status, "Quota of namespace ")
        self._console.print(f"[dim]{NOTE if self._machines else NO_PLUGIN}[/dim]")

    def _run_pods(self) -> None:
        """Bind pods, and have their nodes admit them; wait until it is known what they got."""
        self._waiting.clear()
        unbound = [pod for pod in self._cluster.list(PODS).items if not pod.spec.node_name]
        for pod in unbound if self._machines else ():
            known = self._cluster.list(PODS).items
            nodes = self._cluster.list(NODES).items
            namespace = pod.metadata.namespace
            chosen = choose(
                pod,
                nodes,
                known,
                self._scheme,
                lambda model: self._admission.grants(namespace, model),  # noqa: B023
            )
            if isinstance(chosen, str):
                self._waiting[title(pod)] = chosen
                continue
            where, placed = chosen
            noted = {self._names.placement: encode_placement(placed)}
            address = pod.metadata.name, pod.metadata.namespace
            self._cluster.bind(*address, where, uid=pod.metadata.uid, annotations=noted)
        for started in self._machines:
            started.sync()
        self._until(lambda: not any(self._is_undecided(pod) for pod in self._cluster.list(PODS).items))

    def _is_undecided(self, pod: Pod) -> bool:
        """Tell whether a pod is on a node that has not said yet what became of it."""
        return bool(pod.spec.node_name) and pod.status.phase not in (RUNNING, FAILED)

    def _catch_up(self) -> None:
        """Wait until the informer has seen what was just applied."""
        wanted = {pod.metadata.uid: pod.metadata.resource_version for pod in self._cluster.list(PODS).items}
        self._until(lambda: {pod.metadata.uid: pod.metadata.resource_version for pod in self._pods.all()} == wanted)

    def _node_table(self) -> Table:
        table = Table(
            "node", "GPUs", "model", "memory each", title="Simulated nodes", title_justify="left", box=SIMPLE_HEAD
        )
        for found in sorted(self._nodes.all(), key=lambda each: each.metadata.name):
            cards = decode_inventory(found.metadata.annotations[self._names.inventory])
            table.add_row(found.metadata.name, str(len(cards)), cards[0].model, f"{cards[0].memory_mib} MiB")
        return table

    def _pod_table(self, readings: dict[str, ParsedRequest]) -> Table:
        columns = ("pod", "container", "written in", "cores", "memory", "pod in all", "on")
        places = {title(pod): self._place_of(pod) for pod in self._pods.all()}
        table = Table(*columns, title="Pods, as Quotient admits them", title_justify="left", box=SIMPLE_HEAD)
        for pod, reading in readings.items():
            cores, units = reading.request.resource_counts()
            for first, each in enumerate(reading.request.containers):
                role = "" if each.role == "app" else f" ({each.role})"
                table.add_row(
                    "" if first else pod,
                    escape(each.name + role),
                    self._written.get(pod, {}).get(each.name, each.vocabulary),
                    str(each.share.cores),
                    self._memory(each.share),
                    "" if first else f"{cores} + {units}",
                    escape(places[pod].get(each.name, places[pod].get("", ""))),
                )
        table.caption = "In all: vcuda-core + vcuda-memory, as the scheduler counts them"
        table.caption_justify = "left"
        return table

    def _place_of(self, pod: Pod) -> dict[str, str]:
        """Say on which cards each container is, or under no name why it is on none."""
        if pod.status.phase == FAILED:
            return {"": pod.status.message}
        if not pod.spec.node_name:
            return {"": self._waiting.get(title(pod), "")}
        placed = decode_placement(pod.metadata.annotations.get(self._names.placement, "")) or {}
        return {
            name: f"{pod.spec.node_name}: GPU " + ", ".join(each.uuid.rpartition("-")[2] for each in slices)
            for name, slices in placed.items()
        }

    def _memory(self, share: Share) -> str:
        if share.whole_cards:
            least = (
                f", at least {share.memory_units * self._unit_mib} MiB"
                if share.memory_units > share.whole_cards
                else ""
            )
            return f"all of {share.whole_cards} card{'s' if share.whole_cards > 1 else ''}{least}"
        return "follows the cores" if share.memory_follows_cores else f"{share.memory_units * self._unit_mib} MiB"


def is_config_map(document: Any) -> bool:  # noqa: ANN401 - whatever the file holds
    """Tell a quota from a pod."""
    return isinstance(document, dict) and document.get("kind") == "ConfigMap"


def title(pod: Pod) -> str:
    """Name a pod, with its namespace unless that is the usual one."""
    return named(pod.metadata.name, pod.metadata.namespace)


def named(name: str, namespace: str) -> str:
    """Put a name and a namespace together."""
    return name if namespace == "default" else f"{namespace}/{name}"


def changed_at(files: tuple[Path, ...]) -> Seen:
    """When each file was last written; one that is away is not listed."""
    return {file: file.stat().st_mtime for file in files if file.exists()}
