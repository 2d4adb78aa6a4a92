"""`quotient admit`: what the webhook would say and do, without a cluster."""

import sys
from pathlib import Path

import click
import msgspec
from rich.markup import escape

from console.offline_admission import AdmissionResult, OfflineQuotas, admit_offline, objects_of, read_quotas
from console.printing import as_yaml, wide_console
from settings.loading import Loaded
from vcuda.quota import QuotaError
from vcuda.strict_yaml import DocumentError
from webhook.service import admission_config_of

STDIN = "-"


def read_text(file: str) -> str:
    """Read a file, or standard input."""
    try:
        return sys.stdin.read() if file == STDIN else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as wrong:
        raise click.UsageError(f"{file}: cannot be read: {wrong}") from None


def quotas_from(file: str | None, unit_mib: int) -> OfflineQuotas:
    """Read the quotas that are to be held to."""
    if file is None:
        return OfflineQuotas()
    try:
        return read_quotas(read_text(file), file, unit_mib)
    except QuotaError as wrong:
        raise click.UsageError(str(wrong)) from None


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("-o", "--output", type=click.Choice(["text", "json", "yaml"]), default="text", show_default=True)
@click.option("--quota", "quota_file", metavar="FILE", help="Hold the documents to these quotas, one after another.")
@click.option("-n", "--namespace", default="default", show_default=True, help="For documents that name none.")
@click.option("--as", "user", default="somebody", show_default=True, help="The user who applies them.")
@click.pass_context
def admit(
    context: click.Context, files: tuple[str, ...], *, output: str, quota_file: str | None, namespace: str, user: str
) -> None:
    """Say what would become of manifests: admitted or refused and why, and what would be changed.

    FILE is a manifest of pods or workloads, or - for standard input. -o json writes one object per document and line;
    -o yaml the documents as they would be stored. Exit code: 0 all allowed, 1 some refused, 2 bad usage.
    """
    loaded: Loaded = context.obj
    rules = admission_config_of(loaded.configuration)
    quotas = quotas_from(quota_file, rules.scheme.unit_mib)
    verdicts: list[AdmissionResult] = []
    for file in files:
        try:
            documents = objects_of(read_text(file))
        except DocumentError as wrong:
            raise click.UsageError(f"{file}: {wrong}") from None
        verdicts += [admit_offline(document, rules, quotas, namespace, user) for document in documents]
    if not verdicts:
        raise click.UsageError(f"{', '.join(files)}: no document in it")
    if output == "yaml":
        click.echo(as_yaml(verdict.object for verdict in verdicts if verdict.allowed), nl=False)
    for verdict in verdicts:
        if output == "json":
            click.echo(msgspec.json.encode(shaped(verdict), enc_hook=str))
        elif output == "text":
            show(verdict)
    context.exit(0 if all(verdict.allowed for verdict in verdicts) else 1)


def shaped(verdict: AdmissionResult) -> dict[str, object]:
    """Write a verdict for programs."""
    return {
        "allowed": verdict.allowed,
        "reasons": [
            {
                "code": reason.code,
                "field": reason.field,
                "value": reason.value,
                "message": reason.message,
                "remedy": reason.remedy,
                **({"numbers": reason.numbers} if reason.numbers else {}),
            }
            for reason in verdict.reasons
        ],
        "warnings": list(verdict.warnings),
        "patch": verdict.patch,
        "object": verdict.object,
    }


def show(verdict: AdmissionResult) -> None:
    """Write a verdict for people."""
    console = wide_console()

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    metadata = verdict.object.get("metadata")
    name = (metadata.get("name") or metadata.get("generateName") or "") if isinstance(metadata, dict) else ""
    title = escape(f"{verdict.object.get('kind', 'document')} {name}".strip())
    line(f"{title}: " + ("[green]allowed[/green]" if verdict.allowed else "[bold red]refused[/bold red]"))
    for reason in verdict.reasons:
        line(f"  [red]{escape(reason.field)}[/red]: {escape(repr(reason.value))}: {escape(reason.message)}")
        line(f"    [bold]{escape(reason.remedy)}[/bold]")
    for warning in verdict.warnings:
        line(f"  [yellow]warning[/yellow] {escape(warning)}")
    for operation in verdict.patch:
        value = f" = {msgspec.json.encode(operation['value']).decode()}" if "value" in operation else ""
        line(f"  [dim]{operation['op']} {escape(operation['path'])}{escape(value)}[/dim]")
