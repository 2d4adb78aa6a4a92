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
from rich.console import Console
from rich.markup import escape

from cluster.errors import AlreadyExists, ApiError
from cluster.in_memory import InMemoryCluster
from cluster.informer import Informer
from cluster.objects import CONFIG_MAPS, NAMESPACES, NODES, PODS, Node, Pod
from console.local_admission import LocalAdmission
from console.local_kubelet import FAILED, RUNNING
from console.local_node import SIMULATED_MACHINES, SimulatedNode, node_object
from console.local_scheduler import LocalScheduler
from console.local_tables import ClusterTables, display_name, pod_title
from console.manifests import NO_KIND
from console.printing import wide_console
from console.quota_status_view import show_status
from nodeplugin.compiler import NoCompiler
from nodeplugin.fake.building import compile_nvml
from settings.configuration import Configuration
from settings.loading import Loaded
from settings.logs import configure_logs
from settings.reading import describe_read_error
from vcuda.decision import Unavailable, printable
from vcuda.decoding import convert
from vcuda.names import Names
from vcuda.pod import PodSpec
from vcuda.request import parse_request
from vcuda.strict_yaml import DocumentError, parse_documents
from webhook.service import admission_config_of

SYNC_TIMEOUT_S = 10.0
FILE_POLL_S = 1.0
POLL_S = 0.01
NOTE = (
    "Admission, quotas, the scheduler's extender and the node plugin are Quotient's own code; the driver, the kubelet "
    "and kube-scheduler are simulated, and no container runs."
)
NO_COMPILER_NOTE = "No C compiler was found for the simulated driver: pods are admitted and charged, but not allocated."
# Separates the webhook's name from its reasons in the API server's error.
DENIED = " denied the request: "

ModificationTimes = dict[Path, float]


@click.command(short_help="Run Quotient here, on a simulated cluster.")
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--once", is_flag=True, help="Show the cluster and exit, instead of waiting for changes.")
@click.pass_obj
def local(loaded: Loaded, files: tuple[Path, ...], *, once: bool) -> None:
    """Run Quotient on this machine, on a simulated cluster.

    FILES are manifests of pods and quotas; they are applied again whenever they change. Without files, samples are
    shown.
    """
    if "log.level" not in loaded.sources:
        # The tables show what happens; the components' logs would interrupt them.
        configure_logs("error", loaded.configuration.log.format)
    run = LocalRun(loaded.configuration, wide_console())
    try:
        run.start(files)
        if not once:
            run.follow(files)
    finally:
        run.stop()


class LocalRun:
    """An in-memory cluster with simulated nodes, and Quotient's components on it."""

    def __init__(self, configuration: Configuration, console: Console) -> None:
        config = admission_config_of(configuration)
        self._names, self._scheme = config.names, config.scheme
        self._console = console
        self._cluster = InMemoryCluster()
        self._configuration = configuration
        self._nodes: list[SimulatedNode] = []
        self._admission = LocalAdmission(self._cluster, configuration)
        self._scheduler = LocalScheduler(self._cluster, configuration)
        # Why each unscheduled pod has no node, by title.
        self._pending_reasons: dict[str, str] = {}
        self._quotas: list[tuple[str, str]] = []
        # The vocabulary of each container in its manifest, before the webhook rewrote it.
        self._vocabularies: dict[str, dict[str, str]] = {}
        self._node_cache: Informer[Node] = Informer(self._cluster, NODES)
        self._pod_cache: Informer[Pod] = Informer(self._cluster, PODS)
        self._ending = threading.Event()

    def start(self, files: tuple[Path, ...]) -> None:
        """Fill the cluster and show it."""
        self._start_nodes()
        self._admission.start()
        self._scheduler.start()
        self._apply(files)
        for informer in (self._node_cache, self._pod_cache):
            informer.start()
            informer.wait_synced(SYNC_TIMEOUT_S)
        self._show()

    def _start_nodes(self) -> None:
        """Start a node plugin for each machine; without a compiler for the simulated driver, only create the Nodes."""
        try:
            compile_nvml()
        except NoCompiler:
            for machine in SIMULATED_MACHINES:
                self._cluster.create(NODES, node_object(machine, self._names, self._scheme.unit_mib))
            return
        self._nodes = [SimulatedNode(self._cluster, machine, self._configuration) for machine in SIMULATED_MACHINES]
        for node in self._nodes:
            node.start()
        self._wait_until(lambda: all(node.ready for node in self._nodes))

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SYNC_TIMEOUT_S
        while not condition() and time.monotonic() < deadline:
            self._ending.wait(POLL_S)

    def follow(self, files: tuple[Path, ...]) -> None:
        """Run until interrupted; apply files again when they change."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._ending.set())
        hint = f"; edit {', '.join(map(str, files))} to see changes" if files else ""
        self._console.print(f"[dim]Running until Ctrl-C{hint}.[/dim]")
        before = modification_times(files)
        while not self._ending.wait(FILE_POLL_S):
            if before != (now := modification_times(files)):
                before = now
                self._apply(files)
                self._show()

    def stop(self) -> None:
        self._scheduler.stop()
        self._admission.stop()
        # All plugins are told to end before any is waited for: each may take a second.
        for node in self._nodes:
            node.begin_stop()
        for node in self._nodes:
            node.stop()
        for informer in (self._node_cache, self._pod_cache):
            informer.stop()

    def _apply(self, files: tuple[Path, ...]) -> None:
        """Replace the quotas and pods of the cluster by those of the files."""
        self._delete_all()
        if not files:
            self._apply_text("samples", self._samples())
        for file in files:
            try:
                self._apply_text(str(file), file.read_text())
            except (OSError, UnicodeDecodeError) as error:
                self._print_error(f"{file}: {describe_read_error(error)}")

    def _delete_all(self) -> None:
        while self._quotas:
            self._cluster.delete(CONFIG_MAPS, *self._quotas.pop())
        for pod in self._cluster.list(PODS).items:
            address = pod.metadata.name, pod.metadata.namespace
            if pod.metadata.finalizers:
                self._cluster.patch(PODS, *address, {"metadata": {"finalizers": None}})
            self._cluster.delete(PODS, *address, grace_s=0)
        for node in self._nodes:
            node.sync()
            node.plugin.allocations.release_ended()
        self._admission.wait_idle()

    def _apply_text(self, source: str, text: str) -> None:
        try:
            documents = parse_documents(text)
        except DocumentError as error:
            self._print_error(f"{source}: {error}")
            return
        # Quotas first: they apply to the pods beside them.
        for document in sorted(documents, key=lambda each: not is_config_map(each)):
            self._create(source, document)

    def _print_error(self, message: str) -> None:
        self._console.print(f"[red]{escape(message)}[/red]", highlight=False, soft_wrap=True)

    def _samples(self) -> str:
        """Return the sample manifests, with the configured domain."""
        text = resources.files("console").joinpath("samples.yaml").read_text()
        return text.replace(Names().domain, self._names.domain)

    def _create(self, source: str, document: Any) -> None:  # noqa: ANN401 - any YAML value
        if is_config_map(document):
            self._create_quota(source, document)
            return
        if not isinstance(document, dict) or not document.get("kind"):
            self._print_error(f"{source}: {NO_KIND}")
            return
        if document["kind"] != "Pod":
            kind = printable(document["kind"])
            self._print_error(f"{source}: {kind} is ignored: only pods and quotas can be applied here so far")
            return
        metadata = document.get("metadata")
        try:
            if isinstance(metadata, dict):
                metadata = {"namespace": "default", **metadata}
                document = document | {"metadata": metadata}
                self._ensure_namespace(metadata["namespace"])
            pod = self._cluster.create(PODS, document)
            self._note_vocabularies(pod_title(pod), document)
        except (ApiError, Unavailable) as error:
            self._print_refusal(source, document, str(error))

    def _create_quota(self, source: str, document: dict[str, Any]) -> None:
        """Create a quota, and wait until it is in force."""
        try:
            metadata = {"namespace": "default", **document["metadata"]}
            self._ensure_namespace(metadata["namespace"])
            created = self._cluster.create(CONFIG_MAPS, document | {"metadata": metadata})
        except (ApiError, KeyError, TypeError) as error:
            self._print_error(f"{source}: {error}")
            return
        self._quotas.append((created.metadata.name, created.metadata.namespace))
        self._admission.wait_idle()

    def _note_vocabularies(self, pod: str, document: dict[str, Any]) -> None:
        spec = convert(document["spec"], PodSpec, strict=False)
        request = parse_request(spec, document["metadata"].get("annotations") or {}, self._scheme).request
        self._vocabularies[pod] = {each.name: each.vocabulary for each in request.containers}

    def _print_refusal(self, source: str, document: dict[str, Any], error: str) -> None:
        """Print why a pod was not created: refused by Quotient, or rejected as invalid before."""
        _, denied, reasons = error.partition(DENIED)
        if not denied:
            self._print_error(f"{source}: {error}")
            return
        metadata = document["metadata"]
        name = display_name(str(metadata.get("name", "")), str(metadata.get("namespace", "")))
        text = f"[bold red]refused[/bold red] {escape(name)}: {escape(reasons)}"
        self._console.print(text, highlight=False, soft_wrap=True)

    def _ensure_namespace(self, name: Any) -> None:  # noqa: ANN401 - any YAML value
        """Create the namespace of a manifest, which seldom brings its own."""
        with suppress(AlreadyExists):
            self._cluster.create(NAMESPACES, {"metadata": {"name": name}})

    def _show(self) -> None:
        self._run_pods()
        self._wait_for_cache()
        tables = ClusterTables(self._scheme, self._vocabularies, self._pending_reasons)
        self._console.print(tables.nodes(self._node_cache.all()))
        self._console.print(tables.pods(self._pod_cache.all()))
        self._admission.wait_idle()
        for namespace, status in sorted(self._admission.statuses(self._cluster).items()):
            show_status(namespace, status, "Quota of namespace ")
        self._console.print(f"[dim]{NOTE if self._nodes else NO_COMPILER_NOTE}[/dim]")

    def _run_pods(self) -> None:
        """Bind pods and let the kubelets admit them; wait until each of them is Running or Failed."""
        self._pending_reasons.clear()
        self._wait_until(lambda: all(self._scheduler.knows_node(node.machine.name) for node in self._nodes))
        for pod in self._cluster.list(PODS).items if self._nodes else ():
            if not pod.spec.node_name:
                self._schedule(pod)
        for node in self._nodes:
            node.sync()
        self._wait_until(lambda: not any(is_starting(pod) for pod in self._cluster.list(PODS).items))

    def _schedule(self, pod: Pod) -> None:
        self._wait_until(lambda: self._scheduler.knows(pod))
        if reason := self._scheduler.schedule(pod):
            self._pending_reasons[pod_title(pod)] = reason

    def _wait_for_cache(self) -> None:
        """Wait until the informer has every pod in its current version."""
        current = {pod.metadata.uid: pod.metadata.resource_version for pod in self._cluster.list(PODS).items}
        cached = self._pod_cache.all
        self._wait_until(lambda: {pod.metadata.uid: pod.metadata.resource_version for pod in cached()} == current)


def is_starting(pod: Pod) -> bool:
    """Whether a pod is bound, and its kubelet has neither admitted nor rejected it."""
    return bool(pod.spec.node_name) and pod.status.phase not in (RUNNING, FAILED)


def is_config_map(document: Any) -> bool:  # noqa: ANN401 - any YAML value
    return isinstance(document, dict) and document.get("kind") == "ConfigMap"


def modification_times(files: tuple[Path, ...]) -> ModificationTimes:
    """Return when each file was last written; a file that does not exist is left out."""
    return {file: file.stat().st_mtime for file in files if file.exists()}
