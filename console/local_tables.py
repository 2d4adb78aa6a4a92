"""The tables of `quotient local`: the simulated nodes, and the pods as Quotient admits and places them."""

from collections.abc import Iterable, Mapping

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from cluster.objects import Node, Pod
from console.local_kubelet import FAILED
from vcuda.inventory import decode_inventory
from vcuda.placement_annotation import decode_placement
from vcuda.request import parse_request
from vcuda.scheme import Scheme
from vcuda.vocabulary import Share

POD_COLUMNS = ("pod", "container", "requested as", "cores", "memory", "pod total", "on")


class ClusterTables:
    """Tables of one moment. `vocabularies` and `pending_reasons` are by pod title."""

    def __init__(
        self,
        scheme: Scheme,
        vocabularies: Mapping[str, Mapping[str, str]],
        pending_reasons: Mapping[str, str],
    ) -> None:
        self._scheme, self._vocabularies, self._pending_reasons = scheme, vocabularies, pending_reasons

    def nodes(self, nodes: Iterable[Node]) -> Table:
        table = Table(
            "node", "GPUs", "model", "memory each", title="Simulated nodes", title_justify="left", box=SIMPLE_HEAD
        )
        for node in sorted(nodes, key=lambda each: each.metadata.name):
            cards = decode_inventory(node.metadata.annotations[self._scheme.names.inventory])
            table.add_row(node.metadata.name, str(len(cards)), cards[0].model, f"{cards[0].memory_mib} MiB")
        return table

    def pods(self, pods: Iterable[Pod]) -> Table:
        table = Table(*POD_COLUMNS, title="Pods, as Quotient admits them", title_justify="left", box=SIMPLE_HEAD)
        for pod in sorted(pods, key=pod_title):
            self._add_pod(table, pod)
        table.caption = "Pod total: vcuda-core + vcuda-memory, as the scheduler counts them"
        table.caption_justify = "left"
        return table

    def _add_pod(self, table: Table, pod: Pod) -> None:
        title, locations = pod_title(pod), self._locations(pod)
        request = parse_request(pod.spec, pod.metadata.annotations, self._scheme).request
        cores, units = request.resource_counts()
        for index, each in enumerate(request.containers):
            role = "" if each.role == "app" else f" ({each.role})"
            table.add_row(
                "" if index else title,
                escape(each.name + role),
                self._vocabularies.get(title, {}).get(each.name, each.vocabulary),
                str(each.share.cores),
                self._memory(each.share),
                "" if index else f"{cores} + {units}",
                escape(locations.get(each.name, locations.get("", ""))),
            )

    def _locations(self, pod: Pod) -> dict[str, str]:
        """Return the node and GPUs of each container; or, under the empty name, why the pod has none."""
        if pod.status.phase == FAILED:
            return {"": pod.status.message}
        if not pod.spec.node_name:
            return {"": self._pending_reasons.get(pod_title(pod), "")}
        placement = decode_placement(pod.metadata.annotations.get(self._scheme.names.placement, "")) or {}
        return {
            name: f"{pod.spec.node_name}: GPU " + ", ".join(each.uuid.rpartition("-")[2] for each in slices)
            for name, slices in placement.items()
        }

    def _memory(self, share: Share) -> str:
        requested_mib = share.memory_units * self._scheme.unit_mib
        if share.whole_cards:
            least = f", at least {requested_mib} MiB" if share.memory_units > share.whole_cards else ""
            return f"all of {share.whole_cards} card{'s' if share.whole_cards > 1 else ''}{least}"
        return "follows the cores" if share.memory_follows_cores else f"{requested_mib} MiB"


def pod_title(pod: Pod) -> str:
    return display_name(pod.metadata.name, pod.metadata.namespace)


def display_name(name: str, namespace: str) -> str:
    """Return the name of a pod, with its namespace unless that is `default`."""
    return name if namespace == "default" else f"{namespace}/{name}"
