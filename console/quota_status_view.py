"""The `gpu-quota-status` of namespaces: read from the cluster, and shown as a table."""

from collections.abc import Container
from typing import Any

from rich.markup import escape
from rich.table import Table

from console.connecting import connect_cluster
from console.errors import CommandError
from console.printing import count_of, wide_console
from settings.configuration import Configuration
from vcuda.decision import Unavailable
from vcuda.names import QUOTA_STATUS, STATUS_KEY, STATUS_LABEL
from vcuda.strict_yaml import DocumentError, parse_documents

QuotaStatus = dict[str, Any]

COLUMNS = ("hard", "used", "reserved", "free")


def statuses_in_cluster(configuration: Configuration, namespace: str | None) -> dict[str, QuotaStatus]:
    """Return the status of one namespace or of all, as the controller wrote it.

    The status is in the namespace itself, so a user needs no rights beyond reading ConfigMaps there.
    """
    from cluster.errors import ApiError  # noqa: PLC0415 - only loaded where a cluster is used
    from cluster.interface import Selector  # noqa: PLC0415
    from cluster.objects import CONFIG_MAPS  # noqa: PLC0415

    cluster = connect_cluster(configuration)
    try:
        config_maps = cluster.list(CONFIG_MAPS, namespace or "", Selector(labels=STATUS_LABEL)).items
    except (ApiError, Unavailable) as error:
        hint = "" if namespace else "; name a namespace that you can read: quotient quota NAMESPACE"
        raise CommandError(f"{error}{hint}") from None
    return {
        each.metadata.namespace: read_status(each.data.get(STATUS_KEY, ""))
        for each in config_maps
        if each.metadata.name == QUOTA_STATUS
    }


def read_status(text: str) -> QuotaStatus:
    """Parse a status; one that is malformed is returned as a note that says so."""
    try:
        (status,) = parse_documents(text)
    except (DocumentError, ValueError):
        return {"notes": ["the quota status is malformed"]}
    return dict(status) if isinstance(status, dict) else {}


def show_status(namespace: str, status: QuotaStatus, heading: str = "", refused: Container[str] = ()) -> None:
    """Print a status; `refused` has the pods among its `waiting` that would not be created at all."""
    console = wide_console()
    mode = f" ({status['mode']})" if status.get("mode") == "audit" else ""
    console.print(f"{heading}[bold]{escape(namespace)}[/bold]{mode}", highlight=False)
    table = Table("quota", "type", "resource", *COLUMNS, box=None, padding=(0, 2, 0, 2))
    for quota in status.get("quotas", []):
        for line, dimensions in quota["types"].items():
            for dimension, numbers in dimensions.items():
                row = (quota["name"], line, dimension, *(str(numbers[column]) for column in COLUMNS))
                table.add_row(*map(escape, row), style="red" if numbers["free"] == 0 else None)
    console.print(table)
    for holder in status.get("holders", []):
        amounts = f"{holder['name']}: {holder['cores']} cores, {holder['memoryMiB']} MiB of {holder['model']}"
        console.print(f"    held by {escape(amounts)} in {count_of(holder['pods'], 'pod')}", highlight=False)
    for pod in status.get("waiting", []):
        state = "refused" if pod["name"] in refused else "waiting"
        console.print(f"    [yellow]{state}[/yellow] {escape(pod['name'])}: {escape(pod['reason'])}", soft_wrap=True)
    for note in status.get("notes", []):
        console.print(f"    [yellow]note[/yellow] {escape(note)}", highlight=False, soft_wrap=True)
