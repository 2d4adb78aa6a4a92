"""`quotient why`: the decisions about a pod, and what to do next."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from console.connecting import connect_cluster
from console.errors import CommandError
from console.quota_status_view import read_status
from console.why_facts import PodFacts
from console.why_pod import explain_pod
from console.why_steps import Explanation
from console.why_workload import (
    FAILED_CREATE,
    MissingPodFacts,
    WorkloadFacts,
    explain_missing_pod,
    explain_workload,
    workload_kind,
)
from settings.configuration import Configuration
from settings.loading import Loaded
from vcuda.decision import Unavailable
from vcuda.names import QUOTA_STATUS, STATUS_KEY, WEBHOOK, names_for
from vcuda.scheme import build_scheme
from vcuda.workload_kinds import WorkloadKind

if TYPE_CHECKING:
    from cluster.interface import Cluster
    from cluster.object_details import EventDetails, PodDetails

T = TypeVar("T")


@click.command(short_help="Tell why a pod is pending, refused or does not run.")
@click.argument("pod")
@click.option("-n", "--namespace", help="Namespace; without it, that of the kubeconfig's context.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def why(context: click.Context, pod: str, namespace: str | None, output: str) -> None:
    """Tell which decisions were made about a pod, and what to do next.

    POD is the name of a pod, or a workload such as Deployment/NAME or Job/NAME, whose pods may have been refused. The
    permission to read pods, events and ConfigMaps of the namespace is enough; nodes are shown if they can be read. Exit
    code: 0 the pod or workload exists, 1 it does not, 2 wrong usage or no cluster.
    """
    loaded: Loaded = context.obj
    try:
        explanation = Reader(loaded.configuration, namespace).explain(pod)
    except Unavailable as error:
        raise CommandError(str(error)) from None
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(explanation), indent=2).decode())
    else:
        click.echo("\n".join(explanation.lines()))
    context.exit(0 if explanation.found else 1)


class Reader:
    """Reads what an explanation needs, a few objects of one namespace. What may not be read is noted in `unread`."""

    def __init__(self, configuration: Configuration, namespace: str | None) -> None:
        self.cluster: Cluster = connect_cluster(configuration)
        self.namespace = namespace or namespace_of_context(configuration)
        names = names_for(configuration.domain)
        self.scheme = build_scheme(names, configuration.memory_unit_mib, configuration.vocabularies)
        self.unread: dict[str, str] = {}
        self.now = datetime.now(UTC)

    def explain(self, target: str) -> Explanation:
        word, slash, name = target.partition("/")
        if not slash:
            return self.explain_pod(target)
        if word.lower() in ("pod", "pods", "po"):
            return self.explain_pod(name)
        kind = workload_kind(word)
        if kind is None or not name:
            raise click.UsageError(f"{target!r}: write a pod's name, or a workload such as Deployment/NAME")
        return self.explain_workload(kind, name)

    def explain_pod(self, name: str) -> Explanation:
        from cluster.errors import ApiError, NotFound  # noqa: PLC0415 - only loaded where a cluster is used
        from cluster.object_details import POD_DETAILS  # noqa: PLC0415

        try:
            pod = self.cluster.get(POD_DETAILS, name, self.namespace)
        except NotFound:
            return self.explain_missing_pod(name)
        except ApiError as error:
            # Without the pod itself, there is nothing to tell.
            raise CommandError(str(error)) from None
        return explain_pod(self.pod_facts(pod))

    def pod_facts(self, pod: "PodDetails") -> PodFacts:
        from cluster.objects import CONFIG_MAPS, NODES  # noqa: PLC0415

        status = self._try("quota", lambda: self.cluster.get(CONFIG_MAPS, QUOTA_STATUS, self.namespace))
        node_name = pod.spec.node_name
        node = self._try("node", lambda: self.cluster.get(NODES, node_name)) if node_name else None
        return PodFacts(
            pod=pod,
            now=self.now,
            scheme=self.scheme,
            events=self._events(f"involvedObject.uid={pod.metadata.uid}"),
            quota_status=read_status(status.data.get(STATUS_KEY, "")) if status else None,
            node=node,
            unread=self.unread,
        )

    def explain_missing_pod(self, name: str) -> Explanation:
        facts = MissingPodFacts(
            name=name,
            namespace=self.namespace,
            now=self.now,
            refusals=self._refusals(),
            events=self._events(f"involvedObject.kind=Pod,involvedObject.name={name}"),
            unread=self.unread,
        )
        return explain_missing_pod(facts)

    def explain_workload(self, kind: WorkloadKind, name: str) -> Explanation:
        from cluster.interface import Selector  # noqa: PLC0415
        from cluster.object_details import POD_DETAILS  # noqa: PLC0415
        from cluster.objects import Kind, Workload  # noqa: PLC0415

        api_kind = Kind(kind.api_version, kind.kind, kind.plural, Workload, partial=True)
        workload = self._try(kind.plural, lambda: self.cluster.get(api_kind, name, self.namespace))
        labels = workload.spec.selector.match_labels if workload else {}
        selector = Selector(labels=",".join(f"{key}={value}" for key, value in labels.items()))
        pods = self._try("pods", lambda: self.cluster.list(POD_DETAILS, self.namespace, selector)) if labels else None
        facts = WorkloadFacts(
            kind=kind,
            name=name,
            namespace=self.namespace,
            now=self.now,
            workload=workload,
            pods=pods.items if pods else (),
            refusals=self._refusals(),
            unread=self.unread,
        )
        return explain_workload(facts)

    def _refusals(self) -> "list[EventDetails]":
        """Return events on owners of pods that could not be created: of their controllers, and of the webhook."""
        return self._events(f"reason={FAILED_CREATE}") + self._events(f"reportingComponent={WEBHOOK}")

    def _events(self, fields: str) -> "list[EventDetails]":
        from cluster.interface import Selector  # noqa: PLC0415
        from cluster.object_details import EVENT_DETAILS  # noqa: PLC0415

        listing = self._try("events", lambda: self.cluster.list(EVENT_DETAILS, self.namespace, Selector(fields=fields)))
        return listing.items if listing else []

    def _try(self, what: str, read: Callable[[], T]) -> T | None:
        """Return what is read; None if it does not exist, or, with a note, if it may not be read."""
        from cluster.errors import ApiError, NotFound  # noqa: PLC0415

        try:
            return read()
        except NotFound:
            return None
        except ApiError as error:
            self.unread[what] = str(error)
            return None


def namespace_of_context(configuration: Configuration) -> str:
    from cluster.connection import default_namespace  # noqa: PLC0415 - other commands start without the API client

    return default_namespace(configuration.cluster.kubeconfig, configuration.cluster.context)
